//! Numbers by which epoll and timers name what they are about.

/// What an event or a reminder is about: a number for epoll and [`crate::timers::Timers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The worker's own queue of commands.
    Wake,
    /// A VMM wants to connect.
    VmmListener(u32),
    /// A client wants to connect for a stream.
    StreamListener(u32),
    /// A client wants to connect for messages.
    SeqpacketListener(u32),
    /// The VMM says something.
    FrontEnd(u32),
    /// The guest kicked this ring.
    Kick(u32, u32),
    /// A client in its handshake.
    Handshake(u32, u32),
    /// The peer of a connection.
    Flow(u32, u32),
    /// The wait for an event queue is over.
    Hold(u32),
}

/// Bits of a token for the number within a guest, and for the number of the guest.
const NUMBER_BITS: u32 = 24;
/// Most guests of a worker, and most connections of a guest: beyond what descriptors allow.
pub const MOST_NUMBERS: u32 = 1 << NUMBER_BITS;

impl Token {
    /// As a number.
    #[must_use]
    pub fn pack(self) -> u64 {
        let (kind, vm, number) = match self {
            Self::Wake => (0, 0, 0),
            Self::VmmListener(vm) => (1, vm, 0),
            Self::StreamListener(vm) => (2, vm, 0),
            Self::SeqpacketListener(vm) => (3, vm, 0),
            Self::FrontEnd(vm) => (4, vm, 0),
            Self::Kick(vm, ring) => (5, vm, ring),
            Self::Handshake(vm, number) => (6, vm, number),
            Self::Flow(vm, number) => (7, vm, number),
            Self::Hold(vm) => (8, vm, 0),
        };
        kind << (2 * NUMBER_BITS) | u64::from(vm) << NUMBER_BITS | u64::from(number)
    }

    /// From a number that [`Self::pack`] gave.
    #[must_use]
    pub fn unpack(token: u64) -> Option<Self> {
        let number = |shift: u32| {
            u32::try_from(token >> shift & u64::from(MOST_NUMBERS - 1)).expect("24 bits")
        };
        let (vm, number) = (number(NUMBER_BITS), number(0));
        Some(match token >> (2 * NUMBER_BITS) {
            0 => Self::Wake,
            1 => Self::VmmListener(vm),
            2 => Self::StreamListener(vm),
            3 => Self::SeqpacketListener(vm),
            4 => Self::FrontEnd(vm),
            5 => Self::Kick(vm, number),
            6 => Self::Handshake(vm, number),
            7 => Self::Flow(vm, number),
            8 => Self::Hold(vm),
            _ => return None,
        })
    }
}
