//! Keeps `docs/cli.md` what the command line really is.
//!
//! The file is written by this test when `UPDATE_DOCS` is set:
//! `UPDATE_DOCS=1 cargo test -p sandwire-cli reference`.

use std::{fmt::Write, path::PathBuf};

use clap::{Arg, ArgAction, Command, CommandFactory, Id};

const HEAD: &str = "\
# The command line

Generated from the program itself by `UPDATE_DOCS=1 cargo test -p sandwire-cli reference`; a test
compares the two. How to use it is told in [operate.md](operate.md) and in the recipes for
[Firecracker](recipes/firecracker.md), [Cloud Hypervisor](recipes/cloud-hypervisor.md) and
[QEMU](recipes/qemu.md).

- **Exit status**: 0 done; 1 refused, nothing changed (a wrong command line too); 2 failed. `run` passes
  on its command's own, with 128 and the signal's number if it was killed, 126 or 127 if it could not be
  started. `doctor` ends with 2 if something essential is missing, `health` if the daemon isn't ready.
- **`--json`** prints exactly one JSON document on standard output (`forward` alone one a line, for as long as it runs). A failure prints
  `{\"error\": {\"code\": …, \"message\": …, \"exit_status\": …}}`; `code` is the API's, and
  `unavailable` where no daemon answers, `forbidden` where its socket may not be used. Of a `trace` that
  fails once it has begun, the array of packets is the document, and the status says that it failed.
- Everything else goes to standard error: errors (`sandwire: cannot OPERATION OBJECT: cause; what to do`),
  warnings, progress bars (on a terminal only), logs.
- `NO_COLOR` is respected; away from a terminal there is no colour, and a row of a table is one line.

";

fn document() -> String {
    let mut command = crate::Arguments::command();
    command.build();
    let mut text = HEAD.to_owned();
    describe(&command, &[], &mut text);
    text
}

/// A command, its flags in a table but for those that are `inherited`, then its subcommands.
fn describe(command: &Command, inherited: &[&Id], text: &mut String) {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    let about = command
        .get_about()
        .map(ToString::to_string)
        .unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let is_top = !name.contains(' ');
    let heading = if is_top {
        "## Every verb".to_owned()
    } else {
        format!("## `{name}`")
    };
    // Writing to a text cannot fail.
    let _ = write!(text, "{heading}\n\n{about}.\n\n```\n{usage}\n```\n\n");
    let arguments: Vec<&Arg> = command
        .get_arguments()
        .filter(|argument| !argument.is_hide_set())
        .filter(|argument| !argument.is_global_set() || !inherited.contains(&argument.get_id()))
        .filter(|argument| !matches!(argument.get_action(), ArgAction::Help | ArgAction::Version))
        .collect();
    if !arguments.is_empty() {
        text.push_str("| argument | meaning |\n|---|---|\n");
        for argument in arguments {
            let _ = writeln!(text, "| {} | {} |", spellings(argument), meaning(argument));
        }
        text.push('\n');
    }
    if let Some(after) = command.get_after_help() {
        let _ = write!(text, "{after}\n\n");
    }
    let global = command
        .get_arguments()
        .filter(|found| found.is_global_set());
    let inherited: Vec<&Id> = global.map(Arg::get_id).collect();
    for subcommand in command
        .get_subcommands()
        .filter(|found| found.get_name() != "help")
    {
        describe(subcommand, &inherited, text);
    }
}

/// The long form with its value, then the short one, if there is one.
fn spellings(argument: &Arg) -> String {
    let long = format!("`{}`", spelling(argument));
    match argument.get_short() {
        Some(short) => format!("{long}, `-{short}`"),
        None => long,
    }
}

fn spelling(argument: &Arg) -> String {
    let values: Vec<String> = argument
        .get_value_names()
        .unwrap_or_default()
        .iter()
        .map(ToString::to_string)
        .collect();
    let takes_value = argument.get_action().takes_values();
    let may_have_none = argument
        .get_num_args()
        .is_some_and(|count| count.min_values() == 0);
    match argument.get_long() {
        Some(long) if argument.is_require_equals_set() && may_have_none => {
            format!("--{long}[={}]", values.join(" "))
        }
        Some(long) if takes_value => format!("--{long} {}", values.join(" ")),
        Some(long) => format!("--{long}"),
        None => values.join(" "),
    }
}

fn meaning(argument: &Arg) -> String {
    let mut text = argument
        .get_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    if !text.ends_with('.') {
        text.push('.');
    }
    let words = |values: Vec<String>| values.join(", ");
    let possible: Vec<String> = argument
        .get_possible_values()
        .iter()
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if argument.get_action().takes_values() && !possible.is_empty() {
        let _ = write!(text, " One of {}.", words(possible));
    }
    let defaults: Vec<String> = argument
        .get_default_values()
        .iter()
        .map(|value| format!("`{}`", value.to_string_lossy()))
        .collect();
    if argument.get_action().takes_values() && !defaults.is_empty() {
        let _ = write!(text, " Default: {}.", words(defaults));
    }
    if let Some(variable) = argument.get_env() {
        let _ = write!(text, " Environment: `{}`.", variable.to_string_lossy());
    }
    text.replace('|', "\\|")
}

fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md")
}

#[test]
fn the_reference_describes_this_command_line() {
    let expected = document();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(file(), &expected).unwrap();
    }
    let found = std::fs::read_to_string(file()).unwrap();
    let difference = expected
        .lines()
        .zip(found.lines())
        .find(|(expected, found)| expected != found);
    assert!(
        expected == found,
        "docs/cli.md is out of date, first at {difference:?}; run: UPDATE_DOCS=1 cargo test -p sandwire-cli reference"
    );
}

#[test]
fn every_verb_and_flag_is_described() {
    fn check(command: &Command, text: &str) {
        for argument in command
            .get_arguments()
            .filter(|argument| !argument.is_hide_set())
        {
            if let Some(long) = argument
                .get_long()
                .filter(|long| !["help", "version"].contains(long))
            {
                assert!(text.contains(&format!("`--{long}")), "--{long} is missing");
                let name = command.get_bin_name().unwrap_or_default();
                let section = text.split(&format!("## `{name}`\n")).nth(1);
                let section = section.and_then(|rest| rest.split("\n## ").next());
                if let Some(short) = argument.get_short() {
                    let spelt = section.is_some_and(|text| text.contains(&format!("`-{short}`")));
                    assert!(spelt, "-{short} of {name} is missing");
                }
            }
            let help = argument
                .get_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(
                !help.is_empty(),
                "{:?} of {} has no help",
                argument.get_id(),
                command.get_name()
            );
        }
        for subcommand in command
            .get_subcommands()
            .filter(|found| found.get_name() != "help")
        {
            let name = subcommand.get_bin_name().unwrap_or_default();
            assert!(text.contains(&format!("`{name}`")), "{name} is missing");
            check(subcommand, text);
        }
    }
    let mut command = crate::Arguments::command();
    command.build();
    check(&command, &document());
}

#[test]
fn the_command_line_is_consistent() {
    crate::Arguments::command().debug_assert();
}
