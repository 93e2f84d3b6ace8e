//! Runs probes in a process of their own, with a time limit.

use std::{
    collections::BTreeMap,
    io::Read,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use sandwire_kernel_net::probe::kvm::{self, Kvm};
use serde::{Deserialize, Serialize};

use super::{Probe, datapath, features};

/// How long a probe may take.
const TIME_MAX: Duration = Duration::from_secs(15);

/// What came of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Probed {
    /// Absent if it couldn't be found out.
    pub(super) found: Option<bool>,
    pub(super) detail: String,
}

/// Results by name.
pub(super) type Results = BTreeMap<String, Probed>;

impl Probed {
    /// What a trial says: it worked, or it did not.
    pub(super) fn of_trial<E: std::fmt::Display>(
        trial: Result<(), E>,
        is_unclear: impl Fn(&E) -> bool,
    ) -> Self {
        match trial {
            Ok(()) => Self {
                found: Some(true),
                detail: "tried".to_owned(),
            },
            Err(error) => Self {
                found: if is_unclear(&error) {
                    None
                } else {
                    Some(false)
                },
                detail: error.to_string(),
            },
        }
    }
}

/// Probes in this process.
pub(super) fn here(probe: Probe) -> Results {
    match probe {
        Probe::Features => features::probe_all(),
        Probe::DataPath => datapath::probe_all(),
        Probe::Kvm => BTreeMap::from([("kvm".to_owned(), kvm_runs())]),
    }
}

fn kvm_runs() -> Probed {
    let (found, detail) = match kvm::run() {
        Ok(Kvm::Runs) => (true, "a virtual processor ran code in real mode".to_owned()),
        Ok(Kvm::Stops(reason)) => (
            false,
            format!(
                "a virtual processor was made, but its code stopped with KVM's exit reason {reason}"
            ),
        ),
        Err(error) => (false, error.to_string()),
    };
    Probed {
        found: Some(found),
        detail,
    }
}

/// Probes in a process of its own; why not, if nothing came of it.
pub(super) fn apart(probe: Probe) -> Result<Results, String> {
    let name = probe.name();
    let failed = |reason: String| format!("the probe '{name}' {reason}");
    let mut child = Command::new("/proc/self/exe")
        .args(["doctor", "--probe", name])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed(format!("can't be started: {error}")))?;
    let deadline = Instant::now() + TIME_MAX;
    // Its answer is smaller than a pipe's buffer: it never waits for us to read.
    while child.try_wait().is_ok_and(|ended| ended.is_none()) {
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return Err(failed(format!(
                "hung and was ended after {} s",
                TIME_MAX.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut text = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        let _ = stdout.read_to_string(&mut text);
    }
    serde_json::from_str(&text).map_err(|_| failed("ended without an answer".to_owned()))
}
