//! The end of steering.

use rustix::io::Errno;
use sandwire_kernel_net::{
    Error,
    netlink::{Request, Socket},
    nft::Batch,
    routing_rule::{self, TABLE_PROHIBITED, Version, has_route},
};

use super::{SteeringError, TABLE, TABLE_LOCAL, ends::TABLE_ENDS, listed};

/// What is said of a route that isn't there; the last two by a kernel without IPv6.
const NO_SUCH_ROUTE: [i32; 3] = [
    Errno::SRCH.raw_os_error(),
    Errno::AFNOSUPPORT.raw_os_error(),
    Errno::OPNOTSUPP.raw_os_error(),
];
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
    match first_but(socket.execute_all(request), &[GONE]) {
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
        match first_but(socket.execute_all(request), &NO_SUCH_ROUTE) {
            None => return Ok(()),
            // IPv6: there is none in a table that there is; or a relay that runs has put another one in the place of the one
            // that was found.
            Some(error) if error.errno() == Some(GONE) && attempt < ATTEMPTS => {
                if !has_any_of_ipv6()? {
                    return Ok(());
                }
                attempt += 1;
            }
            Some(error) => return Err(error.into()),
        }
    }
}

fn has_any_of_ipv6() -> Result<bool, Error> {
    let found = [TABLE_LOCAL, TABLE_PROHIBITED].map(|table| has_route(Version::V6, table));
    let [local, prohibited] = found;
    Ok(local? || prohibited?)
}

/// The first failure that is none of these.
fn first_but(failures: Vec<(usize, Error)>, harmless: &[i32]) -> Option<Error> {
    let mut errors = failures.into_iter().map(|(_, error)| error);
    let is_harmless = |error: &Error| error.errno().is_some_and(|errno| harmless.contains(&errno));
    errors.find(|error| !is_harmless(error))
}
