//! What the kernel pays for a page of memory that it takes into use.
//!
//! A virtual machine may have to ask its hypervisor for each page that it gave back while it was free. The buffers of a
//! stream's sockets wander through all free memory, since they are freed by another processor than
//! the one that asks for them; so where that is slow, every stream through a socket is, at times. The record tells
//! by these figures.

use std::{hint::black_box, time::Instant};

const PAGE: usize = 4096;
/// Much more than any list of recently freed pages holds.
const BYTES: usize = 128 << 20;

/// Microseconds for a page that has been free for a while, and for one that was used just now.
pub(super) fn measure() -> (f64, f64) {
    let fresh = touch();
    (fresh, touch().min(touch()))
}

/// Microseconds per page of memory that is new to this process.
fn touch() -> f64 {
    let started = Instant::now();
    // Pages of zeros, none of which is there before it is written to.
    let mut memory = vec![0_u8; BYTES];
    for byte in memory.iter_mut().step_by(PAGE) {
        *byte = 1;
    }
    black_box(&memory);
    let pages = f64::from(u32::try_from(BYTES / PAGE).expect("a constant"));
    started.elapsed().as_secs_f64() * 1e6 / pages
}
