//! From what an interface delivered to packets on a port: checksums completed, super-packets cut, VLAN tags that the
//! kernel took out put back. All edge apps that have a [`VnetHeader`] use it, and count alike.

use super::offload::{self, SuperPacket, VnetHeader};
use crate::app::Figure;
use crate::packet::Packet;
use crate::ports::Ports;

/// What became of all that an interface delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Inbound {
    /// Frames that were delivered, super-packets counted once.
    pub received: u64,
    /// Packets that were sent to the port.
    pub packets: u64,
    /// Super-packets that were cut.
    pub cut: u64,
    /// Checksums that were completed; those of cut super-packets are not counted.
    pub completed: u64,
    /// Dropped: frames and segments longer than the engine's packets.
    pub too_long: u64,
    /// Dropped: frames whose header asks for what can't be done.
    pub malformed: u64,
    /// Dropped: the pool had no packet, or the segments of a super-packet had no room on the link.
    pub no_room: u64,
}

/// A VLAN tag that is not in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VlanTag {
    /// 0x8100 or 0x88a8.
    pub protocol: u16,
    /// Priority and number.
    pub control: u16,
}

impl Inbound {
    /// Sends to `output` what the frame becomes; it must have room for one packet. `vlan` is a tag that goes back in
    /// after everything else: the header's offsets don't count it.
    pub fn deliver(
        &mut self,
        header: &VnetHeader,
        frame: &[u8],
        vlan: Option<VlanTag>,
        ports: &mut Ports<'_>,
        output: usize,
    ) {
        self.received += 1;
        if header.is_super_packet() {
            self.deliver_cut(header, frame, vlan, ports, output);
            return;
        }
        let Some(mut packet) = ports.pool().take() else {
            self.no_room += 1;
            return;
        };
        if !packet.set_bytes(frame) {
            self.too_long += 1;
            return;
        }
        match offload::complete_checksum(header, packet.bytes_mut()) {
            Ok(completed) => self.completed += u64::from(completed),
            Err(_) => {
                self.malformed += 1;
                return;
            }
        }
        self.send(packet, vlan, ports, output);
    }

    /// What finds no room is not even written, so a super-packet of tens of thousands of tiny segments costs no more
    /// than the link holds.
    fn deliver_cut(
        &mut self,
        header: &VnetHeader,
        frame: &[u8],
        vlan: Option<VlanTag>,
        ports: &mut Ports<'_>,
        output: usize,
    ) {
        let Ok(whole) = SuperPacket::new(header, frame) else {
            self.malformed += 1;
            return;
        };
        self.cut += 1;
        let count = whole.count();
        let fitting = count.min(ports.space(output));
        self.no_room += (count - fitting) as u64;
        for index in 0..fitting {
            let Some(mut packet) = ports.pool().take() else {
                self.no_room += (fitting - index) as u64;
                return;
            };
            let length = whole.write(index, packet.room_mut());
            if length.is_some_and(|length| packet.set_length(length)) {
                self.send(packet, vlan, ports, output);
            } else {
                self.too_long += 1;
            }
        }
    }

    fn send(
        &mut self,
        mut packet: Packet,
        vlan: Option<VlanTag>,
        ports: &mut Ports<'_>,
        output: usize,
    ) {
        if vlan.is_some_and(|tag| !insert_vlan(&mut packet, tag)) {
            self.too_long += 1;
            return;
        }
        self.packets += 1;
        ports.transmit(output, packet);
    }

    /// Counts a frame that was too long for the reader.
    #[cold]
    pub fn refuse_too_long(&mut self) {
        self.received += 1;
        self.too_long += 1;
    }

    /// Counts a frame without a whole header.
    #[cold]
    pub fn refuse_malformed(&mut self) {
        self.received += 1;
        self.malformed += 1;
    }

    /// The counts, for an app's report.
    #[must_use]
    pub fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new("received", self.received),
            Figure::new("received_packets", self.packets),
            Figure::new("cut", self.cut),
            Figure::new("checksums_completed", self.completed),
            Figure::new("receive_drop_too_long", self.too_long),
            Figure::new("receive_drop_malformed", self.malformed),
            Figure::new("receive_drop_no_room", self.no_room),
        ]
    }
}

