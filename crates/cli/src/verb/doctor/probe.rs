//! Runs probes in a process of their own, with a time limit.

use std::{
    collections::BTreeMap,
    io::Read,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sandwire_kernel_net::probe::kvm::{self, Kvm};
use serde::{Deserialize, Serialize};

use super::{Probe, datapath, features};

/// How long a probe may take. The slowest one reads the kernel's types and has a dozen programs verified: 1.4 s on a common
/// machine, 15 s on an emulated one.
const TIME_MAX: Duration = Duration::from_secs(180);

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
        Ok(Kvm::Runs) => (true, "a virtual processor ran code".to_owned()),
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
    let mut command = Command::new("/proc/self/exe");
    command.args(["doctor", "--probe", name]);
    let text = output_within(&mut command, TIME_MAX).map_err(failed)?;
    serde_json::from_str(&text).map_err(|_| failed("ended without an answer".to_owned()))
}

/// What a command prints, if it ends in time.
fn output_within(command: &mut Command, time_max: Duration) -> Result<String, String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("can't be started: {error}"))?;
    // A verifier's words are more than a pipe holds: it would wait for us, and we for it.
    let reader = child.stdout.take().map(|mut stdout| {
        thread::spawn(move || {
            let mut text = String::new();
            let _ = stdout.read_to_string(&mut text);
            text
        })
    });
    let deadline = Instant::now() + time_max;
    while child.try_wait().is_ok_and(|ended| ended.is_none()) {
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            let seconds = time_max.as_secs();
            return Err(format!("hung and was ended after {seconds} s"));
        }
        thread::sleep(Duration::from_millis(5));
    }
    let text = reader.and_then(|reader| reader.join().ok());
    Ok(text.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_longer_than_a_pipe_is_read_and_a_probe_that_hangs_is_ended() {
        let shell = |line: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", line]);
            output_within(&mut command, Duration::from_secs(2))
        };
        let text = shell("head -c 300000 /dev/zero | tr '\\0' x").unwrap();
        assert_eq!(text.len(), 300_000);
        let reason = shell("exec sleep 60").unwrap_err();
        assert_eq!(reason, "hung and was ended after 2 s");
    }
}
