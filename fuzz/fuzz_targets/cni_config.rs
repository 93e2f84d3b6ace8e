//! Fuzzes network configurations of the CNI plugin.
#![no_main]

#[path = "../entries/cni_config.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
