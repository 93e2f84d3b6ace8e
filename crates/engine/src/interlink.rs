//! An interlink: packets from an engine in one thread to an engine in another.
//!
//! Packets belong to the pool of their engine and stay in its thread, so what crosses is their buffers, in batches
//! ([`ring`]). The receiving side puts each buffer into a packet of its own pool, and sends the buffer that was
//! there before back: each pool has as many buffers as before, nothing is copied, and after the first packets
//! nothing is allocated. (If the pools' buffers differ in size the frame is copied and its buffer goes back.)
//!
//! A full interlink is back-pressure: packets stay on the link to [`Transmitter`], and that link counts what it has
//! no room for. Either side notices when the other is gone.
//!
//! ```
//! use std::thread;
//! use sandwire_engine::apps::{Sink, Source};
//! use sandwire_engine::interlink::interlink;
//! use sandwire_engine::{Engine, Graph, Runner};
//!
//! let (transmitter, receiver) = interlink();
//! let receiving = thread::spawn(move || {
//!     let mut graph = Graph::new();
//!     graph.app("from_there", receiver).unwrap().app("sink", Sink).unwrap();
//!     graph.link("from_there.output -> sink.input").unwrap();
//!     let mut engine = Engine::new();
//!     engine.configure(&graph).unwrap();
//!     Runner::new().run_until(&mut engine, |_| false);
//!     engine.figure("sink", "packets")
//! });
//! let mut graph = Graph::new();
//! graph.app("source", Source::sizes(&[60]).limit(5000))?.app("to_there", transmitter)?;
//! graph.link("source.output -> to_there.input")?;
//! let mut engine = Engine::new();
//! engine.configure(&graph)?;
//! Runner::new().run_until(&mut engine, |engine| engine.figure("to_there", "packets") == Some(5000));
//! drop((engine, graph));
//! assert_eq!(receiving.join().unwrap(), Some(5000));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod receiver;
mod ring;
mod transmitter;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;

pub use receiver::{Receiver, ReceiverApp};
pub use transmitter::{Transmitter, TransmitterApp};

use receiver::ReceivingEnd;
use ring::ring;
use transmitter::TransmittingEnd;

/// Batches that are under way at most; each has up to [`BATCH_PACKETS_MAX`] packets.
const BATCHES_MAX: usize = 8;

/// Packets of a batch, at most. A batch is what an app finds on its input, often far less.
const BATCH_PACKETS_MAX: usize = 256;

/// What the ring is made of; its test puts other things in their place.
mod sync {
    pub(super) use std::sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    };
}

/// Both ends of a new interlink, each to be added to a graph in its own thread. It holds up to 2048 packets.
#[must_use]
pub fn interlink() -> (Transmitter, Receiver) {
    let (packets, parcels) = ring(BATCHES_MAX);
    let (empties, returns) = ring(BATCHES_MAX);
    (
        Transmitter(Home::of(TransmittingEnd::new(packets, returns))),
        Receiver(Home::of(ReceivingEnd::new(parcels, empties))),
    )
}

/// A packet on its way to another engine.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) bytes: Box<[u8]>,
    pub(crate) start: u16,
    pub(crate) length: u16,
    pub(crate) mark: u32,
}

/// A buffer on its way back.
#[derive(Debug)]
pub(crate) struct Return {
    pub(crate) bytes: Box<[u8]>,
    /// Of the frame that it was sent for.
    pub(crate) length: u16,
}

/// An end of an interlink that could not be built.
#[derive(Debug, Error)]
enum InterlinkError {
    /// An app has it already.
    #[error("this end of the interlink is in use by another app; make an interlink for each pair")]
    InUse,
}

/// Where an end waits for the app that is built of it: descriptions are shared, an end is not. The app takes it when
/// it first runs, so an app that was built in vain takes nothing with it.
struct Home<E>(Arc<Mutex<Option<E>>>);

impl<E> Home<E> {
    fn of(end: E) -> Self {
        Self(Arc::new(Mutex::new(Some(end))))
    }

    fn share(&self) -> Result<Self, InterlinkError> {
        let is_here = self.lock().is_some();
        is_here
            .then(|| Self(Arc::clone(&self.0)))
            .ok_or(InterlinkError::InUse)
    }

    fn take(&self) -> Option<E> {
        self.lock().take()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<E>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<E> PartialEq for Home<E> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<E> fmt::Debug for Home<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("end of an interlink")
    }
}

#[cfg(test)]
mod tests;
