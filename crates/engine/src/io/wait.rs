//! The loop that waits: for packets at descriptors, for deadlines to the nanosecond, and to be woken.
//!
//! A [`Waiter`] runs an engine as [`Runner`](crate::Runner) does, but sleeps in epoll until a descriptor of an app has
//! something, a deadline is due, or somebody else wants the thread. It takes the timer slack of its thread down to
//! 1 ns, from Linux's 50 µs. In polling mode it doesn't sleep at all: a core for the last microseconds. Apps that have
//! their packets in shared memory then look by themselves, with no system call; only where there are others does each
//! breath ask the kernel, else every 50 µs, for wakers and descriptors of the caller.
//!
//! Descriptors are watched edge-triggered, and apps read until there is nothing left, so hundreds of idle interfaces
//! cost nothing. One whose output has no room is left as it is; it is read on as soon as packets move again.

use std::fmt;
use std::hint::spin_loop;
use std::io;
use std::marker::PhantomData;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::thread::{current_timer_slack, set_current_timer_slack};
use thiserror::Error;

use crate::app::Wake;
use crate::engine::Engine;
use crate::report::Load;
use crate::run::{Clock, PAUSE_MAX, PAUSE_STEP};
use crate::time::Time;
pub use crate::watch::{Readiness, Watch};

/// Runs an engine on this thread.
pub struct Waiter {
    clock: Clock,
    epoll: OwnedFd,
    /// For the next configuration, which may come when there are no more descriptors.
    spare: Option<OwnedFd>,
    events: Vec<epoll::Event>,
    waker: Waker,
    /// Descriptors of the caller, by number.
    others: Vec<Option<OwnedFd>>,
    /// Of the apps that are watched, by number.
    watched: Vec<Readiness>,
    /// The engine and graph whose apps these are.
    configuration: Option<Rc<()>>,
    polling: bool,
    /// When polling last asked the kernel.
    asked_at: Time,
    pause: Duration,
    slept: Duration,
    timer_slack: u64,
    /// The timer slack is that of a thread.
    not_send: PhantomData<*const ()>,
}

/// Ends a [`Waiter::run`] from any thread.
#[derive(Debug, Clone)]
pub struct Waker(Arc<OwnedFd>);

/// Why [`Waiter::run`] came back. The engine can go on at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The time has come.
    Due,
    /// `done` said so.
    Done,
    /// A [`Waker`] wanted it.
    Woken,
    /// The descriptor of that number has something; it must be read, or `run` comes back again at once.
    Descriptor(usize),
    /// Nothing can ever happen: no app waits for a time or a descriptor, and nobody else has a waker or a descriptor.
    Idle,
}

/// The system lets nobody wait.
#[derive(Debug, Error)]
#[error("{operation}: {source}")]
pub struct WaitError {
    operation: &'static str,
    source: io::Error,
}

impl WaitError {
    fn when(operation: &'static str) -> impl FnOnce(Errno) -> Self {
        move |source| Self {
            operation,
            source: source.into(),
        }
    }
}

impl Waiter {
    /// A waiter for this thread, whose time starts now and whose timer slack is 1 ns until the waiter goes.
    ///
    /// # Errors
    ///
    /// If the system has no more descriptors.
    pub fn new() -> Result<Self, WaitError> {
        Self::with_clock(Clock::new())
    }

