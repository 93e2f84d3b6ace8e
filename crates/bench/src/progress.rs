//! Says on standard error what a benchmark is doing, by a bar on a terminal and by lines elsewhere.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar for one step of a benchmark. It vanishes when the step ends.
pub(crate) struct Step(ProgressBar);

impl Step {
    /// Begins a step that consists of `total` equal parts.
    pub(crate) fn begin(what: &str, total: u32) -> Self {
        let bar = ProgressBar::new(u64::from(total));
        if bar.is_hidden() {
            eprintln!("{what}");
        }
        let style = ProgressStyle::with_template("{msg:<40} {bar:30} {pos}/{len} {elapsed}")
            .expect("the template is valid");
        bar.set_style(style);
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    /// Says how many parts are done.
    pub(crate) fn at(&self, done: u32) {
        self.0.set_position(u64::from(done));
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