/// Puts a tag behind the addresses; false if the packet has no room or no addresses.
fn insert_vlan(packet: &mut Packet, tag: VlanTag) -> bool {
    if packet.length() < ADDRESSES_BYTES || !packet.prepend(&[0; 4]) {
        return false;
    }
    let bytes = packet.bytes_mut();
    bytes.copy_within(4..4 + ADDRESSES_BYTES, 0);
    bytes[ADDRESSES_BYTES..ADDRESSES_BYTES + 2].copy_from_slice(&tag.protocol.to_be_bytes());
    bytes[ADDRESSES_BYTES + 2..ADDRESSES_BYTES + 4].copy_from_slice(&tag.control.to_be_bytes());
    true
}

/// Both addresses of an Ethernet frame.
const ADDRESSES_BYTES: usize = 12;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Link;
    use crate::pool::Pool;
    use crate::ports::Activity;

    #[test]
    fn a_tag_goes_between_addresses_and_type() {
        let pool = Pool::default();
        let mut packet = pool.take().unwrap();
        assert!(packet.set_bytes(b"toTOtofrFRfr\x08\x00payload"));
        let tag = VlanTag {
            protocol: 0x8100,
            control: 0x0064,
        };
        assert!(insert_vlan(&mut packet, tag));
        assert_eq!(
            packet.bytes(),
            b"toTOtofrFRfr\x81\x00\x00\x64\x08\x00payload"
        );
    }

    #[test]
    fn a_frame_without_addresses_gets_no_tag() {
        let pool = Pool::default();
        let mut packet = pool.take().unwrap();
        assert!(packet.set_bytes(b"short"));
        let tag = VlanTag {
            protocol: 0x8100,
            control: 1,
        };
        assert!(!insert_vlan(&mut packet, tag));
    }

    #[test]
    fn every_segment_of_a_tagged_super_packet_has_the_tag() {
        // IPv4 and UDP, 2 segments of 4 bytes, the second of 3; checksums are computed anew.
        let mut frame = b"toTOtofrFRfr\x08\x00".to_vec();
        frame.extend([
            0x45, 0, 0, 35, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        frame.extend([0, 9, 0, 9, 0, 15, 0, 0]);
        frame.extend(b"onetwo!");
        let header = VnetHeader {
            flags: offload::NEEDS_CHECKSUM,
            gso_type: offload::GSO_UDP_L4,
            segment_bytes: 4,
            checksum_start: 34,
            checksum_offset: 6,
            ..VnetHeader::default()
        };
        let pool = Pool::default();
        let mut links = [Link::default()];
        let mut ports = Ports {
            links: &mut links,
            inputs: &[],
            outputs: &[0],
            pool: &pool,
            activity: Activity::default(),
        };
        let mut inbound = Inbound::default();
        let tag = VlanTag {
            protocol: 0x8100,
            control: 7,
        };
        inbound.deliver(&header, &frame, Some(tag), &mut ports, 0);
        assert_eq!((inbound.cut, inbound.packets, inbound.no_room), (1, 2, 0));
        let mut payload = Vec::new();
        while let Some(packet) = links[0].receive() {
            assert_eq!(packet.bytes()[12..18], [0x81, 0, 0, 7, 8, 0]);
            payload.extend_from_slice(&packet.bytes()[46..]);
        }
        assert_eq!(payload, b"onetwo!");
    }

    #[test]
    fn what_has_no_room_on_the_link_is_counted_and_not_written() {
        let mut frame = b"toTOtofrFRfr\x08\x00".to_vec();
        frame.extend([
            0x45, 0, 0, 0, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        frame.extend([0, 9, 0, 9, 0, 0, 0, 0]);
        frame.resize(42 + 60_000, 1);
        let header = VnetHeader {
            gso_type: offload::GSO_UDP_L4,
            segment_bytes: 1,
            ..VnetHeader::default()
        };
        let pool = Pool::default();
        let mut links = [Link::default()];
        let mut ports = Ports {
            links: &mut links,
            inputs: &[],
            outputs: &[0],
            pool: &pool,
            activity: Activity::default(),
        };
        let mut inbound = Inbound::default();
        inbound.deliver(&header, &frame, None, &mut ports, 0);
        let on_link = crate::LINK_PACKETS_MAX as u64;
        assert_eq!(
            (inbound.packets, inbound.no_room),
            (on_link, 60_000 - on_link)
        );
        assert_eq!(pool.counters().taken, on_link);
    }
}
