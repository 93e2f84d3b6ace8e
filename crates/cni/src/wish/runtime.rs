//! `runtimeConfig`: what the runtime passes for this one container, capability by capability. Keys are taken in whatever
//! case they are written.

use std::net::IpAddr;

use ipnet::IpNet;
use sandwire_api::{
    policy::{LimitSpec, RateLimit},
    published_port::{Protocol, PublishPort},
    slot::MacAddress,
};

use super::Dns;
use crate::{environment::parse_address, error::Error, section::Section};

/// What the capabilities ask for.
#[derive(Clone, Debug, Default)]
pub(super) struct Runtime {
    pub(super) ports: Vec<PublishPort>,
    pub(super) limits: Option<LimitSpec>,
    pub(super) ranges: Vec<RangeSet>,
    pub(super) ips: Vec<IpAddr>,
    pub(super) mac: Option<MacAddress>,
}

/// Ranges, one of which has to have an address of the container.
pub(crate) type RangeSet = Vec<AddressRange>;

/// Where an address may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressRange {
    pub(crate) subnet: IpNet,
    /// First address. Default: the subnet's.
    pub(crate) start: Option<IpAddr>,
    /// Last address. Default: the subnet's.
    pub(crate) end: Option<IpAddr>,
}

impl Runtime {
    /// Reads `runtimeConfig`; its `dns` goes before the network's.
    pub(super) fn parse(whole: &mut Section, dns: &mut Dns) -> Result<Self, Error> {
        let mut section = whole.section("runtimeConfig")?.without_case();
        let mut runtime = Self::default();
        for entry in section.sections("portMappings")? {
            runtime.ports.push(port(entry)?);
        }
        if let Some(value) = section.value("bandwidth") {
            runtime.limits = limits(section.below("bandwidth", value)?)?;
        }
        for (index, set) in section.list("ipRanges")?.into_iter().enumerate() {
            let ranges = section.objects(&format!("ipRanges[{index}]"), set)?;
            let ranges = ranges.into_iter().map(range);
            runtime.ranges.push(ranges.collect::<Result<_, _>>()?);
        }
        for text in section.texts("ips")? {
            let address = parse_address(&text).map_err(|reason| section.invalid("ips", reason))?;
            runtime.ips.push(address);
        }
        runtime.mac = section.parsed("mac")?;
        dns.overlay(section.section("dns")?)?;
        section.finish(
            "this plugin has the capabilities portMappings, bandwidth, ipRanges, ips, mac and dns",
        )?;
        Ok(runtime)
    }
}

fn port(mut entry: Section) -> Result<PublishPort, Error> {
    let host_port = entry.number::<u16>("hostPort")?.filter(|port| *port != 0);
    let clone_port = entry
        .number::<u16>("containerPort")?
        .filter(|port| *port != 0);
    let protocol = match entry
        .text("protocol")?
        .map(|name| name.to_ascii_lowercase())
    {
        None => Protocol::Tcp,
        Some(name) if name == "tcp" => Protocol::Tcp,
        Some(name) if name == "udp" => Protocol::Udp,
        Some(other) => {
            let reason = "TCP and UDP ports can be published, others can't";
            return Err(entry.unsupported("protocol", &other.into(), reason));
        }
    };
    let host_address = match entry.text("hostIP")?.filter(|text| !text.is_empty()) {
        None => None,
        Some(text) => {
            let address = text.parse::<IpAddr>();
            let address = address.map_err(|_| entry.invalid("hostIP", "it is no IP address"))?;
            // All addresses of both families are what the daemon publishes without one.
            Some(address).filter(|address| !address.is_unspecified())
        }
    };
    let required = |port: Option<u16>, key| {
        port.ok_or_else(|| entry.invalid(key, "it must be a port from 1 to 65535"))
    };
    let port = PublishPort {
        protocol,
        host_address,
        host_port: required(host_port, "hostPort")?,
        clone_port: required(clone_port, "containerPort")?,
        nic: 0,
    };
    entry.finish("a port mapping has hostPort, containerPort, protocol and hostIP")?;
    Ok(port)
}

/// The longest burst that the daemon takes: what the rate carries in so many seconds, and so many bytes.
const BURST_SECONDS_MAX: u64 = 3600;
const BURST_BYTES_MAX: u64 = 1 << 32;
/// The shortest: one Ethernet frame.
const BURST_BYTES_MIN: u64 = 1514;

/// Rates in bits per second, bursts in bits; 0 is none. Ingress is what reaches the container, as we say it too.
/// containerd and CRI-O ask for a burst of 512 MiB and 4 GiB at any rate, so longer ones than there can be are cut,
/// and shorter ones than a packet are raised to one.
fn limits(mut section: Section) -> Result<Option<LimitSpec>, Error> {
    let mut direction = |rate_key: &str, burst_key: &str| {
        let rate = section.number::<u64>(rate_key)?.filter(|rate| *rate != 0);
        let burst = section
            .number::<u64>(burst_key)?
            .filter(|burst| *burst != 0);
        if rate.is_none() && burst.is_some() {
            return Err(
                section.invalid(rate_key, format!("it is missing, while {burst_key} is set"))
            );
        }
        Ok(RateLimit {
            bits_per_second: rate,
            burst_bytes: burst.zip(rate).map(|(burst, rate)| {
                let longest = rate.saturating_mul(BURST_SECONDS_MAX).min(burst) / 8;
                longest.clamp(BURST_BYTES_MIN, BURST_BYTES_MAX)
            }),
            ..RateLimit::default()
        })
    };
    let limits = LimitSpec {
        ingress: direction("ingressRate", "ingressBurst")?,
        egress: direction("egressRate", "egressBurst")?,
    };
    section.finish(
        "the capability `bandwidth` has ingressRate, ingressBurst, egressRate and egressBurst",
    )?;
    Ok(Some(limits).filter(|limits| *limits != LimitSpec::default()))
}

fn range(mut section: Section) -> Result<AddressRange, Error> {
    let subnet = section.parsed::<IpNet>("subnet")?;
    section.ignore_empty(&["rangeStart", "rangeEnd", "gateway"]);
    let range = AddressRange {
        subnet: subnet.ok_or_else(|| section.invalid("subnet", "it is missing"))?,
        start: section.parsed("rangeStart")?,
        end: section.parsed("rangeEnd")?,
    };
    section.finish("a range has subnet, rangeStart and rangeEnd; the gateway is the pool's")?;
    Ok(range)
}

impl AddressRange {
    /// Whether all addresses that a pool hands out of a prefix are in it.
    pub(crate) fn covers(&self, pool: IpNet) -> bool {
        self.subnet.contains(&pool)
            && self.start.is_none_or(|start| start <= first(pool))
            && self.end.is_none_or(|end| end >= last(pool))
    }
}

/// The pool keeps the prefix's own address and the next one, which is the host's.
fn first(pool: IpNet) -> IpAddr {
    match pool.network() {
        IpAddr::V4(network) => IpAddr::V4(network.to_bits().saturating_add(2).into()),
        IpAddr::V6(network) => IpAddr::V6(network.to_bits().saturating_add(2).into()),
    }
}

/// In IPv4 the pool keeps the broadcast address.
fn last(pool: IpNet) -> IpAddr {
    match pool.broadcast() {
        IpAddr::V4(broadcast) => IpAddr::V4(broadcast.to_bits().saturating_sub(1).into()),
        last => last,
    }
}
