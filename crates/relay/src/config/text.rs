//! The file as it is written, and its check.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use ipnet::IpNet;
use rustls::pki_types::ServerName;
use serde::Deserialize;

use super::{
    CGROUPS_MAX, Config, ConfigError, Deliver, Egress, Limits, Origin, Owners, Peer, PortRange,
    Protocol, Redirect, Sender, TlsFiles, Transport, UNREAD_PARTS_MIN, is_name,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    folder: Option<PathBuf>,
    report: Option<PathBuf>,
    tls: TlsText,
    #[serde(default)]
    limits: LimitsText,
    egress: Option<EgressText>,
    #[serde(default)]
    peer: Vec<PeerText>,
    #[serde(default)]
    sender: Vec<SenderText>,
    #[serde(default)]
    redirect: Vec<RedirectText>,
    deliver: Option<DeliverText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsText {
    certificate: PathBuf,
    key: PathBuf,
    authorities: PathBuf,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsText {
    connections_per_sender: Option<usize>,
    flows_per_sender: Option<usize>,
    connections: Option<usize>,
    flows: Option<usize>,
    connections_per_host: Option<usize>,
    flows_per_host: Option<usize>,
    openings: Option<usize>,
    buffer_bytes: Option<usize>,
    unread_bytes: Option<usize>,
    datagram_queue_bytes: Option<usize>,
    answer_sockets: Option<usize>,
    tcp_idle_seconds: Option<u64>,
    tcp_unanswered_seconds: Option<u64>,
    udp_idle_seconds: Option<u64>,
    connect_seconds: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EgressText {
    listen_port: Option<u16>,
    daemon: Option<PathBuf>,
    seed: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerText {
    name: String,
    address: SocketAddr,
    server_name: String,
    #[serde(default)]
    transport: Transport,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SenderText {
    name: String,
    addresses: Option<Vec<PrefixText>>,
    identity: Option<Vec<PrefixText>>,
    cgroup: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RedirectText {
    #[serde(default)]
    from: Vec<PrefixText>,
    #[serde(default)]
    senders: Vec<String>,
    to: Vec<PrefixText>,
    protocols: Option<Vec<Protocol>>,
    ports: Option<Vec<PortRange>>,
    via: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeliverText {
    listen: Vec<SocketAddr>,
    clients: Vec<String>,
    allow: Vec<PrefixText>,
}

/// A prefix, or an address alone.
#[derive(Clone, Deserialize)]
#[serde(try_from = "String")]
struct PrefixText(IpNet);

impl TryFrom<String> for PrefixText {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let prefix = text
            .parse::<IpNet>()
            .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
            .map_err(|_| {
                format!("'{text}' is no prefix: write it as 192.0.2.0/24 or 2001:db8::/32")
            })?;
        if prefix.trunc() != prefix {
            return Err(format!(
                "'{text}' has bits behind its length; {} has none",
                prefix.trunc()
            ));
        }
        // Packets of IPv4 aren't of IPv6, so nothing would fit it, and what it is meant for would leave in the clear.
        if let IpNet::V6(prefix) = prefix
            && prefix.addr().to_ipv4_mapped().is_some()
        {
            return Err(format!("'{text}' is IPv4: write it as 192.0.2.0/24"));
        }
        Ok(Self(prefix))
    }
}

fn prefixes(texts: Vec<PrefixText>) -> Vec<IpNet> {
    texts.into_iter().map(|PrefixText(prefix)| prefix).collect()
}

/// Collects where an error is.
struct Checker<'a> {
    path: &'a Path,
}

impl Checker<'_> {
    fn error(&self, key: impl Into<String>, reason: impl Into<String>) -> ConfigError {
        ConfigError::Value {
            path: self.path.to_owned(),
            key: key.into(),
            reason: reason.into(),
        }
    }

    fn server_name(&self, key: &str, text: &str) -> Result<ServerName<'static>, ConfigError> {
        ServerName::try_from(text.to_owned()).map_err(|_| {
            self.error(
                key,
                format!("'{text}' is neither a DNS name nor an address"),
            )
        })
    }

    fn limits(&self, text: &LimitsText) -> Result<Limits, ConfigError> {
        let limits = self.each_limit(text)?;
        let part = limits.unread_part_bytes();
        let least = UNREAD_PARTS_MIN * part;
        if limits.unread_bytes.is_some_and(|bytes| bytes < least) {
            let reason =
                format!("with that `buffer_bytes` it is {least} at least: {part} for a connection");
            return Err(self.error("limits.unread_bytes", reason));
        }
        Ok(limits)
    }

    fn each_limit(&self, text: &LimitsText) -> Result<Limits, ConfigError> {
        let bounded = |key: &str, given: Option<usize>, usual: usize, least: usize, most: usize| {
            let value = given.unwrap_or(usual);
            if (least..=most).contains(&value) {
                return Ok(value);
            }
            let reason = format!("{value} is not between {least} and {most}");
            Err(self.error(format!("limits.{key}"), reason))
        };
        let seconds = |key: &str, given: Option<u64>, usual: u64| {
            let value = given.unwrap_or(usual);
            if (1..=7 * 86_400).contains(&value) {
                return Ok(Duration::from_secs(value));
            }
            let reason = format!("{value} is not between 1 and {}", 7 * 86_400);
            Err(self.error(format!("limits.{key}"), reason))
        };
        let million = 1 << 20;
        Ok(Limits {
            connections_per_sender: bounded(
                "connections_per_sender",
                text.connections_per_sender,
                1024,
                1,
                million,
            )?,
            flows_per_sender: bounded("flows_per_sender", text.flows_per_sender, 4096, 1, million)?,
            connections: bounded("connections", text.connections, 16_384, 1, million)?,
            flows: bounded("flows", text.flows, 16_384, 1, million)?,
            connections_per_host: bounded(
                "connections_per_host",
                text.connections_per_host,
                32_768,
                1,
                million,
            )?,
            flows_per_host: bounded("flows_per_host", text.flows_per_host, 32_768, 1, million)?,
            openings: bounded("openings", text.openings, 4096, 1, million)?,
            buffer_bytes: bounded("buffer_bytes", text.buffer_bytes, 256 << 10, 4096, 64 << 20)?,
            unread_bytes: text.unread_bytes,
            datagram_queue_bytes: bounded(
                "datagram_queue_bytes",
                text.datagram_queue_bytes,
                4 << 20,
                1 << 16,
                1 << 30,
            )?,
            answer_sockets: bounded("answer_sockets", text.answer_sockets, 1024, 1, million)?,
            tcp_idle: seconds("tcp_idle_seconds", text.tcp_idle_seconds, 3600)?,
            tcp_unanswered: seconds("tcp_unanswered_seconds", text.tcp_unanswered_seconds, 60)?,
            udp_idle: seconds("udp_idle_seconds", text.udp_idle_seconds, 60)?,
            connect: seconds("connect_seconds", text.connect_seconds, 10)?,
        })
    }

    fn sender(&self, index: usize, text: SenderText) -> Result<Sender, ConfigError> {
        let key = format!("sender {}", index + 1);
        if !is_name(&text.name) {
            return Err(self.error(
                format!("{key}.name"),
                "a name has 1 to 255 bytes, no control characters",
            ));
        }
        let origin = match (text.addresses, text.identity, text.cgroup) {
            (Some(of), None, None) if !of.is_empty() => Origin::Forwarded(prefixes(of)),
            (None, Some(of), None) if !of.is_empty() => Origin::Identity(prefixes(of)),
            (None, None, Some(path)) if path.is_absolute() => Origin::Cgroup { path, place: 0 },
            (None, None, Some(_)) => {
                return Err(self.error(format!("{key}.cgroup"), "the path has to begin with /"));
            }
            _ => {
                let reason = "say by one of `addresses`, `identity` and `cgroup` who that is";
                return Err(self.error(key, reason));
            }
        };
        Ok(Sender {
            name: text.name.into(),
            origin,
        })
    }

    fn redirect(
        &self,
        index: usize,
        text: RedirectText,
        senders: &[Sender],
        peers: &[Peer],
    ) -> Result<Redirect, ConfigError> {
        let key = |last: &str| format!("redirect {}.{last}", index + 1);
        let empty = |last: &str, reason: &str| Err(self.error(key(last), reason));
        if text.from.is_empty() && text.senders.is_empty() {
            return empty("from", "say by `from` or `senders` whose traffic");
        }
        if text.to.is_empty() {
            return empty(
                "to",
                "say where to; everything is [\"0.0.0.0/0\", \"::/0\"]",
            );
        }
        if text.protocols.as_ref().is_some_and(Vec::is_empty) {
            return empty("protocols", "leave it out for TCP and UDP");
        }
        if text.ports.as_ref().is_some_and(Vec::is_empty) {
            return empty("ports", "leave it out for all ports");
        }
        let via = peers.iter().position(|peer| peer.name == text.via);
        let via =
            via.ok_or_else(|| self.error(key("via"), format!("there is no peer '{}'", text.via)))?;
        let senders: Result<Vec<usize>, ConfigError> = text
            .senders
            .iter()
            .map(|name| {
                let found = senders.iter().position(|sender| *sender.name == **name);
                found.ok_or_else(|| {
                    self.error(key("senders"), format!("there is no sender '{name}'"))
                })
            })
            .collect();
        let mut protocols = Protocol::ALL.to_vec();
        if let Some(named) = text.protocols {
            protocols.retain(|protocol| named.contains(protocol));
        }
        Ok(Redirect {
            from: prefixes(text.from),
            senders: senders?,
            to: prefixes(text.to),
            protocols,
            ports: text.ports.unwrap_or(vec![PortRange::ALL]),
            via,
        })
    }

    fn peer(&self, index: usize, text: PeerText) -> Result<Peer, ConfigError> {
        let key = format!("peer {}", index + 1);
        if !is_name(&text.name) {
            return Err(self.error(
                format!("{key}.name"),
                "a name has 1 to 255 bytes, no control characters",
            ));
        }
        Ok(Peer {
            server_name: self.server_name(&format!("{key}.server_name"), &text.server_name)?,
            name: text.name,
            address: text.address,
            transport: text.transport,
        })
    }

    fn deliver(&self, text: DeliverText) -> Result<Deliver, ConfigError> {
        let clients: Result<Vec<_>, _> = text
            .clients
            .iter()
            .map(|name| self.server_name("deliver.clients", name))
            .collect();
        let deliver = Deliver {
            listen: text.listen,
            clients: clients?,
            allow: prefixes(text.allow),
        };
        for (key, is_empty) in [
            ("deliver.listen", deliver.listen.is_empty()),
            ("deliver.clients", deliver.clients.is_empty()),
            ("deliver.allow", deliver.allow.is_empty()),
        ] {
            if is_empty {
                return Err(self.error(key, "at least one is needed"));
            }
        }
        Ok(deliver)
    }

    fn unique<'a>(
        &self,
        kind: &str,
        names: impl Iterator<Item = &'a str>,
    ) -> Result<(), ConfigError> {
        let mut seen = HashSet::new();
        for name in names {
            if !seen.insert(name) {
                return Err(self.error(kind, format!("there are two of the name '{name}'")));
            }
        }
        Ok(())
    }
}

pub(super) fn parse(path: &Path, text: &str) -> Result<Config, ConfigError> {
    let text: FileText = toml::from_str(text).map_err(|source| ConfigError::Parse {
        path: path.to_owned(),
        source: Box::new(source),
    })?;
    let checker = Checker { path };
    let limits = checker.limits(&text.limits)?;
    let deliver = text
        .deliver
        .map(|deliver| checker.deliver(deliver))
        .transpose()?;
    let is_host = text.egress.is_some();
    for (key, is_there) in [
        ("peer", !text.peer.is_empty()),
        ("sender", !text.sender.is_empty()),
        ("redirect", !text.redirect.is_empty()),
    ] {
        if is_there && !is_host {
            return Err(checker.error(key, "is for the host's side: add a section [egress]"));
        }
    }
    if !is_host && deliver.is_none() {
        return Err(checker.error("egress", "neither [egress] nor [deliver]: nothing to do"));
    }
    let egress = text
        .egress
        .map(|egress| check_egress(&checker, &egress, text.peer, text.sender, text.redirect))
        .transpose()?;
    Ok(Config {
        folder: text
            .folder
            .unwrap_or_else(|| PathBuf::from("/run/sandwire/relay")),
        report: text.report,
        tls: TlsFiles {
            certificate: text.tls.certificate,
            key: text.tls.key,
            authorities: text.tls.authorities,
        },
        limits,
        egress,
        deliver,
    })
}

fn check_egress(
    checker: &Checker<'_>,
    text: &EgressText,
    peers: Vec<PeerText>,
    senders: Vec<SenderText>,
    redirects: Vec<RedirectText>,
) -> Result<Egress, ConfigError> {
    let peers = numbered(peers, |index, peer| checker.peer(index, peer))?;
    let mut senders = numbered(senders, |index, sender| checker.sender(index, sender))?;
    checker.unique("peer", peers.iter().map(|peer| peer.name.as_str()))?;
    checker.unique("sender", senders.iter().map(|sender| &*sender.name))?;
    let redirects = numbered(redirects, |index, redirect| {
        checker.redirect(index, redirect, &senders, &peers)
    })?;
    if redirects.is_empty() {
        return Err(checker.error("redirect", "the host's side needs at least one"));
    }
    let cgroups = number_cgroups(&mut senders);
    if cgroups > CGROUPS_MAX {
        return Err(checker.error("sender", format!("at most {CGROUPS_MAX} may have a cgroup")));
    }
    let listen_port = text.listen_port.unwrap_or(15_001);
    if listen_port == 0 || usize::from(u16::MAX - listen_port) < cgroups {
        return Err(checker.error(
            "egress.listen_port",
            "there is no room for a port of each cgroup",
        ));
    }
    Ok(Egress {
        listen_port,
        daemon: text.daemon.clone(),
        seed: text.seed.unwrap_or(0),
        peers,
        owners: Owners::new(&senders),
        senders,
        redirects,
    })
}

/// Gives each cgroup a place of its own, in the file's order; how many there are.
fn number_cgroups(senders: &mut [Sender]) -> usize {
    let cgroups = senders
        .iter_mut()
        .filter_map(|sender| match &mut sender.origin {
            Origin::Cgroup { place, .. } => Some(place),
            _ => None,
        });
    let mut count = 0;
    for (place, number) in cgroups.zip(1..) {
        *place = number;
        count += 1;
    }
    count
}

fn numbered<T, U>(
    texts: Vec<T>,
    mut check: impl FnMut(usize, T) -> Result<U, ConfigError>,
) -> Result<Vec<U>, ConfigError> {
    texts
        .into_iter()
        .enumerate()
        .map(|(index, text)| check(index, text))
        .collect()
}
