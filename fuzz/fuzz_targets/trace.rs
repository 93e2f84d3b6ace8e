//! Fuzzes the reader of traces, and a line that follows one.
#![no_main]

#[path = "../entries/trace.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
