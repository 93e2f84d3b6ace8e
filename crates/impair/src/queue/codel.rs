//! CoDel, as the pseudocode of RFC 8289 §5 has it: drop from the head while packets have waited for
//! longer than `target` throughout an `interval`, at gaps that shrink with the root of the count.

use super::{Dropped, Fifo, Limit, Queued};
use crate::{DropCause, Nanoseconds};

/// Settings of CoDel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodelSettings {
    /// How long packets may wait, in nanoseconds.
    pub target: Nanoseconds,
    /// For how long they may wait longer, in nanoseconds.
    pub interval: Nanoseconds,
    /// What may wait in all.
    pub limit: Limit,
}

/// The control law's state, of one queue.
#[derive(Clone, Debug, Default)]
pub(super) struct Codel {
    /// When dropping may begin, if packets wait too long until then.
    first_above: Option<Nanoseconds>,
    dropping: bool,
    drop_next: Nanoseconds,
    count: u32,
    last_count: u32,
}

/// While no more than this waits, nothing is dropped: one frame of the usual MTU.
const FRAME_BYTES: u64 = 1514;

impl Default for CodelSettings {
    /// 5 ms and 100 ms, as RFC 8289 §4 recommends, and [`Limit::default`].
    fn default() -> Self {
        Self {
            target: 5_000_000,
            interval: 100_000_000,
            limit: Limit::default(),
        }
    }
}

impl Codel {
    pub(super) fn pop<T>(
        &mut self,
        fifo: &mut Fifo<T>,
        settings: &CodelSettings,
        now: Nanoseconds,
        dropped: Dropped<'_, T>,
    ) -> Option<Queued<T>> {
        let (mut packet, mut too_late) = self.take(fifo, settings, now);
        if self.dropping {
            self.dropping = too_late;
            while self.dropping && now >= self.drop_next {
                let Some(late) = packet.take() else { break };
                dropped(late, DropCause::Codel);
                self.count = self.count.saturating_add(1);
                (packet, too_late) = self.take(fifo, settings, now);
                self.dropping = too_late;
                if too_late {
                    self.drop_next = after(self.drop_next, settings.interval, self.count);
                }
            }
        } else if too_late {
            if let Some(late) = packet.take() {
                dropped(late, DropCause::Codel);
            }
            (packet, _) = self.take(fifo, settings, now);
            self.dropping = true;
            let recent = now.saturating_sub(self.drop_next) < settings.interval.saturating_mul(16);
            let delta = self.count.saturating_sub(self.last_count);
            self.count = if delta > 1 && recent { delta } else { 1 };
            self.last_count = self.count;
            self.drop_next = after(now, settings.interval, self.count);
        }
        packet
    }

    /// The head, and whether it may be dropped.
    fn take<T>(
        &mut self,
        fifo: &mut Fifo<T>,
        settings: &CodelSettings,
        now: Nanoseconds,
    ) -> (Option<Queued<T>>, bool) {
        let Some(packet) = fifo.pop() else {
            self.first_above = None;
            return (None, false);
        };
        let waited = now.saturating_sub(packet.arrived);
        if waited < settings.target || fifo.bytes <= FRAME_BYTES {
            self.first_above = None;
            return (Some(packet), false);
        }
        let first_above = *self
            .first_above
            .get_or_insert_with(|| now.saturating_add(settings.interval));
        (Some(packet), now >= first_above)
    }
}

/// RFC 8289 §5.3, `control_law`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an interval is far below 2⁵³ ns, and a root is at least 1"
)]
fn after(time: Nanoseconds, interval: Nanoseconds, count: u32) -> Nanoseconds {
    let gap = interval as f64 / libm::sqrt(f64::from(count.max(1)));
    time.saturating_add(gap as u64)
}
