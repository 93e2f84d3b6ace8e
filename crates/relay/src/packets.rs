//! Datagrams into packets of a certain length, and back. Pure but for the numbers of those that are cut.
//!
//! Records are put together as long as they fit; one that fits into no packet is cut. What has all of its parts
//! together again is a record; what hasn't is forgotten, the oldest first, so that memory is bounded whatever the
//! other side sends.

use std::{
    collections::{HashMap, VecDeque},
    sync::atomic::{AtomicU32, Ordering},
};

use bytes::Bytes;

use crate::wire::{Datagram, FRAGMENT_OVERHEAD, Fragment, Record, records};

/// Records that may be incomplete at once.
const INCOMPLETE_MAX: usize = 64;
/// Bytes that incomplete records may have together.
const INCOMPLETE_BYTES_MAX: usize = 2 << 20;

/// Number of the next record that is cut: of this process, since several put packets into one channel.
static NEXT_ID: AtomicU32 = AtomicU32::new(0);

/// Puts datagrams into packets. `T` is what its user wants to have of each that was sent.
#[derive(Debug)]
pub struct Packer<T> {
    current: Vec<u8>,
    /// Datagrams in it.
    count: usize,
    scratch: Vec<u8>,
    full: Vec<Packet>,
    /// Of all datagrams, in their order.
    tokens: Vec<T>,
}

impl<T> Default for Packer<T> {
    fn default() -> Self {
        Self {
            current: Vec::new(),
            count: 0,
            scratch: Vec::new(),
            full: Vec::new(),
            tokens: Vec::new(),
        }
    }
}

/// How many datagrams were sent as a whole, and how many weren't.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Sent.
    pub sent: usize,
    /// Not sent, or not all of their fragments.
    pub lost: usize,
}

/// A packet that nothing is added to any more.
#[derive(Debug)]
struct Packet {
    bytes: Bytes,
    /// Datagrams that are complete with it: none with a fragment that others follow.
    ends: usize,
}

impl<T> Packer<T> {
    /// Adds a datagram; packets have at most `length_max` bytes. False if it is too long to be cut.
    pub fn add(&mut self, datagram: &Datagram<'_>, length_max: usize, token: T) -> bool {
        let length = datagram.encoded_length();
        if self.current.len() + length > length_max {
            self.close();
        }
        if length <= length_max {
            self.current.reserve(length_max);
            datagram.encode(&mut self.current);
            self.count += 1;
            self.tokens.push(token);
            return true;
        }
        let room = length_max.saturating_sub(FRAGMENT_OVERHEAD);
        if room == 0 {
            return false;
        }
        let Ok(count) = u8::try_from(length.div_ceil(room)) else {
            return false;
        };
        self.scratch.clear();
        datagram.encode(&mut self.scratch);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        for (content, index) in self.scratch.chunks(room).zip(0..) {
            let fragment = Fragment {
                id,
                index,
                count,
                content,
            };
            let mut packet = Vec::with_capacity(FRAGMENT_OVERHEAD + content.len());
            fragment.encode(&mut packet);
            self.full.push(Packet {
                bytes: packet.into(),
                ends: usize::from(index + 1 == count),
            });
        }
        self.tokens.push(token);
        true
    }

    /// Sends the packets so far by `send`, which says whether one was taken. `each` gets what belongs to the datagrams that
    /// were taken as a whole.
    pub fn send(&mut self, mut send: impl FnMut(Bytes) -> bool, mut each: impl FnMut(T)) -> Sent {
        self.close();
        let mut tokens = self.tokens.drain(..);
        let (mut outcome, mut is_taken) = (Sent::default(), true);
        for packet in self.full.drain(..) {
            // Fragments behind one that is lost are of no use.
            is_taken = is_taken && send(packet.bytes);
            let ended = tokens.by_ref().take(packet.ends);
            if is_taken {
                outcome.sent += packet.ends;
                ended.for_each(&mut each);
            } else {
                outcome.lost += ended.count();
            }
            is_taken |= packet.ends > 0;
        }
        outcome
    }

    fn close(&mut self) {
        if !self.current.is_empty() {
            let mut packet = std::mem::take(&mut self.current);
            // What waits is to take up no more than what is in it.
            if packet.len() < packet.capacity() / 2 {
                packet.shrink_to_fit();
            }
            self.full.push(Packet {
                bytes: packet.into(),
                ends: std::mem::take(&mut self.count),
            });
        }
    }
}

