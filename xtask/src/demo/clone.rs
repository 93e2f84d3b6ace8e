//! One clone of the demo: its lease, its VMM, and what can be seen of it from outside.

use std::{
    net::{IpAddr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use sandwire_testlab::{
    command,
    guest::{Vmm, web::GuestWeb},
    host::{BEYOND_IPV4, BEYOND_IPV6, HOST_IPV4, HOST_IPV6, HTTP_PORT},
    sandwire::Lease,
};

use super::guest::Saved;

/// A running clone and what was seen of it.
pub(super) struct Clone {
    pub(super) number: u16,
    pub(super) lease: Lease,
    pub(super) vmm: Vmm,
    /// From the start of its VMM to the first answer at its clone address.
    first_answer: Duration,
    ping: Duration,
    /// What the web server inside answered after it was told to store something.
    answer: String,
    /// What the clone got from the server beyond the host's uplink.
    fetched: String,
}

impl Clone {
    /// Restores a clone into a slot and looks at it from outside.
    pub(super) fn start(saved: &Saved, lease: Lease, number: u16) -> Result<Self> {
        let started = Instant::now();
        let waiting = thread::spawn({
            let address = lease.ipv4;
            // With a deadline, ping ends at the first answer, not after the first packet.
            move || command::run(&format!("ping -n -q -i 0.01 -c 1 -w 60 {address}"))
        });
        let vmm = saved.restore(&lease.name, &lease.path, &lease.tap)?;
        let pinged = waiting.join().ok().context("the first ping panicked")?;
        pinged.with_context(|| format!("clone {number} doesn't answer"))?;
        let first_answer = started.elapsed();
        let ping = time_ping(lease.ipv4)?;
        time_ping(lease.ipv6)?;
        GuestWeb::at(lease.ipv4).store(&value_of(number))?;
        let answer = GuestWeb::at(lease.ipv4).value()?;
        let fetched = fetch(&lease)?;
        Ok(Self {
            number,
            lease,
            vmm,
            first_answer,
            ping,
            answer,
            fetched,
        })
    }

    /// How long a ping takes now.
    pub(super) fn time_ping(&self) -> Result<Duration> {
        time_ping(self.lease.ipv4)
    }

    /// Where it is plugged in: the slot's namespace, or the host's TAP of that name.
    fn place(&self) -> &str {
        self.lease.namespace.as_ref().unwrap_or(&self.lease.tap)
    }

    /// Whether it reaches an address by a ping of its own.
    pub(super) fn reaches(&self, address: IpAddr) -> Result<bool> {
        GuestWeb::at(self.lease.ipv4).ping(address)
    }

    /// Its line of the table.
    pub(super) fn line(&self) -> String {
        line([
            &self.number.to_string(),
            self.place(),
            &self.lease.ipv4.to_string(),
            &self.lease.ipv6.to_string(),
            &format!("{} ms", self.first_answer.as_millis()),
            &format!("{:.1} ms", self.ping.as_secs_f64() * 1000.0),
            &self.answer,
            &self.fetched,
        ])
    }

    /// Wants it to have kept its own value, asked over the other address family.
    pub(super) fn check_value(&self) -> Result<()> {
        let value = GuestWeb::at(self.lease.ipv6).value()?;
        ensure!(
            value == value_of(self.number),
            "clone {} answers '{value}': another machine's value",
            self.number
        );
        Ok(())
    }
}

/// The head of the table.
pub(super) fn heading() -> String {
    line([
        "#",
        "slot",
        "IPv4",
        "IPv6",
        "answered",
        "ping",
        "web page",
        "fetched outside",
    ])
}

fn line(cells: [&str; 8]) -> String {
    let [number, namespace, ipv4, ipv6, answered, ping, page, fetched] = cells;
    format!(
        "  {number:>3}  {namespace:<20} {ipv4:<12} {ipv6:<15} {answered:>8} {ping:>8}  \
         {page:<14} {fetched}"
    )
}

fn value_of(number: u16) -> String {
    format!("I am clone {number}")
}

/// Average of three pings.
fn time_ping(address: IpAddr) -> Result<Duration> {
    let text = command::run(&format!("ping -n -q -c 3 -i 0.05 -W 10 {address}"))?;
    let figures = text
        .lines()
        .find_map(|line| line.strip_prefix("rtt min/avg/max/mdev = "))
        .with_context(|| format!("ping printed no times: {text}"))?;
    let average = figures.split('/').nth(1).unwrap_or_default();
    let milliseconds: f64 = average
        .parse()
        .with_context(|| format!("ping printed '{figures}'"))?;
    Ok(Duration::from_secs_f64(milliseconds / 1000.0))
}

/// Has the clone fetch a page from beyond the uplink in both families; the page says by which
/// address the server saw it.
fn fetch(lease: &Lease) -> Result<String> {
    for (server, host) in [
        (IpAddr::from(BEYOND_IPV6), IpAddr::from(HOST_IPV6)),
        (BEYOND_IPV4.into(), HOST_IPV4.into()),
    ] {
        let page = GuestWeb::at(lease.ipv4).fetch(SocketAddr::new(server, HTTP_PORT))?;
        ensure!(
            page == format!("beyond: hello {host}\n"),
            "{} fetched '{page}' from {server}",
            lease.name
        );
    }
    Ok("hello, v4 and v6".to_owned())
}
