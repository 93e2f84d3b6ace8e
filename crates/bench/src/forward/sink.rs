//! What is beyond a played host's uplinks: it counts what arrives and looks closely at some of it.

use std::{
    cell::{RefCell, RefMut},
    net::Ipv4Addr,
    process::Command,
};

use anyhow::{Context, Result};
use sandwire_kernel_net::{interface, netlink::Socket, tap::Opened};

use super::{Exit, load::PORT};
use crate::{
    guest::{self, FRAME_MAX},
    packet::{Frame, Seen, VirtioHeader},
    world::{self, World},
};

/// The TAP beyond the veth, to which frames are handed that are to be looked at.
const CAPTURE: &str = "capture";

/// Both uplinks' other sides.
pub(super) struct Sink {
    host: String,
    beyond: String,
    tap: Opened,
    capture: Opened,
    netlink: RefCell<Socket>,
    buffer: RefCell<Vec<u8>>,
}

/// What a closer look at frames has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// Frames that are ours.
    pub(super) frames: u32,
    /// Of these, with another source or wrong checksums.
    pub(super) wrong: u32,
}

impl Sink {
    /// Opens a played host's sinks.
    pub(super) fn open(world: &World) -> Result<Self> {
        let beyond = world.beyond().to_owned();
        world::batch(
            &beyond,
            &format!("tuntap add name {CAPTURE} mode tap vnet_hdr\nlink set {CAPTURE} up"),
        )?;
        let sink = Self {
            tap: world.open_tap()?,
            capture: world::open_tap(&beyond, CAPTURE, true)?,
            netlink: RefCell::new(world::netlink_of(&beyond)?),
            buffer: RefCell::new(vec![0; FRAME_MAX]),
            host: world.name().to_owned(),
            beyond,
        };
        sink.then("drop", true)?;
        Ok(sink)
    }

    /// The host's namespace.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Has a frame come to the host by the TAP.
    pub(super) fn send(&self, frame: &Frame) -> Result<()> {
        guest::write(&self.tap, frame.with_header())
    }

    /// Room for a frame.
    pub(super) fn buffer(&self) -> RefMut<'_, Vec<u8>> {
        self.buffer.borrow_mut()
    }

    /// What happens to frames that come by the veth.
    fn then(&self, what: &str, is_first: bool) -> Result<()> {
        let flush = if is_first {
            ""
        } else {
            "flush chain netdev sink in\n"
        };
        let rules = format!(
            "table netdev sink {{
                chain in {{ type filter hook ingress device \"eth0\" priority 0; }}
            }}
            {flush}add rule netdev sink in {what}"
        );
        world::nft(&self.beyond, &rules)
    }

    /// Sends what comes by the veth to be looked at, or no longer.
    pub(super) fn capture(&self, exit: Exit, is_on: bool) -> Result<()> {
        match (exit, is_on) {
            (Exit::Tap, _) => Ok(()),
            (Exit::Veth, true) => self.then(&format!("fwd to \"{CAPTURE}\""), false),
            (Exit::Veth, false) => self.then("drop", false),
        }
    }

    /// Looks at all frames that have come. To be preceded by [`Self::capture`].
    pub(super) fn look(&self, exit: Exit, source: Ipv4Addr) -> Result<Look> {
        let tap = match exit {
            Exit::Tap => &self.tap,
            Exit::Veth => &self.capture,
        };
        let mut found = Look::default();
        drain(tap, &mut self.buffer(), |bytes| {
            look_at(bytes, true, PORT, &mut found, |seen| seen.source == source);
        })?;
        Ok(found)
    }

    /// Throws away what the TAP holds, and returns how many frames that were.
    pub(super) fn empty_tap(&self) -> Result<u64> {
        let mut frames = 0;
        drain(&self.tap, &mut self.buffer(), |_| frames += 1)?;
        Ok(frames)
    }

    /// How many frames have come by the veth since it was made.
    pub(super) fn veth_frames(&self) -> Result<u64> {
        let mut socket = self.netlink.borrow_mut();
        let all = interface::list_with_traffic(&mut socket)?;
        let veth = all.iter().find(|interface| interface.name == "eth0");
        let veth = veth.context("the far end of the uplink is gone")?;
        Ok(veth.traffic.received_packets)
    }
}

/// Hands over all frames that a TAP holds.
pub(super) fn drain(tap: &Opened, buffer: &mut [u8], mut each: impl FnMut(&[u8])) -> Result<()> {
    while let Some(bytes) = guest::read(tap, buffer)? {
        each(bytes);
    }
    Ok(())
}

/// Looks at a frame, which is ours if it is for this port, and right if its checksums are and `has_right_addresses`.
pub(super) fn look_at(
    bytes: &[u8],
    has_header: bool,
    port: u16,
    found: &mut Look,
    has_right_addresses: impl Fn(&Seen<'_>) -> bool,
) {
    let (header, frame) = if has_header {
        (
            VirtioHeader::parse(bytes),
            bytes.get(VirtioHeader::LENGTH..),
        )
    } else {
        (None, Some(bytes))
    };
    let seen = frame.and_then(Seen::parse);
    if let Some(seen) = seen.filter(|seen| seen.target_port() == Some(port)) {
        found.frames += 1;
        let is_right = has_right_addresses(&seen) && seen.checksums_hold(header);
        found.wrong += u32::from(!is_right);
    }
}

/// Whether a program of iproute2 is there that this suite needs besides `ip`.
pub(super) fn has_tc() -> bool {
    Command::new("tc").arg("-V").output().is_ok()
}