/// Takes packets apart.
#[derive(Debug, Default)]
pub struct Unpacker {
    incomplete: HashMap<u32, Incomplete>,
    order: VecDeque<u32>,
    bytes: usize,
}

#[derive(Debug)]
struct Incomplete {
    parts: Vec<Option<Box<[u8]>>>,
    missing: usize,
    bytes: usize,
}

impl Unpacker {
    /// Calls `each` for every datagram of a packet, and those that it completes. False if a part of the packet
    /// makes no sense.
    pub fn take_apart(&mut self, packet: &[u8], mut each: impl FnMut(Datagram<'_>)) -> bool {
        for record in records(packet) {
            match record {
                Ok(Record::Whole(datagram)) => each(datagram),
                Ok(Record::Fragment(fragment)) => {
                    let Some(whole) = self.add(&fragment) else {
                        continue;
                    };
                    // What was cut is one datagram, and no fragment of one.
                    match records(&whole).next() {
                        Some(Ok(Record::Whole(datagram))) => each(datagram),
                        _ => return false,
                    }
                }
                Err(_) => return false,
            }
        }
        true
    }

    fn add(&mut self, fragment: &Fragment<'_>) -> Option<Vec<u8>> {
        let count = usize::from(fragment.count);
        if !self.incomplete.contains_key(&fragment.id) {
            while self.order.len() >= INCOMPLETE_MAX {
                self.forget_oldest();
            }
            let incomplete = Incomplete {
                parts: vec![None; count],
                missing: count,
                bytes: 0,
            };
            self.incomplete.insert(fragment.id, incomplete);
            self.order.push_back(fragment.id);
        }
        let incomplete = self.incomplete.get_mut(&fragment.id)?;
        let part = incomplete.parts.get_mut(usize::from(fragment.index))?;
        if part.is_some() || incomplete.parts.len() != count {
            return None;
        }
        incomplete.parts[usize::from(fragment.index)] = Some(fragment.content.into());
        incomplete.missing -= 1;
        incomplete.bytes += fragment.content.len();
        self.bytes += fragment.content.len();
        if incomplete.missing == 0 {
            let whole = self.remove(fragment.id)?;
            self.order.retain(|id| *id != fragment.id);
            return Some(whole.parts.into_iter().flatten().flatten().collect());
        }
        while self.bytes > INCOMPLETE_BYTES_MAX {
            self.forget_oldest();
        }
        None
    }

    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.order.pop_front() {
            self.remove(oldest);
        }
    }

    fn remove(&mut self, id: u32) -> Option<Incomplete> {
        let removed = self.incomplete.remove(&id)?;
        self.bytes -= removed.bytes;
        Some(removed)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use super::*;

    fn addresses() -> (SocketAddr, SocketAddr) {
        let parse = |text: &str| text.parse().unwrap();
        (parse("10.0.0.1:1000"), parse("[2001:db8::1]:53"))
    }

    fn datagram(payload: &[u8]) -> Datagram<'_> {
        let (source, destination) = addresses();
        Datagram {
            sender: "web/a",
            source,
            destination,
            payload,
        }
    }

    fn packets_of<T>(packer: &mut Packer<T>) -> Vec<Bytes> {
        let mut packets = Vec::new();
        let take = |packet| {
            packets.push(packet);
            true
        };
        packer.send(take, drop);
        packets
    }

