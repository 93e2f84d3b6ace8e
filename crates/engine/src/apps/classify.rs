//! Parts packets by rules over their headers.

use crate::app::{App, BuildError, Config, Figure, PortList};
use crate::classify::{Match, parse};
use crate::ports::Ports;
use crate::time::Time;

/// From `input` to the output of the first rule that matches; what no rule matches goes to `rest`.
///
/// An output without a link drops what comes to it, counted as sent nowhere, so this is a filter too: link the output
/// of what shall pass. Reports `matched` and `rest`. Fragments without ports match only rules without ports.
///
/// ```
/// # use sandwire_engine::{Graph, apps::Classify, classify::{self, Match}};
/// let dns = Match { protocol: Some(classify::UDP), destination_ports: Some(53..=53), ..Match::default() };
/// # let mut graph = Graph::new();
/// graph.app("by_port", Classify::new().rule("dns", dns))?;
/// # Ok::<(), sandwire_engine::GraphError>(())
/// ```
///
/// Several rules may share an output, `rest` too. Rules may change while it runs; counts go on if the outputs stay the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Classify {
    rules: Vec<(String, Match)>,
}

/// The running [`Classify`].
#[derive(Debug)]
pub struct ClassifyApp {
    rules: Vec<Match>,
    matched: u64,
    rest: u64,
}

impl Classify {
    /// Without a rule: all goes to `rest`.
    #[must_use]
    pub fn new() -> Self {
        Self { rules: Vec::new() }
    }

    /// The same with one more rule, asked after those before it, whose packets go to the output of that name.
    #[must_use]
    pub fn rule(mut self, output: &str, rule: Match) -> Self {
        self.rules.push((output.to_owned(), rule));
        self
    }

    fn matches(&self) -> Vec<Match> {
        self.rules.iter().map(|(_, rule)| rule.clone()).collect()
    }
}

impl Default for Classify {
    fn default() -> Self {
        Self::new()
    }
}

impl Config for Classify {
    type App = ClassifyApp;

    fn inputs(&self) -> PortList {
        PortList::named(["input"])
    }

    fn outputs(&self) -> PortList {
        let names = self.rules.iter().map(|(name, _)| name.clone());
        PortList::Named(names.chain(["rest".to_owned()]).collect())
    }

    fn build(&self) -> Result<ClassifyApp, BuildError> {
        for (_, rule) in &self.rules {
            rule.check()?;
        }
        Ok(ClassifyApp {
            rules: self.matches(),
            matched: 0,
            rest: 0,
        })
    }

    fn keeps_state_of(&self, running: &Self) -> bool {
        self.outputs() == running.outputs()
            && self.rules.iter().all(|(_, rule)| rule.check().is_ok())
    }

    fn apply(&self, app: &mut ClassifyApp) {
        app.rules = self.matches();
    }
}

impl App for ClassifyApp {
    fn push(&mut self, _now: Time, ports: &mut Ports<'_>) {
        while let Some(packet) = ports.receive(0) {
            let headers = parse(packet.bytes());
            let first = self.rules.iter().position(|rule| rule.matches(&headers));
            match first {
                Some(_) => self.matched += 1,
                None => self.rest += 1,
            }
            ports.transmit(first.unwrap_or(self.rules.len()), packet);
        }
    }

    fn report(&self) -> Vec<Figure> {
        vec![
            Figure::new("matched", self.matched),
            Figure::new("rest", self.rest),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apps::{Sink, Source};
    use crate::{Engine, Graph, Runner};

    /// An IPv4 datagram to that port.
    fn datagram(port: u8) -> Vec<u8> {
        let mut frame = vec![0; 60];
        frame[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
        frame[16..18].copy_from_slice(&[0, 46]);
        frame[23] = crate::classify::UDP;
        frame[37] = port;
        frame
    }

    fn to_port(port: u16) -> Match {
        Match {
            destination_ports: Some(port..=port),
            ..Match::default()
        }
    }

    fn graph(classify: Classify) -> Graph {
        let frames = vec![datagram(53), datagram(54), datagram(55), vec![0; 60]];
        let mut graph = Graph::new();
        graph.app("source", Source::of(frames).limit(400)).unwrap();
        graph.app("classify", classify).unwrap();
        for sink in ["dns", "rest"] {
            graph.app(sink, Sink).unwrap();
        }
        graph
            .links("source.output -> classify.input \n classify.dns -> dns.input \n classify.rest -> rest.input")
            .unwrap();
        graph
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let classify = Classify::new()
            .rule("dns", to_port(53))
            .rule("dns", to_port(54))
            .rule("rest", to_port(54))
            .rule("unlinked", to_port(55));
        let mut engine = Engine::new();
        engine.configure(&graph(classify)).unwrap();
        Runner::new().run_until(&mut engine, |_| false);
        assert_eq!(engine.figure("dns", "packets"), Some(200));
        assert_eq!(engine.figure("rest", "packets"), Some(100));
        assert_eq!(engine.figure("classify", "matched"), Some(300));
        let reports = engine.report_apps();
        let report = reports.iter().find(|report| report.app == "classify");
        assert_eq!(report.unwrap().sent_nowhere, 100);
    }

    #[test]
    fn rules_change_while_counts_go_on() {
        let mut engine = Engine::new();
        engine
            .configure(&graph(Classify::new().rule("dns", to_port(53))))
            .unwrap();
        Runner::new().run_until(&mut engine, |_| false);
        let changed = graph(Classify::new().rule("dns", to_port(54)));
        assert_eq!(engine.configure(&changed).unwrap().changed, ["classify"]);
        assert_eq!(engine.figure("classify", "matched"), Some(100));
        let never = to_port(1).reversed();
        let never = Match {
            protocol: Some(crate::classify::ICMP),
            ..never
        };
        let refused = engine.configure(&graph(Classify::new().rule("dns", never)));
        assert!(refused.is_err());
        assert_eq!(engine.figure("classify", "matched"), Some(100));
    }
}
