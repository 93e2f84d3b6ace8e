//! Pings by a raw socket, many targets at once.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto},
};

use crate::{
    packet::{echo_reply, echo_request},
    record::Record,
    statistics, world,
};

/// An answer that hasn't come after this time is lost.
const PATIENCE: Duration = Duration::from_secs(1);

/// A socket that sends pings and receives what answers there are.
pub(crate) struct Pinger {
    socket: OwnedFd,
    identifier: u16,
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) source: Ipv4Addr,
    pub(crate) sequence: u16,
}

impl Pinger {
    /// Opens a socket in a namespace.
    pub(crate) fn open(namespace: &str) -> Result<Self> {
        let socket = world::inside(namespace, || {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let protocol = Some(ipproto::ICMP);
            net::socket_with(AddressFamily::INET, SocketType::RAW, flags, protocol)
                .context("cannot open a socket for pings")
        })?;
        // A flood of answers must not be lost here: what the kernel grants of this is enough.
        let _ = net::sockopt::set_socket_recv_buffer_size_force(&socket, 8 << 20);
        Ok(Self {
            socket,
            identifier: 0x5377,
        })
    }

    /// Sends one ping.
    pub(crate) fn send(&self, target: Ipv4Addr, sequence: u16) -> Result<()> {
        let packet = echo_request(self.identifier, sequence);
        let address = SocketAddrV4::new(target, 0);
        match net::sendto(&self.socket, &packet, SendFlags::empty(), &address) {
            Ok(_) | Err(Errno::AGAIN | Errno::NOBUFS) => Ok(()),
            Err(errno) => Err(errno).with_context(|| format!("cannot ping {target}")),
        }
    }

    /// An answer, if one has come.
    pub(crate) fn receive(&self) -> Result<Option<Answer>> {
        let mut buffer = [0; 2048];
        loop {
            match net::recv(&self.socket, &mut buffer[..], RecvFlags::empty()) {
                Ok((length, _)) => {
                    let reply = buffer.get(..length).and_then(echo_reply);
                    if let Some((source, identifier, sequence)) = reply
                        && identifier == self.identifier
                    {
                        return Ok(Some(Answer { source, sequence }));
                    }
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno).context("cannot receive pings"),
            }
        }
    }

    fn wait(&self, patience: Duration) -> Result<()> {
        let timeout = Timespec::try_from(patience).context("a short time")?;
        let mut wanted = [PollFd::new(&self.socket, PollFlags::IN)];
        match poll(&mut wanted, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno).context("cannot wait for pings"),
        }
    }
}

/// Waits until every target answers.
pub(super) fn reach_all(namespace: &str, targets: &[Ipv4Addr], patience: Duration) -> Result<()> {
    let pinger = Pinger::open(namespace)?;
    let deadline = Instant::now() + patience;
    let mut silent: Vec<Ipv4Addr> = targets.to_vec();
    while !silent.is_empty() {
        if Instant::now() > deadline {
            bail!(
                "{} of {} guests do not answer, the first is {}",
                silent.len(),
                targets.len(),
                silent[0]
            );
        }
        for part in silent.clone().chunks(64) {
            for target in part {
                pinger.send(*target, 0)?;
            }
            pinger.wait(Duration::from_millis(50))?;
            while let Some(answer) = pinger.receive()? {
                silent.retain(|target| *target != answer.source);
            }
        }
    }
    Ok(())
}

/// What pings have found.
#[derive(Debug, Default)]
pub(super) struct Pings {
    round_trips_us: Vec<f64>,
    lost: u32,
}

/// Pings every target once per interval, all of them spread over it.
pub(super) fn run(
    namespace: &str,
    targets: &[Ipv4Addr],
    interval: Duration,
    duration: Duration,
) -> Result<Pings> {
    let pinger = Pinger::open(namespace)?;
    let count = u32::try_from(targets.len())
        .context("fewer targets")?
        .max(1);
    let gap = interval / count;
    let (started, mut next) = (Instant::now(), Instant::now());
    let mut pings = Pings::default();
    let mut underway: HashMap<(Ipv4Addr, u16), Instant> = HashMap::new();
    let mut turns = (0_u16..).flat_map(|round| targets.iter().map(move |target| (*target, round)));
    loop {
        while let Some(answer) = pinger.receive()? {
            if let Some(sent) = underway.remove(&(answer.source, answer.sequence)) {
                pings
                    .round_trips_us
                    .push(sent.elapsed().as_secs_f64() * 1e6);
            }
        }
        let now = Instant::now();
        if now > started + duration + PATIENCE {
            break;
        }
        if now < started + duration && now >= next {
            let (target, round) = turns.next().context("no target")?;
            underway.insert((target, round), Instant::now());
            pinger.send(target, round)?;
            next += gap;
        } else {
            let until = next.saturating_duration_since(now);
            let most = Duration::from_millis(20);
            pinger.wait(if now < started + duration {
                until.min(most)
            } else {
                most
            })?;
        }
    }
    pings.lost = u32::try_from(underway.len()).unwrap_or(u32::MAX);
    Ok(pings)
}

impl Pings {
    pub(super) fn add(&self, record: &mut Record, case: &str, label: &str) {
        let samples = &self.round_trips_us;
        for (kind, percent) in [("p50", 50), ("p99", 99)] {
            let figure = statistics::percentile(samples, percent);
            record.add(
                case,
                &format!("{label}_ping_{kind}"),
                "us",
                figure.as_slice(),
            );
        }
        if !samples.is_empty() {
            let count = u32::try_from(samples.len()).unwrap_or(u32::MAX);
            let mean = samples.iter().sum::<f64>() / f64::from(count);
            let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
            let most = samples.iter().copied().fold(0.0, f64::max);
            for (kind, value) in [("mean", mean), ("min", least), ("max", most)] {
                record.add(case, &format!("{label}_ping_{kind}"), "us", &[value]);
            }
        }
        let lost = f64::from(self.lost);
        record.add(case, &format!("{label}_ping_lost"), "packets", &[lost]);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::host::HostFacts;

    #[test]
    fn pings_that_nobody_answers_are_lost_and_nothing_else() {
        let mut record = Record::new("clones", HostFacts::default(), BTreeMap::new());
        let pings = Pings {
            round_trips_us: Vec::new(),
            lost: 3,
        };
        pings.add(&mut record, "basic", "host_100");
        let rows: Vec<_> = record
            .rows
            .iter()
            .map(|row| (&*row.metric, row.median))
            .collect();
        assert_eq!(rows, [("host_100_ping_lost", 3.0)]);
        assert!(record.not_run.is_empty());
    }
}
