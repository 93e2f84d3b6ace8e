//! Slots of the eBPF data path in a real kernel: netns slots and host slots alike. Guests are fake, the
//! rest is the kernel; the judges are `ip`, `tc`, sockets and a world beyond the uplink.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod answers;
mod connections;
mod container;
#[path = "../fixture/mod.rs"]
mod fixture;
mod life;
mod moves;
mod neighbours;
mod published;
mod reach;
mod switch;
mod trace;
mod uplinks;
mod versions;
mod xdp;
