//! What a container runtime writes to the CNI plugin's standard input: every verb understands it or refuses it with a
//! code of the specification, without a daemon.

use std::ffi::OsString;

use sandwire_cni::{Environment, understand};

/// Codes that a configuration can come to before the daemon is asked.
const CODES: [u32; 4] = [1, 2, 6, 7];

/// One case: a configuration.
pub(crate) fn run(bytes: &[u8]) {
    for verb in ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"] {
        let given = |text: &str| Some(OsString::from(text));
        let environment = Environment {
            command: given(verb),
            container_id: given("3f2a9c81d77e0b45"),
            netns: given("/run/netns/blue"),
            interface: given("eth0"),
            arguments: given("IgnoreUnknown=1;K8S_POD_NAME=a"),
        };
        if let Err(error) = understand(&environment, bytes) {
            assert!(CODES.contains(&error.code()), "{verb}: {error}");
            assert!(!error.to_string().is_empty());
        }
    }
}
