//! Fuzzes the reader of captures.
#![no_main]

#[path = "../entries/pcap_reader.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
