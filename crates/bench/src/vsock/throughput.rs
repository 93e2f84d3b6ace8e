//! How many bytes arrive in some seconds, and what they cost.

use std::{
    fs, process,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use sandwire_vsock_guest::{Guest, Kind, Settings};

use super::{
    backend::{Backend, Program, guest_settings},
    fleet, host,
    role::{Role, join},
};
use crate::{cpu, record::Record};

const GIBIBYTE: f64 = 1_073_741_824.0;
/// Before the measurement begins, connections are opened and find their pace.
const WARM_UP: Duration = Duration::from_millis(200);

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// Host to guest.
    ToGuest,
    /// Guest to host.
    ToHost,
}

impl Direction {
    pub(super) const ALL: [Self; 2] = [Self::ToGuest, Self::ToHost];

    /// As metrics are called.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ToGuest => "h2g",
            Self::ToHost => "g2h",
        }
    }
}

/// A service with its guests, all attached.
pub(super) struct Place {
    pub(super) backend: Backend,
    guests: Vec<Guest>,
}

/// What was moved, and by how much work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    pub(super) bytes: u64,
    pub(super) elapsed: Duration,
    /// Processor time of the service.
    pub(super) service: Duration,
    /// The same of guests and host.
    pub(super) ends: Duration,
    /// Of all that was moved, also before and after these: bytes, and how often guests kicked for them.
    all_bytes: u64,
    kicks: u64,
}

impl Place {
    /// Starts a service and boots its guests.
    pub(super) fn build(program: Program<'_>, vms: usize) -> Result<Self> {
        Self::build_with(program, vms, &guest_settings())
    }

    /// The same with guests of another kind.
    pub(super) fn build_with(
        program: Program<'_>,
        vms: usize,
        settings: &Settings,
    ) -> Result<Self> {
        let backend = Backend::start(program, vms)?;
        let guests = backend.boot(settings)?;
        Ok(Self { backend, guests })
    }

    /// The first guest.
    pub(super) fn guest(&mut self) -> &mut Guest {
        &mut self.guests[0]
    }

    /// Takes the guests from that one on, who have no part in measurements any more.
    pub(super) fn take_guests_from(&mut self, first: usize) -> Vec<Guest> {
        self.guests.split_off(first)
    }

    /// Sends writes of that size by a connection per guest, for so long.
    pub(super) fn measure(
        &mut self,
        direction: Direction,
        write: usize,
        time: Duration,
    ) -> Result<Figures> {
        let port = self.backend.new_port();
        let before = self.kicks();
        let figures = match direction {
            Direction::ToHost => self.measure_to_host(port, write, time),
            Direction::ToGuest => self.measure_to_guests(port, write, time),
        }?;
        let kicks = self.kicks() - before;
        Ok(Figures { kicks, ..figures })
    }

    /// How often the guests have kicked so far.
    fn kicks(&mut self) -> u64 {
        let each = |guest: &mut Guest| guest.transport().kicks_sent();
        self.guests.iter_mut().map(each).sum()
    }

    fn measure_to_host(&mut self, port: u32, write: usize, time: Duration) -> Result<Figures> {
        let vms = 0..self.guests.len();
        let paths: Vec<_> = vms.map(|vm| self.backend.host_socket(vm, port)).collect();
        let listeners = paths.iter().map(|path| host::listen(path));
        let listeners: Vec<_> = listeners.collect::<Result<_>>()?;
        let received = AtomicU64::new(0);
        let (stop_host, stop_guest) = (AtomicBool::new(false), AtomicBool::new(false));
        let (backend, guests) = (&self.backend, &mut self.guests);
        let figures = thread::scope(|scope| {
            let host = scope.spawn(|| {
                Role::Host.pin()?;
                host::sink(&listeners, &received, &stop_host)
            });
            let guest = scope.spawn(|| {
                Role::Guest.pin()?;
                fleet::send(guests, port, write, &stop_guest)
            });
            let goes_on = || !host.is_finished() && !guest.is_finished();
            let figures = watch(backend, &received, time, goes_on);
            // The sender first: an end that it didn't ask for would be an error to it.
            stop_guest.store(true, Ordering::Relaxed);
            let outcome = join(guest);
            stop_host.store(true, Ordering::Relaxed);
            join(host)?;
            outcome?;
            figures.map(|figures| figures.of_all(&received))
        });
        for path in paths {
            fs::remove_file(path)?;
        }
        figures
    }

