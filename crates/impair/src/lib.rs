//! Models of bad networks, in virtual time.
//!
//! Everything here is pure: time is a number of nanoseconds that the caller passes in, randomness is a
//! function of a seed and of packet numbers ([`random`]), packets are whatever implements [`Packet`]. No
//! clock, no socket, no thread. The same seed and the same input give the same verdicts, whenever and
//! however often the results are fetched.
//!
//! [`pipeline::Pipeline`] puts the models of one direction and one flow rule together.

pub mod cause;
pub mod corrupt;
pub mod delay;
pub mod loss;
pub mod pipeline;
pub mod queue;
pub mod random;
pub mod rate;
pub mod trace;

pub use cause::DropCause;

/// A moment, or a length of time, in nanoseconds. Moments count from whatever zero the caller chose, and
/// never go backwards.
pub type Nanoseconds = u64;

/// What the models must know of a packet.
pub trait Packet: Sized {
    /// Length of the frame as it is on the wire, with its Ethernet header and without its check sequence.
    fn frame_bytes(&self) -> u32;

    /// A hash of what tells flows apart; the same for all packets of a flow. FQ-CoDel's queues go by it.
    fn flow_hash(&self) -> u64;

    /// An equal packet, or none if there is no room for one.
    fn copy(&self) -> Option<Self>;
}
