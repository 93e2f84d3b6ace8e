//! Fuzzes texts and JSON of impairments.
#![no_main]

#[path = "../entries/impairment_text.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
