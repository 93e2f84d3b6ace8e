//! What is sent: a payload, as one frame or, without segmentation offload, as several.

use std::net::SocketAddrV4;

use crate::{
    packet::{ACK, Checksum, Flow, Frame, Mac, PSH, SEGMENT, TcpFields},
    way::Sandbox,
    world,
};

/// Port that the packets are for.
pub(super) const PORT: u16 = 5001;
/// Port that they come from, and that answers are for.
pub(super) const ANSWERED_PORT: u16 = 40_000;

/// A payload of one packet, as a guest with offloads sends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// A frame of 64 bytes, without what Ethernet appends.
    Udp64,
    /// A full frame.
    Tcp1514,
    /// 16 KiB of payload.
    Tso16k,
    /// As many full segments as an IP packet holds: 64,240 bytes of payload.
    Tso64k,
}

impl Load {
    pub(super) const ALL: [Self; 4] = [Self::Udp64, Self::Tcp1514, Self::Tso16k, Self::Tso64k];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Udp64 => "64",
            Self::Tcp1514 => "1514",
            Self::Tso16k => "16k",
            Self::Tso64k => "64k",
        }
    }

    /// Loads in one batch, so that the uplink's queue (500 frames on a TAP) holds them all.
    pub(super) fn batch(self) -> u32 {
        match self {
            Self::Udp64 | Self::Tcp1514 => 256,
            Self::Tso16k => 32,
            Self::Tso64k => 8,
        }
    }

    fn payload(self) -> usize {
        match self {
            Self::Udp64 => 22,
            Self::Tcp1514 => SEGMENT,
            Self::Tso16k => 16_384,
            Self::Tso64k => 44 * SEGMENT,
        }
    }

    /// The frames of this load as the sandbox sends them to `target`.
    pub(super) fn frames(self, sandbox: &Sandbox, target: SocketAddrV4) -> Vec<Frame> {
        let flow = sandbox.flow(ANSWERED_PORT, target);
        self.frames_of(&flow, sandbox.has_offloads)
    }

    /// The frames of this load as who is beyond the TAP answers the sandbox, by an uplink with this Ethernet address.
    pub(super) fn answers(self, sandbox: &Sandbox, uplink: Mac) -> Vec<Frame> {
        let flow = Flow {
            source_mac: world::BEYOND_MAC,
            target_mac: uplink,
            source: SocketAddrV4::new(world::BEYOND_TAP, PORT),
            target: SocketAddrV4::new(sandbox.clone, ANSWERED_PORT),
        };
        self.frames_of(&flow, sandbox.has_offloads)
    }

    fn frames_of(self, flow: &Flow, has_offloads: bool) -> Vec<Frame> {
        let checksum = if has_offloads {
            Checksum::Partial
        } else {
            Checksum::Complete
        };
        if self == Self::Udp64 {
            return vec![flow.udp(checksum, self.payload())];
        }
        let largest = if has_offloads {
            self.payload()
        } else {
            SEGMENT
        };
        let mut frames = Vec::new();
        let mut sent = 0;
        while sent < self.payload() {
            let length = largest.min(self.payload() - sent);
            let fields = TcpFields {
                sequence: u32::try_from(sent + 1).unwrap_or(1),
                acknowledged: 1,
                flags: ACK | PSH,
                window: 0xffff,
            };
            frames.push(flow.tcp(checksum, &fields, &[], length));
            sent += length;
        }
        frames
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn sandbox(has_offloads: bool) -> Sandbox {
        Sandbox {
            namespace: "host".to_owned(),
            tap: "tap0".to_owned(),
            has_offloads,
            mac: [2; 6],
            gateway_mac: [4; 6],
            guest: Ipv4Addr::new(10, 0, 0, 2),
            gateway: Ipv4Addr::new(10, 0, 0, 1),
            prefix_length: 30,
            clone: Ipv4Addr::new(10, 0, 0, 2),
        }
    }

    #[test]
    fn with_offloads_every_load_is_one_frame() {
        let target = SocketAddrV4::new(Ipv4Addr::new(198, 19, 0, 2), PORT);
        let lengths = Load::ALL.map(|load| {
            let frames = load.frames(&sandbox(true), target);
            assert_eq!(frames.len(), 1);
            frames[0].plain().len()
        });
        assert_eq!(lengths, [64, 1514, 16_438, 64_294]);
    }

    #[test]
    fn without_offloads_no_frame_exceeds_the_mtu() {
        let target = SocketAddrV4::new(Ipv4Addr::new(198, 19, 0, 2), PORT);
        let counts = Load::ALL.map(|load| {
            let frames = load.frames(&sandbox(false), target);
            assert!(frames.iter().all(|frame| frame.plain().len() <= 1514));
            frames.len()
        });
        assert_eq!(counts, [1, 1, 12, 44]);
    }
}
