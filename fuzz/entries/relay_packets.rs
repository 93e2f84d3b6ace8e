//! Packets of another relay are records up to the first that makes no sense; datagrams say the same when written again,
//! however they were cut; and a stream's beginning reads back.

use sandwire_relay::{
    packets::{Packer, Unpacker},
    wire::{Datagram, Opening, Record, records},
};

/// One case: a byte that says how long packets are, and a packet.
pub(crate) fn run(bytes: &[u8]) {
    let Some((length, packet)) = bytes.split_first() else {
        return;
    };
    if let Ok(opening) = Opening::decode(packet) {
        assert_eq!(Opening::decode(&opening.encode()[2..]), Ok(opening));
    }
    let mut unpacker = Unpacker::default();
    // Twice, so that fragments meet those of before.
    for _ in 0..2 {
        unpacker.take_apart(packet, |_| {});
    }
    let mut packer = Packer::default();
    let mut sent = Vec::new();
    for record in records(packet) {
        if let Ok(Record::Whole(datagram)) = record
            && packer.add(&datagram, 60 + usize::from(*length) * 8, ())
        {
            sent.push((
                datagram.source,
                datagram.destination,
                datagram.payload.to_vec(),
            ));
        }
    }
    let mut received = Vec::new();
    let mut unpacker = Unpacker::default();
    let mut receive = |datagram: Datagram<'_>| {
        let payload = datagram.payload.to_vec();
        received.push((datagram.source, datagram.destination, payload));
    };
    let outcome = packer.send(|packet| unpacker.take_apart(&packet, &mut receive), drop);
    assert_eq!((outcome.sent, outcome.lost), (sent.len(), 0));
    assert_eq!(received, sent);
}
