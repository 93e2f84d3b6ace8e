//! Placeholder until the device's branch is merged.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        mpsc::{Sender, SyncSender},
    },
};

use sandwire_api::vsock::{VsockConnection, VsockType};

use crate::{address::VmKey, capture::Sink};

/// By which a worker is told things.
#[derive(Clone, Debug)]
pub struct WorkerHandle(pub Sender<Command>);

impl WorkerHandle {
    /// Tells it.
    pub fn send(&self, command: Command) {
        let _ = self.0.send(command);
    }
}

/// What a worker is told.
#[derive(Debug)]
pub enum Command {
    /// A connection from a sibling.
    Connect {
        vm: VmKey,
        port: u32,
        socket: OwnedFd,
        kind: VsockType,
        peer: String,
    },
    /// Look again.
    PolicyChanged(VmKey),
    /// Capture, or no more.
    SetCapture(VmKey, Option<Arc<Sink>>),
    /// All connections.
    List(SyncSender<Vec<VsockConnection>>),
    /// End.
    Stop,
}
