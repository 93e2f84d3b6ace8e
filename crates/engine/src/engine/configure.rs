//! From the graph that runs to another: check all, build what is new, and only then change anything.

use std::collections::BTreeMap;
use std::mem;

use super::parts::{Part, Parts, parts_of};
use super::{Changes, Engine, Node};
use crate::app::{App, PortList, Relation, SharedConfig};
use crate::error::ConfigureError;
use crate::graph::{Graph, LinkName, PortName};
use crate::link::Link;
use crate::order::order;
use crate::ports::NO_LINK;

pub(super) fn configure(engine: &mut Engine, graph: &Graph) -> Result<Changes, ConfigureError> {
    let plan = Plan::of(graph)?;
    let fates = decide(engine, graph)?;
    let mut changes = Changes::default();
    replace_links(engine, plan.links, &mut changes);
    replace_apps(engine, fates, &plan.ports, &mut changes);
    divide(engine, &plan.order, &plan.parts);
    Ok(changes)
}

/// Orders the calls of apps by part, and wakes them all.
fn divide(engine: &mut Engine, order: &[usize], part_of: &[usize]) {
    let mut pulls: Vec<usize> = (0..engine.apps.len()).collect();
    let mut pushes: Vec<usize> = order.to_vec();
    pushes.retain(|&app| !engine.apps[app].inputs.is_empty());
    // Both sorts keep the order within a part.
    pulls.sort_by_key(|&app| part_of[app]);
    pushes.sort_by_key(|&app| part_of[app]);
    let range = |order: &[usize], part: usize| {
        let start = order.partition_point(|&app| part_of[app] < part);
        start..order.partition_point(|&app| part_of[app] <= part)
    };
    let count = part_of.iter().max().map_or(0, |last| last + 1);
    let parts = (0..count).map(|part| Part::new(range(&pulls, part), range(&pushes, part)));
    engine.parts = Parts::new(parts.collect());
    engine.pull_order = pulls.into_iter().map(index_of).collect();
    engine.push_order = pushes.into_iter().map(index_of).collect();
    for (node, &part) in engine.apps.iter_mut().zip(part_of) {
        node.part = part;
        if let Some(watch) = node.app.watch() {
            watch.readiness.belongs_to(engine.parts.awake(), part);
        }
    }
}

/// A graph that fits together, in indices.
struct Plan {
    /// By name, so that reports and indices don't depend on the order of statements.
    links: Vec<LinkName>,
    /// Input and output ports of each app: indices of links.
    ports: Vec<(Vec<u32>, Vec<u32>)>,
    /// Indices of apps, each after those that feed it.
    order: Vec<usize>,
    /// The part that each app is in.
    parts: Vec<usize>,
}

impl Plan {
    fn of(graph: &Graph) -> Result<Self, ConfigureError> {
        check_ends(graph)?;
        check_shared_ports(graph)?;
        let links: Vec<LinkName> = graph.links.iter().cloned().collect();
        let from = ends_of(&links, |link| &link.from);
        let to = ends_of(&links, |link| &link.to);
        let ports: Vec<_> = graph
            .apps
            .iter()
            .map(|(name, config)| {
                let inputs = ports_of(&config.inputs(), name, &to);
                let outputs = ports_of(&config.outputs(), name, &from);
                (inputs, outputs)
            })
            .collect();
        let place: BTreeMap<&str, usize> = graph.apps.keys().map(String::as_str).zip(0..).collect();
        let connected =
            |link: &LinkName| (place[link.from.app.as_str()], place[link.to.app.as_str()]);
        let connections: Vec<_> = links.iter().map(connected).collect();
        let dependencies: Vec<_> = links
            .iter()
            .filter(|link| !graph.apps[&link.from.app].is_edge())
            .map(connected)
            .collect();
        Ok(Self {
            ports,
            order: order(graph.apps.len(), &dependencies),
            parts: parts_of(graph.apps.len(), &connections),
            links,
        })
    }
}

/// Every link leads from an output that there is to an input that there is.
fn check_ends(graph: &Graph) -> Result<(), ConfigureError> {
    for link in &graph.links {
        let from = app_of(graph, link, &link.from)?;
        check_port(link, &link.from, "output", &from.outputs())?;
        let to = app_of(graph, link, &link.to)?;
        check_port(link, &link.to, "input", &to.inputs())?;
        if link.from.app == link.to.app {
            let link = link.to_string();
            return Err(ConfigureError::SelfLink { link });
        }
    }
    Ok(())
}

fn app_of<'a>(
    graph: &'a Graph,
    link: &LinkName,
    end: &PortName,
) -> Result<&'a SharedConfig, ConfigureError> {
    let app = graph.apps.get(&end.app);
    app.ok_or_else(|| ConfigureError::UnknownApp {
        link: link.to_string(),
        app: end.app.clone(),
    })
}

fn check_port(
    link: &LinkName,
    end: &PortName,
    direction: &'static str,
    ports: &PortList,
) -> Result<(), ConfigureError> {
    let PortList::Named(names) = ports else {
        return Ok(());
    };
    if names.contains(&end.port) {
        return Ok(());
    }
    let known = if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    };
    Err(ConfigureError::UnknownPort {
        link: link.to_string(),
        app: end.app.clone(),
        direction,
        port: end.port.clone(),
        known,
    })
}

