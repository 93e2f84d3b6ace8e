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

/// Deletes the interfaces of these names that are there, or of these numbers where they are known, and whatever else is in the
/// group, which they are put into for that: a number isn't given to another one for long, as a name is. The kernel waits for its readers once instead of once per interface, which takes 10 to 20 ms each time. Which of many go
/// together is told by [`DELETED_AT_ONCE`].
///
/// # Errors
/// The kernel refuses; then some of them may be gone, and some in the group.
pub fn delete_together<'a>(
    socket: &mut Socket,
    interfaces: impl IntoIterator<Item = (&'a str, Option<InterfaceIndex>)>,
    group: u32,
) -> Result<(), Error> {
    let mut request = Request::new();
    for (name, index) in interfaces {
        let change = Change {
            name,
            index,
            group: Some(group),
            ..Change::default()
        };
        change.apply(&mut request);
    }
    let failures = socket.execute_all(request);
    if let Some((_, error)) = failures.into_iter().find(|(_, error)| !error.is_missing()) {
        return Err(error);
    }
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
