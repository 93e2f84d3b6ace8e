//! `sandwire pool create`: a pool from flags or from a file.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
};

use clap::{Args, builder::PossibleValuesParser};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sandwire_api::{
    attach::{DeviceChoice, InterfaceName, ParentSpec},
    name::Name,
    pool::{AddressPlan, GuestSpec, PolicySpec, PoolSpec, TapSpec},
    slot::{DataPath, MacAddress, SlotKind},
};

use super::{pool_text, wait_until_full};
use crate::{
    Context,
    connection::cannot,
    failure::{Failure, Outcome},
    patient::Patient,
    prefix::prefix,
    verb::policy::{
        PolicyFlags,
        flags::{self, words},
    },
};

/// Command line of `sandwire pool create`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Name of the pool, unique in the daemon.
    name: Name,

    /// Wait until the pool is full.
    #[arg(long)]
    wait: bool,

    /// Take all settings from this file, TOML or (by its ending .json) JSON; `-` reads TOML or JSON
    /// from standard input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["settings", flags::GROUP])]
    file: Option<PathBuf>,

    #[command(flatten)]
    settings: Settings,

    #[command(flatten)]
    policy: PolicyFlags,
}

/// A pool's settings as flags, without its policy. What isn't given has the default that the API documents.
#[derive(Debug, Args)]
#[group(id = "settings", multiple = true)]
struct Settings {
    /// Slots to keep ready, beside those that are leased [default: 8].
    #[arg(long)]
    size: Option<u32>,

    /// Kind of slot [default: netns].
    #[arg(long, value_parser = words::<SlotKind>(&["netns", "host", "container"]))]
    kind: Option<SlotKind>,

    /// Data path [default: auto].
    #[arg(long, value_parser = words::<DataPath>(&["auto", "nft", "ebpf", "xdp"]))]
    data_path: Option<DataPath>,

    /// What kind of interface containers get; auto is netkit where the kernel has it, else veth
    /// [default: veth].
    #[arg(long, value_parser = words::<DeviceChoice>(&["auto", "veth", "netkit", "macvlan", "ipvlan"]))]
    device: Option<DeviceChoice>,

    /// Interface of the host whose children containers get; with --device macvlan or ipvlan.
    #[arg(long, value_name = "INTERFACE")]
    parent: Option<InterfaceName>,

    /// Gateway of the parent's network; may be given once for each family [default: the host's own default
    /// gateways by the parent].
    #[arg(long, value_name = "ADDRESS", requires = "parent")]
    parent_gateway: Vec<IpAddr>,

    /// Subnet of the parent's network; may be given several times [default: those of the parent's addresses].
    #[arg(long, value_name = "PREFIX", requires = "parent", value_parser = prefix::<IpNet>("192.0.2.0/24"))]
    parent_subnet: Vec<IpNet>,

    /// Prefix of the IPv4 clone addresses, as 10.64.0.0/16; without it the sandboxes have no IPv4.
    #[arg(long, value_name = "PREFIX", value_parser = prefix::<Ipv4Net>("10.64.0.0/16"))]
    ipv4: Option<Ipv4Net>,

    /// Prefix of the IPv6 clone addresses, as fd00:c10e::/64; without it the sandboxes have no IPv6.
    #[arg(long, value_name = "PREFIX", value_parser = prefix::<Ipv6Net>("fd00:c10e::/64"))]
    ipv6: Option<Ipv6Net>,

    /// How slot numbers become clone addresses: counted up in the prefixes, or by the scheme of
    /// Firecracker's document on clones (which has IPv4 addresses of its own; it takes no --ipv4) [default: prefix].
    #[arg(long, value_parser = PossibleValuesParser::new(["prefix", "firecracker-clones"]))]
    plan: Option<String>,

    /// Interfaces per sandbox, 1 to 8 [default: 1].
    #[arg(long, value_name = "NUMBER")]
    nics: Option<u8>,

    /// Name of the first TAP, at most 15 bytes [default: vmtap0].
    #[arg(long, value_name = "INTERFACE")]
    tap: Option<String>,

    /// Numeric user that may open the TAP [default: only privileged users].
    #[arg(long)]
    uid: Option<u32>,

    /// Numeric group that may open the TAP [default: only privileged users].
    #[arg(long)]
    gid: Option<u32>,

