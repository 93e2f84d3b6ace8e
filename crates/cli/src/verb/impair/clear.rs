//! `sandwire impair clear`: ends impairments.

use std::path::Path;

use clap::Args;
use sandwire_impair_host::control::{Cleared, Client, Target};
use serde::Serialize;

use super::{lease, service, target::Which};
use crate::{
    Context,
    failure::{Failure, Outcome},
};

/// Command line of `sandwire impair clear`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    lease: lease::Which,

    #[command(flatten)]
    which: Which,

    /// All interfaces.
    #[arg(long, conflicts_with_all = ["which", "lease"])]
    all: bool,

    /// Drop packets that are under way instead of letting them go.
    #[arg(long)]
    flush: bool,
}

/// One that was ended.
#[derive(Debug, Serialize)]
struct Row {
    target: Target,
    #[serde(flatten)]
    cleared: Cleared,
}

pub(super) fn run(context: &Context, folder: &Path, arguments: &Arguments) -> Outcome {
    if let Some(name) = &arguments.lease.lease {
        return lease::clear(context, name, arguments.lease.owner_uid, arguments.flush);
    }
    if !arguments.all && !arguments.which.is_given() {
        return Err(Failure::refused(
            "say which: the name of a lease, --interface NAME, --pid PID, --netns PATH or --all",
        ));
    }
    let rows = match service::connect_to_clear(folder)? {
        Some(client) => clear(client, arguments)?,
        None if arguments.all => Vec::new(),
        None => vec![Row {
            target: arguments.which.target()?,
            cleared: Cleared::default(),
        }],
    };
    context.output.answer(&rows, |rows| text(rows))
}

/// Goes on after a failure; the first counts.
fn clear(mut client: Client, arguments: &Arguments) -> Result<Vec<Row>, Failure> {
    let targets = if arguments.all {
        let listed = client.list().map_err(service::failure)?;
        listed.into_iter().map(|status| status.target).collect()
    } else {
        vec![arguments.which.target_for(&mut client)?]
    };
    let mut rows = Vec::new();
    let mut failure = None;
    for target in targets {
        match client.clear(&target, arguments.flush) {
            Ok(cleared) => rows.push(Row { target, cleared }),
            Err(error) => failure = failure.or(Some(service::failure(error))),
        }
    }
    failure.map_or(Ok(rows), Err)
}

fn text(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "nothing was impaired\n".to_owned();
    }
    let line = |row: &Row| {
        let Cleared {
            was_impaired,
            released,
            flushed,
        } = row.cleared;
        let what = outcome_text(was_impaired, released, flushed);
        format!("{}: {what}\n", row.target)
    };
    rows.iter().map(line).collect()
}

/// What became of an impairment that was to end.
pub(super) fn outcome_text(was_impaired: bool, released: u64, flushed: u64) -> String {
    if was_impaired {
        format!("impaired no more; {released} packets were let go, {flushed} flushed")
    } else {
        "it was not impaired".to_owned()
    }
}
