//! A graph: which apps there are, and which links between their ports.
//!
//! It is a description without effect until an engine is configured with it. Names are checked as they are
//! given, whether they fit together when it is configured, so the order of statements is free.
//!
//! A graph may have circles of apps, as a forwarder between two interfaces has. A breath calls each app once, so a
//! packet in a circle goes on in the next breath, and the links bound how many there are.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;
use std::str::FromStr;

use crate::app::{Config, SharedConfig};
use crate::error::GraphError;

/// A description of apps and links.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    pub(crate) apps: BTreeMap<String, SharedConfig>,
    pub(crate) links: BTreeSet<LinkName>,
}

impl Graph {
    /// Nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an app.
    ///
    /// # Errors
    ///
    /// If the name is taken or isn't one.
    pub fn app(&mut self, name: &str, config: impl Config) -> Result<&mut Self, GraphError> {
        check_name(name)?;
        if self.apps.contains_key(name) {
            return Err(GraphError::AppTwice {
                name: name.to_owned(),
            });
        }
        self.apps.insert(name.to_owned(), Rc::new(config));
        Ok(self)
    }

    /// Adds an app, in place of the one of that name if there is one.
    ///
    /// # Errors
    ///
    /// If the name isn't one.
    pub fn replace(&mut self, name: &str, config: impl Config) -> Result<&mut Self, GraphError> {
        check_name(name)?;
        self.apps.insert(name.to_owned(), Rc::new(config));
        Ok(self)
    }

    /// Takes an app out, and all links of it. Without effect if there is none of that name.
    pub fn remove(&mut self, name: &str) -> &mut Self {
        self.apps.remove(name);
        self.links
            .retain(|link| link.from.app != name && link.to.app != name);
        self
    }

    /// Adds a link, written as `if1.output -> loss.input`. The same link twice is one.
    ///
    /// # Errors
    ///
    /// If it isn't written so.
    pub fn link(&mut self, line: &str) -> Result<&mut Self, GraphError> {
        self.links.insert(line.parse()?);
        Ok(self)
    }

    /// Adds a link from an app's output to an app's input.
    ///
    /// # Errors
    ///
    /// If one of the names isn't one.
    pub fn connect(
        &mut self,
        from: (&str, &str),
        to: (&str, &str),
    ) -> Result<&mut Self, GraphError> {
        self.link(&format!("{}.{} -> {}.{}", from.0, from.1, to.0, to.1))
    }

    /// Adds links, one a line; empty lines and what follows a `#` are skipped.
    ///
    /// # Errors
    ///
    /// The first wrong line, by number; none is added then.
    pub fn links(&mut self, lines: &str) -> Result<&mut Self, GraphError> {
        let mut new = Vec::new();
        for (index, line) in lines.lines().enumerate() {
            let line = line.split_once('#').map_or(line, |(link, _)| link);
            if !line.trim().is_empty() {
                let link = line.parse().map_err(|source| GraphError::Line {
                    number: index + 1,
                    source: Box::new(source),
                })?;
                new.push(link);
            }
        }
        self.links.extend(new);
        Ok(self)
    }

    /// Takes a link out. Without effect if there is none.
    ///
    /// # Errors
    ///
    /// If it isn't written as a link.
    pub fn unlink(&mut self, line: &str) -> Result<&mut Self, GraphError> {
        let link: LinkName = line.parse()?;
        self.links.remove(&link);
        Ok(self)
    }
}

/// A link by its two ports.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkName {
    /// The output that packets come from.
    pub from: PortName,
    /// The input that they go to.
    pub to: PortName,
}

impl fmt::Display for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.from, self.to)
    }
}

impl FromStr for LinkName {
    type Err = GraphError;

    fn from_str(line: &str) -> Result<Self, GraphError> {
        let parsed = line.split_once("->").and_then(|(from, to)| {
            let from = PortName::parse(from.trim())?;
            let to = PortName::parse(to.trim())?;
            Some(Self { from, to })
        });
        parsed.ok_or_else(|| GraphError::LinkSyntax {
            line: line.trim().to_owned(),
        })
    }
}

/// A port of an app.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortName {
    /// The app.
    pub app: String,
    /// Its port.
    pub port: String,
}

impl PortName {
    fn parse(text: &str) -> Option<Self> {
        let (app, port) = text.split_once('.')?;
        check_name(app).ok()?;
        check_name(port).ok()?;
        Some(Self {
            app: app.to_owned(),
            port: port.to_owned(),
        })
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.app, self.port)
    }
}

fn check_name(name: &str) -> Result<(), GraphError> {
    let valid = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if !name.is_empty() && name.chars().all(valid) {
        return Ok(());
    }
    Err(GraphError::Name {
        name: name.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apps::Pass;

    #[test]
    fn links_are_read_with_or_without_spaces() {
        let link: LinkName = "if1.output->loss-1.input ".parse().unwrap();
        assert_eq!(link.to_string(), "if1.output -> loss-1.input");
        for wrong in [
            "",
            "a -> b",
            "a.x",
            "a.x -> b",
            "a.x -> b.y.z",
            ".x -> b.y",
            "a.x -> b.y -> c.z",
            "a b.x -> c.y",
        ] {
            let parsed = wrong.parse::<LinkName>();
            assert!(
                matches!(parsed, Err(GraphError::LinkSyntax { .. })),
                "{wrong}"
            );
        }
    }

    #[test]
    fn a_wrong_line_is_named_and_adds_nothing() {
        let mut graph = Graph::new();
        let error = graph.links("# two\na.x -> b.y\n\nb.y => c.z").unwrap_err();
        assert!(matches!(error, GraphError::Line { number: 4, .. }));
        assert!(graph.links.is_empty());
        graph.links("a.x -> b.y # first\n\na.x -> b.y").unwrap();
        assert_eq!(graph.links.len(), 1);
    }

    #[test]
    fn a_link_is_there_once_until_it_or_its_app_is_taken_out() {
        let mut graph = Graph::new();
        let lines = |graph: &Graph| -> Vec<String> {
            let links = graph.links.iter();
            links.map(ToString::to_string).collect()
        };
        let [first, second, third] = ["a.x -> b.y", "b.x -> c.y", "c.x -> d.y"];
        for line in [second, first, second, third, first] {
            graph.link(line).unwrap();
        }
        assert_eq!(lines(&graph), [first, second, third]);
        graph.unlink(first).unwrap().unlink("z.x -> z.y").unwrap();
        assert_eq!(lines(&graph), [second, third]);
        graph.remove("b");
        assert_eq!(lines(&graph), [third]);
        graph.links(&[third, second].join("\n")).unwrap();
        assert_eq!(lines(&graph), [second, third]);
    }

    #[test]
    fn names_are_taken_once() {
        let mut graph = Graph::new();
        graph.app("a", Pass).unwrap();
        assert!(graph.app("a", Pass).is_err());
        assert!(graph.app("a.b", Pass).is_err());
        assert!(graph.app("", Pass).is_err());
        assert!(graph.replace("a", Pass).is_ok());
        graph.link("a.output -> b.input").unwrap();
        graph.remove("a");
        assert!(graph.links.is_empty());
    }
}
