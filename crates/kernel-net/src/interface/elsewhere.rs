//! Interfaces of another namespace than the socket's, by the number that the socket's has for it.

use std::os::fd::{AsRawFd, BorrowedFd};

use super::{
    Attributes, CHANGE, CREATE, ChildDevice, Error, Interface, InterfaceIndex,
    RTEXT_FILTER_SKIP_STATS, Request, Socket, attribute, header, list_by,
};

const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
/// The family, and padding.
const NUMBER_HEADER: [u8; 4] = [0; 4];

/// By what number the socket's namespace knows another one. It stays for as long as both do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NamespaceNumber(pub u32);

impl NamespaceNumber {
    /// The number of a namespace, which gets one if it has none.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn of(socket: &mut Socket, namespace: BorrowedFd<'_>) -> Result<Self, Error> {
        const OBJECT: &str = "number of a network namespace";
        if let Some(number) = Self::look_up(socket, namespace)? {
            return Ok(number);
        }
        let file = namespace.as_raw_fd().cast_unsigned();
        let mut request = Request::new();
        request.message((libc::RTM_NEWNSID, CREATE), "make", OBJECT, |message| {
            message.raw(&NUMBER_HEADER);
            // Any that is free.
            message.put_u32(NETNSA_NSID, u32::MAX);
            message.put_u32(NETNSA_FD, file);
        });
        match socket.execute(request) {
            // Somebody was faster.
            Err(error) if !error.is_existing() => return Err(error),
            _ => {}
        }
        let number = Self::look_up(socket, namespace)?;
        number.ok_or_else(|| {
            let missing = std::io::Error::from_raw_os_error(libc::ENOENT);
            Error::system("look up", OBJECT, missing)
        })
    }

    /// The number of a namespace, if it has one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn look_up(socket: &mut Socket, namespace: BorrowedFd<'_>) -> Result<Option<Self>, Error> {
        let file = namespace.as_raw_fd().cast_unsigned();
        let found = socket.query(
            libc::RTM_GETNSID,
            false,
            ("look up", "number of a network namespace"),
            |message| {
                message.raw(&NUMBER_HEADER);
                message.put_u32(NETNSA_FD, file);
            },
            |reply| {
                let number = reply.attributes(NUMBER_HEADER.len()).find(NETNSA_NSID)?;
                attribute::u32_of(number)
            },
        )?;
        let number = found.into_iter().next();
        Ok(number.filter(|number| number.cast_signed() >= 0).map(Self))
    }

    /// The namespace of the other end of an interface, if that is another one.
    pub(super) fn of_link(attributes: &Attributes<'_>) -> Option<Self> {
        let number = attributes.find(libc::IFLA_LINK_NETNSID)?;
        let number = attribute::u32_of(number)?;
        // -1 is that of a namespace without one.
        (number.cast_signed() >= 0).then_some(Self(number))
    }
}

/// The interfaces of all namespaces that the socket's has numbers for that are wanted, without their traffic.
///
/// # Errors
/// The kernel refuses.
fn find_elsewhere(
    socket: &mut Socket,
    is_wanted: impl Fn(&Interface) -> bool,
) -> Result<Vec<(NamespaceNumber, Interface)>, Error> {
    let numbers = socket.query(
        libc::RTM_GETNSID,
        true,
        ("list", "numbers of network namespaces"),
        |message| message.raw(&NUMBER_HEADER),
        |reply| {
            let number = reply.attributes(NUMBER_HEADER.len()).find(NETNSA_NSID)?;
            attribute::u32_of(number).map(NamespaceNumber)
        },
    )?;
    let mut found = Vec::new();
    for number in numbers {
        let listed = list_in(socket, number)?.into_iter();
        let wanted = listed.filter(|interface| is_wanted(interface));
        found.extend(wanted.map(|interface| (number, interface)));
    }
    Ok(found)
}

/// The children ([`ChildDevice`]) in such namespaces whose alias is wanted.
///
/// # Errors
/// The kernel refuses.
pub fn find_children(
    socket: &mut Socket,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<Vec<(NamespaceNumber, Interface)>, Error> {
    find_elsewhere(socket, |found| {
        ChildDevice::is_of(found) && found.alias.as_deref().is_some_and(&is_wanted)
    })
}

/// Deletes the children that bear an alias; all of them, also if one would not go. None is fine.
///
/// # Errors
/// The first that the kernel refused.
pub fn delete_children(socket: &mut Socket, alias: &str) -> Result<(), Error> {
    let mut done = Ok(());
    for (namespace, child) in find_children(socket, |its| its == alias)? {
        let deleted = delete_elsewhere(socket, namespace, child.index);
        done = done.and(deleted);
    }
    done
}

/// Deletes an interface that [`find_children`] has found. One that is gone, or whose namespace is, is fine.
///
/// # Errors
/// The kernel refuses.
pub fn delete_elsewhere(
    socket: &mut Socket,
    namespace: NamespaceNumber,
    interface: InterfaceIndex,
) -> Result<(), Error> {
    let mut request = Request::new();
    delete_in(&mut request, namespace, interface);
    match socket.execute(request) {
        Err(error) if !is_gone(&error) => Err(error),
        _ => Ok(()),
    }
}

/// Whether an interface elsewhere is gone: the second, with its namespace.
fn is_gone(error: &Error) -> bool {
    error.is_missing() || error.errno() == Some(libc::EINVAL)
}

/// All interfaces of a namespace, without their traffic. None if it is gone.
///
/// # Errors
/// The kernel refuses.
pub fn list_in(socket: &mut Socket, namespace: NamespaceNumber) -> Result<Vec<Interface>, Error> {
    let object = format!("interfaces of namespace {}", namespace.0);
    let listed = list_by(socket, &object, |message| {
        message.raw(&header(0, None));
        message.put_u32(libc::IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
        message.put_u32(libc::IFLA_TARGET_NETNSID, namespace.0);
    });
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
    let failed = failures.into_iter().find(|(_, error)| !is_gone(error));
    failed.map_or(Ok(()), |(_, error)| Err(error))
}

/// Deletes an interface, if it is there still, with the TAPs that [`delete_taps_beyond`] finds. The interface goes also if one
/// of them would not.
///
/// # Errors
/// The first that the kernel refused.
pub fn delete_with_taps_beyond(socket: &mut Socket, found: &Interface) -> Result<(), Error> {
    let beyond = delete_taps_beyond(socket, found);
    let mut request = Request::new();
    super::delete_by_index(&mut request, &found.name, found.index);
    match socket.execute(request) {
        Err(error) if error.is_missing() => beyond,
        other => other.and(beyond),
    }
}
