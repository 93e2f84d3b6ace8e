//! What connects an engine with the system: a runner that waits for descriptors, and apps that read and write outside.
//! The only module with system calls.

pub mod tap;
pub mod wait;

pub use tap::{Tap, TapApp};
pub use wait::{Stop, Waiter, Waker};
