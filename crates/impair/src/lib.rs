//! Models of bad networks, in virtual time.
//!
//! Everything here is pure: time is a number of nanoseconds that the caller passes in, randomness is a
//! function of a seed and of packet numbers ([`random`]), packets are whatever implements [`Packet`]. No
//! clock, no socket, no thread. The same seed and the same input give the same verdicts, whenever and
//! however often the results are fetched.
//!
//! [`pipeline::Pipeline`] puts the models of one direction and one flow rule together; [`nat::Nat`] is one
//! link's translation, both ways. [`app::Line`] carries out what users ask for ([`compile`]) as an app of an engine. What each model is exactly: `docs/impair-models.md`.

pub mod app;
pub mod cause;
mod checksum;
pub mod compile;
pub mod corrupt;
pub mod decision;
pub mod delay;
mod delay_line;
pub mod flap;
pub mod line;
pub mod loss;
pub mod mtu;
pub mod nat;
pub mod pipeline;
pub mod queue;
pub mod random;
pub mod rate;
pub mod reorder;
pub mod scenario;
pub mod settings;
#[cfg(test)]
mod test_frames;
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

    /// The frame itself.
    fn bytes(&self) -> &[u8];

    /// An equal packet, or none if there is no room for one.
    fn copy(&self) -> Option<Self>;

    /// A packet of the same flow with this frame, or none if there is no room for one.
    fn with_bytes(&self, frame: &[u8]) -> Option<Self>;
}
