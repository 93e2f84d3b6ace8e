//! `sandwire impair presets`: networks by name.

use sandwire_api::impairment::{PRESETS, Preset};
use serde::Serialize;

use crate::{Context, failure::Outcome, render};

/// A preset, for programs.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    title: &'static str,
    egress: &'static str,
    ingress: &'static str,
    source: &'static str,
}

impl From<&Preset> for Row {
    fn from(preset: &Preset) -> Self {
        Self {
            name: preset.name,
            title: preset.title,
            egress: preset.egress,
            ingress: preset.ingress,
            source: preset.source,
        }
    }
}

pub(super) fn run(context: &Context) -> Outcome {
    let rows: Vec<Row> = PRESETS.iter().map(Row::from).collect();
    context.output.answer(&rows, |rows| {
        let mut table = render::table(&["NAME", "WHAT", "EGRESS", "INGRESS", "NUMBERS FROM"]);
        for row in rows {
            table.add_row([row.name, row.title, row.egress, row.ingress, row.source]);
        }
        render::table_text(&table)
    })
}
