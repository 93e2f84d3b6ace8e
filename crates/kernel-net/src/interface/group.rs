//! Deletes many interfaces at once.

use super::{Change, Interface, InterfaceIndex, header};
use crate::{
    Error,
    netlink::{CHANGE, Request, Socket},
};

/// Interfaces that are best deleted at once: the kernel holds the lock that all network configuration needs for about a third
/// of a millisecond per TAP.
pub const DELETED_AT_ONCE: usize = 100;
/// Groups of interfaces are numbers that anybody may use; ours begin here.
pub const FIRST_GROUP: u32 = 0x4000_0000;

/// The first group from this one on, of the next so many, in which no interface is that `may_go` doesn't allow to be deleted.
pub fn free_group(
    present: &[Interface],
    first: u32,
    attempts: u32,
    may_go: impl Fn(&Interface) -> bool,
) -> Option<u32> {
    (first..first + attempts).find(|group| {
        let mut of_group = present.iter().filter(|found| found.group == *group);
        of_group.all(&may_go)
    })
}

/// Takes an interface out of its group, into that of all which nobody has put into one.
pub fn leave_group(request: &mut Request, interface: &Interface) {
    let change = Change {
        name: &interface.name,
        index: Some(interface.index),
        group: Some(NO_GROUP),
        ..Change::default()
    };
    change.apply(request);
}

/// Deletes the interfaces of these names that are there, or of these numbers where they are known, and whatever else is in the
/// group, which they are put into for that: a number isn't given to another one for long, as a name is. The kernel waits for its readers once instead of once per interface, which takes 10 to 20 ms each time. Which of many go
/// together is told by [`DELETED_AT_ONCE`].
///
/// # Errors
/// The first that the kernel refuses; all others are gone.
pub fn delete_together<'a>(
    socket: &mut Socket,
    interfaces: impl IntoIterator<Item = (&'a str, Option<InterfaceIndex>)>,
    group: u32,
) -> Result<(), Error> {
    let interfaces: Vec<_> = interfaces.into_iter().collect();
    let gathered = regroup(socket, &interfaces, group);
    if gathered.and(delete_group(socket, group)).is_ok() {
        return Ok(());
    }
    // Of a group in which one can't be deleted none is.
    let done = delete_each(socket, interfaces.iter().copied());
    // What is left must not keep others of the group the next time.
    done.and(regroup(socket, &interfaces, NO_GROUP))
}

/// The group of interfaces that nobody has put into another one.
const NO_GROUP: u32 = 0;

/// Puts those that are there into a group; the first that can't be.
fn regroup(
    socket: &mut Socket,
    interfaces: &[(&str, Option<InterfaceIndex>)],
    group: u32,
) -> Result<(), Error> {
    let mut request = Request::new();
    for (name, index) in interfaces {
        let change = Change {
            name,
            index: *index,
            group: Some(group),
            ..Change::default()
        };
        change.apply(&mut request);
    }
    first_of(socket.execute_all(request))
}

/// Deletes the interfaces of these names that are there, or of these numbers where they are known, one by one.
///
/// # Errors
/// The first that the kernel refused; all others are gone.
pub fn delete_each<'a>(
    socket: &mut Socket,
    interfaces: impl IntoIterator<Item = (&'a str, Option<InterfaceIndex>)>,
) -> Result<(), Error> {
    let mut request = Request::new();
    for (name, index) in interfaces {
        match index {
            Some(index) => super::delete_by_index(&mut request, name, index),
            None => super::delete(&mut request, name),
        }
    }
    first_of(socket.execute_all(request))
}

/// The first failure that doesn't say that something is gone already.
fn first_of(failures: Vec<(usize, Error)>) -> Result<(), Error> {
    let mut errors = failures.into_iter().map(|(_, error)| error);
    errors.find(|error| !error.is_missing()).map_or(Ok(()), Err)
}

fn delete_group(socket: &mut Socket, group: u32) -> Result<(), Error> {
    let mut request = Request::new();
    let object = format!("interfaces of group {group}");
    request.message((libc::RTM_DELLINK, CHANGE), "delete", object, |message| {
        message.raw(&header(0, None));
        message.put_u32(libc::IFLA_GROUP, group);
    });
    match socket.execute(request) {
        // None of them was there.
        Err(error) if error.is_missing() => Ok(()),
        other => other,
    }
}
