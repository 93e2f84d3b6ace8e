//! The fuzz target of this crate, on its seeds and on bytes made of them.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

#[path = "../../../fuzz/drive.rs"]
mod drive;
#[path = "../../../fuzz/entries/relay_packets.rs"]
mod relay_packets;

#[test]
fn packets_of_another_relay() {
    drive::drive("relay_packets", relay_packets::run, &[], 20_000);
}
