//! The end of steering.

use sandwire_kernel_net::{
    netlink::{Request, Socket},
    nft::Batch,
    routing_rule::{self, TABLE_PROHIBITED, Version},
};

use super::{SteeringError, TABLE, TABLE_LOCAL, ends::TABLE_ENDS, listed};

/// Takes it all away: what was redirected leaves as it is from then on.
///
/// # Errors
/// What the kernel refuses to remove; the rest is gone.
pub fn clear() -> Result<(), Vec<SteeringError>> {
    let mut errors: Vec<SteeringError> = Vec::new();
    let remove_table = |table| -> Result<(), SteeringError> {
        let mut batch = Batch::new(table);
        // One that isn't there can't be deleted.
        batch.add_table();
        batch.delete_table();
        Ok(batch.commit(&mut Socket::netfilter()?)?)
    };
    errors.extend(remove_table(TABLE).err());
    errors.extend(remove_table(TABLE_ENDS).err());
    let remove_routes = || -> Result<(), SteeringError> {
        let mut socket = Socket::route()?;
        let mut request = Request::new();
        for rule in listed(&mut socket)? {
            rule.delete(&mut request);
        }
        socket.execute(request)?;
        let mut request = Request::new();
        for version in Version::ALL {
            for table in [TABLE_LOCAL, TABLE_PROHIBITED] {
                routing_rule::delete_default(&mut request, version, table);
            }
        }
        let failures = socket.execute_all(request);
        // ESRCH: there was none.
        let failed = failures
            .into_iter()
            .map(|(_, error)| error)
            .find(|error| error.errno() != Some(NO_SUCH_ROUTE));
        failed.map_or(Ok(()), |error| Err(error.into()))
    };
    errors.extend(remove_routes().err());
    if errors.is_empty() {
        Ok(())
    } else {
        Err(errors)
    }
}

const NO_SUCH_ROUTE: i32 = 3;
