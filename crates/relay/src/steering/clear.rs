//! The end of steering.

use rustix::io::Errno;
use sandwire_kernel_net::{
    Error,
    netlink::{Request, Socket},
    nft::Batch,
    routing_rule::{self, TABLE_PROHIBITED, Version},
};

use super::{SteeringError, TABLE, TABLE_LOCAL, ends::TABLE_ENDS, listed};

const NO_SUCH_ROUTE: i32 = Errno::SRCH.raw_os_error();
const GONE: i32 = Errno::NOENT.raw_os_error();
const ATTEMPTS: usize = 10;

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
    errors.extend(remove_rules().err());
    errors.extend(remove_routes().err());
    if errors.is_empty() {
        Ok(())
    } else {
        Err(errors)
    }
}

fn remove_rules() -> Result<(), SteeringError> {
    let mut socket = Socket::route()?;
    let mut request = Request::new();
    for rule in listed(&mut socket)? {
        rule.delete(&mut request);
    }
    // A relay that runs may take some away at the same time.
    match first_but(socket.execute_all(request), GONE) {
        None => Ok(()),
        Some(error) => Err(error.into()),
    }
}

fn remove_routes() -> Result<(), SteeringError> {
    let mut socket = Socket::route()?;
    let mut attempt = 1;
    loop {
        let mut request = Request::new();
        for version in Version::ALL {
            for table in [TABLE_LOCAL, TABLE_PROHIBITED] {
                routing_rule::delete_default(&mut request, version, table);
            }
        }
        match first_but(socket.execute_all(request), NO_SUCH_ROUTE) {
            None => return Ok(()),
            // IPv6: a relay that runs has put another one in the place of the one that was found.
            Some(error) if error.errno() == Some(GONE) && attempt < ATTEMPTS => attempt += 1,
            Some(error) => return Err(error.into()),
        }
    }
}

/// The first failure that isn't this one.
fn first_but(failures: Vec<(usize, Error)>, errno: i32) -> Option<Error> {
    let mut errors = failures.into_iter().map(|(_, error)| error);
    errors.find(|error| error.errno() != Some(errno))
}
