//! `sandwire publish`: host ports that lead to leases.

use std::{
    io::ErrorKind,
    net::{IpAddr, UdpSocket},
    str::FromStr,
};

use clap::Args;
use sandwire_api::{
    name::Name,
    published_port::{Protocol, PublishPort, PublishedPort},
};
use serde_json::json;

use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
    output::note,
    render,
};

/// Command line of `sandwire publish`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Name of the lease.
    #[arg(required_unless_present = "list")]
    name: Option<Name>,

    /// Port on the host and port of the sandbox, with /udp for UDP. To withdraw, the host's is enough.
    #[arg(
        value_name = "HOSTPORT:CLONEPORT[/udp]",
        required_unless_present = "list"
    )]
    port: Option<PortPair>,

    /// Address of the host that is published. Default: all of them.
    #[arg(long, value_name = "ADDRESS")]
    host_address: Option<IpAddr>,

    /// Publish the port also where the host itself listens; nobody elsewhere reaches that any more. For root.
    #[arg(long, conflicts_with = "withdraw")]
    hide_host_service: bool,

    /// Interface of the sandbox, from 0.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    nic: u8,

    /// Numeric user that holds the lease, if not you; for root.
    #[arg(long, value_name = "UID")]
    owner_uid: Option<u32>,

    /// End it instead.
    #[arg(long)]
    withdraw: bool,

    /// List published ports, of all leases that you may see or of the named one.
    #[arg(long, conflicts_with_all = ["port", "withdraw", "host_address", "hide_host_service"])]
    list: bool,
}

/// `HOSTPORT[:CLONEPORT][/tcp|/udp]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PortPair {
    host: u16,
    clone: Option<u16>,
    protocol: Protocol,
}

impl FromStr for PortPair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || {
            format!(
                "'{text}' is not a pair of ports: write HOSTPORT:CLONEPORT, with /udp for UDP, as 8080:80"
            )
        };
        let (ports, protocol) = match text.split_once('/') {
            None => (text, Protocol::Tcp),
            Some((ports, "tcp")) => (ports, Protocol::Tcp),
            Some((ports, "udp")) => (ports, Protocol::Udp),
            Some(_) => return Err(refuse()),
        };
        let parse = |port: &str| match port.parse() {
            Ok(0) | Err(_) => Err(refuse()),
            Ok(port) => Ok(port),
        };
        let (host, clone) = match ports.split_once(':') {
            None => (parse(ports)?, None),
            Some((host, clone)) => (parse(host)?, Some(parse(clone)?)),
        };
        Ok(Self {
            host,
            clone,
            protocol,
        })
    }
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    match (&arguments.name, arguments.port) {
        (Some(name), Some(pair)) if arguments.withdraw => withdraw(context, arguments, name, pair),
        (Some(name), Some(pair)) => publish(context, arguments, name, pair),
        (name, _) => list(context, name.as_ref(), arguments.owner_uid),
    }
}

fn publish(context: &Context, arguments: &Arguments, name: &Name, pair: PortPair) -> Outcome {
    let host_port = pair.host;
    let clone_port = pair.clone.ok_or_else(|| {
        Failure::refused(format!(
            "cannot publish port {host_port} to lease {name}: the sandbox's port is not given; \
             write HOSTPORT:CLONEPORT"
        ))
    })?;
    let request = PublishPort {
        protocol: pair.protocol,
        host_address: arguments.host_address,
        host_port,
        clone_port,
        nic: arguments.nic,
    };
    let published = context
        .client()
        .publish(
            name,
            arguments.owner_uid,
            &request,
            arguments.hide_host_service,
        )
        .map_err(cannot(format!("publish port {host_port} to lease {name}")))?;
    if let Some(address) = arguments.host_address.filter(|address| !is_here(*address)) {
        note(&format!(
            "no interface here has {address}: nobody reaches the port until the host has it"
        ));
    }
    context.output.answer(&published, |published| {
        format!(
            "{} of lease {}",
            port_text(&published.port),
            published.lease
        )
    })
}

/// Whether an address is the host's now. One that comes and goes, as with keepalived, may be published all the same.
fn is_here(address: IpAddr) -> bool {
    let bound = UdpSocket::bind((address, 0));
    !bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
}

