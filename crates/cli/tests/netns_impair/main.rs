//! `sandwire impair` on interfaces in namespaces of their own, judged by ping, iperf3 and the kernel.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

mod changes;
mod deaths;
mod lab;
mod many;
mod packets;
mod record;
mod refusals;
mod scenarios;
