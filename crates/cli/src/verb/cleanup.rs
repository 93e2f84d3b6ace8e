//! `sandwire cleanup`: removes what a daemon that is gone has left in the kernel.
//!
//! Kernel objects bear their instance's name, so no journal is needed, and what doesn't bear it is
//! never touched. Namespaces go first and all at once: the kernel destroys many together, and with
//! each the host end of its veth; then the interfaces that are left, many at once.

mod journal;
mod leftovers;
mod users;

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use indicatif::ProgressBar;
use sandwire_api::{error::ErrorCode, name::Name};
use sandwire_daemon::instance::InstanceLock;
use sandwire_datapath::{Datapath, filtered_uplinks};
use sandwire_kernel_net::{
    Error,
    interface::{self, DELETED_AT_ONCE, FIRST_GROUP, Interface},
    netlink::{Request, Socket},
    netns,
    nft::Batch,
};
use serde::Serialize;

use self::{
    leftovers::{Kind, Leftover},
    users::User,
};
use crate::{
    Context,
    failure::{Failure, Outcome},
    output::note,
    privilege, progress, render,
};

/// Command line of `sandwire cleanup`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Instance whose kernel objects are removed, as in the daemon's configuration.
    #[arg(long, default_value = "default")]
    instance: Name,

    /// Only say what would be removed.
    #[arg(long)]
    dry_run: bool,

    /// Take also those slots away that processes still use.
    #[arg(long)]
    force: bool,

    /// Remove the journal in this folder too; without it, leases that are gone with their slots are
    /// forgotten when the daemon starts the next time.
    #[arg(long, value_name = "FOLDER")]
    state_dir: Option<PathBuf>,

    /// Folder of the eBPF data path's programs and maps, if the configuration has another than
    /// /sys/fs/bpf/sandwire/INSTANCE.
    #[arg(long, value_name = "FOLDER")]
    bpf_folder: Option<PathBuf>,
}

/// What was found, and what came of it.
#[derive(Debug, Serialize)]
struct Report {
    instance: Name,
    dry_run: bool,
    found: Vec<Leftover>,
    removed: Vec<Leftover>,
    failures: Vec<String>,
}

/// Groups of interfaces that are looked at for one that is free.
const GROUP_ATTEMPTS: u32 = 1024;
/// How long the kernel is given to destroy interfaces by itself before they are deleted by name.
const DESTRUCTION_PATIENCE: Duration = Duration::from_secs(2);

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let instance = &arguments.instance;
    refuse_beside_daemon(context, instance)?;
    // Wherever its socket and its state folder are; and none starts before all is removed.
    let _lock = InstanceLock::take(instance).map_err(|error| {
        let process = error.pid.map(|pid| format!(", process {pid}"));
        refusal(
            instance,
            &format!("its daemon runs{}", process.unwrap_or_default()),
        )
    })?;
    let programs = match &arguments.bpf_folder {
        Some(folder) => folder.clone(),
        None => sandwire_datapath::folder_for(instance.as_str()),
    };
    let journal = match &arguments.state_dir {
        Some(folder) => journal::find(folder, instance)?,
        None => Vec::new(),
    };
    let mut found = leftovers::find(instance, &programs).map_err(|error| {
        let message = format!("cannot clean up instance {instance}: {error}");
        Failure::failed(privilege::advise(message, &error))
    })?;
    let state = arguments.state_dir.as_deref();
    let state = state.map(|folder| Leftover::new(Kind::Journal, folder.display().to_string()));
    match state {
        Some(state) if journal.is_empty() => note(&format!("no journal is in {}", state.name)),
        state => found.extend(state),
    }
    let mut report = Report {
        instance: instance.clone(),
        dry_run: arguments.dry_run,
        found,
        removed: Vec::new(),
        failures: Vec::new(),
    };
    if !arguments.dry_run {
        refuse_in_use(&report, arguments.force)?;
        remove_all(&mut report, &programs, &journal);
    }
    context.output.answer(&report, report_text)?;
    for failure in &report.failures {
        note(failure);
    }
    Ok(ExitCode::from(if report.failures.is_empty() {
        0
    } else {
        2
    }))
}

/// A daemon would find its slots damaged and fight for them.
fn refuse_beside_daemon(context: &Context, instance: &Name) -> Result<(), Failure> {
    let health = context
        .client()
        .with_timeout(Duration::from_secs(5))
        .health();
    match health {
        Ok(health) if health.instance == instance.as_str() => Err(refusal(
            instance,
            &format!("its daemon answers at {}", context.socket.display()),
        )),
        _ => Ok(()),
    }
}

