//! Whether KVM runs code, as opposed to `/dev/kvm` being there.

#[cfg_attr(target_arch = "x86_64", path = "kvm/x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "kvm/aarch64.rs")]
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod architecture;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod machine;

use crate::Error;

/// How far KVM goes on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kvm {
    /// A virtual processor ran code of ours and said so.
    Runs,
    /// A virtual processor was made, but its code ended otherwise, with this exit reason of KVM.
    Stops(u32),
}

/// Runs a few instructions in a virtual machine of one page.
///
/// # Errors
/// There is no `/dev/kvm`, it may not be opened, or a step of making the machine fails.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub fn run() -> Result<Kvm, Error> {
    machine::run()
}

/// Other architectures have other registers; nobody has written theirs down here.
///
/// # Errors
/// Always.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn run() -> Result<Kvm, Error> {
    let source = std::io::Error::from(std::io::ErrorKind::Unsupported);
    let operation = "probe on this architecture";
    Err(Error::system(operation, "/dev/kvm", source))
}
