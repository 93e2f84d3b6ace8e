//! All that an `ADD` asks for: the whole network configuration, each key looked at.
//!
//! What the plugin doesn't know is refused by name, and so is what it knows but the daemon can't do: a container that
//! comes up with less than was asked for is worse than one that doesn't come up.

use std::net::IpAddr;

use ipnet::IpNet;
use sandwire_api::{
    attach::{Attach, AttachTap, InterfaceName},
    lease::AcquireLease,
    policy::LimitSpec,
    pool::PolicySpec,
    published_port::PublishPort,
};
use serde_json::{Map, Value};

use crate::{
    environment::{Attachment, parse_address},
    error::Error,
    network::{INTERFACE, Network, POOL, PREVIOUS_RESULT},
    section::Section,
};

mod dns;
mod runtime;

use dns::Dns;
use runtime::Runtime;
pub(crate) use runtime::{AddressRange, RangeSet};

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    /// The lease, with everything but limits that come by `bandwidth`.
    pub(crate) lease: AcquireLease,
    /// Limits that come by `bandwidth`.
    pub(crate) limits: Option<LimitSpec>,
    /// Addresses that the interface has to have. The first one is in the lease, too.
    pub(crate) addresses: Vec<IpAddr>,
    /// Where its addresses have to be.
    pub(crate) ranges: Vec<RangeSet>,
    /// Ports of the host that lead to it.
    pub(crate) ports: Vec<PublishPort>,
    /// What the runtime is to be told of name servers.
    pub(crate) dns: Map<String, Value>,
    /// What the plugins before this one came to.
    pub(crate) previous: Option<Map<String, Value>>,
}

impl Wish {
    /// Reads a whole configuration. `is_later` says whether other plugins of the chain come before this one.
    pub(crate) fn parse(
        network: &Network,
        attachment: &Attachment,
        is_later: bool,
    ) -> Result<Self, Error> {
        let mut section = Section::whole(&network.keys);
        // Read by `Network`, or meant for runtimes.
        section.ignore(&[
            "cniVersion",
            "cniVersions",
            "name",
            "type",
            "socket",
            "capabilities",
            "disableCheck",
            "disableGC",
            "loadOnlyInlinedPlugins",
            INTERFACE,
            PREVIOUS_RESULT,
            POOL,
        ]);
        section.ignore_prefix("cni.dev/");
        let pool = network.pool()?;
        let interface = own_interface(network, attachment, is_later)?;
        let mtu = section.number("mtu")?;
        let routes = routes(&mut section, is_later)?;
        let tap = tap(&mut section)?;
        let policy = policy(&mut section)?;
        let mut dns = Dns::parse(&mut section)?;
        refuse_delegation(&mut section)?;
        let runtime = Runtime::parse(&mut section, &mut dns)?;
        let addresses = addresses(&mut section, attachment, runtime.ips)?;
        section.finish("this plugin has no such key")?;
        let lease = AcquireLease {
            pool,
            name: Some(network.lease(&attachment.container)),
            clone_address: addresses.first().copied(),
            ttl_seconds: None,
            policy,
            process: false,
            vsock: None,
            attach: Some(Attach {
                netns: attachment.netns.clone(),
                interface,
                mtu,
                mac: runtime.mac.or(attachment.arguments.mac),
                routes,
                tap,
            }),
        };
        Ok(Self {
            lease,
            limits: runtime.limits,
            addresses,
            ranges: runtime.ranges,
            ports: runtime.ports,
            dns: dns.into_result(),
            previous: network.previous()?,
        })
    }
}

/// The interface to make: the container's own, or, later in a chain, a further one beside it.
pub(crate) fn own_interface(
    network: &Network,
    attachment: &Attachment,
    is_later: bool,
) -> Result<InterfaceName, Error> {
    let chain = &attachment.container.interface;
    let section = Section::whole(&Map::new());
    let reason = match &network.interface {
        None if !is_later => return Ok(chain.clone()),
        None => {
            "it is missing: as a later plugin of a chain, which has made the container's interface, this one makes a \
             further one, and needs a name for it"
        }
        Some(_) if !is_later => {
            "it is for a later plugin of a chain; the first one makes the interface that CNI_IFNAME names"
        }
        Some(own) if own == chain => "it is the one that the chain makes: name another one",
        Some(own) => return Ok(own.clone()),
    };
    Err(section.invalid(INTERFACE, reason))
}

/// `routes`: destinations that lead to the gateway. Without them the first plugin makes default routes, a later one none.
fn routes(section: &mut Section, is_later: bool) -> Result<Option<Vec<IpNet>>, Error> {
    let Some(list) = section.value("routes") else {
        return Ok(is_later.then(Vec::new));
    };
    let mut destinations = Vec::new();
    for mut route in section.objects("routes", list)? {
        let destination = route.prefix("dst")?;
        destinations.push(destination.ok_or_else(|| route.invalid("dst", "it is missing"))?);
        route.finish("a route leads to the gateway of the pool; name its `dst` only")?;
    }
    Ok(Some(destinations))
}

fn policy(section: &mut Section) -> Result<Option<PolicySpec>, Error> {
    let Some(value) = section.value("policy") else {
        return Ok(None);
    };
    serde_json::from_value(value)
        .map(Some)
        .map_err(|error| section.invalid("policy", error))
}

/// `tap`: the name of a TAP beside the interface, or an object that says whose it is, too.
fn tap(section: &mut Section) -> Result<Option<AttachTap>, Error> {
    let Some(value) = section.value("tap") else {
        return Ok(None);
    };
    let value = match value {
        Value::String(name) => serde_json::json!({ "name": name }),
        other => other,
    };
    serde_json::from_value(value)
        .map(Some)
        .map_err(|error| section.invalid("tap", error))
}

/// Well-known keys of things that the pool decides.
fn refuse_delegation(section: &mut Section) -> Result<(), Error> {
    let ipam = section.section("ipam")?;
    ipam.finish("addresses come from the pool: leave `ipam` out")?;
    match section.value("ipMasq") {
        None => Ok(()),
        Some(value) => {
            let reason =
                "the pool's policy decides by `uplink` behind which address packets leave the host";
            Err(section.unsupported("ipMasq", &value, reason))
        }
    }
}

/// Addresses that were asked for: by the capability, else by `args`, else by `CNI_ARGS`.
fn addresses(
    section: &mut Section,
    attachment: &Attachment,
    by_capability: Vec<IpAddr>,
) -> Result<Vec<IpAddr>, Error> {
    // Whatever else is in `args` may be for others.
    let mut labelled = section.section("args")?.section("cni")?;
    let texts = labelled.texts("ips")?;
    let by_args: Vec<IpAddr> = texts
        .iter()
        .map(|text| parse_address(text).map_err(|reason| labelled.invalid("ips", reason)))
        .collect::<Result<_, _>>()?;
    let by_variable = Vec::from_iter(attachment.arguments.ip);
    let all = [by_capability, by_args, by_variable];
    let mut given = all.into_iter().filter(|addresses| !addresses.is_empty());
    Ok(given.next().unwrap_or_default())
}
