//! What is held for connections whose other end doesn't read, in QUIC: all streams to another relay are in one connection of
//! QUIC, which keeps what has come of each until it is taken.
//!
//! Who doesn't read has a part of it from the moment on that something waits for it, until it has read all. There are so many
//! parts; beyond them, who has most loses its newest ([`crate::fair`]). As the window of the QUIC connection has room for all
//! parts and some more, who doesn't read holds up nobody else; and as it has room for no more, another relay can't have more
//! held, whatever it sends ([decision 45](../../../docs/decisions/0045-who-does-not-read-has-a-part-of-what-is-held.md)).

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use quinn::VarInt;
use rustix::system::sysinfo;

use crate::{
    config::{Limits, UNREAD_PARTS_MIN},
    fair::Bounds,
    metrics::Metrics,
    room::{Room, Rooms},
};

/// What a stream may have on its way and unread, in buffers.
pub(crate) const STREAM_BUFFERS: usize = 8;
/// Streams that may be full although they have no part: those that move. The other side sends as much without an
/// acknowledgement.
pub(crate) const MOVING: usize = 4;
/// Channels in which a host may have all its parts: the one that it has, and one of before that hasn't been missed yet.
pub(crate) const WIDE_CHANNELS: usize = 2;

/// What is held in all, in bytes.
fn bytes(limits: &Limits) -> usize {
    limits.unread_bytes.unwrap_or_else(|| memory() / 4)
}

/// Limits for one of so many sides of a relay, each of which has as much of what is held.
pub(crate) fn of_side(mut limits: Limits, sides: usize) -> Limits {
    limits.unread_bytes = Some(bytes(&limits) / sides);
    limits
}

/// Of what is held, how many parts there are in all.
pub(crate) fn parts(limits: &Limits) -> usize {
    (bytes(limits) / limits.unread_part_bytes()).max(UNREAD_PARTS_MIN)
}

/// Parts that one host may have at its peer.
pub(crate) fn parts_of_host(limits: &Limits) -> usize {
    parts(limits) / WIDE_CHANNELS
}

/// How parts are shared.
pub(crate) fn bounds(limits: &Limits, per_host: usize) -> Bounds {
    Bounds {
        per_sender: usize::MAX,
        per_host,
        all: parts(limits),
    }
}

/// Bytes that the other side may have on their way and unread in one stream.
pub(crate) fn stream_window(limits: &Limits) -> VarInt {
    window(limits.buffer_bytes.saturating_mul(STREAM_BUFFERS))
}

/// The same in all streams of a QUIC connection, of which so many have a part.
pub(crate) fn connection_window(limits: &Limits, parts: usize) -> VarInt {
    let stream = limits.buffer_bytes.saturating_mul(STREAM_BUFFERS);
    let held = stream.saturating_mul(parts.saturating_add(MOVING));
    // QUIC tells the other side of new room once it is an eighth of the window: until then it is no room.
    window(held.saturating_add(held.div_ceil(7)))
}

fn window(bytes: usize) -> VarInt {
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    VarInt::from_u64(bytes).unwrap_or(VarInt::MAX)
}

/// The machine's memory.
fn memory() -> usize {
    let found = sysinfo();
    // What the kernel counts in is a byte or a page.
    let unit = u64::from(found.mem_unit.max(1));
    let bytes = found.totalram.saturating_mul(unit);
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Who has parts.
#[derive(Clone, Copy)]
pub(crate) struct Unread<'a> {
    pub(crate) of: &'a Rooms,
    pub(crate) metrics: &'a Metrics,
    /// Whether the QUIC connection has room for parts, if that may change.
    pub(crate) is_wide: Option<&'a AtomicBool>,
}

/// What a connection has of it.
pub(crate) struct Waiting<'a> {
    unread: Unread<'a>,
    host: &'a Arc<str>,
    sender: &'a Arc<str>,
    part: Option<Room>,
}

/// There is none for it, or others need the one that it had.
#[derive(Debug)]
pub(crate) struct NoPart;

impl<'a> Unread<'a> {
    /// For a connection of that sender of which nothing waits yet.
    pub(crate) fn of(self, host: &'a Arc<str>, sender: &'a Arc<str>) -> Waiting<'a> {
        Waiting {
            unread: self,
            host,
            sender,
            part: None,
        }
    }
}