    proptest! {
        #[test]
        fn datagrams_come_back_whatever_the_packets_length(
            lengths in proptest::collection::vec(0_usize..5000, 0..20), length_max in 60_usize..3000
        ) {
            let payloads: Vec<Vec<u8>> = lengths.iter().zip(0_u8..)
                .map(|(length, byte)| vec![byte; *length]).collect();
            let mut packer = Packer::default();
            for payload in &payloads {
                prop_assert!(packer.add(&datagram(payload), length_max, ()));
            }
            let packets = packets_of(&mut packer);
            let mut unpacker = Unpacker::default();
            let mut found = Vec::new();
            for packet in &packets {
                prop_assert!(packet.len() <= length_max);
                prop_assert!(unpacker.take_apart(packet, |datagram| found.push(datagram.payload.to_vec())));
            }
            prop_assert_eq!(found, payloads);
            prop_assert_eq!(unpacker.bytes, 0);
            prop_assert!(unpacker.order.is_empty());
        }

        #[test]
        fn fragments_of_anybody_take_bounded_memory(
            fragments in proptest::collection::vec(
                (0_u32..200, 0_u8..9, 1_u8..9, 0_usize..60_000), 0..200)
        ) {
            let content = vec![1; 60_000];
            let mut unpacker = Unpacker::default();
            for (id, index, count, length) in fragments {
                let mut packet = Vec::new();
                Fragment { id, index, count, content: &content[..length] }.encode(&mut packet);
                unpacker.take_apart(&packet, |_| {});
                prop_assert!(unpacker.incomplete.len() <= INCOMPLETE_MAX);
                prop_assert_eq!(unpacker.incomplete.len(), unpacker.order.len());
                prop_assert!(unpacker.bytes <= INCOMPLETE_BYTES_MAX);
                let sum: usize = unpacker.incomplete.values().map(|one| one.bytes).sum();
                prop_assert_eq!(sum, unpacker.bytes);
            }
        }
    }

    #[test]
    fn fragments_in_any_order_make_the_datagram_and_a_lost_one_nothing() {
        let payload: Vec<u8> = (0..=255).cycle().take(5000).collect();
        let mut packer = Packer::default();
        assert!(packer.add(&datagram(&payload), 1200, ()));
        assert!(packer.add(&datagram(&payload), 1200, ()));
        let mut packets = packets_of(&mut packer);
        packets.remove(2);
        packets.reverse();
        let mut unpacker = Unpacker::default();
        let mut found = 0;
        for packet in &packets {
            assert!(unpacker.take_apart(packet, |datagram| {
                assert_eq!(datagram.payload, payload);
                found += 1;
            }));
        }
        assert_eq!(found, 1);
    }

    #[test]
    fn fragments_of_two_packers_are_not_taken_for_each_others() {
        let payloads = [vec![1; 3000], vec![2; 3000]];
        let packets = payloads.each_ref().map(|payload| {
            let mut packer = Packer::default();
            assert!(packer.add(&datagram(payload), 1200, ()));
            packets_of(&mut packer)
        });
        let mut unpacker = Unpacker::default();
        let mut found = Vec::new();
        for (one, other) in packets[0].iter().zip(&packets[1]) {
            for packet in [one, other] {
                unpacker.take_apart(packet, |datagram| found.push(datagram.payload.to_vec()));
            }
        }
        assert_eq!(found, payloads);
    }

    #[test]
    fn small_datagrams_share_a_packet() {
        let mut packer = Packer::default();
        for _ in 0..10 {
            assert!(packer.add(&datagram(&[5; 200]), 1400, ()));
        }
        let packets = packets_of(&mut packer);
        let lengths: Vec<usize> = packets.iter().map(Bytes::len).collect();
        assert_eq!(lengths.len(), 2);
        assert!(lengths[0] > 1100);
    }

    #[test]
    fn a_datagram_is_lost_with_any_of_its_fragments_and_with_its_packet() {
        let mut packer = Packer::default();
        for (length, number) in [100, 100, 3000, 100, 3000, 100].into_iter().zip(0..) {
            assert!(packer.add(&datagram(&vec![5; length]), 1400, number));
        }
        let (mut packets, mut told) = (0, Vec::new());
        // Two in a packet, three fragments, a packet, three fragments, a packet. Lost: one fragment, and the last packet.
        let send = |_| {
            packets += 1;
            ![3, 8].contains(&packets)
        };
        let sent = packer.send(send, |number| told.push(number));
        assert_eq!(told, [0, 1, 3, 4]);
        assert_eq!(sent, Sent { sent: 4, lost: 2 });
        assert_eq!(packets, 8, "the fragment behind a lost one isn't sent");
        assert!(packets_of(&mut packer).is_empty());
    }

    #[test]
    fn a_datagram_that_can_not_be_cut_is_refused() {
        let mut packer = Packer::default();
        assert!(!packer.add(&datagram(&[0; 60_000]), 100, ()));
        assert!(!packer.add(&datagram(&[0; 60]), 5, ()));
        assert!(packets_of(&mut packer).is_empty());
    }
}
