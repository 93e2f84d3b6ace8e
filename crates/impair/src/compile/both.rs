//! An impairment compiled for both directions, which may go to another thread.
//!
//! Reading a trace takes long: a megabyte of it some milliseconds, in which an engine's thread would carry no packet. So each
//! is read once, for both directions and for what comes after it with the same trace, by whoever is not in a hurry.

use sandwire_api::impairment::Impairment;

use super::{CompileError, CompiledRule, compile_resolved};
use crate::{
    random::Direction,
    trace::{Trace, TraceError},
};

/// What happens to packets both ways.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    pub(crate) seed: u64,
    egress: Vec<CompiledRule>,
    ingress: Vec<CompiledRule>,
    /// In the order of the impairment's rules that have one.
    traces: Vec<Option<Trace>>,
}

impl Compiled {
    /// Compiles it.
    ///
    /// # Errors
    /// Says which rule and field is wrong, and how.
    pub fn new(impairment: &Impairment) -> Result<Self, CompileError> {
        Self::from_traces(impairment, Traces::default())
    }

    /// The same, after another one; the traces that this has, too, aren't read again.
    ///
    /// # Errors
    /// As [`Compiled::new`].
    pub fn after(
        impairment: &Impairment,
        before: &Impairment,
        compiled: &Self,
    ) -> Result<Self, CompileError> {
        let known = contents(before).zip(&compiled.traces);
        let known = known.filter_map(|(content, trace)| Some((content, trace.clone()?)));
        Self::from_traces(impairment, Traces(known.collect()))
    }

    fn from_traces(impairment: &Impairment, known: Traces<'_>) -> Result<Self, CompileError> {
        let resolved = impairment.resolved()?;
        // Of no longer life than what is compiled.
        let mut traces = known;
        let mut rules = |direction| compile_resolved(&resolved, direction, &mut traces);
        let (egress, ingress) = (rules(Direction::Egress)?, rules(Direction::Ingress)?);
        let own = contents(impairment).map(|content| traces.find(content));
        Ok(Self {
            seed: impairment.seed,
            egress,
            ingress,
            traces: own.collect(),
        })
    }

    /// The rules for one direction, in their order.
    pub(crate) fn rules(&self, direction: Direction) -> &[CompiledRule] {
        match direction {
            Direction::Egress => &self.egress,
            Direction::Ingress => &self.ingress,
        }
    }
}

fn contents(impairment: &Impairment) -> impl Iterator<Item = &str> {
    let traces = impairment.rules.iter().flat_map(|rule| &rule.trace);
    traces.map(|trace| trace.content.as_deref().unwrap_or_default())
}

/// Traces that have been read, by what is in their files.
#[derive(Debug, Default)]
pub(super) struct Traces<'a>(Vec<(&'a str, Trace)>);

impl<'a> Traces<'a> {
    /// The one with that content, which is read if it wasn't yet.
    pub(super) fn read(&mut self, content: &'a str) -> Result<Trace, TraceError> {
        if let Some(found) = self.find(content) {
            return Ok(found);
        }
        let read = Trace::parse(content)?;
        self.0.push((content, read.clone()));
        Ok(read)
    }

    fn find(&self, content: &str) -> Option<Trace> {
        let mut all = self.0.iter();
        let found = all.find(|(text, _)| *text == content);
        found.map(|(_, trace)| trace.clone())
    }
}
