//! An AF_PACKET socket on one interface: what the apps `Raw` and `Ring` have in common.
//!
//! It sees what arrives at the interface and nothing that leaves it, its own packets least of all. It is bound to the
//! interface's number: a rename changes nothing, an interface that was down comes back by itself, one that was
//! deleted does not.

use std::cell::Cell;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{self as socket, AddressFamily, SocketFlags, SocketType, sockopt};

use super::inbound::VlanTag;
use super::interface::{EdgeError, Interface};
use super::offload::VnetHeader;
use crate::app::BuildError;
use crate::pool::PoolLimits;

/// Where an app hears, and how much of it: what its description says of that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hearing {
    interface: String,
    is_promiscuous: bool,
}

/// The socket, and what the kernel says that it has dropped.
#[derive(Debug)]
pub(super) struct PacketSocket {
    descriptor: OwnedFd,
    interface: Interface,
    /// The kernel counts from the last question on.
    kernel_drops: Cell<u64>,
}

/// One frame from [`PacketSocket::receive`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Received {
    /// Bytes of vnet header and frame in the buffer.
    pub(super) length: usize,
    /// Only the beginning had room.
    pub(super) is_truncated: bool,
    /// The tag that the kernel took out.
    pub(super) vlan: Option<VlanTag>,
}

impl Hearing {
    /// On the interface of that name, in the network namespace of the thread that opens the socket; every frame,
    /// whatever its address.
    pub(super) fn all(interface: &str) -> Self {
        Self {
            interface: interface.to_owned(),
            is_promiscuous: true,
        }
    }

    /// Whether frames for other addresses are heard too.
    pub(super) fn promiscuous(self, is_promiscuous: bool) -> Self {
        Self {
            is_promiscuous,
            ..self
        }
    }

    pub(super) fn interface(&self) -> &str {
        &self.interface
    }

    /// Whether there is such an interface, whose frames fit.
    pub(super) fn check(&self, limits: PoolLimits) -> Result<(), BuildError> {
        let socket = PacketSocket::open(&self.interface)?;
        Ok(socket.interface().check_frames(limits)?)
    }

    /// Starts to receive by a socket that was opened on the interface.
    pub(super) fn begin(&self, socket: &PacketSocket) -> Result<(), EdgeError> {
        if self.is_promiscuous {
            socket.become_promiscuous()?;
        }
        socket.bind()
    }
}

