//! Answers that go on: chunks as they come.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::HttpBody;
use hyper::body::{Bytes, Frame};
use tokio::sync::mpsc::Receiver;

/// The body of an answer: chunks until the sender is dropped, or says that there should be more and breaks it off.
pub(super) struct Chunks<E = Infallible>(pub(super) Receiver<Result<Bytes, E>>);

impl<E> HttpBody for Chunks<E> {
    type Data = Bytes;
    type Error = E;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, E>>> {
        let chunk = self.0.poll_recv(context);
        chunk.map(|chunk| chunk.map(|chunk| chunk.map(Frame::data)))
    }
}