    /// The same in the time of this clock, so that engines on several threads have one time.
    ///
    /// # Errors
    ///
    /// As [`Waiter::new`].
    pub fn with_clock(clock: Clock) -> Result<Self, WaitError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = eventfd(0, flags).map_err(WaitError::when("make an eventfd"))?;
        let timer_slack =
            current_timer_slack().map_err(WaitError::when("read the thread's timer slack"))?;
        set_current_timer_slack(Some(NonZeroU64::MIN))
            .map_err(WaitError::when("set the thread's timer slack"))?;
        Ok(Self {
            clock,
            epoll: new_epoll()?,
            spare: Some(new_epoll()?),
            events: Vec::with_capacity(EVENTS_MAX),
            waker: Waker(Arc::new(event)),
            others: Vec::new(),
            watched: Vec::new(),
            configuration: None,
            polling: false,
            asked_at: Time::START,
            pause: Duration::ZERO,
            slept: Duration::ZERO,
            timer_slack,
            not_send: PhantomData,
        })
    }

    /// The same that never sleeps, or does again.
    #[must_use]
    pub fn polling(mut self, polling: bool) -> Self {
        self.polling = polling;
        // Who is watched depends on it.
        self.configuration = None;
        self
    }

    /// The clock of its time.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// What ends [`Waiter::run`] from another thread. Each wake ends one run, this one or the next.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Lets [`Waiter::run`] come back whenever this descriptor has something to read; its number. It is a duplicate
    /// that is watched, and stays open until [`Waiter::unwatch`].
    ///
    /// # Errors
    ///
    /// If there are no more descriptors, or it is one that can't be waited for.
    pub fn watch(&mut self, descriptor: impl AsFd) -> Result<usize, WaitError> {
        let descriptor = rustix::io::fcntl_dupfd_cloexec(descriptor, 0)
            .map_err(WaitError::when("duplicate a descriptor to watch"))?;
        let free = self.others.iter().position(Option::is_none);
        let number = free.unwrap_or(self.others.len());
        add(&self.epoll, &descriptor, OTHER | number as u64, false)?;
        match self.others.get_mut(number) {
            Some(place) => *place = Some(descriptor),
            None => self.others.push(Some(descriptor)),
        }
        Ok(number)
    }

    /// Watches the descriptor of that number no more.
    pub fn unwatch(&mut self, number: usize) {
        if let Some(descriptor) = self.others.get_mut(number).and_then(Option::take) {
            // It was added; and what is closed is watched by nobody.
            let _ = epoll::delete(&self.epoll, &descriptor);
        }
    }

    /// Runs for that long, or until [`Waiter::run`] has another reason to come back; reports the load since the last
    /// report.
    ///
    /// # Errors
    ///
    /// As [`Waiter::run`].
    pub fn run_for(&mut self, engine: &mut Engine, duration: Duration) -> Result<Load, WaitError> {
        let end = self.clock.now() + duration;
        self.run(engine, Some(end), |_| false)?;
        Ok(self.report_load(engine))
    }

    /// The engine's load since the last report, with what was slept last.
    pub fn report_load(&self, engine: &mut Engine) -> Load {
        Load {
            sleep: self.slept,
            ..engine.report_load()
        }
    }

    /// Runs until a time, until `done`, which is asked after every breath, says so, or until somebody wants the
    /// thread. An engine must stay with one clock, since its time may not go backwards.
    ///
    /// # Errors
    ///
    /// If the system lets nobody wait: there are no more descriptors or no memory. The engine is as it was, and it may be
    /// tried again.
    pub fn run(
        &mut self,
        engine: &mut Engine,
        until: Option<Time>,
        mut done: impl FnMut(&Engine) -> bool,
    ) -> Result<Stop, WaitError> {
        self.follow(engine)?;
        loop {
            let breath = engine.breathe_by(|| self.clock.now());
            if done(engine) {
                return Ok(Stop::Done);
            }
            if until.is_some_and(|until| engine.now() >= until) {
                return Ok(Stop::Due);
            }
            let stop = if breath.moved > 0 {
                self.pause /= 2;
                self.slept = Duration::ZERO;
                self.glance(engine.now())?.stop
            } else {
                self.rest(breath.wake, until)?
            };
            if let Some(stop) = stop {
                return Ok(stop);
            }
        }
    }

    /// Watches the apps of the engine's graph. Those that can't be watched, such as files, go on looking every time.
    fn follow(&mut self, engine: &Engine) -> Result<(), WaitError> {
        let configuration = engine.configuration();
        if (self.configuration.as_ref()).is_some_and(|known| Rc::ptr_eq(known, configuration)) {
            return Ok(());
        }
        // A new epoll forgets descriptors of apps that are gone, even if somebody has duplicates of them.
        let epoll = match self.spare.take() {
            Some(spare) => spare,
            None => new_epoll()?,
        };
        add(&epoll, &self.waker.0, WAKER, false)?;
        for (number, other) in self.others.iter().enumerate() {
            if let Some(other) = other {
                add(&epoll, other, OTHER | number as u64, false)?;
            }
        }
        self.release();
        for watch in engine.watches() {
            if self.polling && watch.readiness.looks_for_free() {
                continue;
            }
            let number = self.watched.len() as u64;
            if add(&epoll, watch.descriptor, APP | number, true).is_ok() {
                watch.readiness.set_ready();
                self.watched.push(watch.readiness.clone());
            }
        }
        // The old one is closed by then, and makes room for it.
        self.epoll = epoll;
        self.spare = new_epoll().ok();
        self.configuration = Some(Rc::clone(configuration));
        Ok(())
    }

    /// Leaves apps to look for themselves.
    fn release(&mut self) {
        for readiness in self.watched.drain(..) {
            readiness.set_unwatched();
        }
    }

    /// Waits as long as nothing can be missed.
    fn rest(&mut self, wake: Wake, end: Option<Time>) -> Result<Option<Stop>, WaitError> {
        let now = self.clock.now();
        let mut until = match (wake.at, end) {
            (Some(at), Some(end)) => Some(at.min(end)),
            (at, end) => at.or(end),
        };
        if until.is_none() && !wake.polls && !self.can_be_woken() {
            return Ok(Some(Stop::Idle));
        }
        if self.polling {
            self.slept = Duration::ZERO;
            return self.spin(now, wake.polls, until);
        }
        if wake.polls {
            self.pause = (self.pause + PAUSE_STEP).min(PAUSE_MAX);
            let look = now + self.pause;
            until = Some(until.map_or(look, |until| until.min(look)));
        }
        let timeout = until.map(|until| until.since(now));
        let looked = self.look(timeout)?;
        self.slept = self.clock.now().since(now);
        Ok(looked.stop)
    }

    fn spin(
        &mut self,
        mut now: Time,
        polls: bool,
        until: Option<Time>,
    ) -> Result<Option<Stop>, WaitError> {
        loop {
            let looked = self.glance(now)?;
            let is_due = until.is_some_and(|until| now >= until);
            if looked.stop.is_some() || looked.found || is_due || polls {
                return Ok(looked.stop);
            }
            spin_loop();
            now = self.clock.now();
        }
    }

    /// Sees what descriptors have, without waiting. While polling, and no app relies on it, only now and then.
    fn glance(&mut self, now: Time) -> Result<Looked, WaitError> {
        if self.polling {
            if self.watched.is_empty() && now.since(self.asked_at) < GLANCE_PERIOD {
                return Ok(Looked::default());
            }
            self.asked_at = now;
        }
        self.look(Some(Duration::ZERO))
    }

    fn can_be_woken(&self) -> bool {
        !self.watched.is_empty()
            || self.others.iter().any(Option::is_some)
            || Arc::strong_count(&self.waker.0) > 1
    }

    /// Waits for descriptors and tells their apps.
    fn look(&mut self, timeout: Option<Duration>) -> Result<Looked, WaitError> {
        // A time too far for the system is as good as none.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        self.events.clear();
        match epoll::wait(
            &self.epoll,
            spare_capacity(&mut self.events),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(WaitError::when("wait for packets")(errno)),
        }
        let mut looked = Looked::default();
        for event in &self.events {
            let data = event.data.u64();
            let number = usize::try_from(data & NUMBER).unwrap_or(usize::MAX);
            match data & !NUMBER {
                APP => {
                    looked.found = true;
                    if let Some(readiness) = self.watched.get(number) {
                        readiness.set_ready();
                    }
                }
                OTHER => looked.stop = looked.stop.or(Some(Stop::Descriptor(number))),
                _ => {
                    self.waker.take_back();
                    looked.stop = Some(Stop::Woken);
                }
            }
        }
        Ok(looked)
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter")
            .field("clock", &self.clock)
            .field("polling", &self.polling)
            .field("apps", &self.watched.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.release();
        // Nobody can be told, and a thread with less slack than before works as well.
        let _ = set_current_timer_slack(NonZeroU64::new(self.timer_slack));
    }
}