impl PacketSocket {
    /// A socket that has the interface's number but doesn't receive yet; [`Hearing::begin`] starts that, so that
    /// options and rings can come before.
    pub(super) fn open(name: &str) -> Result<Self, EdgeError> {
        let failed = |step| move |error: io::Error| EdgeError::of_step(name, step, error);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let descriptor = socket::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)
            .map_err(io::Error::from)
            .map_err(failed("open an AF_PACKET socket"))?;
        let interface = Interface::find(&descriptor, name)?;
        let this = Self {
            descriptor,
            interface,
            kernel_drops: Cell::new(0),
        };
        // More than the limit for everybody if we may, else up to that limit.
        let socket = &this.descriptor;
        let _ = sockopt::set_socket_recv_buffer_size_force(socket, BUFFER_BYTES)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(socket, BUFFER_BYTES));
        let _ = sockopt::set_socket_send_buffer_size(socket, BUFFER_BYTES);
        this.set(libc::PACKET_VNET_HDR, &1)
            .map_err(failed("ask for vnet headers"))?;
        this.set(libc::PACKET_AUXDATA, &1)
            .map_err(failed("ask for VLAN tags"))?;
        this.set(libc::PACKET_IGNORE_OUTGOING, &1)
            .map_err(failed("leave out what is sent (needs Linux 4.20)"))?;
        Ok(this)
    }

    /// Has every frame on the wire delivered, whatever its address, for as long as the socket is open.
    fn become_promiscuous(&self) -> Result<(), EdgeError> {
        let membership = libc::packet_mreq {
            mr_ifindex: self.interface.index.cast_signed(),
            mr_type: MEMBERSHIP_PROMISCUOUS,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        self.set(libc::PACKET_ADD_MEMBERSHIP, &membership)
            .map_err(|error| EdgeError::of_step(&self.interface.name, "be promiscuous", error))
    }

    /// Starts to receive.
    fn bind(&self) -> Result<(), EdgeError> {
        self.bind_to(ALL_PROTOCOLS)
    }

    /// Is on the interface from now on, but never receives.
    pub(super) fn bind_to_send(&self) -> Result<(), EdgeError> {
        self.bind_to(0)
    }

    #[expect(unsafe_code, reason = "no safe wrapper knows addresses of AF_PACKET")]
    fn bind_to(&self, protocol: u16) -> Result<(), EdgeError> {
        // SAFETY: the address is integers and bytes only: all zeros is one.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = FAMILY;
        address.sll_protocol = protocol;
        address.sll_ifindex = self.interface.index.cast_signed();
        let mut length = length_of::<libc::sockaddr_ll>();
        let socket = self.descriptor.as_raw_fd();
        // SAFETY: the kernel reads `length` bytes of the address, and writes at most as many.
        let bound = unsafe { libc::bind(socket, (&raw const address).cast(), length) == 0 };
        let name = &self.interface.name;
        if !bound {
            let error = io::Error::last_os_error();
            return Err(EdgeError::of_step(name, "bind to it", error));
        }
        // SAFETY: as above.
        unsafe { libc::getsockname(socket, (&raw mut address).cast(), &raw mut length) };
        if ![libc::ARPHRD_ETHER, libc::ARPHRD_LOOPBACK].contains(&address.sll_hatype) {
            return Err(EdgeError::NotEthernet {
                name: name.clone(),
                kind: address.sll_hatype,
            });
        }
        Ok(())
    }

    pub(super) fn interface(&self) -> &Interface {
        &self.interface
    }

    /// Bytes of the longest frame without a VLAN tag that the interface takes now; as it was when the socket was opened
    /// where that isn't known, as after it was renamed.
    pub(super) fn frame_bytes(&self) -> usize {
        let now = Interface::find(&self.descriptor, &self.interface.name).ok();
        let now = now.filter(|now| now.index == self.interface.index);
        let mtu = now.map_or(self.interface.mtu, |now| now.mtu);
        mtu as usize + ETHERNET_HEADER_BYTES
    }

    /// Sets an option of the level `SOL_PACKET`.
    #[expect(unsafe_code, reason = "no safe wrapper knows the options of AF_PACKET")]
    pub(super) fn set<T: Copy>(&self, option: libc::c_int, value: &T) -> io::Result<()> {
        let socket = self.descriptor.as_raw_fd();
        let length = length_of::<T>();
        let value: *const T = value;
        // SAFETY: the kernel reads `length` bytes of a value that is borrowed for so long.
        match unsafe { libc::setsockopt(socket, libc::SOL_PACKET, option, value.cast(), length) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The oldest frame that waits, vnet header first; `None` if none does.
    #[expect(
        unsafe_code,
        reason = "no safe wrapper knows this kind of control message"
    )]
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<Received>> {
        let mut control = Control([0; CONTROL_BYTES]);
        let mut vector = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        // SAFETY: a message header is integers and pointers: all zeros is one.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES;
        let socket = self.descriptor.as_raw_fd();
        // SAFETY: the kernel writes within buffer and control, whose lengths it is told and which live on.
        let length = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_TRUNC) };
        let Ok(length) = usize::try_from(length) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock => Ok(None),
                _ => Err(error),
            };
        };
        Ok(Some(Received {
            length: length.min(buffer.len()),
            is_truncated: message.msg_flags & libc::MSG_TRUNC != 0,
            vlan: vlan_of(&message),
        }))
    }

    /// Sends one complete frame of wire size.
    #[inline]
    pub(super) fn send(&self, frame: &[u8]) -> io::Result<usize> {
        let header = VnetHeader::default().write();
        let parts = [io::IoSlice::new(&header), io::IoSlice::new(frame)];
        Ok(rustix::io::writev(&self.descriptor, &parts)?)
    }

    /// Frames that the kernel dropped since the socket was opened, for want of room in its buffer or ring.
    #[expect(unsafe_code, reason = "no safe wrapper knows the options of AF_PACKET")]
    pub(super) fn kernel_drops(&self) -> u64 {
        let mut statistics = libc::tpacket_stats {
            tp_packets: 0,
            tp_drops: 0,
        };
        let mut length = length_of::<libc::tpacket_stats>();
        let socket = self.descriptor.as_raw_fd();
        let value = &raw mut statistics;
        // SAFETY: the kernel writes at most `length` bytes, which is how many there are.
        let asked = unsafe {
            let option = libc::PACKET_STATISTICS;
            libc::getsockopt(
                socket,
                libc::SOL_PACKET,
                option,
                value.cast(),
                &raw mut length,
            )
        };
        if asked == 0 {
            let drops = self.kernel_drops.get() + u64::from(statistics.tp_drops);
            self.kernel_drops.set(drops);
        }
        self.kernel_drops.get()
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Control messages begin where a header of one may.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// The VLAN tag that came beside a frame.
#[expect(unsafe_code, reason = "control messages are chained by pointers")]
fn vlan_of(message: &libc::msghdr) -> Option<VlanTag> {
    // SAFETY: the header is as `recvmsg` left it, and the control buffer that it points to lives on and is aligned.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !next.is_null() {
        // SAFETY: not null, so within the control buffer, and written by the kernel.
        let header = unsafe { *next };
        if header.cmsg_level == libc::SOL_PACKET && header.cmsg_type == libc::PACKET_AUXDATA {
            // SAFETY: the kernel wrote a whole `tpacket_auxdata` behind this header, perhaps not aligned.
            let data = unsafe { libc::CMSG_DATA(next).cast::<libc::tpacket_auxdata>() };
            // SAFETY: as above.
            let data = unsafe { data.read_unaligned() };
            return vlan_tag(data.tp_status, data.tp_vlan_tci, data.tp_vlan_tpid);
        }
        // SAFETY: as for the first.
        next = unsafe { libc::CMSG_NXTHDR(message, next) };
    }
    None
}

