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
