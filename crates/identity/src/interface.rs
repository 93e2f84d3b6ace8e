//! The identities' addresses on an interface of the host.

use std::net::IpAddr;

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

/// All addresses of the host's interfaces.
pub(crate) fn addresses() -> Result<Vec<IpAddr>, Error> {
    let listed = address::list(&mut Socket::route()?)?;
    Ok(listed.iter().map(|found| found.address.addr()).collect())
}

/// The interface that has an address already.
pub(crate) fn holder(wanted: IpAddr) -> Result<Option<String>, Error> {
    let listed = address::list(&mut Socket::route()?)?;
    let found = listed.iter().find(|found| found.address.addr() == wanted);
    found.map(|found| name(found.interface.0)).transpose()
}

/// Puts an address on an interface. The host's own sockets aren't to leave by it: of IPv4 the kernel takes the address that
/// an interface had first, of IPv6 the one that is most like the destination, unless it is deprecated.
pub(crate) fn add(index: u32, wanted: IpAddr) -> Result<(), Error> {
    let mut request = Request::new();
    let address = Address::new(InterfaceIndex(index), IpNet::from(wanted));
    match wanted {
        IpAddr::V4(_) => address.add(&mut request),
        IpAddr::V6(_) => address.add_deprecated(&mut request),
    }
    Ok(Socket::route()?.execute(request)?)
}

/// Takes an address off an interface. One that isn't there was taken off already.
pub(crate) fn remove(index: u32, wanted: IpAddr) -> Result<(), Error> {
    let mut request = Request::new();
    Address::new(InterfaceIndex(index), IpNet::from(wanted)).delete(&mut request);
    match Socket::route()?.execute(request) {
        Err(error) if error.is_missing() || error.errno() == Some(libc::EADDRNOTAVAIL) => Ok(()),
        other => Ok(other?),
    }
}
