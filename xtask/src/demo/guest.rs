//! The guest of the demo under either VMM: boot once, save, restore many times.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sandwire_testlab::{
    fake_guest::GuestNetwork,
    guest::{Vmm, cpu_can_virtualise, firecracker, kernel::Kernel, qemu},
};

/// What runs the guests.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// QEMU, with KVM where it works, else emulated.
    Qemu,
    /// Firecracker, if it is on the PATH.
    Firecracker,
}

impl Kind {
    /// Clones that may wake up at the same time on each core.
    pub(super) fn starts_per_core(self) -> usize {
        match self {
            // A KVM that emulates the guest's kernel makes everything in it slow.
            Self::Firecracker if !cpu_can_virtualise() => 1,
            Self::Qemu | Self::Firecracker => 4,
        }
    }

    /// Its name on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Firecracker => "firecracker",
        }
    }
}

/// A saved guest.
pub(super) enum Saved {
    Qemu(qemu::Snapshot),
    Firecracker(firecracker::Snapshot),
}

impl Saved {
    /// Restores a clone; returns when it runs.
    pub(super) fn restore(&self, name: &str, netns: &Path, tap: &str) -> Result<Vmm> {
        Ok(match self {
            Self::Qemu(snapshot) => snapshot.restore(name, netns, tap)?.into_vmm(),
            Self::Firecracker(snapshot) => snapshot.restore(name, netns, tap)?.into_vmm(),
        })
    }

    /// What runs its clones.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Qemu(_) => Kind::Qemu,
            Self::Firecracker(_) => Kind::Firecracker,
        }
    }

    /// Bytes that all clones share, and bytes of the device state.
    pub(super) fn sizes(&self) -> Result<(u64, u64)> {
        match self {
            Self::Qemu(snapshot) => snapshot.sizes(),
            Self::Firecracker(snapshot) => snapshot.sizes(),
        }
    }
}

/// A booted guest that has not been saved yet.
pub(super) enum Original {
    Qemu(qemu::Recipe, qemu::Qemu),
    Firecracker(firecracker::Recipe, firecracker::Firecracker),
}

impl Original {
    /// Boots the guest on a TAP and waits until its web server listens.
    pub(super) fn boot(
        kind: Kind,
        kernel: Option<&PathBuf>,
        folder: &Path,
        netns: &Path,
        tap: &str,
    ) -> Result<Self> {
        let network = GuestNetwork::default();
        Ok(match kind {
            Kind::Qemu => {
                let mut recipe = qemu::Recipe::prepare(&Kernel::fetch()?, &network, folder)?;
                let guest = recipe.boot(netns, tap)?;
                Self::Qemu(recipe, guest)
            }
            Kind::Firecracker => {
                let kernel = kernel.context("Firecracker needs a kernel")?;
                let recipe = firecracker::Recipe::prepare(kernel, &network, folder)?;
                let guest = recipe.boot(netns, tap)?;
                Self::Firecracker(recipe, guest)
            }
        })
    }

    /// How the guest runs, in words.
    pub(super) fn manner(&self) -> &'static str {
        match self {
            Self::Qemu(recipe, _) => match recipe.accelerator() {
                qemu::Accelerator::Kvm => "QEMU with KVM",
                qemu::Accelerator::Tcg => "QEMU, emulated (no working KVM here)",
            },
            Self::Firecracker(..) => "Firecracker",
        }
    }

    /// Saves it and ends its VMM.
    pub(super) fn save(self) -> Result<Saved> {
        Ok(match self {
            Self::Qemu(recipe, guest) => Saved::Qemu(guest.save(&recipe)?),
            Self::Firecracker(recipe, guest) => Saved::Firecracker(guest.save(&recipe)?),
        })
    }
}
