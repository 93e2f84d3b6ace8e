//! Makes packets out of given frames, as many as its output has room for, without end or up to a limit.

use thiserror::Error;

use crate::app::{App, BuildError, Config, Figure, PortList};
use crate::ports::{BATCH_PACKETS, Ports};
use crate::time::Time;

/// Sends its frames in turn to `output`, each written into a packet of its own. Reports `packets`.
///
/// A change of the limit keeps the count; after a change of frames it begins anew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    frames: Vec<Vec<u8>>,
    limit: Option<u64>,
}

/// A [`Source`] that can't be.
#[derive(Debug, Error)]
pub enum SourceError {
    /// There is nothing to send.
    #[error("a source needs at least one frame")]
    NoFrames,
}

/// The running [`Source`].
#[derive(Debug)]
pub struct SourceApp {
    frames: Vec<Vec<u8>>,
    next: usize,
    left: u64,
    packets: u64,
    too_long: u64,
}

impl Source {
    /// A source of these frames. One that is longer than the engine's packets is skipped, and counted as `too_long`.
    #[must_use]
    pub fn of(frames: Vec<Vec<u8>>) -> Self {
        Self {
            frames,
            limit: None,
        }
    }

    /// A source of frames of these sizes in turn, in bytes; what they say is 0, 1, 2 and so on.
    #[must_use]
    pub fn sizes(sizes: &[u16]) -> Self {
        let frames = sizes
            .iter()
            .map(|&size| (0..=u8::MAX).cycle().take(size.into()).collect());
        Self::of(frames.collect())
    }

    /// The same source, at its end after that many packets.
    #[must_use]
    pub fn limit(self, packets: u64) -> Self {
        Self {
            limit: Some(packets),
            ..self
        }
    }

    fn packets_max(&self) -> u64 {
        self.limit.unwrap_or(u64::MAX)
    }
}

impl Config for Source {
    type App = SourceApp;

    fn inputs(&self) -> PortList {
        PortList::none()
    }

    fn outputs(&self) -> PortList {
        PortList::named(["output"])
    }

    fn build(&self) -> Result<SourceApp, BuildError> {
        if self.frames.is_empty() {
            return Err(SourceError::NoFrames.into());
        }
        Ok(SourceApp {
            frames: self.frames.clone(),
            next: 0,
            left: self.packets_max(),
            packets: 0,
            too_long: 0,
        })
    }

    fn keeps_state_of(&self, running: &Self) -> bool {
        self.frames == running.frames
    }

    fn apply(&self, app: &mut SourceApp) {
        app.left = self.packets_max().saturating_sub(app.packets);
    }
}

impl App for SourceApp {
    fn pull(&mut self, _now: Time, ports: &mut Ports<'_>) {
        let count =
            usize::try_from(self.left).map_or(BATCH_PACKETS, |left| left.min(BATCH_PACKETS));
        if let [frame] = &self.frames[..]
            && frame.len() <= usize::from(ports.pool().limits().frame_bytes_max)
        {
            let made = ports.fill(0, count, |packet| _ = packet.set_bytes(frame));
            self.packets += made as u64;
            self.left -= made as u64;
            return;
        }
        for _ in 0..count.min(ports.space(0)) {
            let Some(mut packet) = ports.pool().take() else {
                return;
            };
            self.left -= 1;
            let written = packet.set_bytes(&self.frames[self.next]);
            self.next = (self.next + 1) % self.frames.len();
            if written {
                self.packets += 1;
                ports.transmit(0, packet);
            } else {
                self.too_long += 1;
            }
        }
    }

    fn report(&self) -> Vec<Figure> {
        vec![
            Figure::new("packets", self.packets),
            Figure::new("too_long", self.too_long),
        ]
    }
}