impl Waker {
    /// Ends one run.
    pub fn wake(&self) {
        // It fails only if 2^64 - 2 wakes wait already; one is enough.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn take_back(&self) {
        // Nothing to take is as good.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// What a look at the descriptors found.
#[derive(Debug, Default)]
struct Looked {
    /// Apps have something to read.
    found: bool,
    stop: Option<Stop>,
}

fn new_epoll() -> Result<OwnedFd, WaitError> {
    epoll::create(epoll::CreateFlags::CLOEXEC).map_err(WaitError::when("make an epoll"))
}

fn add(epoll: &OwnedFd, descriptor: impl AsFd, data: u64, edge: bool) -> Result<(), WaitError> {
    let mut flags = epoll::EventFlags::IN;
    flags.set(epoll::EventFlags::ET, edge);
    epoll::add(epoll, descriptor, epoll::EventData::new_u64(data), flags)
        .map_err(WaitError::when("watch a descriptor"))
}

/// Whose an event is, in the upper half of its number.
const WAKER: u64 = 0;
const APP: u64 = 1 << 32;
const OTHER: u64 = 2 << 32;
const NUMBER: u64 = 0xffff_ffff;

/// How long wakers and descriptors of the caller may wait for one who polls, and has no app that needs to be told.
const GLANCE_PERIOD: Duration = Duration::from_micros(50);
/// Events that are taken at once; what is left is taken after the next breath.
const EVENTS_MAX: usize = 256;