    /// Give the TAP several queues. Firecracker refuses such a TAP.
    #[arg(long)]
    multi_queue: bool,

    /// MTU in bytes, 1280 to 65521 [default: 1500].
    #[arg(long, value_name = "BYTES")]
    mtu: Option<u32>,

    /// Ethernet address of the guest's first interface, as frozen in its snapshot
    /// [default: 06:00:c0:a8:f1:02].
    #[arg(long, value_name = "MAC")]
    guest_mac: Option<MacAddress>,

    /// Ethernet address of the gateway on the first TAP [default: 02:73:77:00:00:01].
    #[arg(long, value_name = "MAC")]
    gateway_mac: Option<MacAddress>,

    /// The guest's IPv4 address with its prefix length, as frozen in its snapshot
    /// [default: 192.168.241.2/29].
    #[arg(long, value_name = "ADDRESS/LENGTH", value_parser = prefix::<Ipv4Net>("192.168.241.2/29"))]
    guest_ipv4: Option<Ipv4Net>,

    /// The guest's IPv6 address with its prefix length, as frozen in its snapshot
    /// [default: fd00:5eed::2/64].
    #[arg(long, value_name = "ADDRESS/LENGTH", value_parser = prefix::<Ipv6Net>("fd00:5eed::2/64"))]
    guest_ipv6: Option<Ipv6Net>,

    /// Seconds that a released clone address rests before it is given out again [default: 3].
    #[arg(long, value_name = "SECONDS")]
    quarantine: Option<u32>,
}

pub(crate) fn run(context: &Context, arguments: Arguments) -> Outcome {
    let name = arguments.name;
    let spec = match &arguments.file {
        Some(file) => read_file(file, &name)?,
        None => arguments.settings.into_spec(name, arguments.policy)?,
    };
    let client = super::patient(context);
    let operation = format!("create pool {}", spec.name);
    let mut pool = client.create_pool(&spec).map_err(cannot(operation))?;
    if arguments.wait {
        pool = wait_until_full(&client, pool)?;
    }
    context.output.answer(&pool, pool_text)
}

impl Settings {
    fn into_spec(self, name: Name, policy: PolicyFlags) -> Result<PoolSpec, Failure> {
        let addresses = self.address_plan(&name)?;
        let has_ipv4 = match &addresses {
            AddressPlan::Prefix { ipv4, .. } => ipv4.is_some(),
            AddressPlan::FirecrackerClones { .. } => true,
        };
        let guest = GuestSpec::default();
        let guest = GuestSpec {
            mac: self.guest_mac.unwrap_or(guest.mac),
            gateway_mac: self.gateway_mac.unwrap_or(guest.gateway_mac),
            ipv4: self.guest_ipv4.or(guest.ipv4).filter(|_| has_ipv4),
            ipv6: self
                .guest_ipv6
                .or(guest.ipv6)
                .filter(|_| self.ipv6.is_some()),
            ..guest
        };
        let tap = TapSpec::default();
        // The API's own defaults for what has no flag, from the smallest specification there is.
        let smallest = serde_json::json!({ "name": name, "addresses": addresses });
        let spec: PoolSpec = serde_json::from_value(smallest)
            .map_err(|error| Failure::refused(format!("cannot create pool {name}: {error}")))?;
        Ok(PoolSpec {
            kind: self.kind.unwrap_or(spec.kind),
            data_path: self.data_path.unwrap_or(spec.data_path),
            device: self.device.unwrap_or(spec.device),
            parent: self.parent.map(|interface| ParentSpec {
                interface,
                gateways: self.parent_gateway,
                subnets: self.parent_subnet,
            }),
            size: self.size.unwrap_or(spec.size),
            nics: self.nics.unwrap_or(spec.nics),
            tap: TapSpec {
                name: self.tap.unwrap_or(tap.name),
                owner_uid: self.uid,
                owner_gid: self.gid,
                multi_queue: self.multi_queue,
                mtu: self.mtu.unwrap_or(tap.mtu),
                ..tap
            },
            guest,
            policy: policy.apply(PolicySpec::default()),
            quarantine_seconds: self.quarantine.unwrap_or(spec.quarantine_seconds),
            ..spec
        })
    }

