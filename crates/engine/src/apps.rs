//! Apps that need nothing but packets. Those that talk to the outside come beside them, a file each.

#![forbid(unsafe_code)]

mod classify;
mod filter;
mod join;
mod pass;
mod sink;
mod source;
mod tee;

pub use classify::{Classify, ClassifyApp};
pub use filter::{Filter, FilterApp};
pub use join::{Join, JoinApp};
pub use pass::{Pass, PassApp};
pub use sink::{Sink, SinkApp};
pub use source::{Source, SourceApp, SourceError};
pub use tee::{Tee, TeeApp};