impl Waiting<'_> {
    /// Waits until the other end takes more.
    ///
    /// # Errors
    /// There is no part for it, or none any more.
    pub(crate) async fn until<T>(&mut self, more: impl Future<Output = T>) -> Result<T, NoPart> {
        if self.part.is_none() {
            let is_wide = self.unread.is_wide;
            // What waits would fill the window for all others.
            if is_wide.is_some_and(|is_wide| !is_wide.load(Ordering::Relaxed)) {
                return Err(NoPart);
            }
            let part = Room::take(self.unread.of, self.host, self.sender).ok_or(NoPart)?;
            self.unread.metrics.connections_unread.add(1);
            self.part = Some(part);
        }
        let lost = async {
            match &self.part {
                Some(part) => part.lost().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = lost => Err(NoPart),
            taken = more => Ok(taken),
        }
    }

    /// Nothing waits any more.
    pub(crate) fn is_read(&mut self) {
        if self.part.take().is_some() {
            self.unread.metrics.connections_unread.subtract(1);
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.is_read();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, ready},
        path::Path,
    };

    use super::*;
    use crate::{config::Config, fair::Fair};

    fn limits(lines: &str) -> Limits {
        let text = format!(
            "[tls]\ncertificate = \"a\"\nkey = \"b\"\nauthorities = \"c\"\n[limits]\n{lines}\n\
             [deliver]\nlisten = [\"127.0.0.1:1\"]\nclients = [\"a.example\"]\nallow = [\"0.0.0.0/0\"]\n"
        );
        Config::parse(Path::new("relay.toml"), &text)
            .unwrap()
            .limits
    }

    #[test]
    fn a_window_has_room_for_all_parts_and_what_moves_before_the_other_side_is_told_of_more() {
        for (lines, wanted) in [
            ("buffer_bytes = 4096\nunread_bytes = 131072", 2),
            ("unread_bytes = 1073741824", 256),
        ] {
            let limits = limits(lines);
            assert_eq!(parts(&limits), wanted);
            assert_eq!(parts_of_host(&limits), wanted / 2);
            let stream = stream_window(&limits).into_inner();
            let whole = connection_window(&limits, wanted).into_inner();
            let held = stream * (wanted + MOVING) as u64;
            assert!(whole - whole / 8 >= held && whole < held * 7 / 6, "{whole}");
        }
        assert!(parts(&limits("")) >= UNREAD_PARTS_MIN);
        let of_two = of_side(limits("unread_bytes = 1073741824"), 2);
        assert_eq!(parts(&of_two), 128);
        assert_eq!(window(usize::MAX), VarInt::MAX);
    }

    #[tokio::test]
    async fn who_reads_nothing_has_a_part_until_it_reads_and_who_has_most_loses_one() {
        let rooms: Rooms = Fair::new(Bounds {
            per_sender: usize::MAX,
            per_host: 3,
            all: 3,
        });
        let metrics = Metrics::default();
        let unread = Unread {
            of: &rooms,
            metrics: &metrics,
            is_wide: None,
        };
        let [host, greedy, few]: [Arc<str>; 3] = ["", "greedy", "few"].map(Into::into);
        let mut of_greedy = [(); 3].map(|()| unread.of(&host, &greedy));
        for waiting in &mut of_greedy {
            assert!(waiting.part.is_none());
            waiting.until(ready(())).await.unwrap();
            assert!(waiting.part.is_some());
        }
        let mut beyond = unread.of(&host, &greedy);
        beyond.until(ready(())).await.unwrap_err();
        let mut of_few = unread.of(&host, &few);
        of_few.until(ready(())).await.unwrap();
        of_greedy[2].until(pending::<()>()).await.unwrap_err();
        of_greedy[1].until(ready(())).await.unwrap();
        of_greedy[1].is_read();
        assert_eq!(metrics.connections_unread.get(), 3);
        beyond.until(ready(())).await.unwrap();
        drop((of_greedy, of_few, beyond));
        assert_eq!(metrics.connections_unread.get(), 0);
    }

    #[tokio::test]
    async fn in_a_channel_without_room_for_it_nobody_has_a_part() {
        let rooms: Rooms = Fair::new(Bounds {
            per_sender: 1,
            per_host: 1,
            all: 1,
        });
        let (metrics, is_wide) = (Metrics::default(), AtomicBool::new(false));
        let unread = Unread {
            of: &rooms,
            metrics: &metrics,
            is_wide: Some(&is_wide),
        };
        let name: Arc<str> = "a".into();
        let mut waiting = unread.of(&name, &name);
        waiting.until(ready(())).await.unwrap_err();
        is_wide.store(true, Ordering::Relaxed);
        waiting.until(ready(())).await.unwrap();
    }
}
