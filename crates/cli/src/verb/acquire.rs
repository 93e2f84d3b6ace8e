//! `sandwire acquire`: takes a slot of a pool.

use std::{net::IpAddr, path::PathBuf};

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use ipnet::IpNet;
use sandwire_api::{
    attach::{Attach, AttachTap, InterfaceName},
    lease::AcquireLease,
    name::Name,
    slot::MacAddress,
    vsock::{VsockKind, VsockRequest},
};

use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
    prefix::prefix,
    verb::{policy, show},
};

/// Command line of `sandwire acquire`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Pool to take the slot from.
    pool: Name,

    /// Your own name for the lease. Asking again for the same name and pool gives the same lease.
    /// Without one, the daemon makes one up.
    name: Option<Name>,

    /// A certain clone address of the first interface: a paused sandbox comes back at its old one.
    #[arg(long, value_name = "ADDRESS")]
    clone_address: Option<IpAddr>,

    /// End the lease by itself after this time: seconds, or a number with s, m, h or d.
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    ttl: Option<u64>,

    /// Give it the policy of this file, TOML or JSON, instead of the pool's; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,

    /// The sandbox is a process in the slot's namespace, not a guest behind the TAP.
    #[arg(long)]
    process: bool,

    #[command(flatten)]
    attach: AttachFlags,

    #[command(flatten)]
    vsock: VsockFlags,
}

/// A namespace for the interface, with pools of kind container.
#[derive(Debug, Args)]
struct AttachFlags {
    /// Put the interface into this network namespace: a name under /run/netns, or a path.
    #[arg(long, value_name = "PATH", group = "place")]
    netns: Option<PathBuf>,

    /// Put the interface into the network namespace of this process.
    #[arg(long, group = "place")]
    pid: Option<u32>,

    /// The interface's name in there [default: eth0].
    #[arg(long, value_name = "NAME", requires = "place")]
    interface: Option<InterfaceName>,

    /// Its MTU in bytes [default: the pool's].
    #[arg(long, value_name = "BYTES", requires = "place")]
    mtu: Option<u32>,

    /// Its Ethernet address [default: one made of the clone address].
    #[arg(long, requires = "place")]
    mac: Option<MacAddress>,

    /// A destination that it leads to; may be given several times [default: everything].
    #[arg(long = "route", value_name = "PREFIX", requires = "place", value_parser = prefix::<IpNet>("10.0.0.0/8"))]
    routes: Vec<IpNet>,

    /// Make no routes, as a further interface of a container wants it.
    #[arg(long, requires = "place", conflicts_with = "routes")]
    no_routes: bool,

    /// Make a TAP of this name beside it, for a microVM in there, and join the two.
    #[arg(long, value_name = "NAME", requires = "place")]
    tap: Option<InterfaceName>,

    /// Numeric user that may open the TAP [default: only root].
    #[arg(long, value_name = "UID", requires = "tap")]
    tap_owner_uid: Option<u32>,

    /// Numeric group that may open the TAP [default: only root].
    #[arg(long, value_name = "GID", requires = "tap")]
    tap_owner_gid: Option<u32>,
}

impl AttachFlags {
    fn request(self) -> Option<Attach> {
        let netns = match (self.netns, self.pid) {
            (Some(name), _) if name.components().count() == 1 && name.is_relative() => {
                PathBuf::from("/run/netns").join(name)
            }
            (Some(path), _) => std::path::absolute(&path).unwrap_or(path),
            (None, Some(pid)) => PathBuf::from(format!("/proc/{pid}/ns/net")),
            (None, None) => return None,
        };
        Some(Attach {
            netns,
            interface: self.interface.unwrap_or_default(),
            mtu: self.mtu,
            mac: self.mac,
            routes: (self.no_routes || !self.routes.is_empty()).then_some(self.routes),
            tap: self.tap.map(|name| AttachTap {
                name,
                owner_uid: self.tap_owner_uid,
                owner_gid: self.tap_owner_gid,
            }),
        })
    }
}

/// A vsock channel beside the network.
#[derive(Debug, Args)]
struct VsockFlags {
    /// With a vsock channel: for a VMM without a device of its own (vhost-user: QEMU), or one that has one
    /// (hybrid: Firecracker, Cloud Hypervisor).
    #[arg(
        long,
        value_name = "KIND",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "vhost-user",
        value_parser = vsock_kind()
    )]
    vsock: Option<VsockKind>,

    /// The guest's CID [default: 3].
    #[arg(long, value_name = "CID", requires = "vsock")]
    cid: Option<u32>,

    /// CID by which your other sandboxes may call this one, if their policy names it.
    #[arg(long, value_name = "CID", requires = "vsock")]
    virtual_cid: Option<u32>,

    /// What the guest may reach by vsock, from this file, TOML or JSON, instead of what the pool says; `-` reads
    /// standard input.
    #[arg(long, value_name = "FILE", requires = "vsock")]
    vsock_policy: Option<PathBuf>,
}

impl VsockFlags {
    fn request(&self, operation: &str) -> Result<Option<VsockRequest>, Failure> {
        let Some(kind) = self.vsock else {
            return Ok(None);
        };
        let policy = match &self.vsock_policy {
            Some(file) => Some(policy::read_policy(file, operation)?),
            None => None,
        };
        Ok(Some(VsockRequest {
            kind,
            cid: self.cid,
            virtual_cid: self.virtual_cid,
            policy,
        }))
    }
}

