//! Fuzzes what a VMM says.
#![no_main]

#[path = "../entries/vhost_user_messages.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
