//! Fuzzes the handshake of a client of the host.
#![no_main]

#[path = "../entries/handshake.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
