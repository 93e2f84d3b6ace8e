//! What can be wrong with a graph, an app or a pool.

#![forbid(unsafe_code)]

use thiserror::Error;

use crate::app::BuildError;

/// A pool that can't be.
#[derive(Debug, Error)]
pub enum PoolError {
    /// The longest frame is too short or too long.
    #[error("make a pool: frames of up to {asked} bytes; {min} to {max} are possible")]
    FrameBytes {
        /// What was asked for.
        asked: u16,
        /// The least.
        min: u16,
        /// The most.
        max: u16,
    },
}

/// What is wrong with one statement about a graph.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum GraphError {
    /// Not a name.
    #[error("name {name:?}: use letters, digits, '-' and '_', at least one")]
    Name {
        /// What was given.
        name: String,
    },
    /// Two apps by one name.
    #[error("add app {name}: the graph has an app of that name; choose another name")]
    AppTwice {
        /// The name.
        name: String,
    },
    /// Not a link.
    #[error("link {line:?}: write it as `app.port -> app.port`")]
    LinkSyntax {
        /// What was given.
        line: String,
    },
    /// A link of many lines was wrong.
    #[error("line {number}")]
    Line {
        /// Which, from 1.
        number: usize,
        /// What is wrong with it.
        source: Box<GraphError>,
    },
}

/// Why an engine did not take a graph. It goes on with the one it has.
#[derive(Debug, Error)]
pub enum ConfigureError {
    /// A link names an app that isn't there.
    #[error("configure: link {link}: there is no app {app}; add it, or correct the name")]
    UnknownApp {
        /// The link.
        link: String,
        /// The name.
        app: String,
    },
    /// A link names a port that its app doesn't have.
    #[error("configure: link {link}: app {app} has no {direction} port {port}; it has {known}")]
    UnknownPort {
        /// The link.
        link: String,
        /// The app.
        app: String,
        /// "input" or "output".
        direction: &'static str,
        /// The port that it hasn't.
        port: String,
        /// Those that it has.
        known: String,
    },
    /// Two links lead to one port, or from one.
    #[error(
        "configure: links {first} and {second} share port {port}; join or tee them with an app"
    )]
    PortTwice {
        /// One of them.
        first: String,
        /// The other.
        second: String,
        /// The port.
        port: String,
    },
    /// A link from an app to itself.
    #[error("configure: link {link} leads from an app to itself; put another app between")]
    SelfLink {
        /// The link.
        link: String,
    },
    /// An app did not start.
    #[error("configure: start app {app}")]
    Build {
        /// The app.
        app: String,
        /// What it says.
        source: BuildError,
    },
}
