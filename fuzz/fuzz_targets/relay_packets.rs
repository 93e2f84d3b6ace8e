//! Fuzzes what another relay sends.
#![no_main]

#[path = "../entries/relay_packets.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
