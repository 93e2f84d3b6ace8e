//! Fuzzes the packets of a guest on real rings.
#![no_main]

#[path = "../entries/guest_packets.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
