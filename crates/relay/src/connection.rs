//! One carried connection, as both relays do it: carried, counted, reported.

use tokio::net::TcpStream;
use tracing::field::display;

use crate::{
    config::Limits,
    metrics::Metrics,
    pump::{self, Cut, Progress, Secure},
    report::{Report, Subject},
    unread::Unread,
};

/// Who speaks in the clear with this relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plain {
    /// Who opened the connection: a relay of senders.
    Sender,
    /// Whom it is for: a relay of destinations.
    Destination,
}

/// Where it is written down what connections do.
#[derive(Clone, Copy)]
pub(crate) struct Books<'a> {
    pub(crate) limits: &'a Limits,
    pub(crate) metrics: &'a Metrics,
    pub(crate) report: &'a Report,
    pub(crate) unread: Unread<'a>,
}

/// A connection that is carried. It is written down when this goes, also when the relay ends.
struct Entry<'a> {
    books: Books<'a>,
    subject: &'a Subject,
    side: Plain,
    progress: Progress,
    outcome: &'static str,
}

impl Books<'_> {
    /// Carries bytes until both ends are closed, one is cut, or there is a reason to cut it.
    pub(crate) async fn carry(
        self,
        subject: &Subject,
        plain: (Plain, TcpStream),
        secure: Secure,
        reason: impl Future<Output = String>,
    ) {
        let (side, stream) = plain;
        self.metrics.connections.add(1);
        self.metrics.connections_open.add(1);
        let mut entry = Entry {
            books: self,
            subject,
            side,
            progress: Progress::new(),
            outcome: "cut",
        };
        let waiting = self.unread.of(&subject.host, &subject.sender);
        let ends = (stream, secure);
        let carried = pump::carry(ends, waiting, self.limits, &entry.progress, reason).await;
        match carried {
            Ok(()) => entry.outcome = "closed",
            Err(reason) => {
                let (sender, destination) = (&subject.sender, &subject.destination);
                let host = (!subject.host.is_empty()).then_some(display(&subject.host));
                match reason {
                    Cut::Unread => {
                        entry.outcome = "unread";
                        self.metrics.cut_unread.add(1);
                        tracing::info!(host, %sender, %destination, %reason, "a connection is cut");
                    }
                    Cut::Unanswered(..) => {
                        tracing::info!(host, %sender, %destination, %reason, "a connection is cut");
                    }
                    Cut::Other(reason) => {
                        tracing::debug!(%sender, %destination, reason, "a connection is cut");
                    }
                }
            }
        }
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        let metrics = self.books.metrics;
        metrics.connections_open.subtract(1);
        let (from_plain, to_plain) = self.progress.bytes();
        let (out, back) = match self.side {
            Plain::Sender => (from_plain, to_plain),
            Plain::Destination => (to_plain, from_plain),
        };
        metrics.bytes_out.add(out);
        metrics.bytes_in.add(back);
        if self.outcome != "closed" {
            metrics.connections_cut.add(1);
        }
        self.books
            .report
            .add(self.subject, self.outcome, (out, back));
    }
}
