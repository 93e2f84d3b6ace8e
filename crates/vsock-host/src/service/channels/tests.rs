#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{fs, mem};

use super::*;
use crate::worker::WorkerHandle;

fn start(memory: &Path) -> Channels {
    let waker = || Arc::new(Waker::new().unwrap());
    let captures = Captures::spawn(waker()).unwrap();
    let (state, settings) = (State::new(memory.to_owned()), WorkerSettings::default());
    Channels::start(1, 1 << 20, &settings, state, captures, &waker()).unwrap()
}

fn spec(folder: &Path) -> VmSpec {
    let text = format!(
        r#"{{"key": {{"tenant": 1000, "lease": "a"}}, "folder": "{}"}}"#,
        folder.display()
    );
    serde_json::from_str(&text).unwrap()
}

/// Else nobody would know of it any more, nor could have it served again.
#[test]
fn a_guest_that_a_worker_takes_too_late_is_served_no_more_and_can_be_again() {
    let root = tempfile::tempdir().unwrap();
    let [memory, folder] = ["memory", "web.1"].map(|name| root.path().join(name));
    fs::create_dir(&memory).unwrap();
    fs::create_dir(&folder).unwrap();
    let mut channels = start(&memory);
    let spec = spec(&folder);
    // Until it goes on nobody takes what it is told.
    let held = WorkerHandle::new().unwrap();
    let worker = mem::replace(&mut channels.workers[0].handle, held.clone());
    channels.patience = Duration::ZERO;
    let late = channels.add(spec.clone()).unwrap_err();
    assert!(matches!(late, ChannelError::Silent), "{late}");
    assert!(channels.list().is_empty());
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "no socket stays");
    for command in held.take() {
        worker.send(command);
    }
    channels.workers[0].handle = worker;
    channels.patience = 6 * PATIENCE;
    channels.add(spec.clone()).unwrap();
    assert_eq!(channels.list().len(), 1);
    channels.remove(&spec.key).unwrap();
    channels.end();
}
