//! The file that declares a lab: from TOML text to a checked [`Lab`].
//!
//! Nothing has been made when something is refused, and every refusal names the line. `docs/impair.md` describes the
//! keys.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::Range,
    path::Path,
};

use ipnet::IpNet;
use sandwire_api::{impairment::Impairment, name::Name};
use serde::Deserialize;
use toml::Spanned;

use super::{
    End, Host, Lab, LabError, Link, Position, Route,
    address::{IPV6_MTU_MIN, assigned, is_of_a_host, mac_of},
};
use crate::ways::{Ways, WaysError};

/// Hosts and switches of a lab; each has an octet of the addresses that are assigned.
const HOSTS_MAX: usize = 250;
/// Links of a lab.
const LINKS_MAX: usize = 256;
/// What IPv4 needs at least (RFC 791), and what a veth takes at most.
const MTU_RANGE: std::ops::RangeInclusive<u32> = 68..=65_535;
const MTU_DEFAULT: u32 = 1500;
/// Longest name of an interface (`IFNAMSIZ` without its final zero).
const INTERFACE_NAME_BYTES_MAX: usize = 15;

/// What the file may hold.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: Option<Spanned<String>>,
    #[serde(default)]
    host: BTreeMap<Spanned<String>, HostSection>,
    #[serde(default)]
    switch: BTreeMap<Spanned<String>, SwitchSection>,
    #[serde(default)]
    link: Vec<LinkSection>,
    #[serde(default)]
    route: Vec<RouteSection>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostSection {
    #[serde(default)]
    forward: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SwitchSection {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkSection {
    ends: Spanned<Vec<Spanned<String>>>,
    interfaces: Option<Spanned<Vec<Spanned<String>>>>,
    addresses: Option<Spanned<Vec<Spanned<toml::Value>>>>,
    mtu: Option<Spanned<u32>>,
    ab: Option<Spanned<String>>,
    ba: Option<Spanned<String>>,
    both: Option<Spanned<String>>,
    impairment: Option<Spanned<Impairment>>,
}

/// Where rules are: a type that knows of places only, for files that were read already.
#[derive(Deserialize)]
struct RulePlaces {
    link: Vec<LinkPlaces>,
}

#[derive(Deserialize)]
struct LinkPlaces {
    impairment: Option<TablePlaces>,
}

#[derive(Deserialize)]
struct TablePlaces {
    #[serde(default, alias = "rules")]
    rule: Vec<Spanned<toml::Value>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteSection {
    host: Spanned<String>,
    to: Spanned<String>,
    via: Spanned<String>,
}

impl Lab {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// Names file, line and column of what is unknown or impossible.
    pub fn load(path: &Path) -> Result<Self, LabError> {
        let text = fs::read_to_string(path).map_err(|source| LabError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    /// Checks the text of a file; `path` is for messages, and its stem is the lab's name if the text gives none.
    ///
    /// # Errors
    /// Names file, line and column of what is unknown or impossible.
    pub fn parse(text: &str, path: &Path) -> Result<Self, LabError> {
        Source { text, path }.read()
    }
}

struct Source<'a> {
    text: &'a str,
    path: &'a Path,
}

/// What is known while links are read.
struct Places {
    hosts: Vec<Host>,
    /// Of each host: its interfaces so far, and their addresses.
    interfaces: Vec<Vec<(String, Vec<IpNet>)>>,
    /// The switch that stands for all those joined with one, to find circles.
    joined: Vec<usize>,
    /// Where each address was given.
    addresses: HashMap<IpAddr, String>,
}

impl Source<'_> {
    fn read(&self) -> Result<Lab, LabError> {
        let file: File = toml::from_str(self.text)
            .map_err(|error| self.invalid(error.span().unwrap_or(0..0), error.message()))?;
        let name = self.lab_name(file.name.as_ref())?;
        let hosts = self.hosts(file.host, file.switch)?;
        let mut places = Places {
            interfaces: vec![Vec::new(); hosts.len()],
            joined: (0..hosts.len()).collect(),
            hosts,
            addresses: HashMap::new(),
        };
        if let Some(link) = file.link.get(LINKS_MAX) {
            let reason = format!("a lab has at most {LINKS_MAX} links");
            return Err(self.invalid(link.ends.span(), reason));
        }
        // All switches that are joined are one network, wherever in the file they are joined.
        let mut ends = Vec::with_capacity(file.link.len());
        for section in &file.link {
            let hosts = self.ends(section, &places.hosts)?;
            self.join(section, hosts, &mut places)?;
            ends.push(hosts);
        }
        let mut links = Vec::with_capacity(file.link.len());
        for (number, (section, hosts)) in file.link.iter().zip(ends).enumerate() {
            links.push(self.link(number, section, hosts, &mut places)?);
        }
        for section in &file.route {
            let (host, route) = self.route(section, &places.hosts, &links)?;
            places.hosts[host].routes.push(route);
        }
        Ok(Lab {
            name,
            hosts: places.hosts,
            links,
        })
    }

    fn lab_name(&self, given: Option<&Spanned<String>>) -> Result<Name, LabError> {
        if let Some(given) = given {
            return self.name(given);
        }
        let stem = self.path.file_stem().unwrap_or_default();
        stem.to_string_lossy().parse().map_err(|error| {
            let reason = format!("{error}; the file's name doesn't do: begin with name = \"…\"");
            self.invalid(0..0, reason)
        })
    }

    fn name(&self, given: &Spanned<String>) -> Result<Name, LabError> {
        let parsed = given.get_ref().parse();
        parsed.map_err(|error: sandwire_api::name::InvalidName| {
            self.invalid(given.span(), error.to_string())
        })
    }

    fn hosts(
        &self,
        hosts: BTreeMap<Spanned<String>, HostSection>,
        switches: BTreeMap<Spanned<String>, SwitchSection>,
    ) -> Result<Vec<Host>, LabError> {
        if hosts.is_empty() {
            let reason = "the lab has no hosts; add some, as [host.client]";
            return Err(self.invalid(0..0, reason));
        }
        let hosts = hosts
            .into_iter()
            .map(|(name, it)| (name, false, it.forward));
        let switches = switches.into_keys().map(|name| (name, true, false));
        let mut found: Vec<Host> = Vec::new();
        for (given, switch, forward) in hosts.chain(switches) {
            let name = self.name(&given)?;
            if found.iter().any(|host| host.name == name) {
                let reason = format!("'{name}' is a host already; give the switch another name");
                return Err(self.invalid(given.span(), reason));
            }
            if found.len() == HOSTS_MAX {
                let reason = format!("a lab has at most {HOSTS_MAX} hosts and switches");
                return Err(self.invalid(given.span(), reason));
            }
            found.push(Host {
                name,
                switch,
                forward,
                routes: Vec::new(),
            });
        }
        Ok(found)
    }

    /// What a link joins.
    fn ends(&self, section: &LinkSection, hosts: &[Host]) -> Result<[usize; 2], LabError> {
        let [first, second] = self.pair(&section.ends, "ends", "hosts or switches")?;
        let ends = [self.host(first, hosts)?, self.host(second, hosts)?];
        if ends[0] == ends[1] {
            let reason = "both ends of the link are the same; name two";
            return Err(self.invalid(section.ends.span(), reason));
        }
        Ok(ends)
    }

    fn link(
        &self,
        number: usize,
        section: &LinkSection,
        hosts: [usize; 2],
        places: &mut Places,
    ) -> Result<Link, LabError> {
        let mtu = section
            .mtu
            .as_ref()
            .map_or(MTU_DEFAULT, |mtu| *mtu.get_ref());
        if let Some(given) = &section.mtu
            && !MTU_RANGE.contains(&mtu)
        {
            return Err(self.invalid(given.span(), "mtu must be between 68 and 65535"));
        }
        let interfaces = self.interfaces(section, hosts, places)?;
        let addresses = self.addresses(number, section, hosts, mtu, places)?;
        let ends = [0, 1].map(|end| End {
            host: hosts[end],
            interface: interfaces[end].clone(),
            addresses: addresses[end].clone(),
            mac: mac_of(number, end),
        });
        for end in &ends {
            let known = (end.interface.clone(), end.addresses.clone());
            places.interfaces[end.host].push(known);
        }
        let impairment = self.impairment(number, section)?;
        Ok(Link {
            ends,
            mtu,
            impairment,
        })
    }

    /// What happens on a link: a text for each way, or a table.
    fn impairment(&self, number: usize, section: &LinkSection) -> Result<Impairment, LabError> {
        let given = [&section.ab, &section.ba, &section.both];
        let Some(table) = &section.impairment else {
            return self.ways(given);
        };
        if let Some(text) = given.into_iter().flatten().next() {
            let reason = "the link has a table 'impairment' too; write all into one of them";
            return Err(self.invalid(text.span(), reason));
        }
        let mut impairment = table.get_ref().clone();
        let read = impairment.read_files(|file| self.read_beside(file));
        read.and_then(|()| impairment.check()).map_err(|error| {
            let rules = 0..impairment.rules.len();
            let mut named =
                rules.filter(|rule| Some(&*impairment.rule_name(*rule)) == error.rule());
            let span = named.next().and_then(|rule| self.rule_span(number, rule));
            self.invalid(span.unwrap_or(table.span()), error.to_string())
        })?;
        Ok(impairment)
    }

    /// What the texts of a link say.
    fn ways(&self, given: [&Option<Spanned<String>>; 3]) -> Result<Impairment, LabError> {
        let [ab, ba, both] = given.map(|text| Some(text.as_ref()?.get_ref().as_str()));
        let read = |[ab, ba, both]: [Option<&str>; 3]| -> Result<Impairment, WaysError> {
            let mut impairment = Ways { ab, ba, both }.combine()?;
            impairment.read_files(|file| self.read_beside(file))?;
            impairment.check()?;
            Ok(impairment)
        };
        read([ab, ba, both]).map_err(|error| {
            // The first that is wrong alone; what is wrong with them together is said at the last.
            let alone = [[ab, None, None], [None, ba, None], [None, None, both]];
            let wrong = alone.into_iter().position(|ways| read(ways).is_err());
            let last = given.iter().rposition(|text| text.is_some());
            let at = wrong.or(last).and_then(|at| given[at].as_ref());
            self.invalid(at.map_or(0..0, Spanned::span), error.to_string())
        })
    }

    /// A file that the lab's names, in the folder of that.
    fn read_beside(&self, file: &str) -> std::io::Result<String> {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        fs::read_to_string(folder.join(file))
    }

    /// Where a rule of a link's table is.
    fn rule_span(&self, link: usize, rule: usize) -> Option<Range<usize>> {
        let places: RulePlaces = toml::from_str(self.text).ok()?;
        let table = places.link.get(link)?.impairment.as_ref()?;
        Some(table.rule.get(rule)?.span())
    }

    /// Refuses a circle of switches: frames for all would go round in it for ever.
    fn join(
        &self,
        section: &LinkSection,
        hosts: [usize; 2],
        places: &mut Places,
    ) -> Result<(), LabError> {
        if !hosts.iter().all(|&host| places.hosts[host].switch) {
            return Ok(());
        }
        let [kept, gone] = hosts.map(|host| places.joined[host]);
        if kept == gone {
            let reason = "this link closes a circle of switches, in which broadcasts would go round for ever; \
                          leave it out";
            return Err(self.invalid(section.ends.span(), reason));
        }
        for joined in &mut places.joined {
            if *joined == gone {
                *joined = kept;
            }
        }
        Ok(())
    }

    fn host(&self, given: &Spanned<String>, hosts: &[Host]) -> Result<usize, LabError> {
        let place = hosts
            .iter()
            .position(|host| host.name.as_str() == given.get_ref());
        place.ok_or_else(|| {
            let known: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
            let reason = format!(
                "there is no host '{}'; there are {}",
                given.get_ref(),
                known.join(", ")
            );
            self.invalid(given.span(), reason)
        })
    }

    fn pair<'a, T>(
        &self,
        list: &'a Spanned<Vec<T>>,
        key: &str,
        what: &str,
    ) -> Result<[&'a T; 2], LabError> {
        match list.get_ref().as_slice() {
            [first, second] => Ok([first, second]),
            other => {
                let reason = format!("{key} must be two {what}, not {}", other.len());
                Err(self.invalid(list.span(), reason))
            }
        }
    }

    fn interfaces(
        &self,
        section: &LinkSection,
        hosts: [usize; 2],
        places: &Places,
    ) -> Result<[String; 2], LabError> {
        let Some(list) = &section.interfaces else {
            return Ok(hosts.map(|host| free_name(&places.interfaces[host])));
        };
        let given = self.pair(list, "interfaces", "names")?;
        for (name, host) in given.into_iter().zip(hosts) {
            if let Some(reason) = name_defect(name.get_ref()) {
                let reason = format!("'{}': the name of an interface {reason}", name.get_ref());
                return Err(self.invalid(name.span(), reason));
            }
            let mut taken = places.interfaces[host].iter();
            if taken.any(|(taken, _)| taken == name.get_ref()) {
                let host = &places.hosts[host].name;
                let reason = format!("{host} has an interface '{}' already", name.get_ref());
                return Err(self.invalid(name.span(), reason));
            }
        }
        Ok(given.map(|name| name.get_ref().clone()))
    }

    fn addresses(
        &self,
        number: usize,
        section: &LinkSection,
        hosts: [usize; 2],
        mtu: u32,
        places: &mut Places,
    ) -> Result<[Vec<IpNet>; 2], LabError> {
        let switches = hosts.map(|host| places.hosts[host].switch);
        let Some(list) = &section.addresses else {
            let given = assigned(number, switches, hosts, &places.joined, mtu);
            for (end, addresses) in given.iter().enumerate() {
                for address in addresses {
                    self.take(*address, section.ends.span(), places)?;
                    self.refuse_overlap(*address, section.ends.span(), hosts[end], places)?;
                }
            }
            return Ok(given);
        };
        let given = self.pair(list, "addresses", "addresses, one for each end")?;
        let mut found = [Vec::new(), Vec::new()];
        for (end, value) in given.into_iter().enumerate() {
            let addresses = self.end_addresses(value)?;
            if switches[end] && !addresses.is_empty() {
                let reason = format!(
                    "{} is a switch, which has no addresses: write [] for it",
                    places.hosts[hosts[end]].name
                );
                return Err(self.invalid(value.span(), reason));
            }
            for address in &addresses {
                if address.addr().is_ipv6() && mtu < IPV6_MTU_MIN {
                    let reason = format!("IPv6 needs an mtu of at least {IPV6_MTU_MIN}");
                    return Err(self.invalid(value.span(), reason));
                }
                self.take(*address, value.span(), places)?;
                self.refuse_overlap(*address, value.span(), hosts[end], places)?;
            }
            found[end] = addresses;
        }
        Ok(found)
    }

    /// One address as a text, or several in a list.
    fn end_addresses(&self, value: &Spanned<toml::Value>) -> Result<Vec<IpNet>, LabError> {
        let texts: Vec<&toml::Value> = match value.get_ref() {
            toml::Value::Array(list) => list.iter().collect(),
            single => vec![single],
        };
        let mut addresses = Vec::with_capacity(texts.len());
        for text in texts {
            let parsed = text.as_str().and_then(|text| text.parse::<IpNet>().ok());
            let Some(address) = parsed.filter(|address| is_of_a_host(*address)) else {
                let reason = format!(
                    "{text} is no address of a host with the length of its prefix: write it as \"10.0.0.1/24\", or \
                     several as [\"10.0.0.1/24\", \"fd00::1/64\"]"
                );
                return Err(self.invalid(value.span(), reason));
            };
            addresses.push(address);
        }
        Ok(addresses)
    }

    /// Refuses an address that the lab has already.
    fn take(
        &self,
        address: IpNet,
        span: Range<usize>,
        places: &mut Places,
    ) -> Result<(), LabError> {
        let line = Position::of(self.text, span.start).line;
        let place = format!("line {line}");
        if let Some(other) = places.addresses.insert(address.addr(), place) {
            let reason = format!("address {} is given twice; see {other}", address.addr());
            return Err(self.invalid(span, reason));
        }
        Ok(())
    }

    /// Refuses a second interface into one network: packets would leave by one of them only.
    fn refuse_overlap(
        &self,
        address: IpNet,
        span: Range<usize>,
        host: usize,
        places: &Places,
    ) -> Result<(), LabError> {
        for (interface, others) in &places.interfaces[host] {
            let overlaps = |other: &&IpNet| {
                other.contains(&address.trunc()) || address.contains(&other.trunc())
            };
            if let Some(other) = others.iter().find(overlaps) {
                let reason = format!(
                    "{address} overlaps with {other} of {}'s interface {interface}; choose another network",
                    places.hosts[host].name
                );
                return Err(self.invalid(span, reason));
            }
        }
        Ok(())
    }

    fn route(
        &self,
        section: &RouteSection,
        hosts: &[Host],
        links: &[Link],
    ) -> Result<(usize, Route), LabError> {
        let host = self.host(&section.host, hosts)?;
        let via: IpAddr = section.via.get_ref().parse().map_err(|_| {
            let reason = format!("'{}' is no address", section.via.get_ref());
            self.invalid(section.via.span(), reason)
        })?;
        let to = match section.to.get_ref().as_str() {
            "default" => any_of(via),
            text => text.parse::<IpNet>().map_err(|_| {
                let reason =
                    format!("'{text}' is no network: write it as \"10.0.2.0/24\", or \"default\"");
                self.invalid(section.to.span(), reason)
            })?,
        };
        if to.addr().is_ipv4() != via.is_ipv4() {
            let reason = format!("{to} and {via} are of different families");
            return Err(self.invalid(section.via.span(), reason));
        }
        let ends = links.iter().enumerate().flat_map(|(link, it)| {
            let ends = it.ends.iter().enumerate();
            ends.map(move |(end, it)| (link, end, it))
        });
        let mut ends = ends.filter(|(_, _, it)| it.host == host);
        let leads = |address: &IpNet| address.contains(&via) && address.addr() != via;
        let found = ends.find(|(_, _, it)| it.addresses.iter().any(leads));
        let Some((link, end, _)) = found else {
            let reason = format!(
                "{via} is in none of the networks of {}: name an address that it reaches without a route",
                section.host.get_ref()
            );
            return Err(self.invalid(section.via.span(), reason));
        };
        if hosts[host]
            .routes
            .iter()
            .any(|route| route.to == to.trunc())
        {
            let reason = format!("{} has a route to {to} already", section.host.get_ref());
            return Err(self.invalid(section.to.span(), reason));
        }
        let to = to.trunc();
        Ok((host, Route { to, via, link, end }))
    }

    fn invalid(&self, span: Range<usize>, reason: impl Into<String>) -> LabError {
        LabError::Invalid {
            path: self.path.to_owned(),
            position: Position::of(self.text, span.start),
            reason: reason.into(),
        }
    }
}

/// The first of eth0, eth1 … that a host hasn't.
fn free_name(taken: &[(String, Vec<IpNet>)]) -> String {
    let mut names = (0..).map(|number| format!("eth{number}"));
    let is_free = |name: &String| taken.iter().all(|(taken, _)| taken != name);
    names.find(is_free).expect("there is no end of numbers")
}

fn name_defect(name: &str) -> Option<&'static str> {
    if name.is_empty() || name.len() > INTERFACE_NAME_BYTES_MAX {
        Some("has 1 to 15 bytes")
    } else if name.contains(|c: char| c == '/' || c == ':' || c == '%' || c.is_whitespace()) {
        Some("has no blanks, '/', ':' or '%'")
    } else if matches!(name, "lo" | "." | ".." | super::build::BRIDGE) {
        Some("is none of 'lo', '.', '..' and 'bridge'")
    } else {
        None
    }
}

fn any_of(address: IpAddr) -> IpNet {
    let unspecified = match address {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    IpNet::new(unspecified, 0).expect("0 is a length of both families")
}

#[cfg(test)]
mod tests;
