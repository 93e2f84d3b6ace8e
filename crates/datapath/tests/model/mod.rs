//! What the data path should do, written a second time and as plainly as possible.
//!
//! [`run`] takes a frame, the hook it appears on and the [`World`] as it is, and says what becomes of
//! the frame; what the path remembers (counters, meters, answers) changes in the world. No map, no
//! cache, no incremental checksum, no bound that only the verifier asks for. Each stage has its file;
//! [`from_guest`], [`to_guest`] and [`child`] put them in order.

pub(crate) mod answers;
pub(crate) mod antispoof;
pub(crate) mod checksum;
pub(crate) mod child;
pub(crate) mod from_guest;
pub(crate) mod link;
pub(crate) mod nat;
pub(crate) mod packet;
pub(crate) mod police;
pub(crate) mod policy;
pub(crate) mod route;
pub(crate) mod to_guest;
pub(crate) mod world;

use sandwire_api::drop_reason::DropReason;

pub(crate) use packet::{Fragment, Packet};
pub(crate) use world::World;

/// An Ethernet address.
pub(crate) type Mac = [u8; 6];

/// Where a frame appears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Hook {
    /// Ingress of the host end of a slot.
    HostEnd,
    /// Ingress of an uplink.
    Uplink,
    /// Egress of the shared interface.
    Shared,
    /// Egress of a container's interface that is a child of one of the host's.
    FromChild,
    /// Ingress of the same.
    ToChild,
}

/// From where the host's stack has what it sends to a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It has made it.
    Host,
    /// A sandbox whose packet the data path handed up.
    Shared,
    /// A slot's host end of this number, past the data path.
    HostEnd(u32),
    Uplink,
}

/// A frame and what the kernel knows of it beside its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Input {
    pub(crate) hook: Hook,
    /// Index in `nics` that the filter's class id names; only [`Hook::HostEnd`] and those of children.
    pub(crate) class: usize,
    /// Whether the interface took the frame as its own by the destination MAC.
    pub(crate) to_this_host: bool,
    /// From where the host's stack has it; only [`Hook::Shared`].
    pub(crate) origin: Origin,
    pub(crate) frame: Vec<u8>,
    /// Payload bytes of each segment; zero for a packet that goes out as it is.
    pub(crate) gso_size: u32,
    /// How many segments the kernel knows of; zero if it doesn't.
    pub(crate) gso_segs: u32,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub(crate) now: u64,
}

/// The number in `enum verdict`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Verdict {
    Drop = 0,
    Uplink = 1,
    Sandbox = 2,
    Stack = 3,
    Answered = 4,
    Guest = 5,
    Pass = 6,
}

/// The number in `enum stage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Parse = 0,
    Antispoof = 1,
    Policy = 2,
    Route = 3,
    Police = 4,
    Redirect = 6,
}

/// What becomes of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    pub(crate) reason: Option<DropReason>,
    pub(crate) stage: Stage,
    /// Whose packet it is: entry of `nics`. None where nobody can be named.
    pub(crate) nic: Option<usize>,
    /// Whether it was on its way to that one, not from it.
    pub(crate) ingress: bool,
    /// Interface that it leaves by; zero if it doesn't.
    pub(crate) target: u32,
    /// The other sandbox that it goes to.
    pub(crate) receiver: Option<usize>,
    /// The frame as it leaves.
    pub(crate) frame: Vec<u8>,
    /// Whose job the Ethernet addresses of `frame` are.
    pub(crate) macs: Macs,
    /// Firewall mark set on it.
    pub(crate) mark: Option<u32>,
    /// Time at which the uplink's queue should send it, if that isn't at once.
    pub(crate) departure: Option<u64>,
}

/// Who writes the Ethernet addresses of a frame that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Macs {
    /// The path: they are as in the outcome.
    Path,
    /// The path if it knows the neighbour by heart, else the kernel after it.
    PathOrKernel,
    /// The kernel: the neighbour isn't known.
    Kernel,
}

/// A frame that ends here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dropped {
    pub(crate) reason: DropReason,
    /// Entry of `nics` whose packet it is, and who counts it unless there is a receiver.
    pub(crate) nic: usize,
    /// The other sandbox whose limit it was.
    pub(crate) receiver: Option<usize>,
    /// Whether it was on its way to that one, not from it.
    pub(crate) ingress: bool,
    pub(crate) stage: Stage,
}

impl Dropped {
    /// What a sandbox sends, dropped in the stage that the reason belongs to.
    pub(crate) fn egress(nic: usize, reason: DropReason) -> Self {
        Self {
            reason,
            nic,
            receiver: None,
            ingress: false,
            stage: stage_of(reason),
        }
    }

    /// The same of what was on its way to a sandbox.
    pub(crate) fn ingress(nic: usize, reason: DropReason) -> Self {
        Self {
            ingress: true,
            ..Self::egress(nic, reason)
        }
    }
}

/// Judges one frame.
pub(crate) fn run(world: &mut World, input: &Input) -> Outcome {
    match input.hook {
        Hook::HostEnd => from_guest::run(world, input),
        Hook::Uplink | Hook::Shared => to_guest::run(world, input),
        Hook::FromChild => child::send(world, input),
        Hook::ToChild => child::receive(world, input),
    }
}

impl Outcome {
    /// A frame that is dropped and counted.
    pub(crate) fn dropped(world: &mut World, input: &Input, dropped: Dropped) -> Self {
        let counted = dropped.receiver.unwrap_or(dropped.nic);
        world.nics[counted].counters.drops[dropped.reason as usize] += 1;
        Self {
            verdict: Verdict::Drop,
            reason: Some(dropped.reason),
            stage: dropped.stage,
            ingress: dropped.ingress,
            nic: Some(dropped.nic),
            target: 0,
            receiver: dropped.receiver,
            frame: input.frame.clone(),
            macs: Macs::Path,
            mark: None,
            departure: None,
        }
    }
}

/// The stage in which a packet is dropped for this reason.
fn stage_of(reason: DropReason) -> Stage {
    use DropReason as R;
    match reason {
        R::NotLeased | R::VlanTag | R::Ethertype | R::Malformed | R::NoAddress => Stage::Parse,
        R::RoutingHeader | R::ExtensionHeaders => Stage::Parse,
        R::SourceMac | R::SourceAddress | R::RogueDhcp | R::RogueRa => Stage::Antispoof,
        R::Arp | R::Neighbour | R::LinkChatter => Stage::Antispoof,
        R::Multicast | R::Destination | R::GatewayService | R::OtherSandbox => Stage::Policy,
        R::Policy | R::Metadata | R::HostService | R::UplinkDenied => Stage::Policy,
        R::NotRelayed => Stage::Policy,
        // Policy and route are one decision.
        R::NoSuchSandbox => Stage::Policy,
        R::NoRoute | R::TooBig | R::NeighbourLimit => Stage::Route,
        R::BitLimit | R::PacketLimit => Stage::Police,
        R::Helper => Stage::Redirect,
    }
}
