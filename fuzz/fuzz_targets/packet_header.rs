//! Fuzzes a packet's header.
#![no_main]

#[path = "../entries/packet_header.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
