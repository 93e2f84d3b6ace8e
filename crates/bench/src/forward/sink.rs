//! What is beyond a played host's uplinks: it counts what arrives and looks closely at some of it.

use std::{cell::RefCell, net::Ipv4Addr, process::Command};

use anyhow::{Context, Result};
use sandwire_kernel_net::{interface, netlink::Socket, tap::Opened};

use super::{Exit, load::PORT};
use crate::{
    guest::{self, FRAME_MAX},
    packet::{Seen, VirtioHeader},
    world::{self, World},
};

/// The TAP beyond the veth, to which frames are handed that are to be looked at.
const CAPTURE: &str = "capture";

/// Both uplinks' other sides.
pub(super) struct Sink {
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
            beyond,
        };
        sink.then("drop", true)?;
        Ok(sink)
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
        self.drain(tap, |bytes| {
            let header = VirtioHeader::parse(bytes);
            let seen = bytes.get(VirtioHeader::LENGTH..).and_then(Seen::parse);
            if let Some(seen) = seen.filter(|seen| seen.target_port() == Some(PORT)) {
                found.frames += 1;
                let is_right = seen.source == source && seen.checksums_hold(header);
                found.wrong += u32::from(!is_right);
            }
        })?;
        Ok(found)
    }

    /// Throws away what the TAP holds, and returns how many frames that were.
    pub(super) fn empty_tap(&self) -> Result<u64> {
        let mut frames = 0;
        self.drain(&self.tap, |_| frames += 1)?;
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

    fn drain(&self, tap: &Opened, mut each: impl FnMut(&[u8])) -> Result<()> {
        let mut buffer = self.buffer.borrow_mut();
        while let Some(bytes) = guest::read(tap, &mut buffer)? {
            each(bytes);
        }
        Ok(())
    }
}

/// Whether a program of iproute2 is there that this suite needs besides `ip`.
pub(super) fn has_tc() -> bool {
    Command::new("tc").arg("-V").output().is_ok()
}
