//! Answers that go on: chunks as they come.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::HttpBody;
use hyper::body::{Bytes, Frame};
use tokio::sync::mpsc::Receiver;

/// The body of an answer: chunks until the sender is dropped.
pub(super) struct Chunks(pub(super) Receiver<Bytes>);

impl HttpBody for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let chunk = self.0.poll_recv(context);
        chunk.map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}
