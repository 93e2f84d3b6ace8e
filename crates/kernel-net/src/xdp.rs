//! XDP programs in an interface's driver.
//!
//! Only native mode: in generic mode the kernel runs the program after it has made a socket buffer, and
//! super-packets are lost on the way.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{
    Error,
    interface::InterfaceIndex,
    netlink::{
        CHANGE, Request, Socket,
        attribute::{self, Attributes},
    },
};

const IFLA_XDP: u16 = 43;
const IFLA_XDP_FD: u16 = 1;
const IFLA_XDP_ATTACHED: u16 = 2;
const IFLA_XDP_FLAGS: u16 = 3;
const IFLA_XDP_PROG_ID: u16 = 4;
const XDP_FLAGS_UPDATE_IF_NOEXIST: u32 = 1 << 0;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
const XDP_ATTACHED_DRV: u8 = 1;
const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;
const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
/// Instead of a program's descriptor: none.
const NO_PROGRAM: u32 = u32::MAX;

/// Puts a program into the driver, where none may be yet.
pub fn attach(request: &mut Request, interface: InterfaceIndex, program: BorrowedFd<'_>) {
    let flags = XDP_FLAGS_DRV_MODE | XDP_FLAGS_UPDATE_IF_NOEXIST;
    let program = program.as_raw_fd().cast_unsigned();
    set(request, interface, program, flags, "attach");
}

/// Puts a program into the driver, in the place of any other that came by netlink.
pub fn replace(request: &mut Request, interface: InterfaceIndex, program: BorrowedFd<'_>) {
    let program = program.as_raw_fd().cast_unsigned();
    set(request, interface, program, XDP_FLAGS_DRV_MODE, "replace");
}

/// Takes the program out of the driver.
pub fn detach(request: &mut Request, interface: InterfaceIndex) {
    set(request, interface, NO_PROGRAM, XDP_FLAGS_DRV_MODE, "detach");
}

fn set(
    request: &mut Request,
    interface: InterfaceIndex,
    program: u32,
    flags: u32,
    operation: &'static str,
) {
    let object = format!("XDP program of interface {interface}");
    request.message((libc::RTM_SETLINK, CHANGE), operation, object, |message| {
        message.raw(&header(interface));
        message.nest(IFLA_XDP, |xdp| {
            xdp.put_u32(IFLA_XDP_FD, program);
            xdp.put_u32(IFLA_XDP_FLAGS, flags);
        });
    });
}

/// The number of the program in an interface's driver, if there is one.
///
/// # Errors
/// There is no such interface, or the kernel refuses.
pub fn find(socket: &mut Socket, interface: InterfaceIndex) -> Result<Option<u32>, Error> {
    let object = format!("interface {interface}");
    let found = socket.query(
        libc::RTM_GETLINK,
        false,
        ("look up XDP program of", &object),
        |message| message.raw(&header(interface)),
        |reply| {
            (reply.kind == libc::RTM_NEWLINK)
                .then(|| parse(reply.payload))
                .flatten()
        },
    )?;
    Ok(found.into_iter().next())
}

/// What an interface's driver can do with XDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// It runs programs.
    pub runs_programs: bool,
    /// Its programs may send frames to other interfaces.
    pub redirects: bool,
    /// It takes frames from programs of other interfaces, as it is now: many drivers do only while they have a program
    /// themselves, a veth while its other end has one, or GRO.
    pub takes_frames: bool,
}

/// What an interface's driver can do; `None` if the kernel (before 6.3) can't tell.
///
/// # Errors
/// There is no such interface, or the kernel refuses.
pub fn features(interface: InterfaceIndex) -> Result<Option<Features>, Error> {
    let mut socket = Socket::generic()?;
    let family = socket.query(
        GENL_ID_CTRL,
        false,
        ("look up netlink family", "netdev"),
        |message| {
            message.raw(&[CTRL_CMD_GETFAMILY, 1, 0, 0]);
            message.put_text(CTRL_ATTR_FAMILY_NAME, "netdev");
        },
        |reply| {
            let id = reply.attributes(GENERIC_HEADER).find(CTRL_ATTR_FAMILY_ID)?;
            id.try_into().ok().map(u16::from_ne_bytes)
        },
    );
    let family = match family {
        Err(error) if error.is_missing() => return Ok(None),
        other => other?,
    };
    let Some(family) = family.into_iter().next() else {
        return Ok(None);
    };
    let object = format!("interface {interface}");
    let features = socket.query(
        family,
        false,
        ("look up XDP features of", &object),
        |message| {
            message.raw(&[NETDEV_CMD_DEV_GET, 1, 0, 0]);
            message.put_u32(NETDEV_A_DEV_IFINDEX, interface.0);
        },
        |reply| {
            let attributes = reply.attributes(GENERIC_HEADER);
            let bits = attributes.find(NETDEV_A_DEV_XDP_FEATURES)?;
            bits.try_into().ok().map(u64::from_ne_bytes)
        },
    )?;
    Ok(features.into_iter().next().map(|bits| Features {
        runs_programs: bits & 1 != 0,
        redirects: bits & 2 != 0,
        takes_frames: bits & 4 != 0,
    }))
}

fn parse(payload: &[u8]) -> Option<u32> {
    let xdp = Attributes::new(payload.get(HEADER..)?).nested(IFLA_XDP);
    let is_native = xdp.find(IFLA_XDP_ATTACHED) == Some(&[XDP_ATTACHED_DRV]);
    let program = xdp.find(IFLA_XDP_PROG_ID).and_then(attribute::u32_of);
    program.filter(|_| is_native)
}

fn header(interface: InterfaceIndex) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[4..8].copy_from_slice(&interface.0.to_ne_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attribute::Writer;

    #[test]
    fn a_truncated_answer_names_no_program() {
        let mut answer = header(InterfaceIndex(3)).to_vec();
        Writer::new(&mut answer).nest(IFLA_XDP, |xdp| {
            xdp.put_u8(IFLA_XDP_ATTACHED, XDP_ATTACHED_DRV);
            xdp.put_u32(IFLA_XDP_PROG_ID, 17);
        });
        assert_eq!(parse(&answer), Some(17));
        for length in 0..answer.len() {
            assert_eq!(parse(&answer[..length]), None, "{length} bytes");
        }
    }

    #[test]
    fn a_generic_program_is_not_in_the_driver() {
        let mut answer = header(InterfaceIndex(3)).to_vec();
        Writer::new(&mut answer).nest(IFLA_XDP, |xdp| {
            xdp.put_u8(IFLA_XDP_ATTACHED, 2);
            xdp.put_u32(IFLA_XDP_PROG_ID, 17);
        });
        assert_eq!(parse(&answer), None);
    }
}
