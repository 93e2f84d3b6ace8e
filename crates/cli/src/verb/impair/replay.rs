//! `sandwire impair replay`: a recorded run again, in virtual time.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use sandwire_impair_host::record::{self, Difference, Replayed};
use serde_json::json;

use crate::{
    Context,
    failure::{Failure, Outcome},
};

/// Command line of `sandwire impair replay`.
#[derive(Debug, Args)]
#[command(after_help = "It ends with 2 if anything is decided otherwise than it was.")]
pub(crate) struct Arguments {
    /// The folder of the recording.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let replayed =
        record::replay(&arguments.folder).map_err(|error| Failure::refused(error.to_string()))?;
    context.output.answer(&replayed, text)?;
    Ok(ExitCode::from(if replayed.is_same { 0 } else { 2 }))
}

fn text(replayed: &Replayed) -> String {
    let Replayed {
        frames,
        decisions,
        unrepeatable,
        is_cut_off,
        different,
        ..
    } = replayed;
    let mut text = format!("{frames} frames, {decisions} decisions: ");
    if replayed.is_same {
        text.push_str("all the same again");
    } else {
        text.push_str(&format!("{different} are not the same again"));
    }
    if *unrepeatable > 0 {
        text.push_str(&format!(
            "; {unrepeatable} of them were made by who took packets too late or flushed them, and cannot be repeated"
        ));
    }
    if *is_cut_off {
        text.push_str("; the recording was cut off, and is compared up to its last frame");
    }
    text.push('\n');
    for difference in &replayed.differences {
        let Difference {
            way,
            rule,
            number,
            recorded,
            replayed,
        } = difference;
        let line = json!({ "way": way, "rule": rule, "number": number, "recorded": recorded, "replayed": replayed });
        text.push_str(&format!("  {line}\n"));
    }
    text
}
