//! The tiers: what each needs, and how long it may take.

use std::{thread, time::Duration};

use sandwire_testlab::capabilities;

use super::arm;
use crate::command;

/// A group of tests that need the same things.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Tier {
    /// Needs nothing: `cargo test`.
    Unit,
    /// Needs a C++ compiler, for libFuzzer: the targets of `fuzz/`, for about a minute in all.
    Fuzz,
    /// Needs root, for private namespaces.
    Netns,
    /// Needs root, podman and containerd, for containers and pods of real runtimes.
    Container,
    /// Needs root, QEMU and user-mode Linux, for real guests.
    Guest,
    /// Needs root, Firecracker, a kernel for it and a KVM that works.
    Firecracker,
    /// Needs root and the program of CNI's reference library.
    Cnitool,
    /// Needs Rust's target for 64-bit ARM, a cross compiler and QEMU: some tests of `netns` on an emulated machine.
    Arm,
}

impl Tier {
    /// Every tier, in the order in which they run.
    pub(crate) const ALL: [Self; 8] = [
        Self::Unit,
        Self::Netns,
        Self::Container,
        Self::Guest,
        // Built meanwhile.
        Self::Fuzz,
        Self::Firecracker,
        Self::Cnitool,
        Self::Arm,
    ];

    /// The tier's name on the command line and in reasons of `#[ignore]`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Fuzz => "fuzz",
            Self::Netns => "netns",
            Self::Container => "container",
            Self::Guest => "guest",
            Self::Firecracker => "firecracker",
            Self::Cnitool => "cnitool",
            Self::Arm => "arm",
        }
    }

    /// How long the tier's tests may take, of the first tier with its build: half as much again as two slow cores need. What
    /// still runs then is ended and counts as failed.
    pub(crate) fn deadline(self) -> Duration {
        let minutes = match self {
            Self::Unit => 20,
            Self::Fuzz => 10,
            Self::Netns => 40,
            Self::Container | Self::Firecracker | Self::Cnitool => 10,
            Self::Guest => 60,
            Self::Arm => 45,
        };
        Duration::from_secs(60 * minutes)
    }

    /// How many tests of one executable run at a time; nothing means as many as there are cores.
    /// An emulated guest keeps a core busy, so two at once would miss each other's deadlines on one.
    /// Those of namespaces wait most of the time, for packets and for time-outs.
    pub(crate) fn threads(self) -> Option<usize> {
        match self {
            Self::Guest | Self::Firecracker => Some(1),
            Self::Netns => Some(1 + cores()),
            _ => None,
        }
    }

    /// How many executables run at a time: the last tests of one would leave cores idle, and so would one guest.
    pub(crate) fn lanes(self) -> usize {
        match self {
            Self::Netns => 2,
            Self::Guest => cores().min(2),
            _ => 1,
        }
    }

    /// Whether it can be had wherever the rest can: no package of Debian has Firecracker, cnitool or Rust's other targets.
    /// Unless it is named, such a tier may be missing even where all are required.
    pub(crate) fn is_for_all(self) -> bool {
        !matches!(self, Self::Firecracker | Self::Cnitool | Self::Arm)
    }

    /// Whether it runs when it is named, but not with the rest: an emulated ARM repeats tests of `netns` for 20 minutes.
    pub(crate) fn only_by_name(self) -> bool {
        self == Self::Arm
    }

    /// Why the tier cannot run here, if it can't.
    pub(crate) fn obstacle(self) -> Option<String> {
        match self {
            Self::Unit => (command::find("cc").is_none()).then(|| "no cc".to_owned()),
            Self::Fuzz => (command::find("c++").is_none()).then(|| "no c++".to_owned()),
            Self::Netns => capabilities::missing_for_namespaces(),
            Self::Container => capabilities::missing_for_containers(),
            Self::Guest => capabilities::missing_for_user_mode_linux()
                .or_else(capabilities::missing_for_qemu)
                .or_else(capabilities::missing_for_systemd),
            Self::Firecracker => capabilities::missing_for_firecracker(),
            Self::Cnitool => capabilities::missing_for_cnitool(),
            Self::Arm => capabilities::missing_for_arm().or_else(arm::missing_target),
        }
    }
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}
