//! Whether BPF programs load, and attach where sandwire would attach them.

use std::os::fd::{AsFd, OwnedFd};

use crate::{
    Error,
    bpf::{self, BPF_TCX_INGRESS, BPF_XDP, ProgramType, XDP_FLAGS_DRV_MODE, instruction},
    interface::InterfaceIndex,
};

/// Where a program attaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// tc ingress by a TCX link (Linux 6.6 and later).
    Tcx,
    /// The driver's own receive path.
    NativeXdp,
}

const XDP_PASS: i32 = 2;

/// A loaded program that lets every packet pass.
#[derive(Debug)]
pub struct Program {
    descriptor: OwnedFd,
    hook: Hook,
}

impl Program {
    /// Loads the program for a hook.
    ///
    /// # Errors
    /// The kernel has no BPF, or refuses it to this process.
    pub fn load(hook: Hook) -> Result<Self, Error> {
        let (program_type, verdict) = match hook {
            Hook::Tcx => (ProgramType::Classifier, 0),
            Hook::NativeXdp => (ProgramType::Xdp, XDP_PASS),
        };
        let instructions = [
            // r0 = verdict
            instruction(0xb7, 0, 0, 0, verdict),
            // exit
            instruction(0x95, 0, 0, 0, 0),
        ];
        let descriptor = bpf::load(program_type, "sandwire_probe", &instructions)
            .map_err(|source| Error::system("load", "BPF program", source))?;
        Ok(Self { descriptor, hook })
    }

    /// The loaded program, for attaching by other means.
    #[must_use]
    pub fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    /// Attaches it to an interface until the answer is dropped.
    ///
    /// # Errors
    /// The kernel has no such hook on this interface.
    pub fn attach(&self, interface: InterfaceIndex) -> Result<OwnedFd, Error> {
        let (attach_type, flags) = match self.hook {
            Hook::Tcx => (BPF_TCX_INGRESS, 0),
            Hook::NativeXdp => (BPF_XDP, XDP_FLAGS_DRV_MODE),
        };
        bpf::create_link(self.descriptor.as_fd(), interface, attach_type, flags).map_err(|source| {
            let object = format!("interface {interface}");
            Error::system("attach BPF program to", object, source)
        })
    }
}
