//! The header that carries what a network card would do for a frame.

/// `struct virtio_net_hdr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VnetHeader {
    pub(crate) flags: u8,
    pub(crate) gso_type: u8,
    pub(crate) header_length: u16,
    pub(crate) gso_size: u16,
    pub(crate) checksum_start: u16,
    pub(crate) checksum_offset: u16,
}

/// Length of the header.
pub(crate) const VNET_HEADER: usize = 10;
/// The checksum is to be finished.
pub(crate) const NEEDS_CHECKSUM: u8 = 1;
pub(crate) const GSO_TCPV4: u8 = 1;
/// Datagrams cut into fragments, as no Linux has sent them since 4.14.
pub(crate) const GSO_UDP: u8 = 3;
pub(crate) const GSO_TCPV6: u8 = 4;
/// Datagrams of the same length each, but for the last.
pub(crate) const GSO_UDP_L4: u8 = 5;

impl VnetHeader {
    pub(crate) fn bytes(self) -> Vec<u8> {
        let mut bytes = vec![self.flags, self.gso_type];
        for field in [
            self.header_length,
            self.gso_size,
            self.checksum_start,
            self.checksum_offset,
        ] {
            bytes.extend(field.to_ne_bytes());
        }
        bytes
    }

    pub(crate) fn read(bytes: &[u8]) -> Self {
        let field = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            header_length: field(2),
            gso_size: field(4),
            checksum_start: field(6),
            checksum_offset: field(8),
        }
    }
}
