//! What the project promises, and whether a record reaches it.

use crate::record::Record;

/// A promise, compared with a record.
pub(super) struct Verdict {
    /// What the promise is about.
    pub(super) what: String,
    /// The promise in words.
    pub(super) bound: String,
    /// What the record says.
    pub(super) value: f64,
    /// Whether it is kept.
    pub(super) is_reached: bool,
}

enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

use Bound::{AtLeast, AtMost};

/// Promises about ratios.
const RATIOS: &[(&str, Bound)] = &[
    ("netns_fill_speedup", AtLeast(20.0)),
    ("fill_flatness_v4", AtLeast(0.8)),
    ("fill_flatness_dual", AtLeast(0.65)),
];

/// Promises about medians of rows: case, metric, bound.
const MEDIANS: &[(&str, &str, Bound)] = &[
    ("acquire_at_rest", "acquire_p50_us", AtMost(300.0)),
    ("acquire_at_rest", "acquire_p99_us", AtMost(2000.0)),
    ("acquire_during_refill", "acquire_p50_us", AtMost(300.0)),
    ("acquire_during_refill", "acquire_p99_us", AtMost(2000.0)),
    ("acquire_during_teardown", "acquire_p50_us", AtMost(300.0)),
    ("acquire_during_teardown", "acquire_p99_us", AtMost(2000.0)),
    ("acquire_30_clients", "acquire_p99_us", AtMost(10_000.0)),
    ("teardown", "teardown_per_slot", AtMost(2.0)),
    ("adopt", "adopt_ready", AtMost(3.0)),
];

/// Compares a record with every promise that it has figures for.
pub(super) fn verdicts(record: &Record) -> Vec<Verdict> {
    let ratios = RATIOS.iter().filter_map(|(name, bound)| {
        let value = *record.ratios.get(*name)?;
        Some(bound.judge((*name).to_owned(), value))
    });
    let medians = MEDIANS.iter().filter_map(|(case, metric, bound)| {
        let row = record.row(case, metric)?;
        Some(bound.judge(format!("{case} {metric}"), row.median))
    });
    ratios.chain(medians).collect()
}

impl Bound {
    fn judge(&self, what: String, value: f64) -> Verdict {
        let (bound, is_reached) = match self {
            AtLeast(least) => (format!("at least {least}"), value >= *least),
            AtMost(most) => (format!("at most {most}"), value <= *most),
        };
        Verdict {
            what,
            bound,
            value,
            is_reached,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_kept_at_its_very_value() {
        for bound in [AtLeast(2.0), AtMost(2.0)] {
            assert!(bound.judge(String::new(), 2.0).is_reached);
        }
        assert!(!AtLeast(2.0).judge(String::new(), 1.9).is_reached);
        assert!(!AtMost(2.0).judge(String::new(), 2.1).is_reached);
    }

    #[test]
    fn a_figure_that_is_no_number_keeps_no_promise() {
        for bound in [AtLeast(2.0), AtMost(2.0)] {
            assert!(!bound.judge(String::new(), f64::NAN).is_reached);
        }
    }
}
