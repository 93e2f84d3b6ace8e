//! What becomes of packets that an app gives to an interface: sent, dropped for a cause that is counted, or kept until
//! the kernel has room. An error never ends the app.

use std::io;

use crate::app::Figure;

/// What became of all that an interface was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outbound {
    /// Packets that the kernel took.
    pub sent: u64,
    /// Times that the kernel had no room, and the packet waited.
    pub waits: u64,
    /// Dropped: a queue of the kernel's was full, or it had no memory.
    pub no_buffers: u64,
    /// Dropped: the interface was down.
    pub down: u64,
    /// Dropped: the interface is gone.
    pub gone: u64,
    /// Dropped: longer than the interface's MTU allows.
    pub too_long: u64,
    /// Dropped: not a frame, or anything else that the kernel does not take.
    pub refused: u64,
}

/// What to do with a packet that was offered to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is done with: sent, or dropped and counted.
    Done,
    /// Nothing has become of it: offer it again later.
    Wait,
    /// Nothing has become of it: offer it again at once.
    Again,
}

impl Outbound {
    /// Counts what the kernel said about one packet.
    #[inline]
    pub fn count<T>(&mut self, outcome: io::Result<T>) -> Verdict {
        match outcome {
            Ok(_) => {
                self.sent += 1;
                Verdict::Done
            }
            Err(error) => self.count_error(error.raw_os_error().unwrap_or(0)),
        }
    }

    #[cold]
    fn count_error(&mut self, error: i32) -> Verdict {
        match error {
            libc::EINTR => return Verdict::Again,
            libc::EAGAIN => {
                self.waits += 1;
                return Verdict::Wait;
            }
            libc::ENOBUFS | libc::ENOMEM => self.no_buffers += 1,
            libc::ENETDOWN => self.down += 1,
            libc::ENXIO | libc::ENODEV => self.gone += 1,
            libc::EMSGSIZE => self.too_long += 1,
            _ => self.refused += 1,
        }
        Verdict::Done
    }

    /// The counts, for an app's report.
    #[must_use]
    pub fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new("sent", self.sent),
            Figure::new("send_waits", self.waits),
            Figure::new("send_drop_no_buffers", self.no_buffers),
            Figure::new("send_drop_interface_down", self.down),
            Figure::new("send_drop_interface_gone", self.gone),
            Figure::new("send_drop_too_long", self.too_long),
            Figure::new("send_drop_refused", self.refused),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(number: i32) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(number))
    }

    #[test]
    fn every_error_is_a_wait_or_a_counted_drop() {
        let mut outbound = Outbound::default();
        assert_eq!(outbound.count(Ok(())), Verdict::Done);
        assert_eq!(outbound.count(error(libc::EAGAIN)), Verdict::Wait);
        assert_eq!(outbound.count(error(libc::EINTR)), Verdict::Again);
        for number in 1..134 {
            if ![libc::EAGAIN, libc::EINTR].contains(&number) {
                assert_eq!(outbound.count(error(number)), Verdict::Done);
            }
        }
        let figures = outbound.figures();
        let counted: u64 = figures.iter().map(|figure| figure.value).sum();
        assert_eq!(counted, 1 + 1 + 131);
        assert_eq!((outbound.sent, outbound.waits), (1, 1));
    }
}
