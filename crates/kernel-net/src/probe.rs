//! Finds out what the kernel can do, by doing it.
//!
//! A probe makes what it asks for and drops it again; nothing stays behind when its process ends. A
//! probe may hang where the kernel is broken, so callers give it a process of its own and a time limit.

pub mod bpf;
pub mod child;
pub mod kvm;
pub mod netkit;