fn withdraw(context: &Context, arguments: &Arguments, name: &Name, pair: PortPair) -> Outcome {
    let (protocol, port) = (pair.protocol, pair.host);
    context
        .client()
        .withdraw(
            name,
            arguments.owner_uid,
            protocol,
            port,
            arguments.host_address,
        )
        .map_err(cannot(format!(
            "withdraw {protocol} port {port} of lease {name}"
        )))?;
    let document = json!({ "withdrawn": {
        "lease": name,
        "protocol": protocol,
        "host_port": port,
        "host_address": arguments.host_address,
    }});
    context.output.answer(&document, |_| {
        format!("{protocol} port {port} of lease {name} withdrawn")
    })
}

fn list(context: &Context, name: Option<&Name>, owner_uid: Option<u32>) -> Outcome {
    let mut ports = context
        .client()
        .ports()
        .map_err(cannot("list published ports"))?;
    ports.retain(|port| is_asked_for(port, name, owner_uid));
    context.output.answer(&ports, |ports| ports_text(ports))
}

fn is_asked_for(port: &PublishedPort, name: Option<&Name>, owner_uid: Option<u32>) -> bool {
    name.is_none_or(|name| port.lease == *name)
        && owner_uid.is_none_or(|owner| port.owner_uid == owner)
}

fn ports_text(ports: &[PublishedPort]) -> String {
    if ports.is_empty() {
        return "no published ports\n".to_owned();
    }
    let headings = [
        "HOST ADDRESS",
        "HOST PORT",
        "LEASE",
        "PORT",
        "INTERFACE",
        "OWNER",
    ];
    let mut table = render::table(&headings);
    for published in ports {
        let port = &published.port;
        table.add_row([
            host_text(port.host_address),
            format!("{}/{}", port.host_port, port.protocol),
            published.lease.to_string(),
            port.clone_port.to_string(),
            port.nic.to_string(),
            published.owner_uid.to_string(),
        ]);
    }
    render::table_text(&table)
}

/// A published port in a line.
pub(crate) fn port_text(port: &PublishPort) -> String {
    let host = match port.host_address {
        Some(IpAddr::V6(address)) => format!("[{address}]"),
        other => host_text(other),
    };
    let interface = match port.nic {
        0 => String::new(),
        nic => format!(" of interface {nic}"),
    };
    format!(
        "{} {host}:{} -> port {}{interface}",
        port.protocol, port.host_port, port.clone_port
    )
}

fn host_text(address: Option<IpAddr>) -> String {
    address.map_or("*".to_owned(), |address| address.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_no_interface_has_is_told_from_the_hosts_own() {
        assert!(is_here("127.0.0.1".parse().unwrap()));
        assert!(!is_here("192.0.2.1".parse().unwrap()));
    }

    #[test]
    fn pairs_of_ports_are_read() {
        let pair: PortPair = "8080:80".parse().unwrap();
        assert_eq!(
            (pair.host, pair.clone, pair.protocol),
            (8080, Some(80), Protocol::Tcp)
        );
        let pair: PortPair = "53:5353/udp".parse().unwrap();
        assert_eq!(
            (pair.host, pair.clone, pair.protocol),
            (53, Some(5353), Protocol::Udp)
        );
        assert_eq!("8080".parse::<PortPair>().unwrap().clone, None);
    }

    #[test]
    fn what_is_no_pair_of_ports_is_refused() {
        for text in [
            "",
            ":",
            "80:",
            ":80",
            "0:80",
            "80:0",
            "65536:80",
            "80:80/sctp",
            "80:80:80",
            "-1:80",
        ] {
            assert!(text.parse::<PortPair>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn leases_of_other_owners_by_the_same_name_are_left_out() {
        let published = |lease: &str, owner_uid| PublishedPort {
            lease: lease.parse().unwrap(),
            owner_uid,
            port: PublishPort {
                protocol: Protocol::Tcp,
                host_address: None,
                host_port: 80,
                clone_port: 80,
                nic: 0,
            },
        };
        let name: Name = "a".parse().unwrap();
        for (lease, owner, asked, expected) in [
            ("a", 1000, Some(1000), true),
            ("a", 1001, Some(1000), false),
            ("b", 1000, Some(1000), false),
            ("a", 1001, None, true),
        ] {
            let port = published(lease, owner);
            assert_eq!(is_asked_for(&port, Some(&name), asked), expected);
        }
        assert!(!is_asked_for(&published("b", 1000), None, Some(1001)));
    }

    #[test]
    fn an_ipv6_host_address_is_bracketed() {
        let port = PublishPort {
            protocol: Protocol::Udp,
            host_address: Some("2001:db8::1".parse().unwrap()),
            host_port: 53,
            clone_port: 5353,
            nic: 1,
        };
        assert_eq!(
            port_text(&port),
            "udp [2001:db8::1]:53 -> port 5353 of interface 1"
        );
    }
}
