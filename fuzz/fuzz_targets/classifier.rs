//! Fuzzes the classifier of frames.
#![no_main]

#[path = "../entries/classifier.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
