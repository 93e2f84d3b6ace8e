//! The fuzz targets of `fuzz/`, for a short while and always with the same bytes: no fuzzer needed.

#[path = "../../../fuzz/drive.rs"]
mod drive;
#[path = "../../../fuzz/entries/impairment_text.rs"]
mod impairment_text;
#[path = "../../../fuzz/entries/scenario.rs"]
mod scenario;
#[path = "../../../fuzz/entries/trace.rs"]
mod trace;

use drive::drive;

#[test]
fn texts_of_impairments() {
    drive("impairment_text", impairment_text::run, &[], 10_000);
}

#[test]
fn files_of_scenarios() {
    drive("scenario", scenario::run, &[], 3_000);
}

#[test]
fn files_of_traces() {
    drive("trace", trace::run, &[], 10_000);
}
