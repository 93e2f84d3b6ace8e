//! Every verb against a daemon of a few lines: what it is asked, what the runtime gets, and which code each error has.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

mod add;
mod chain;
mod check;
mod daemon;
mod del;
mod gc;
mod refusals;
mod status;
