//! Bad networks of leases.

use hyper::Method;

use super::{Call, Client, ClientError, lease_path};
use crate::{
    impairment::{Impairment, ImpairmentCleared, LeaseImpairment},
    name::Name,
};

impl Client {
    /// How a lease is impaired, and what became of its packets.
    pub async fn impairment(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
    ) -> Result<LeaseImpairment, ClientError> {
        let path = lease_path(name, "/impairment", owner_uid);
        self.json(Call::new(Method::GET, path)).await
    }

    /// Impairs all interfaces of a lease from now on, or changes how. Files of traces must have been read.
    pub async fn impair(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        impairment: &Impairment,
    ) -> Result<LeaseImpairment, ClientError> {
        let path = lease_path(name, "/impairment", owner_uid);
        self.json(Call::with_body(Method::PUT, path, impairment))
            .await
    }

    /// Ends a lease's impairment. Packets under way are let go first, which takes as long as it takes, or with `flush`
    /// dropped.
    pub async fn end_impairment(
        &self,
        name: &Name,
        owner_uid: Option<u32>,
        flush: bool,
    ) -> Result<ImpairmentCleared, ClientError> {
        let mut path = lease_path(name, "/impairment", owner_uid);
        if flush {
            path.push(if owner_uid.is_some() { '&' } else { '?' });
            path.push_str("flush=true");
        }
        self.json(Call::new(Method::DELETE, path)).await
    }
}