    fn measure_to_guests(&mut self, port: u32, write: usize, time: Duration) -> Result<Figures> {
        let vms = 0..self.guests.len();
        let sockets: Vec<_> = vms.map(|vm| self.backend.socket(vm)).collect();
        for guest in &mut self.guests {
            guest.listen(Kind::Stream, port);
        }
        let received = AtomicU64::new(0);
        let (stop_host, stop_guest) = (AtomicBool::new(false), AtomicBool::new(false));
        let (backend, guests) = (&self.backend, &mut self.guests);
        thread::scope(|scope| {
            let guest = scope.spawn(|| {
                Role::Guest.pin()?;
                fleet::receive(guests, port, &received, &stop_guest)
            });
            let host = scope.spawn(|| {
                Role::Host.pin()?;
                host::source(&sockets, port, write, &stop_host)
            });
            let goes_on = || !host.is_finished() && !guest.is_finished();
            let figures = watch(backend, &received, time, goes_on);
            // The sender first here too.
            stop_host.store(true, Ordering::Relaxed);
            let outcome = join(host);
            stop_guest.store(true, Ordering::Relaxed);
            join(guest)?;
            outcome?;
            figures.map(|figures| figures.of_all(&received))
        })
    }

    /// What the guests have to complain about.
    pub(super) fn violations(&self) -> Option<String> {
        let all = self.guests.iter().flat_map(Guest::violations);
        all.take(1).next().cloned()
    }
}

/// Waits for the first byte, then a moment, then looks at what arrives for so long.
fn watch(
    backend: &Backend,
    received: &AtomicU64,
    time: Duration,
    goes_on: impl Fn() -> bool,
) -> Result<Figures> {
    let patience = Instant::now() + Duration::from_secs(20);
    while received.load(Ordering::Relaxed) == 0 && goes_on() && Instant::now() < patience {
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(WARM_UP);
    let (service, ends) = (backend.time()?, cpu::process_time(process::id())?);
    let (bytes, started) = (received.load(Ordering::Relaxed), Instant::now());
    while started.elapsed() < time && goes_on() {
        thread::sleep(Duration::from_millis(5).min(time));
    }
    Ok(Figures {
        bytes: received.load(Ordering::Relaxed) - bytes,
        elapsed: started.elapsed(),
        service: backend.time()?.saturating_sub(service),
        ends: cpu::process_time(process::id())?.saturating_sub(ends),
        all_bytes: 0,
        kicks: 0,
    })
}

impl Figures {
    fn of_all(self, received: &AtomicU64) -> Self {
        let all_bytes = received.load(Ordering::Relaxed);
        Self { all_bytes, ..self }
    }

    /// Adds rows to a record: throughput, and per gibibyte processor time and kicks.
    pub(super) fn add(&self, record: &mut Record, case: &str, name: &str) {
        record.add(case, name, "Gbit/s", &[self.gigabits()]);
        let gibibytes = precise(self.bytes) / GIBIBYTE;
        if self.bytes > 0 {
            let service = self.service.as_secs_f64() / gibibytes;
            let all = service + self.ends.as_secs_f64() / gibibytes;
            let metric = |kind: &str| format!("{name}_{kind}_per_gib");
            record.add(case, &metric("service_cpu"), "s", &[service]);
            record.add(case, &metric("all_cpu"), "s", &[all]);
            let kicks = precise(self.kicks) / (precise(self.all_bytes) / GIBIBYTE);
            record.add(case, &metric("kicks"), "", &[kicks]);
        }
    }

    /// Gigabits per second.
    pub(super) fn gigabits(&self) -> f64 {
        precise(self.bytes) * 8.0 / 1e9 / self.elapsed.as_secs_f64()
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "bytes of some seconds are far below 2^52"
)]
pub(super) fn precise(count: u64) -> f64 {
    count as f64
}
