//! What is asked on the control socket: whatever is understood is written and understood the same again, and
//! a policy is judged without panicking.

use std::path::Path;

use sandwire_api::vsock::VsockKind;
use sandwire_vsock_host::{control::Request, policy};

/// One case: a line.
pub(crate) fn run(bytes: &[u8]) {
    let Ok(request) = serde_json::from_slice::<Request>(bytes) else {
        return;
    };
    let written = serde_json::to_vec(&request).expect("writing it");
    let again: Request = serde_json::from_slice(&written).expect("reading it again");
    assert_eq!(again, request);
    let policy = match &request {
        Request::AddVm { vm } => &vm.policy,
        Request::SetPolicy { policy, .. } => policy,
        _ => return,
    };
    for kind in [VsockKind::VhostUser, VsockKind::Hybrid] {
        let _ = policy::check(policy, kind, Path::new("/run/sandwire/vsock/x/vsock.sock"));
    }
}
