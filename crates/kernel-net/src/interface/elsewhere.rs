//! Interfaces of another namespace than the socket's, that one of its interfaces leads to.

use super::{
    Attributes, CHANGE, Error, Interface, InterfaceIndex, RTEXT_FILTER_SKIP_STATS, Request, Socket,
    attribute, header, parse,
};

/// By what number the socket's namespace knows another one. It stays for as long as both do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NamespaceNumber(u32);

impl NamespaceNumber {
    /// The namespace of the other end of an interface, if that is another one.
    pub(super) fn of_link(attributes: &Attributes<'_>) -> Option<Self> {
        let number = attributes.find(libc::IFLA_LINK_NETNSID)?;
        let number = attribute::u32_of(number)?;
        // -1 is that of a namespace without one.
        (number.cast_signed() >= 0).then_some(Self(number))
    }
}

/// All interfaces of a namespace, without their traffic. None if it is gone.
///
/// # Errors
/// The kernel refuses.
fn list_in(socket: &mut Socket, namespace: NamespaceNumber) -> Result<Vec<Interface>, Error> {
    let object = format!("interfaces of namespace {}", namespace.0);
    let listed = socket.query(
        libc::RTM_GETLINK,
        true,
        ("list", &object),
        |message| {
            message.raw(&header(0, None));
            message.put_u32(libc::IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
            message.put_u32(libc::IFLA_TARGET_NETNSID, namespace.0);
        },
        |reply| {
            (reply.kind == libc::RTM_NEWLINK)
                .then(|| parse(reply.payload))
                .flatten()
        },
    );
    match listed {
        // What the kernel says of a number that it doesn't know.
        Err(error) if error.errno() == Some(libc::EINVAL) => Ok(Vec::new()),
        other => other,
    }
}

/// Deletes an interface of a namespace by its number in there.
fn delete_in(request: &mut Request, namespace: NamespaceNumber, interface: InterfaceIndex) {
    let object = format!("interface {interface} of namespace {}", namespace.0);
    request.message((libc::RTM_DELLINK, CHANGE), "delete", object, |message| {
        message.raw(&header(interface.0, None));
        message.put_u32(libc::IFLA_TARGET_NETNSID, namespace.0);
    });
}

/// Deletes the TAPs that bear an interface's alias in the namespace of its other end. None is fine.
///
/// # Errors
/// The kernel refuses.
pub fn delete_taps_beyond(socket: &mut Socket, of: &Interface) -> Result<(), Error> {
    let (Some(namespace), Some(alias)) = (of.peer_namespace, &of.alias) else {
        return Ok(());
    };
    let mut request = Request::new();
    for found in list_in(socket, namespace)? {
        if found.tun.is_some() && found.alias.as_ref() == Some(alias) {
            delete_in(&mut request, namespace, found.index);
        }
    }
    let failures = socket.execute_all(request);
    // The second, of a namespace that goes meanwhile.
    let is_gone = |error: &Error| error.is_missing() || error.errno() == Some(libc::EINVAL);
    let failed = failures.into_iter().find(|(_, error)| !is_gone(error));
    failed.map_or(Ok(()), |(_, error)| Err(error))
}

/// Deletes an interface of that name, if there is one, with the TAPs that [`delete_taps_beyond`] finds. The interface
/// goes also if one of them would not.
///
/// # Errors
/// The first that the kernel refused.
pub fn delete_with_taps_beyond(socket: &mut Socket, name: &str) -> Result<(), Error> {
    let beyond = match super::find(socket, name)? {
        Some(found) => delete_taps_beyond(socket, &found),
        None => return Ok(()),
    };
    let mut request = Request::new();
    super::delete(&mut request, name);
    match socket.execute(request) {
        Err(error) if error.is_missing() => beyond,
        other => other.and(beyond),
    }
}