fn vsock_kind() -> impl TypedValueParser<Value = VsockKind> {
    PossibleValuesParser::new(["vhost-user", "hybrid"]).map(|word| match &*word {
        "hybrid" => VsockKind::Hybrid,
        _ => VsockKind::VhostUser,
    })
}

pub(crate) fn run(context: &Context, arguments: Arguments) -> Outcome {
    let operation = match &arguments.name {
        Some(name) => format!("acquire lease {name} from pool {}", arguments.pool),
        None => format!("acquire a lease from pool {}", arguments.pool),
    };
    let policy = match &arguments.policy {
        Some(file) => Some(policy::read_policy(file, &operation)?),
        None => None,
    };
    let place = match arguments.attach.pid {
        Some(_) => "--pid",
        None => "--netns",
    };
    let request = AcquireLease {
        pool: arguments.pool,
        name: arguments.name,
        clone_address: arguments.clone_address,
        ttl_seconds: arguments.ttl,
        policy,
        process: arguments.process,
        vsock: arguments.vsock.request(&operation)?,
        attach: arguments.attach.request(),
    };
    let acquired = context
        .client()
        .acquire(&request)
        .map_err(cannot(operation))
        .map_err(|failure| by_options(failure, place))?;
    context.output.answer(&acquired.lease, show::lease_text)
}

/// Has a refusal name the option, where the daemon has named the request's field.
fn by_options(failure: Failure, place: &str) -> Failure {
    let Some(field) = &failure.field else {
        return failure;
    };
    let option = match field.as_str() {
        "attach.netns" => place,
        "attach.mtu" => "--mtu",
        "attach.mac" => "--mac",
        "attach.routes" => "--route",
        "attach.tap.name" => "--tap",
        "clone_address" => "--clone-address",
        "ttl_seconds" => "--ttl",
        "process" => "--process",
        _ => return failure,
    };
    let (named, shown) = (format!("{field} = "), format!("{option} = "));
    let message = failure.message.replacen(&named, &shown, 1);
    Failure { message, ..failure }
}

/// Seconds from a text such as `90`, `90s`, `30m`, `12h` or `7d`.
fn parse_ttl(text: &str) -> Result<u64, String> {
    let refuse = || format!("'{text}' is not a time: write seconds, or a number with s, m, h or d");
    let digits = text.trim_end_matches(|last: char| last.is_ascii_alphabetic());
    let seconds_each = match &text[digits.len()..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(refuse()),
    };
    let number: u64 = digits.parse().map_err(|_| refuse())?;
    let seconds = number.checked_mul(seconds_each).ok_or_else(refuse)?;
    if seconds == 0 {
        return Err(
            "a lease of no time can't be had: leave --ttl out for one without end".to_owned(),
        );
    }
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attach_of(flags: &str) -> Option<Attach> {
        #[derive(Debug, clap::Parser)]
        struct Line {
            #[command(flatten)]
            attach: AttachFlags,
        }
        let words = ["line"].into_iter().chain(flags.split_whitespace());
        let line = <Line as clap::Parser>::try_parse_from(words).unwrap();
        line.attach.request()
    }

    #[test]
    fn a_namespace_is_named_in_three_ways() {
        let path = |flags: &str| attach_of(flags).unwrap().netns;
        assert_eq!(path("--netns blue"), PathBuf::from("/run/netns/blue"));
        assert_eq!(path("--netns /x/blue"), PathBuf::from("/x/blue"));
        assert_eq!(path("--pid 17"), PathBuf::from("/proc/17/ns/net"));
        assert_eq!(attach_of(""), None);
        let routes = |flags: &str| attach_of(flags).unwrap().routes.map(|routes| routes.len());
        assert_eq!(routes("--pid 17"), None);
        assert_eq!(routes("--pid 17 --no-routes"), Some(0));
        assert_eq!(routes("--pid 17 --route 10.0.0.0/8 --route ::/0"), Some(2));
        let tap = |flags: &str| attach_of(flags).unwrap().tap;
        assert_eq!(tap("--pid 17"), None);
        let given = tap("--pid 17 --tap tap0 --tap-owner-uid 1000").unwrap();
        assert_eq!((given.name.as_str(), given.owner_uid), ("tap0", Some(1000)));
    }

    #[test]
    fn a_refusal_names_the_options_that_were_given() {
        let message = "cannot acquire lease a from pool web: attach.netns = /proc/7/ns/net: it is no namespace";
        let refused = |field: Option<&str>| {
            let failure = Failure {
                field: field.map(str::to_owned),
                ..Failure::refused(message)
            };
            by_options(failure, "--pid").message
        };
        assert_eq!(
            refused(Some("attach.netns")),
            "cannot acquire lease a from pool web: --pid = /proc/7/ns/net: it is no namespace"
        );
        // Somebody's words, not the name of a field.
        assert_eq!(refused(None), message);
        assert_eq!(refused(Some("attach.interface")), message);
    }

    #[test]
    fn times_are_read_with_their_units() {
        let read = ["90", "90s", "30m", "12h", "7d"].map(|text| parse_ttl(text).unwrap());
        assert_eq!(read, [90, 90, 1800, 43_200, 604_800]);
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "m",
            "-1",
            "1w",
            "1.5h",
            "30 m",
            "0",
            "0d",
            "99999999999999999999",
            "300000000000000d",
        ] {
            assert!(parse_ttl(text).is_err(), "{text:?} was taken");
        }
    }
}