    fn address_plan(&self, name: &Name) -> Result<AddressPlan, Failure> {
        let refuse = |reason: &str| {
            Err(Failure::refused(format!(
                "cannot create pool {name}: {reason}"
            )))
        };
        let firecracker = self.plan.as_deref() == Some("firecracker-clones");
        match (firecracker, self.ipv4, self.ipv6) {
            (true, Some(_), _) => refuse(
                "the plan firecracker-clones has IPv4 addresses of its own; leave --ipv4 out",
            ),
            (false, None, None) => refuse(
                "it has no clone addresses; give --ipv4 PREFIX (as 10.64.0.0/16), --ipv6 PREFIX \
                 (as fd00:c10e::/64), or both",
            ),
            (false, None, _) if self.guest_ipv4.is_some() => {
                refuse("--guest-ipv4 needs --ipv4 PREFIX")
            }
            (_, _, None) if self.guest_ipv6.is_some() => refuse("--guest-ipv6 needs --ipv6 PREFIX"),
            (true, None, ipv6) => Ok(AddressPlan::FirecrackerClones { ipv6 }),
            (false, ipv4, ipv6) => Ok(AddressPlan::Prefix { ipv4, ipv6 }),
        }
    }
}

/// Reads a pool's settings from a file. Its `name` may be left out, but not contradict.
fn read_file(file: &Path, name: &Name) -> Result<PoolSpec, Failure> {
    let text = if file == Path::new("-") {
        std::io::read_to_string(Patient(std::io::stdin()))
    } else {
        std::fs::read_to_string(file)
    };
    let shown = file.display();
    let text = text
        .map_err(|error| Failure::refused(format!("cannot read pool settings {shown}: {error}")))?;
    let is_json = file.extension().is_some_and(|ending| ending == "json")
        || text.trim_start().starts_with('{');
    let spec = if is_json {
        parse_json(&text, name)
    } else {
        parse_toml(&text, name)
    };
    let spec = spec.map_err(|reason| {
        Failure::refused(format!("cannot create pool {name} from {shown}: {reason}"))
    })?;
    if spec.name == *name {
        Ok(spec)
    } else {
        Err(Failure::refused(format!(
            "cannot create pool {name} from {shown}: the file names it {}; make the two agree",
            spec.name
        )))
    }
}

fn parse_json(text: &str, name: &Name) -> Result<PoolSpec, String> {
    let mut document: serde_json::Value =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    let object = document.as_object_mut().ok_or("it is not a JSON object")?;
    if object.contains_key("name") {
        // From the text itself, so that errors name the line.
        return serde_json::from_str(text).map_err(|error| error.to_string());
    }
    object.insert("name".to_owned(), name.as_str().into());
    serde_json::from_value(document).map_err(|error| error.to_string())
}

