//! One carried connection, as both relays do it: carried, counted, reported.

use tokio::net::TcpStream;

use crate::{
    config::Limits,
    metrics::Metrics,
    pump::{self, Secure},
    report::{Report, Subject},
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
}

impl Books<'_> {
    /// Carries bytes until both ends are closed or one is cut.
    pub(crate) async fn carry(self, subject: &Subject, plain: (Plain, TcpStream), secure: Secure) {
        let (side, stream) = plain;
        self.metrics.connections.add(1);
        self.metrics.connections_open.add(1);
        let limits = self.limits;
        let carried = pump::carry(stream, secure, limits.buffer_bytes, limits.tcp_idle).await;
        self.metrics.connections_open.subtract(1);
        let (out, back) = match side {
            Plain::Sender => (carried.from_plain, carried.to_plain),
            Plain::Destination => (carried.to_plain, carried.from_plain),
        };
        self.metrics.bytes_out.add(out);
        self.metrics.bytes_in.add(back);
        let outcome = match &carried.cut {
            None => "closed",
            Some(reason) => {
                let (sender, destination) = (&subject.sender, &subject.destination);
                tracing::debug!(%sender, %destination, reason, "a connection is cut");
                self.metrics.connections_cut.add(1);
                "cut"
            }
        };
        self.report.add(subject, outcome, (out, back));
    }
}
