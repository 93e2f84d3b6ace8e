//! `sandwire lab`: a few hosts and the links between them, from a file.

mod exec;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use sandwire_api::name::Name;
use sandwire_impair_host::lab::{self, End, Found, Lab, LabError, Removed};
use serde_json::{Value, json};

use crate::{
    Context,
    failure::{Failure, Outcome},
    interruption::Interruption,
    output::note,
    privilege::{self, Capability},
    verb::impair::service,
};

/// What to do with labs.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Make the hosts and links that a file declares.
    Up(UpArguments),
    /// Run a command in a host of a lab.
    Exec(exec::Arguments),
    /// Take a lab away.
    Down(DownArguments),
    /// List the labs that are up, their hosts and addresses.
    List,
}

/// Command line of `sandwire lab up`.
#[derive(Debug, Args)]
#[command(
    after_help = "The file is checked as a whole before anything is made, and what was made is taken away again when \
    a step fails."
)]
pub(crate) struct UpArguments {
    /// The file, in TOML.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Only check the file, and say what it would make.
    #[arg(long)]
    check: bool,

    #[command(flatten)]
    service: ServiceArguments,
}

/// Which service impairs links.
#[derive(Debug, Args)]
struct ServiceArguments {
    /// Folder of the impairment service.
    #[arg(
        long,
        value_name = "FOLDER",
        env = "SANDWIRE_IMPAIR_FOLDER",
        default_value = sandwire_impair_host::control::DEFAULT_FOLDER
    )]
    impair_folder: PathBuf,
}

/// Command line of `sandwire lab down`.
#[derive(Debug, Args)]
pub(crate) struct DownArguments {
    /// Name of the lab; may be left out when only one is up.
    name: Option<Name>,

    #[command(flatten)]
    service: ServiceArguments,
}

pub(crate) fn run(context: &Context, verb: Verb) -> Outcome {
    match verb {
        Verb::Up(arguments) => up(context, &arguments),
        Verb::Exec(arguments) => exec::run(&arguments),
        Verb::Down(arguments) => down(context, arguments),
        Verb::List => list(context),
    }
}

fn up(context: &Context, arguments: &UpArguments) -> Outcome {
    let lab = Lab::load(&arguments.file).map_err(failure)?;
    if !arguments.check {
        require_privilege(&format!("make lab {}", lab.name))?;
        let mut service = if lab.is_impaired() {
            Some(service::connect_or_start(&arguments.service.impair_folder)?.0)
        } else {
            None
        };
        let interruption = Interruption::catch()?;
        lab::up(&lab, service.as_mut(), |_| {
            if interruption.has_come() {
                return Err("interrupted by a signal".to_owned());
            }
            Ok(())
        })
        .map_err(failure)?;
    }
    context.output.answer(&document(&lab), |_| {
        let hosts: Vec<&str> = lab.hosts.iter().map(|host| host.name.as_str()).collect();
        let verb = if arguments.check {
            "would be made"
        } else {
            "is up"
        };
        format!("lab {} {verb}: {}\n", lab.name, hosts.join(", "))
    })
}

/// What a lab is, with names in place of numbers.
fn document(lab: &Lab) -> Value {
    let hosts = lab.hosts.iter().map(|host| {
        json!({
            "name": host.name,
            "namespace": lab.namespace(host),
            "switch": host.switch,
            "forward": host.forward,
            "routes": host.routes.iter().map(|route| json!({ "to": route.to, "via": route.via })).collect::<Vec<_>>(),
        })
    });
    let end = |end: &End| {
        json!({
            "host": lab.hosts[end.host].name,
            "interface": end.interface,
            "addresses": end.addresses,
        })
    };
    let links = lab.links.iter().map(|link| {
        json!({
            "ends": [end(&link.ends[0]), end(&link.ends[1])],
            "mtu": link.mtu,
            "impairment": link.impairment,
        })
    });
    json!({
        "name": lab.name,
        "hosts": hosts.collect::<Vec<_>>(),
        "links": links.collect::<Vec<_>>(),
    })
}

fn down(context: &Context, arguments: DownArguments) -> Outcome {
    let name = match arguments.name {
        Some(name) => name,
        None => only(lab::list().map_err(failure)?)?.name,
    };
    require_privilege(&format!("take down lab {name}"))?;
    // Hosts and links go even if nobody can be asked to end what happens on them.
    let mut service =
        service::connect_to_clear(&arguments.service.impair_folder).unwrap_or_else(|failure| {
            note(&failure.message);
            None
        });
    let removed = lab::down(&name, service.as_mut()).map_err(failure)?;
    if !removed.processes.is_empty() {
        note(&format!(
            "processes of lab {name} run on without a network: {}; end them, or they keep its namespaces",
            numbers(&removed.processes)
        ));
    }
    if !removed.failures.is_empty() {
        let failures = removed.failures.join("; ");
        return Err(Failure::failed(format!(
            "cannot take down all of lab {name}: {failures}"
        )));
    }
    let document = json!({ "name": name, "removed": removed });
    context.output.answer(&document, |_| {
        let Removed {
            namespaces, links, ..
        } = &removed;
        format!(
            "lab {name} is down: {} hosts and {links} links are gone\n",
            namespaces.len()
        )
    })
}

fn require_privilege(operation: &str) -> Result<(), Failure> {
    let what = "to make, enter and remove network namespaces";
    privilege::require(Capability::SysAdmin, operation, what)
}

fn numbers(processes: &[u32]) -> String {
    let numbers: Vec<String> = processes.iter().map(u32::to_string).collect();
    numbers.join(", ")
}

fn list(context: &Context) -> Outcome {
    let labs = lab::list().map_err(failure)?;
    context.output.answer(&labs, |labs| match labs.as_slice() {
        [] => "no lab is up\n".to_owned(),
        labs => labs.iter().map(lab_text).collect(),
    })
}

fn lab_text(lab: &Found) -> String {
    let mut text = format!("{}\n", lab.name);
    for host in &lab.hosts {
        text.push_str(&format!("  {}", host.name));
        for (interface, addresses) in &host.addresses {
            let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            let addresses = if addresses.is_empty() {
                "-".to_owned()
            } else {
                addresses.join(" ")
            };
            text.push_str(&format!("  {interface} {addresses}"));
        }
        text.push('\n');
    }
    text
}

/// The lab, if there is no choice.
fn only(labs: Vec<Found>) -> Result<Found, Failure> {
    let mut labs = labs.into_iter();
    match (labs.next(), labs.next()) {
        (Some(lab), None) => Ok(lab),
        (None, _) => Err(Failure::refused(
            "no lab is up; make one: sandwire lab up FILE",
        )),
        (Some(first), Some(second)) => {
            let names = [first, second].into_iter().chain(labs);
            let names: Vec<String> = names.map(|lab| lab.name.to_string()).collect();
            Err(Failure::refused(format!(
                "several labs are up; choose one: {}",
                names.join(", ")
            )))
        }
    }
}

fn failure(error: LabError) -> Failure {
    if error.is_refusal() {
        Failure::refused(error.to_string())
    } else {
        Failure::failed(error.to_string())
    }
}
