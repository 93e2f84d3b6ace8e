//! Progress bars on standard error, hidden where that is not a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts up to `total`. It shows nothing away from a terminal.
pub(crate) fn bar(total: u64, doing: &str) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}") {
        bar.set_style(style);
    }
    bar.set_message(doing.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
