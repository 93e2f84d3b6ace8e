//! `sandwire impair` itself: impairs an interface from now on.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use rustix::process::getuid;
use sandwire_api::{
    impairment::{Direction, Impairment, OnDeath, Preset},
    name::Name,
};
use sandwire_impair_host::control::{Owner, Target};
use serde::Serialize;

use super::{lease, service, target::Which};
use crate::{
    Context,
    failure::{Failure, Outcome},
};

/// Which interface, and how.
#[derive(Debug, Args)]
pub(crate) struct Impairing {
    #[command(flatten)]
    lease: lease::Which,

    #[command(flatten)]
    which: Which,

    /// What happens to packets that leave the sandbox.
    #[arg(long, value_name = "TEXT")]
    egress: Vec<String>,

    /// What happens to packets that come to the sandbox.
    #[arg(long, value_name = "TEXT")]
    ingress: Vec<String>,

    /// What happens to packets both ways, each way for itself.
    #[arg(long, value_name = "TEXT")]
    both: Vec<String>,

    /// A file of rules in TOML; rules of flags come before them.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// A network by name; see `sandwire impair presets`. Its rules come last.
    #[arg(long, value_name = "NAME")]
    preset: Option<Name>,

    /// Of all random decisions: the same seed and the same packets give the same losses.
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,

    /// What becomes of packets when the service has died [default: closed].
    #[arg(long, value_enum, value_name = "WHAT")]
    on_death: Option<OnDeathArgument>,

    /// Also if it is the interface of the machine's default route, or somebody else impairs it.
    #[arg(long, conflicts_with = "lease")]
    force: bool,
}

/// What becomes of packets.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum OnDeathArgument {
    /// They are dropped and counted.
    Closed,
    /// They pass, unimpaired.
    Open,
}

/// What was done.
#[derive(Debug, Serialize)]
struct Answer {
    target: Target,
    impairment: Impairment,
    started_service: bool,
}

pub(super) fn run(context: &Context, folder: &Path, arguments: &Impairing) -> Outcome {
    let impairment = arguments.impairment()?;
    if let Some(name) = &arguments.lease.lease {
        return lease::set(context, name, arguments.lease.owner_uid, &impairment);
    }
    // What can't be meant starts no service.
    arguments.which.target()?;
    let (mut client, started_service) = service::connect_or_start(folder)?;
    let target = arguments.which.target_for(&mut client)?;
    let owner = Owner::User {
        uid: getuid().as_raw(),
    };
    client
        .set_with(&target, &owner, &impairment, arguments.force)
        .map_err(service::failure)?;
    let answer = Answer {
        target,
        impairment,
        started_service,
    };
    context.output.answer(&answer, |answer| {
        format!("{}: {}\n", answer.target, answer.impairment)
    })
}

impl Impairing {
    /// What is asked for; wrong texts are refused before anything is touched.
    fn impairment(&self) -> Result<Impairment, Failure> {
        let mut impairment = Impairment::default();
        let ways = [
            ("--egress", Direction::Egress, &self.egress),
            ("--ingress", Direction::Ingress, &self.ingress),
            ("--both", Direction::Both, &self.both),
        ];
        for (flag, direction, texts) in ways {
            for text in texts {
                add_text(&mut impairment, flag, direction, text)?;
            }
        }
        if let Some(file) = &self.file {
            add_file(&mut impairment, file)?;
        }
        if let Some(name) = &self.preset {
            let preset = Preset::find(name.as_str()).ok_or_else(|| {
                let message = "see `sandwire impair presets` for those that there are";
                Failure::refused(format!("no network is called {name}; {message}"))
            })?;
            impairment.rules.extend(preset.impairment().rules);
        }
        if impairment.rules.is_empty() {
            return Err(Failure::refused(
                "say what is to happen: --both TEXT, --egress TEXT, --ingress TEXT, --file FILE or --preset NAME; \
                 `sandwire impair clear` ends an impairment",
            ));
        }
        if let Some(seed) = self.seed {
            impairment.seed = seed;
        }
        if let Some(on_death) = self.on_death {
            impairment.on_death = match on_death {
                OnDeathArgument::Closed => OnDeath::Closed,
                OnDeathArgument::Open => OnDeath::Open,
            };
        }
        let read = |path: &str| fs::read_to_string(path);
        let refused = |error: sandwire_api::impairment::InvalidImpairment| {
            Failure::refused(format!("cannot impair packets so: {error}"))
        };
        impairment.read_files(read).map_err(refused)?;
        impairment.check().map_err(refused)?;
        Ok(impairment)
    }
}

fn add_text(
    impairment: &mut Impairment,
    flag: &str,
    direction: Direction,
    text: &str,
) -> Result<(), Failure> {
    let refused = |problem: String| Failure::refused(format!("{flag} '{text}': {problem}"));
    let read: Impairment = text
        .parse()
        .map_err(|error: sandwire_api::impairment::InvalidText| refused(error.to_string()))?;
    add_settings(impairment, &read);
    for mut rule in read.rules {
        if direction != Direction::Both {
            if rule.direction != Direction::Both && rule.direction != direction {
                return Err(refused("the flag says the other direction".to_owned()));
            }
            rule.direction = direction;
        }
        impairment.rules.push(rule);
    }
    Ok(())
}

fn add_file(impairment: &mut Impairment, file: &Path) -> Result<(), Failure> {
    let refused =
        |problem: String| Failure::refused(format!("cannot read {}: {problem}", file.display()));
    let text = fs::read_to_string(file).map_err(|error| refused(error.to_string()))?;
    let read: Impairment =
        toml::from_str(&text).map_err(|error: toml::de::Error| refused(error.to_string()))?;
    add_settings(impairment, &read);
    impairment.rules.extend(read.rules);
    Ok(())
}

/// What is said once for all rules, where it is said.
fn add_settings(impairment: &mut Impairment, read: &Impairment) {
    if read.seed != 0 {
        impairment.seed = read.seed;
    }
    if read.on_death == OnDeath::Open {
        impairment.on_death = OnDeath::Open;
    }
    impairment.budget = read.budget.or(impairment.budget);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_takes_back_no_seed_and_no_way_to_die_that_a_text_has_said() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("more.toml");
        let text = "seed 7; on-death open; loss 1%";
        for (more, seed) in [("[[rule]]\nloss = \"2%\"\n", 7), ("seed = 9\n", 9)] {
            fs::write(&file, more).unwrap();
            let mut impairment = Impairment::default();
            add_text(&mut impairment, "--both", Direction::Both, text).unwrap();
            add_file(&mut impairment, &file).unwrap();
            assert_eq!(impairment.seed, seed);
            assert_eq!(impairment.on_death, OnDeath::Open);
        }
    }
}
