//! Apps at the edge of a graph: they bring packets in from the kernel, and hand packets to it.

pub mod xdp;
