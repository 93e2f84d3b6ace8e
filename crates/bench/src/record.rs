//! What a benchmark yields: one JSON document, the same for every suite.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::{host::HostFacts, statistics};

/// The result of one run of a suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Name of the suite.
    pub suite: String,
    /// The machine that it ran on.
    pub host: HostFacts,
    /// Sizes and numbers of rounds that the figures depend on.
    pub settings: BTreeMap<String, u64>,
    /// What was measured.
    pub rows: Vec<Row>,
    /// Comparisons of rows of this run, by name.
    pub ratios: BTreeMap<String, f64>,
    /// Cases that could not be run, and why.
    #[serde(default)]
    pub not_run: BTreeMap<String, String>,
    /// What must be known to read a ratio, by its name.
    #[serde(default)]
    pub notes: BTreeMap<String, String>,
}

/// One metric of one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was done.
    pub case: String,
    /// What was measured of it.
    pub metric: String,
    /// Unit of all the figures.
    pub unit: String,
    /// Median of the samples.
    pub median: f64,
    /// Smallest sample.
    pub min: f64,
    /// Largest sample.
    pub max: f64,
    /// Samples in the order in which they were taken: all of them, or so many as [`Record::add_summary`] keeps.
    pub samples: Vec<f64>,
    /// Those that aren't kept.
    #[serde(skip)]
    rest: Vec<f64>,
}

impl Record {
    /// A record without any rows yet.
    #[must_use]
    pub fn new(suite: &str, host: HostFacts, settings: BTreeMap<String, u64>) -> Self {
        Self {
            suite: suite.to_owned(),
            host,
            settings,
            rows: Vec::new(),
            ratios: BTreeMap::new(),
            not_run: BTreeMap::new(),
            notes: BTreeMap::new(),
        }
    }

    /// Reads a record that was written as JSON.
    ///
    /// # Errors
    /// If the file can't be read or holds something else.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the benchmark record {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| {
            format!(
                "{} is not a benchmark record; `sandwire bench SUITE --json` writes one",
                path.display()
            )
        })
    }

    /// Adds samples. To a case and metric that has some already, they are added. What is no number goes to `not_run`: JSON
    /// has no word for it, and the whole record could not be read again.
    pub fn add(&mut self, case: &str, metric: &str, unit: &str, samples: &[f64]) {
        if let Some(sample) = samples.iter().find(|sample| !sample.is_finite()) {
            let reason = format!("it came to {sample} {unit}");
            self.not_run(&format!("{case} {metric}"), &reason);
            return;
        }
        if samples.is_empty() {
            return;
        }
        let found = self
            .rows
            .iter_mut()
            .find(|row| row.case == case && row.metric == metric);
        if let Some(row) = found {
            let samples = samples.iter().copied().map(rounded);
            // In the order in which they were taken, which those that are kept are the first of.
            if row.rest.is_empty() {
                row.samples.extend(samples);
            } else {
                row.rest.extend(samples);
            }
            row.summarize();
            return;
        }
        let mut row = Row {
            case: case.to_owned(),
            metric: metric.to_owned(),
            unit: unit.to_owned(),
            median: 0.0,
            min: 0.0,
            max: 0.0,
            samples: samples.iter().copied().map(rounded).collect(),
            rest: Vec::new(),
        };
        row.summarize();
        self.rows.push(row);
    }

    /// Adds so many samples that only the first thousand of the row are written, for plots; median, smallest, largest and
    /// ratios are of all that this process has added.
    pub fn add_summary(&mut self, case: &str, metric: &str, unit: &str, samples: &[f64]) {
        const KEPT_MAX: usize = 1000;
        self.add(case, metric, unit, samples);
        let row = self
            .rows
            .iter_mut()
            .find(|row| row.case == case && row.metric == metric);
        if let Some(row) = row
            && row.samples.len() > KEPT_MAX
        {
            row.rest = row.samples.split_off(KEPT_MAX);
        }
    }

    /// Adds a ratio that is no plain quotient of two medians. One that is no number goes to `not_run`, as samples do.
    pub fn insert_ratio(&mut self, name: &str, ratio: f64) {
        if !ratio.is_finite() {
            self.not_run(name, &format!("it came to {ratio}"));
            return;
        }
        self.ratios.insert(name.to_owned(), rounded(ratio));
    }

    /// Says why a case has no rows.
    pub fn not_run(&mut self, case: &str, reason: &str) {
        self.not_run.insert(case.to_owned(), reason.to_owned());
    }

    /// Says what must be known to read a ratio.
    pub fn note(&mut self, ratio: &str, note: &str) {
        self.notes.insert(ratio.to_owned(), note.to_owned());
    }

    /// The row of a case and metric.
    #[must_use]
    pub fn row(&self, case: &str, metric: &str) -> Option<&Row> {
        self.rows
            .iter()
            .find(|row| row.case == case && row.metric == metric)
    }

    /// Adds the ratio of two rows' medians, if both rows are there.
    pub fn add_ratio(&mut self, name: &str, numerator: (&str, &str), denominator: (&str, &str)) {
        let samples = |(case, metric)| self.row(case, metric).map(Row::all);
        let ratio = samples(numerator)
            .zip(samples(denominator))
            .and_then(|(above, below)| statistics::ratio_of_medians(&above, &below));
        if let Some(ratio) = ratio {
            self.ratios.insert(name.to_owned(), rounded(ratio));
        }
    }
}