/// No port has two links.
fn check_shared_ports(graph: &Graph) -> Result<(), ConfigureError> {
    let mut taken: BTreeMap<(bool, &PortName), &LinkName> = BTreeMap::new();
    for link in &graph.links {
        for (port, is_input) in [(&link.from, false), (&link.to, true)] {
            if let Some(first) = taken.insert((is_input, port), link) {
                return Err(ConfigureError::PortTwice {
                    first: first.to_string(),
                    second: link.to_string(),
                    port: port.to_string(),
                });
            }
        }
    }
    Ok(())
}

/// The ports that links lead from, or to, with the links' indices, by app and sorted by port.
type Ends<'a> = BTreeMap<&'a str, Vec<(&'a str, u32)>>;

fn ends_of(links: &[LinkName], end: fn(&LinkName) -> &PortName) -> Ends<'_> {
    let mut ends = Ends::new();
    for (link, index) in links.iter().zip(0..) {
        let PortName { app, port } = end(link);
        ends.entry(app).or_default().push((port, index));
    }
    ends.values_mut().for_each(|ports| ports.sort_unstable());
    ends
}

/// For each of an app's ports on one side the index of its link.
fn ports_of(ports: &PortList, app: &str, ends: &Ends<'_>) -> Vec<u32> {
    let linked = ends.get(app).map_or(&[][..], Vec::as_slice);
    match ports {
        PortList::Any => linked.iter().map(|&(_, index)| index).collect(),
        PortList::Named(names) => {
            let link_of = |name: &String| linked.iter().find(|(port, _)| port == name);
            let indices = names.iter().map(link_of);
            indices
                .map(|found| found.map_or(NO_LINK, |&(_, index)| index))
                .collect()
        }
    }
}

/// What becomes of each app of the new graph.
enum Fate {
    Keeps,
    Applies(SharedConfig),
    Starts(SharedConfig, Box<dyn App>),
}

/// Decides, and builds what is to be built: the last step that may fail.
fn decide(engine: &Engine, graph: &Graph) -> Result<Vec<(String, Fate)>, ConfigureError> {
    let running: BTreeMap<&str, &Node> = engine
        .apps
        .iter()
        .map(|node| (node.name.as_str(), node))
        .collect();
    let mut fates = Vec::with_capacity(graph.apps.len());
    for (name, config) in &graph.apps {
        let relation = running
            .get(name.as_str())
            .map_or(Relation::Different, |node| config.relation(&*node.config));
        let fate = match relation {
            Relation::Same => Fate::Keeps,
            Relation::Applicable => Fate::Applies(SharedConfig::clone(config)),
            Relation::Different => {
                let app = config.build(engine.pool.limits());
                let app = app.map_err(|source| ConfigureError::Build {
                    app: name.clone(),
                    source,
                })?;
                Fate::Starts(SharedConfig::clone(config), app)
            }
        };
        fates.push((name.clone(), fate));
    }
    Ok(fates)
}

fn replace_links(engine: &mut Engine, names: Vec<LinkName>, changes: &mut Changes) {
    let old_names = mem::take(&mut engine.link_names);
    let old_links = mem::take(&mut engine.links);
    let mut old: BTreeMap<LinkName, Link> = old_names.into_iter().zip(old_links).collect();
    engine.links = names
        .iter()
        .map(|name| old.remove(name).unwrap_or_default())
        .collect();
    engine.link_names = names;
    for link in old.values_mut() {
        changes.flushed += link.discard(&engine.pool).0;
    }
}

fn replace_apps(
    engine: &mut Engine,
    fates: Vec<(String, Fate)>,
    ports: &[(Vec<u32>, Vec<u32>)],
    changes: &mut Changes,
) {
    let old = mem::take(&mut engine.apps).into_iter();
    let mut old: BTreeMap<String, Node> = old.map(|node| (node.name.clone(), node)).collect();
    for ((name, fate), (inputs, outputs)) in fates.into_iter().zip(ports) {
        let running = old.remove(&name);
        let mut node = match (fate, running) {
            (Fate::Starts(config, app), running) => {
                changes.started.push(name.clone());
                changes.stopped.extend(running.map(|node| node.name));
                Node::new(name, config, app)
            }
            (Fate::Applies(config), Some(mut node)) => {
                config.apply(&mut *node.app);
                node.is_edge = config.is_edge();
                node.config = config;
                changes.changed.push(name);
                node
            }
            (Fate::Keeps, Some(node)) => node,
            // Only an app that runs is kept or changed.
            (Fate::Applies(_) | Fate::Keeps, None) => continue,
        };
        node.inputs.clone_from(inputs);
        node.outputs.clone_from(outputs);
        engine.apps.push(node);
    }
    changes.stopped.extend(old.into_keys());
}

impl Node {
    fn new(name: String, config: SharedConfig, app: Box<dyn App>) -> Self {
        Self {
            name,
            is_edge: config.is_edge(),
            config,
            app,
            part: 0,
            inputs: Vec::new(),
            outputs: Vec::new(),
            sent_nowhere: 0,
        }
    }
}

/// Indices of apps and links fit in 32 bits: their names alone would fill the memory before.
fn index_of(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(NO_LINK)
}
