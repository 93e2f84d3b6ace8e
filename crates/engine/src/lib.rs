//! A packet engine for user space: apps that do something to packets, links between them, and a breath that moves
//! packets through the graph.
//!
//! ```
//! use std::time::Duration;
//! use sandwire_engine::apps::{Filter, Sink, Source};
//! use sandwire_engine::{Engine, Graph, Runner};
//!
//! let mut graph = Graph::new();
//! graph.app("source", Source::sizes(&[60, 61]).limit(1000))?;
//! graph.app("even", Filter::new(|packet| packet.length() % 2 == 0))?;
//! graph.app("sink", Sink)?;
//! graph.links("source.output -> even.input \n even.output -> sink.input")?;
//!
//! let mut engine = Engine::new();
//! engine.configure(&graph)?;
//! let load = Runner::new().run_until(&mut engine, |_| false);
//! println!("{load}\n{}", engine.report_links());
//! assert_eq!(engine.figure("sink", "packets"), Some(500));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! An engine is one thread's. It has no globals, so there may be many in a process ([`interlink`] hands packets from
//! one to another), and no locks. The core does no I/O ([`io`] does) and reads no clock ([`run`] alone does), so tests
//! run it in a time of their own. Nor has it any `unsafe`, which each of its modules forbids.

#![deny(unsafe_code)]

mod app;
pub mod apps;
mod awake;
pub mod classify;
mod engine;
mod error;
mod graph;
pub mod interlink;
pub mod io;
mod link;
mod order;
mod packet;
mod pool;
mod ports;
mod report;
pub mod rewrite;
pub mod run;
mod time;
mod watch;

pub use app::{App, BuildError, Config, Figure, PortList, Wake};
pub use engine::{Breath, Changes, Engine};
pub use error::{ConfigureError, GraphError, PoolError};
pub use graph::{Graph, LinkName, PortName};
pub use link::{Copied, LINK_PACKETS_MAX, LinkCounters};
pub use packet::{HEADROOM, Packet};
pub use pool::{Pool, PoolCounters, PoolLimits};
pub use ports::{BATCH_PACKETS, Ports};
pub use report::{AppReport, LinkReport, Links, Load};
pub use run::{Clock, Runner};
pub use time::Time;
pub use watch::{Readiness, Watch};
