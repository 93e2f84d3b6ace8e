//! Whether the daemon and its data path work.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Answer of `/healthz`: status 200 if `ready`, else 503.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// Whether leases can be handed out and packets of leases pass.
    pub ready: bool,
    /// Version of the daemon.
    pub version: String,
    /// Name of the daemon's instance, which is part of the names of its kernel objects.
    pub instance: String,
    /// What is wrong, or was found wrong and repaired.
    pub problems: Vec<Problem>,
}

/// Something that an operator should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// What it is about: `pool web`, `lease a7`, `nft table sandwire`.
    pub subject: String,
    /// What is wrong and what to do.
    pub message: String,
    /// Whether it keeps `ready` from being true.
    pub blocking: bool,
}
