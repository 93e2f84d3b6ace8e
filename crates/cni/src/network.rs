//! Which network is meant: the keys that every operation needs, whatever else the configuration says.
//!
//! `DEL` and `GC` look at nothing more, so that what was added can be taken back when the rest of the
//! configuration is wrong or has changed.

use std::path::PathBuf;

use sandwire_api::{DEFAULT_SOCKET, attach::InterfaceName, client::Blocking, name::Name};
use serde_json::{Map, Value};

use crate::{
    environment::{Container, is_identifier},
    error::Error,
    lease_name,
    section::Section,
    version::Version,
};

/// Key of the interface that a later plugin of a chain makes.
pub(crate) const INTERFACE: &str = "interface";
/// Key of the pool.
pub(crate) const POOL: &str = "pool";
/// Key of what the plugins before this one, or `ADD` itself, came to.
pub(crate) const PREVIOUS_RESULT: &str = "prevResult";

/// A network configuration, read as far as every operation needs it.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    pub(crate) version: Version,
    name: String,
    socket: PathBuf,
    /// The interface that this plugin makes as a later one of a chain.
    pub(crate) interface: Option<InterfaceName>,
    /// All of it.
    pub(crate) keys: Map<String, Value>,
}

impl Network {
    pub(crate) fn parse(text: &[u8]) -> Result<Self, Error> {
        let decoded = serde_json::from_slice(text).map_err(|error| Error::Undecodable {
            reason: error.to_string(),
        })?;
        let Value::Object(keys) = decoded else {
            return Err(Error::Undecodable {
                reason: "it is no JSON object".to_owned(),
            });
        };
        let mut section = Section::whole(&keys);
        let version = Version::parse(section.text("cniVersion")?.as_deref())?;
        let name = section.text("name")?.unwrap_or_default();
        if !is_identifier(&name) {
            let reason =
                "it must start with a letter or digit, and have only those, '_', '.' and '-'";
            return Err(section.invalid("name", reason));
        }
        let socket = section.text("socket")?;
        let socket = PathBuf::from(socket.as_deref().unwrap_or(DEFAULT_SOCKET));
        if !socket.is_absolute() {
            return Err(section.invalid("socket", "it must be an absolute path"));
        }
        let interface = section.parsed(INTERFACE)?;
        Ok(Self {
            version,
            name,
            socket,
            interface,
            keys,
        })
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// A client of the daemon. It connects at the first request.
    pub(crate) fn client(&self) -> Blocking {
        Blocking::new(&self.socket)
    }

    /// Name of the lease that a container's interface has.
    pub(crate) fn lease(&self, container: &Container) -> Name {
        let interface = container.interface.as_str();
        lease_name::of(&self.name, self.own_interface(), &container.id, interface)
    }

    /// How the names of all leases of this network begin.
    pub(crate) fn lease_prefix(&self) -> String {
        lease_name::prefix(&self.name, self.own_interface())
    }

    /// The pool that slots are taken from.
    pub(crate) fn pool(&self) -> Result<Name, Error> {
        let mut section = Section::whole(&self.keys);
        let pool = section.parsed(POOL)?;
        pool.ok_or_else(|| {
            let reason = "it is missing: name a pool of kind `container`, as `sandwire pool list` shows them";
            section.invalid(POOL, reason)
        })
    }

    /// `prevResult`, if there is one.
    pub(crate) fn previous(&self) -> Result<Option<Map<String, Value>>, Error> {
        match self.keys.get(PREVIOUS_RESULT) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(result)) => Ok(Some(result.clone())),
            Some(_) => {
                Err(Section::whole(&self.keys).invalid(PREVIOUS_RESULT, "it is not an object"))
            }
        }
    }

    fn own_interface(&self) -> &str {
        self.interface.as_ref().map_or("", InterfaceName::as_str)
    }
}
