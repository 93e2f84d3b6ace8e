//! What a thread waits for: readiness of descriptors, by epoll, and being woken by another thread.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, Timespec, epoll, eventfd},
    io::Errno,
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create,
        timerfd_settime,
    },
};

/// What is waited for at a descriptor. Hang-up and errors are always reported besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Until there is something to read, or the other side has ended.
    pub read: bool,
    /// Until something can be written.
    pub write: bool,
}

impl Interest {
    /// Only reading.
    pub const READ: Self = Self {
        read: true,
        write: false,
    };
    /// Only writing.
    pub const WRITE: Self = Self {
        read: false,
        write: true,
    };
    /// Both.
    pub const BOTH: Self = Self {
        read: true,
        write: true,
    };

    /// The same for epoll, level-triggered.
    #[must_use]
    pub fn flags(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        if self.read {
            flags |= epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        }
        if self.write {
            flags |= epoll::EventFlags::OUT;
        }
        flags
    }
}

/// One descriptor that is ready.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    /// The number under which it was added.
    pub token: u64,
    /// There is something to read, or an end or error to be learnt by reading.
    pub read: bool,
    /// It can be written to, or an error is to be learnt by writing.
    pub write: bool,
    /// The other side is gone, both ways: what is written won't be read.
    pub hangup: bool,
}

/// An epoll instance of one thread.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
    ready: Vec<Ready>,
}

/// Events taken from the kernel at once.
const EVENTS: usize = 256;

impl Poller {
    /// # Errors
    /// Of `epoll_create1`.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            ready: Vec::new(),
        })
    }

    /// Adds a descriptor, level-triggered.
    ///
    /// # Errors
    /// Of `epoll_ctl`.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(token),
            interest.flags(),
        )?)
    }

    /// Adds a descriptor, edge-triggered: what was reported once is reported again only after a read or write
    /// has met `EAGAIN`.
    ///
    /// # Errors
    /// Of `epoll_ctl`.
    pub fn add_edge(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(token),
            interest.flags() | epoll::EventFlags::ET,
        )?)
    }

    /// Has something else reported of a descriptor that was added by [`Self::add_edge`]; at once, if it is so.
    ///
    /// # Errors
    /// Of `epoll_ctl`.
    pub fn change_edge(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(token),
            interest.flags() | epoll::EventFlags::ET,
        )?)
    }

    /// Takes a descriptor out. Closing it does the same if there is no duplicate.
    ///
    /// # Errors
    /// Of `epoll_ctl`.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// Waits until something is ready or `deadline` has come; without a deadline for as long as it takes.
    ///
    /// # Errors
    /// Of `epoll_wait`; a signal is none.
    pub fn wait(&mut self, deadline: Option<Instant>) -> io::Result<&[Ready]> {
        let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = timeout.map(timespec);
        let mut events = [const { MaybeUninit::uninit() }; EVENTS];
        let events = match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => &mut [],
            Err(error) => return Err(error.into()),
        };
        self.ready.clear();
        self.ready.extend(events.iter().map(Ready::from));
        Ok(&self.ready)
    }
}

impl From<&epoll::Event> for Ready {
    fn from(event: &epoll::Event) -> Self {
        let flags = event.flags;
        let ended = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
        let readable = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        Self {
            token: event.data.u64(),
            read: ended || flags.intersects(readable),
            write: ended || flags.contains(epoll::EventFlags::OUT),
            hangup: flags.contains(epoll::EventFlags::HUP),
        }
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// A duration as the kernel takes it.
#[must_use]
pub fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

/// By which other threads wake one that waits in a [`Poller`].
#[derive(Debug)]
pub struct Waker(OwnedFd);

impl Waker {
    /// # Errors
    /// Of `eventfd`.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// Wakes it, now or when it next waits.
    pub fn wake(&self) {
        // EAGAIN means that it is awake already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Forgets earlier calls of [`Self::wake`]; needed for a level-triggered wait.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A descriptor that becomes readable when a time is over.
#[derive(Debug)]
pub struct Timer(OwnedFd);

impl Timer {
    /// One that isn't set.
    ///
    /// # Errors
    /// Of `timerfd_create`.
    pub fn new() -> io::Result<Self> {
        Ok(Self(timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )?))
    }

    /// Lets it expire after that time, once.
    ///
    /// # Errors
    /// Of `timerfd_settime`.
    pub fn set(&self, after: Duration) -> io::Result<()> {
        // Zero would switch it off.
        let after = after.max(Duration::from_nanos(1));
        let once = Itimerspec {
            it_interval: timespec(Duration::ZERO),
            it_value: timespec(after),
        };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }

    /// Whether it has expired since it was last set or asked.
    #[must_use]
    pub fn has_expired(&self) -> bool {
        rustix::io::read(&self.0, &mut [0_u8; 8]).is_ok()
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_up_before_the_wait_is_not_lost() {
        let waker = Waker::new().expect("an eventfd");
        let mut poller = Poller::new().expect("an epoll instance");
        poller.add(&waker, 7, Interest::READ).expect("adding it");
        waker.wake();
        waker.wake();
        let soon = Instant::now() + Duration::from_secs(5);
        let ready = poller.wait(Some(soon)).expect("waiting");
        assert_eq!(
            ready.iter().map(|ready| ready.token).collect::<Vec<_>>(),
            [7]
        );
        assert!(ready[0].read && !ready[0].write);
        waker.clear();
        assert_eq!(poller.wait(Some(Instant::now())).expect("waiting").len(), 0);
    }
}