fn parse_toml(text: &str, name: &Name) -> Result<PoolSpec, String> {
    let mut table: toml::Table = toml::from_str(text).map_err(|error| error.to_string())?;
    if table.contains_key("name") {
        return toml::from_str(text).map_err(|error| error.to_string());
    }
    table.insert("name".to_owned(), name.as_str().into());
    table
        .try_into()
        .map_err(|error: toml::de::Error| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn spec(line: &str) -> Result<PoolSpec, Failure> {
        let line = std::iter::once("create").chain(line.split_whitespace());
        let arguments = Line::parse_from(line).arguments;
        arguments
            .settings
            .into_spec(arguments.name, arguments.policy)
    }

    #[test]
    fn a_pool_with_one_family_has_guests_of_that_family_only() {
        let v4 = spec("web --ipv4 10.64.0.0/16").unwrap();
        assert_eq!((v4.guest.ipv4.is_some(), v4.guest.ipv6), (true, None));
        let v6 = spec("web --ipv6 fd00:c10e::/64").unwrap();
        assert_eq!((v6.guest.ipv4, v6.guest.ipv6.is_some()), (None, true));
    }

    #[test]
    fn defaults_are_those_of_the_api() {
        let api = r#"{"name":"web","addresses":{"plan":"prefix","ipv4":"10.64.0.0/16","ipv6":"fd00:c10e::/64"}}"#;
        let expected: PoolSpec = serde_json::from_str(api).unwrap();
        assert_eq!(
            spec("web --ipv4 10.64.0.0/16 --ipv6 fd00:c10e::/64").unwrap(),
            expected
        );
    }

    #[test]
    fn every_flag_reaches_the_specification() {
        let spec = spec(
            "web --plan firecracker-clones --ipv6 fd00:c10e::/64 --size 3 --kind host --data-path xdp --device veth \
             --parent eth1 --parent-gateway 192.0.2.1 --parent-gateway fe80::1 --parent-subnet 192.0.2.0/24 --nics 1 \
             --tap tap7 --uid 5 --gid 6 --multi-queue --mtu 9000 --guest-mac 06:00:00:00:00:01 \
             --gateway-mac 06:00:00:00:00:02 --guest-ipv4 172.16.0.2/30 --guest-ipv6 fd01::2/64 --uplink route \
             --clone-to-clone --host-service tcp/53 --host-service icmp --cloud-metadata --connections-max 9 \
             --deny 10.0.0.0/8 --limit-egress 1mbit --quarantine 30",
        )
        .unwrap();
        let expected: PoolSpec = toml::from_str(
            r#"
            name = "web"
            kind = "host"
            data_path = "xdp"
            device = "veth"
            size = 3
            nics = 1
            quarantine_seconds = 30
            parent = { interface = "eth1", gateways = ["192.0.2.1", "fe80::1"], subnets = ["192.0.2.0/24"] }
            [tap]
            name = "tap7"
            owner_uid = 5
            owner_gid = 6
            multi_queue = true
            mtu = 9000
            [guest]
            mac = "06:00:00:00:00:01"
            gateway_mac = "06:00:00:00:00:02"
            ipv4 = "172.16.0.2/30"
            ipv6 = "fd01::2/64"
            [addresses]
            plan = "firecracker_clones"
            ipv6 = "fd00:c10e::/64"
            [policy]
            uplink = "route"
            clone_to_clone = true
            host_services = ["tcp/53", "icmp"]
            cloud_metadata = true
            connections_max = 9
            egress = { rules = [{ action = "deny", prefixes = ["10.0.0.0/8"] }] }
            limits = { egress = { bits_per_second = 1_000_000 } }
            "#,
        )
        .unwrap();
        assert_eq!(spec, expected);
    }

    #[test]
    fn settings_that_contradict_are_refused() {
        for line in [
            "web",
            "web --size 3",
            "web --plan firecracker-clones --ipv4 10.64.0.0/16",
            "web --ipv6 fd00:c10e::/64 --guest-ipv4 172.16.0.2/30",
            "web --ipv4 10.64.0.0/16 --guest-ipv6 fd01::2/64",
            "web --plan firecracker-clones --guest-ipv6 fd01::2/64",
        ] {
            assert_eq!(spec(line).unwrap_err().exit_status, 1, "{line} was taken");
        }
    }

    #[test]
    fn a_file_and_settings_by_flag_exclude_each_other() {
        for setting in ["--size=3", "--uplink=deny", "--deny=any"] {
            let line = ["create", "web", "--file", "web.toml", setting];
            assert!(Line::try_parse_from(line).is_err(), "{setting} was taken");
        }
    }

    #[test]
    fn a_file_may_leave_the_name_out_but_not_contradict() {
        let folder = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = folder.path().join(file);
            std::fs::write(&path, text).unwrap();
            path
        };
        let name: Name = "web".parse().unwrap();
        let plan = "[addresses]\nplan = \"prefix\"\nipv4 = \"10.64.0.0/16\"\n";
        let nameless = write("nameless.toml", plan);
        assert_eq!(read_file(&nameless, &name).unwrap().name, name);
        let other = write("other.toml", &format!("name = \"db\"\n{plan}"));
        assert!(
            read_file(&other, &name)
                .unwrap_err()
                .message
                .contains("make the two agree")
        );
        let json = write("web.json", r#"{"addresses":{"plan":"firecracker_clones"}}"#);
        assert_eq!(read_file(&json, &name).unwrap().name, name);
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line() {
        let text = "name = \"web\"\nsizes = 3\n[addresses]\nplan = \"prefix\"\n";
        let error = parse_toml(text, &"web".parse().unwrap()).unwrap_err();
        assert!(
            error.contains("line 2") && error.contains("sizes"),
            "{error}"
        );
    }
}
