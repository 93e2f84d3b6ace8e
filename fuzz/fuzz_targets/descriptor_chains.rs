//! Fuzzes chains of descriptors.
#![no_main]

#[path = "../entries/descriptor_chains.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
