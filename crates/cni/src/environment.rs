//! What a runtime says by environment variables.

use std::{
    env,
    ffi::{OsStr, OsString},
    fmt,
    net::IpAddr,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use sandwire_api::{attach::InterfaceName, slot::MacAddress};

use crate::error::Error;

const COMMAND: &str = "CNI_COMMAND";
const CONTAINER_ID: &str = "CNI_CONTAINERID";
const NETNS: &str = "CNI_NETNS";
const INTERFACE: &str = "CNI_IFNAME";
const ARGUMENTS: &str = "CNI_ARGS";

/// The variables of an operation, as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// `CNI_COMMAND`.
    pub command: Option<OsString>,
    /// `CNI_CONTAINERID`.
    pub container_id: Option<OsString>,
    /// `CNI_NETNS`.
    pub netns: Option<OsString>,
    /// `CNI_IFNAME`.
    pub interface: Option<OsString>,
    /// `CNI_ARGS`.
    pub arguments: Option<OsString>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Add,
    Del,
    Check,
    Gc,
    Status,
    Version,
}

/// A container's interface, by which the runtime knows what it has added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Container {
    pub(crate) id: String,
    /// Name of the interface that the chain of plugins makes in there.
    pub(crate) interface: InterfaceName,
}

/// The same with what adding and checking need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attachment {
    pub(crate) container: Container,
    /// File of the container's network namespace.
    pub(crate) netns: PathBuf,
    pub(crate) arguments: Arguments,
}

/// What `CNI_ARGS` says that a plugin understands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Arguments {
    pub(crate) ip: Option<IpAddr>,
    pub(crate) mac: Option<MacAddress>,
}

impl Environment {
    /// Those of this process.
    #[must_use]
    pub fn read() -> Self {
        Self {
            command: env::var_os(COMMAND),
            container_id: env::var_os(CONTAINER_ID),
            netns: env::var_os(NETNS),
            interface: env::var_os(INTERFACE),
            arguments: env::var_os(ARGUMENTS),
        }
    }

    pub(crate) fn operation(&self) -> Result<Operation, Error> {
        let name = required(COMMAND, self.command.as_deref()).map_err(|error| match error {
            Error::InvalidEnvironment { variable, reason } if self.command.is_none() => {
                let reason = format!("{reason}; a container runtime starts this program, not you");
                Error::InvalidEnvironment { variable, reason }
            }
            other => other,
        })?;
        let found = Operation::ALL
            .into_iter()
            .find(|known| known.as_str() == name);
        found.ok_or_else(|| {
            let known = Operation::ALL.map(Operation::as_str).join(", ");
            invalid(
                COMMAND,
                format!("{} is none of {known}", shown(OsStr::new(name))),
            )
        })
    }

    pub(crate) fn container(&self) -> Result<Container, Error> {
        let id = required(CONTAINER_ID, self.container_id.as_deref())?;
        if !is_identifier(id) {
            let reason = format!(
                "{} must start with a letter or digit, and have only those, '_', '.' and '-'",
                shown(OsStr::new(id))
            );
            return Err(invalid(CONTAINER_ID, reason));
        }
        let interface = required(INTERFACE, self.interface.as_deref())?;
        Ok(Container {
            id: id.to_owned(),
            interface: interface
                .parse()
                .map_err(|error| invalid(INTERFACE, format!("{error}")))?,
        })
    }

    pub(crate) fn attachment(&self) -> Result<Attachment, Error> {
        let container = self.container()?;
        let netns = self.netns.as_deref().filter(|path| !path.is_empty());
        let netns = netns.ok_or_else(|| invalid(NETNS, "it is missing".to_owned()))?;
        let path = Path::new(netns);
        // The daemon opens it, to whom these would be its own namespace.
        let is_own = ["/proc/self", "/proc/thread-self"]
            .iter()
            .any(|own| path.starts_with(own));
        if !path.is_absolute() || is_own || path.to_str().is_none() {
            let reason = format!(
                "{} must be a path that means the same to the daemon: /run/netns/NAME or \
                 /proc/PID/ns/net",
                shown(netns)
            );
            return Err(invalid(NETNS, reason));
        }
        Ok(Attachment {
            container,
            netns: path.to_owned(),
            arguments: self.arguments()?,
        })
    }

    /// Pairs of `KEY=VALUE`, parted by semicolons. Keys that nobody knows are an error unless `IgnoreUnknown` is
    /// set, as the reference plugins have it.
    fn arguments(&self) -> Result<Arguments, Error> {
        let Some(text) = self.arguments.as_deref().filter(|text| !text.is_empty()) else {
            return Ok(Arguments::default());
        };
        let text = required(ARGUMENTS, Some(text))?;
        let (mut known, mut unknown) = (Arguments::default(), None);
        let mut ignores_unknown = false;
        for pair in text.split(';').filter(|pair| !pair.is_empty()) {
            let wrong = |reason: &dyn fmt::Display| {
                let pair = shown(OsStr::new(pair));
                invalid(ARGUMENTS, format!("{pair}: {reason}"))
            };
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| wrong(&"it is no KEY=VALUE"))?;
            match key {
                "IgnoreUnknown" => ignores_unknown = matches!(value, "1" | "true" | "True" | "t"),
                "IP" => known.ip = Some(parse_address(value).map_err(|reason| wrong(&reason))?),
                "MAC" => known.mac = Some(value.parse().map_err(|error| wrong(&error))?),
                _ => unknown = unknown.or(Some(wrong(&"no such key is known"))),
            }
        }
        match unknown {
            Some(error) if !ignores_unknown => Err(error),
            _ => Ok(known),
        }
    }
}

impl Operation {
    const ALL: [Self; 6] = [
        Self::Add,
        Self::Del,
        Self::Check,
        Self::Gc,
        Self::Status,
        Self::Version,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// An address, with or without a prefix length: the length is the pool's business.
pub(crate) fn parse_address(text: &str) -> Result<IpAddr, String> {
    let address = text.parse::<IpAddr>();
    let network = text.parse::<IpNet>().map(|network| network.addr());
    address.or(network).map_err(|_| {
        format!(
            "{} is no IP address",
            shown(OsStr::new(&text.chars().take(60).collect::<String>()))
        )
    })
}

/// Whether it is what the specification calls an identifier: of containers, and of networks.
pub(crate) fn is_identifier(text: &str) -> bool {
    let starts_well = text.starts_with(|first: char| first.is_ascii_alphanumeric());
    let rest = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    starts_well && text.bytes().all(rest)
}

fn required<'a>(variable: &'static str, value: Option<&'a OsStr>) -> Result<&'a str, Error> {
    let value = value.filter(|value| !value.is_empty());
    let value = value.ok_or_else(|| invalid(variable, "it is missing".to_owned()))?;
    value
        .to_str()
        .ok_or_else(|| invalid(variable, format!("{} is no UTF-8", shown(value))))
}

/// What was given, cut to a printable length.
fn shown(value: &OsStr) -> String {
    let text = value.to_string_lossy();
    let short: String = text.chars().take(80).collect();
    format!("{short:?}")
}

fn invalid(variable: &'static str, reason: String) -> Error {
    Error::InvalidEnvironment { variable, reason }
}