/// The VLAN tag that is in these fields if the status says so.
pub(super) fn vlan_tag(status: u32, control: u16, protocol: u16) -> Option<VlanTag> {
    let has_protocol = status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
    (status & libc::TP_STATUS_VLAN_VALID != 0).then_some(VlanTag {
        protocol: if has_protocol {
            protocol
        } else {
            VLAN_PROTOCOL
        },
        control,
    })
}

/// The size of an address or option, as system calls want it.
#[expect(clippy::cast_possible_truncation, reason = "a few dozen bytes")]
const fn length_of<T>() -> libc::socklen_t {
    size_of::<T>() as libc::socklen_t
}

#[expect(clippy::cast_possible_truncation, reason = "17")]
const FAMILY: libc::sa_family_t = libc::AF_PACKET as libc::sa_family_t;
/// `ETH_P_ALL`, in the byte order of the network.
const ALL_PROTOCOLS: u16 = 0x0003_u16.to_be();
const MEMBERSHIP_PROMISCUOUS: u16 = 1;
/// What waits in the kernel for an engine that is busy: a tenth of a second at a gigabit, with the kernel's overhead.
const BUFFER_BYTES: usize = 32 << 20;
/// Bytes of the longest super-packet, all headers included: what kernels make where they are told to (`GSO_MAX_SIZE`), which is
/// eight times what they make otherwise.
pub(super) const SUPER_PACKET_BYTES_MAX: usize = 513 * 1024;
const ETHERNET_HEADER_BYTES: usize = 14;
const VLAN_PROTOCOL: u16 = 0x8100;
const CONTROL_BYTES: usize = 64;