fn refusal(instance: &Name, reason: &str) -> Failure {
    Failure::new(
        ErrorCode::Conflict,
        format!("cannot clean up instance {instance}: {reason}; stop the daemon first"),
    )
}

fn refuse_in_use(report: &Report, force: bool) -> Result<(), Failure> {
    let used: Vec<&Leftover> = report
        .found
        .iter()
        .filter(|object| !object.used_by.is_empty())
        .collect();
    let Some(first) = used.first().filter(|_| !force) else {
        return Ok(());
    };
    let users: Vec<String> = first.used_by.iter().map(User::to_string).collect();
    Err(Failure::new(
        ErrorCode::Conflict,
        format!(
            "cannot clean up instance {}: {} still in use, as {} by {}; end these processes, or give --force; a daemon \
             that is started again would adopt them",
            report.instance,
            render::count(used.len(), "slot") + if used.len() == 1 { " is" } else { " are" },
            first.name,
            users.join(", ")
        ),
    ))
}

/// Removes everything that was found, going on after errors.
fn remove_all(report: &mut Report, programs: &Path, journal: &[PathBuf]) {
    let bar = progress::bar(report.found.len() as u64, "cleaning up");
    let (namespaces, rest): (Vec<Leftover>, Vec<Leftover>) = report
        .found
        .iter()
        .cloned()
        .partition(|object| object.kind == Kind::Namespace);
    let had_namespaces = !namespaces.is_empty();
    for object in namespaces {
        let removed = netns::remove(&object.name);
        record(report, object, removed);
        bar.inc(1);
    }
    // Before the interface by whose addresses they are told.
    let (routes, rest): (Vec<Leftover>, Vec<Leftover>) = rest
        .into_iter()
        .partition(|object| object.kind == Kind::Route);
    for object in routes {
        let removed = delete_route(&object.name);
        record(report, object, removed);
        bar.inc(1);
    }
    let (interfaces, rest): (Vec<Leftover>, Vec<Leftover>) = rest
        .into_iter()
        .partition(|object| object.kind == Kind::Interface);
    if had_namespaces {
        wait_for_destruction(&report.instance, &interfaces);
    }
    remove_interfaces(report, &interfaces, &bar);
    for object in rest {
        match object.kind {
            Kind::Programs => remove_programs(report, object),
            Kind::Journal => match journal::remove(journal) {
                failures if failures.is_empty() => report.removed.push(object),
                failures => report.failures.extend(failures),
            },
            Kind::Child => {
                let removed = Socket::route()
                    .and_then(|mut route| interface::delete_children(&mut route, &object.name));
                record(report, object, removed);
            }
            Kind::Filter => {
                let removed = delete_filter(&object.name, programs);
                record(report, object, removed);
            }
            _ => {
                let removed = delete_table(&object.name);
                record(report, object, removed);
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
}

/// Many go at once, since the kernel takes as long for a hundred as for one; one by one if that fails, to tell which.
fn remove_interfaces(report: &mut Report, interfaces: &[Leftover], bar: &ProgressBar) {
    let (group, ours) = match present(&report.instance) {
        Ok(found) => found,
        Err(error) => {
            report.failures.push(error.to_string());
            return;
        }
    };
    for batch in interfaces.chunks(DELETED_AT_ONCE) {
        // One that is gone meanwhile is removed, whoever has its name now.
        let here = batch.iter().filter_map(|object| ours.get(&object.name));
        let removed = group.map(|group| remove_together(&here.collect::<Vec<_>>(), group));
        if let Some(Ok(beside)) = removed {
            report.removed.extend_from_slice(batch);
            let beside = beside.into_iter().map(|error| error.to_string());
            report.failures.extend(beside);
        } else {
            for object in batch {
                let removed = match ours.get(&object.name) {
                    Some(found) => Socket::route().and_then(|mut route| {
                        interface::delete_with_taps_beyond(&mut route, found)
                    }),
                    None => Ok(()),
                };
                record(report, object.clone(), removed);
            }
        }
        bar.inc(batch.len() as u64);
    }
}

/// A group that nobody's interface is in, if there is one, and the instance's interfaces by name.
fn present(instance: &Name) -> Result<(Option<u32>, HashMap<String, Interface>), Error> {
    let all = interface::list(&mut Socket::route()?)?;
    let group = interface::free_group(&all, FIRST_GROUP, GROUP_ATTEMPTS, |_| false);
    let ours = leftovers::of_instance(all, instance);
    let ours = ours.map(|found| (found.name.clone(), found)).collect();
    Ok((group, ours))
}

/// Removes interfaces together, and returns what went wrong with TAPs that are joined to them in other namespaces.
fn remove_together(interfaces: &[&Interface], group: u32) -> Result<Vec<Error>, Error> {
    let route = &mut Socket::route()?;
    // First: without the interface nothing leads to them any more.
    let beside = interfaces
        .iter()
        .filter_map(|found| interface::delete_taps_beyond(route, found).err())
        .collect();
    let numbered = interfaces
        .iter()
        .map(|found| (found.name.as_str(), Some(found.index)));
    interface::delete_together(route, numbered, group)?;
    Ok(beside)
}

fn record(report: &mut Report, object: Leftover, removed: Result<(), Error>) {
    match removed {
        Ok(()) => report.removed.push(object),
        Err(error) => report.failures.push(error.to_string()),
    }
}

/// Waits while the kernel destroys interfaces with their namespaces, as long as it gets on with it.
fn wait_for_destruction(instance: &Name, interfaces: &[Leftover]) {
    let mut left = interfaces.len();
    let mut progressed_at = Instant::now();
    // The shared interface goes with no namespace.
    while left > 1 && progressed_at.elapsed() < DESTRUCTION_PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
        let now = leftovers::interfaces(instance).map_or(0, |interfaces| interfaces.len());
        if now < left {
            progressed_at = Instant::now();
        }
        left = now;
    }
}

fn delete_route(prefix: &str) -> Result<(), Error> {
    let mut request = Request::new();
    if let Ok(prefix) = prefix.parse() {
        leftovers::route_to(prefix).delete(&mut request);
    }
    match Socket::route()?.execute(request) {
        Err(error) if error.is_missing() => Ok(()),
        other => other,
    }
}

fn delete_table(name: &str) -> Result<(), Error> {
    let mut batch = Batch::new(name);
    batch.delete_table();
    match batch.commit(&mut Socket::netfilter()?) {
        Err(error) if error.is_missing() => Ok(()),
        other => other,
    }
}

/// The qdisc stays: others may have filters there.
fn delete_filter(uplink: &str, programs: &Path) -> Result<(), Error> {
    let mut request = Request::new();
    for (name, place) in filtered_uplinks(programs)? {
        if name == uplink {
            place.delete(&mut request);
        }
    }
    match Socket::route()?.execute(request) {
        Err(error) if error.is_missing() => Ok(()),
        other => other,
    }
}

/// With the pins go the programs on uplinks; those on slots went with their interfaces.
fn remove_programs(report: &mut Report, object: Leftover) {
    let folder = Path::new(&object.name);
    match Datapath::remove(folder) {
        Ok(()) => {
            // Shared with other instances, if there are any: then it isn't empty, and stays.
            let _ = folder.parent().map(fs::remove_dir);
            report.removed.push(object);
        }
        Err(error) => report.failures.push(error.to_string()),
    }
}

fn report_text(report: &Report) -> String {
    let (objects, verb) = if report.dry_run {
        (&report.found, "would remove")
    } else {
        (&report.removed, "removed")
    };
    if report.found.is_empty() {
        return format!("nothing left of instance {}\n", report.instance);
    }
    objects
        .iter()
        .map(|object| format!("{verb} {} {}\n", object.kind.text(), object.name))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(pids: &[u32]) -> Report {
        let users = pids.iter().map(|pid| User {
            pid: Some(*pid),
            command: "firecracker".to_owned(),
        });
        Report {
            instance: "default".parse().unwrap(),
            dry_run: false,
            found: vec![Leftover {
                kind: Kind::Namespace,
                name: "sandwire.default.web.1".to_owned(),
                used_by: users.collect(),
            }],
            removed: Vec::new(),
            failures: Vec::new(),
        }
    }

    #[test]
    fn slots_in_use_are_kept_unless_forced() {
        let refusal = refuse_in_use(&report(&[42]), false).unwrap_err();
        assert_eq!(refusal.exit_status, 1);
        assert!(
            refusal.message.contains(
                "1 slot is still in use, as sandwire.default.web.1 by firecracker (pid 42)"
            )
        );
        assert_eq!(refuse_in_use(&report(&[42]), true), Ok(()));
        assert_eq!(refuse_in_use(&report(&[]), false), Ok(()));
    }
}
