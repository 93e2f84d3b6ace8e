//! What is reported of a relay's sockets, and when: as little as will do, since each report wakes the router.
//!
//! *Room.* That a socket takes more is reported only while bytes wait for it. A reader that keeps up would wake
//! us after each read of its own.
//!
//! *Rest.* A socket from which much came and that is empty then isn't looked at for [`REST`], and nothing is
//! reported of it meanwhile: a sender of many small writes has written more by then, and each would have been a
//! wake-up. The other direction, and all other connections, are served as ever. A sender that stops is waited for as
//! before. One that filled its socket's buffer meanwhile was held back: its socket is let rest no more for
//! [`RESTLESS`] turns.

use std::time::{Duration, Instant};

use super::{
    Entry, Router,
    connection::{Connection, Stage},
};
use crate::{
    hybrid::relay::Relay,
    readiness::{Interest, Poller, Ready},
};

/// Bytes in one turn that make a sender one in full flow.
const BULK: u64 = 32 * 1024;
/// How long its socket rests; the kernel's slack makes that about 90 µs.
const REST: Duration = Duration::from_micros(40);
/// Bytes that wait after a rest and tell of a full buffer: a Unix socket of the usual size takes from 100 KiB, in
/// writes of 4 KiB, to 256 KiB, in writes of 64 KiB, which are worth a wake-up each.
const FULL: usize = 160 * 1024;
/// Turns without a rest, then.
const RESTLESS: u16 = 256;

/// What is reported of a relay's two sockets.
#[derive(Debug)]
pub(super) struct Watch {
    reported: [Interest; 2],
    rests: [bool; 2],
    /// Whether it has rested since its last turn.
    rested: [bool; 2],
    /// Turns until it may rest again.
    restless: [u16; 2],
}

impl Watch {
    /// Has both reported when there is something to read. Whether the kernel could.
    pub(super) fn begin(poller: &Poller, relay: &Relay, number: u64) -> Option<Self> {
        for (socket, token) in relay.sockets().into_iter().zip(tokens(number)) {
            poller.add_edge(socket, token, Interest::READ).ok()?;
        }
        Some(Self {
            reported: [Interest::READ; 2],
            rests: [false; 2],
            rested: [false; 2],
            restless: [0; 2],
        })
    }

    /// A socket has become ready: before the relay is told. Room that nobody waits for is reported no more.
    pub(super) fn heard(&mut self, poller: &Poller, relay: &Relay, number: u64, ready: Ready) {
        let socket = usize::from(ready.token % 2 == 1);
        if ready.write && self.reported[socket].write && !relay.waits_for_room()[socket] {
            let interest = Interest {
                write: false,
                ..self.reported[socket]
            };
            // If it fails, it is reported for nothing once more.
            let _ = self.change(poller, relay, number, socket, interest);
        }
    }

    /// After a turn that has moved so many bytes out of each socket: what is to be reported from now on, and
    /// which sockets begin to rest. None if the kernel can't.
    pub(super) fn after_turn(
        &mut self,
        poller: &Poller,
        relay: &Relay,
        number: u64,
        moved: [u64; 2],
    ) -> Option<[bool; 2]> {
        let room = relay.waits_for_room();
        let mut begin = [false; 2];
        for socket in 0..2 {
            if std::mem::take(&mut self.rested[socket]) && relay.waited()[socket] >= FULL {
                self.restless[socket] = RESTLESS;
            }
            if moved[socket] >= BULK && !relay.may_read(socket) && !self.rests[socket] {
                begin[socket] = self.restless[socket] == 0;
                self.rests[socket] = begin[socket];
                self.restless[socket] = self.restless[socket].saturating_sub(1);
            }
            let interest = Interest {
                read: !self.rests[socket],
                write: room[socket] || self.reported[socket].write,
            };
            self.change(poller, relay, number, socket, interest)?;
        }
        Some(begin)
    }

    fn change(
        &mut self,
        poller: &Poller,
        relay: &Relay,
        number: u64,
        socket: usize,
        interest: Interest,
    ) -> Option<()> {
        if self.reported[socket] != interest {
            let (fd, token) = (relay.sockets()[socket], tokens(number)[socket]);
            poller.change_edge(fd, token, interest).ok()?;
            self.reported[socket] = interest;
        }
        Some(())
    }
}

fn tokens(number: u64) -> [u64; 2] {
    [number * 2, number * 2 + 1]
}

impl Router {
    /// Lets sockets rest from now on.
    pub(super) fn rest(&mut self, number: u64, sockets: [bool; 2]) {
        let until = Instant::now() + REST;
        for (socket, begins) in sockets.into_iter().enumerate() {
            if begins {
                self.resting.push_back((until, number, socket));
            }
        }
    }

    /// Looks at sockets that have rested long enough.
    pub(super) fn end_rests(&mut self, now: Instant) {
        while let Some((at, number, socket)) = self.resting.front().copied()
            && at <= now
        {
            self.resting.pop_front();
            let Some(Entry::Connection(connection)) = self.entries.get_mut(&number) else {
                continue;
            };
            if let Connection {
                stage:
                    Stage::Relaying {
                        relay,
                        queued,
                        watch,
                    },
                vm,
                ..
            } = connection.as_mut()
            {
                watch.rests[socket] = false;
                watch.rested[socket] = true;
                let ready = Ready {
                    token: tokens(number)[socket],
                    read: true,
                    write: false,
                    hangup: false,
                };
                relay.ready(socket, ready);
                if !std::mem::replace(queued, true) {
                    self.run.push(vm, number);
                }
            }
        }
    }
}
