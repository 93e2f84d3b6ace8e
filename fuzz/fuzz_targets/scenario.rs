//! Fuzzes files of scenarios.
#![no_main]

#[path = "../entries/scenario.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