impl Row {
    fn summarize(&mut self) {
        let all = self.all();
        self.median = rounded(statistics::median(&all).unwrap_or(f64::NAN));
        self.min = all.iter().copied().fold(f64::NAN, f64::min);
        self.max = all.iter().copied().fold(f64::NAN, f64::max);
    }

    fn all(&self) -> Vec<f64> {
        [self.samples.as_slice(), &self.rest].concat()
    }
}

/// Four digits after the point: below the noise of everything that is measured here.
fn rounded(value: f64) -> f64 {
    (value * 10_000.0).round() / 10_000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let settings = BTreeMap::from([("slots".to_owned(), 200)]);
        Record::new("slots", HostFacts::default(), settings)
    }

    #[test]
    fn samples_of_several_rounds_make_one_row() {
        let mut record = record();
        record.add("recipe", "fill_per_slot", "ms", &[70.0]);
        record.add("recipe", "fill_per_slot", "ms", &[60.0, 68.000_04]);
        let row = record.row("recipe", "fill_per_slot").unwrap();
        assert_eq!(row.samples, [70.0, 60.0, 68.0]);
        assert_eq!((row.median, row.min, row.max), (68.0, 60.0, 70.0));
    }

    #[test]
    fn a_ratio_compares_medians_of_the_same_record() {
        let mut record = record();
        record.add("recipe", "fill_per_slot", "ms", &[60.0, 70.0]);
        record.add_ratio(
            "speedup",
            ("recipe", "fill_per_slot"),
            ("sandwire", "fill_per_slot"),
        );
        assert!(record.ratios.is_empty(), "one row is missing");
        record.add("sandwire", "fill_per_slot", "ms", &[2.0, 3.0]);
        record.add_ratio(
            "speedup",
            ("recipe", "fill_per_slot"),
            ("sandwire", "fill_per_slot"),
        );
        assert_eq!(record.ratios["speedup"], 26.0);
    }

    #[test]
    fn a_summary_of_several_rounds_is_of_all_of_their_samples() {
        let mut record = record();
        record.add("few", "echo", "us", &[1.0]);
        for value in [1.0, 5.0, 5.0] {
            record.add_summary("many", "echo", "us", &[value; 1500]);
        }
        let row = record.row("many", "echo").unwrap();
        assert_eq!((row.median, row.min, row.max), (5.0, 1.0, 5.0));
        assert_eq!(row.samples, [1.0; 1000]);
        record.add_ratio("many_vs_few", ("many", "echo"), ("few", "echo"));
        assert_eq!(record.ratios["many_vs_few"], 5.0);
    }

    #[test]
    fn a_record_reads_back_as_written() {
        let mut record = record();
        record.add("recipe", "fill_per_slot", "ms", &[60.0]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), serde_json::to_string(&record).unwrap()).unwrap();
        assert_eq!(Record::read(file.path()).unwrap(), record);
    }

    #[test]
    fn what_is_no_number_leaves_the_record_readable() {
        let mut record = record();
        record.add("nobody", "ping", "us", &[]);
        record.add_summary("nobody", "probe", "us", &[]);
        record.add("nothing", "ping", "us", &[1.0, f64::INFINITY]);
        record.insert_ratio("by_zero", f64::NAN);
        assert!(record.rows.is_empty() && record.ratios.is_empty());
        assert_eq!(record.not_run["nothing ping"], "it came to inf us");
        assert_eq!(record.not_run["by_zero"], "it came to NaN");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), serde_json::to_string(&record).unwrap()).unwrap();
        assert_eq!(Record::read(file.path()).unwrap(), record);
    }

    #[test]
    fn another_file_is_refused_by_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{}").unwrap();
        let error = Record::read(file.path()).unwrap_err().to_string();
        assert!(error.contains("is not a benchmark record"), "{error}");
    }
}
