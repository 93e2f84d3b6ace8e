//! Fuzzes what is asked on the control socket.
#![no_main]

#[path = "../entries/control_request.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| entry::run(bytes));
