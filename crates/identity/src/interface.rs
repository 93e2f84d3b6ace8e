//! The identities' addresses on an interface of the host.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use sandwire_kernel_net::{
    address::{self, Address},
    interface::{self, InterfaceIndex},
    netlink::{Request, Socket},
};

use crate::Error;

/// The number of an interface.
pub(crate) fn find(name: &str) -> Result<InterfaceIndex, Error> {
    let found = interface::find(&mut Socket::route()?, name)?;
    let found = found.ok_or_else(|| Error::NoInterface {
        name: name.to_owned(),
    })?;
    Ok(found.index)
}

/// The name of an interface, or its number if it is gone.
pub(crate) fn name(index: u32) -> Result<String, Error> {
    let listed = interface::find_by_index(&mut Socket::route()?, InterfaceIndex(index));
    match listed {
        Ok(Some(found)) => Ok(found.name),
        Ok(None) => Ok(index.to_string()),
        Err(error) if error.is_missing() => Ok(index.to_string()),
        Err(error) => Err(error.into()),
    }
}

/// All addresses of the host's interfaces, each with an interface that has it.
pub(crate) fn addresses() -> Result<BTreeMap<IpAddr, u32>, Error> {
    let listed = address::list(&mut Socket::route()?)?.into_iter();
    // The first one if several have it.
    let found = listed.rev();
    Ok(found
        .map(|found| (found.address.addr(), found.interface.0))
        .collect())
}

/// Puts an address on an interface. The host's own sockets aren't to leave by it: of IPv4 the kernel takes the address that
/// an interface had first, of IPv6 the one that is most like the destination, unless it is deprecated.
pub(crate) fn add(index: u32, wanted: IpAddr) -> Result<(), Error> {
    Ok(try_add(index, wanted)?)
}

/// Puts an address on an interface again that somebody has taken off it. Whether it did: the interface may be gone, too.
pub(crate) fn put_back(index: u32, wanted: IpAddr) -> Result<bool, Error> {
    match try_add(index, wanted) {
        Ok(()) => Ok(true),
        Err(error) if error.is_missing() || error.is_existing() => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn try_add(index: u32, wanted: IpAddr) -> Result<(), sandwire_kernel_net::Error> {
    let mut request = Request::new();
    let address = Address::new(InterfaceIndex(index), IpNet::from(wanted));
    match wanted {
        IpAddr::V4(_) => address.add(&mut request),
        IpAddr::V6(_) => address.add_deprecated(&mut request),
    }
    Socket::route()?.execute(request)
}

/// Takes addresses off interfaces, in one call. Those that aren't there were taken off already; what fails of the others is
/// told by its place.
pub(crate) fn remove(addresses: &[(u32, IpAddr)]) -> Result<Vec<(usize, Error)>, Error> {
    if addresses.is_empty() {
        return Ok(Vec::new());
    }
    let mut request = Request::new();
    for (index, address) in addresses {
        Address::new(InterfaceIndex(*index), IpNet::from(*address)).delete(&mut request);
    }
    let failures = Socket::route()?.execute_all(request).into_iter();
    let is_failure = |error: &sandwire_kernel_net::Error| {
        !error.is_missing() && error.errno() != Some(libc::EADDRNOTAVAIL)
    };
    Ok(failures
        .filter(|(_, error)| is_failure(error))
        .map(|(index, error)| (index, error.into()))
        .collect())
}
