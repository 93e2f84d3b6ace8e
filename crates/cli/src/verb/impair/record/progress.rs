//! How far the measuring is, for who looks at a terminal.

use std::time::Duration;

use indicatif::ProgressBar;

use crate::{output::Output, progress};

/// Time from one figure to the next.
const PACE: Duration = Duration::from_millis(250);

/// A bar of seconds with what was answered so far; nothing where nobody would see it.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    next: Duration,
}

impl Progress {
    /// For measuring that takes this long.
    pub(super) fn new(output: Output, length: Duration) -> Self {
        let bar = if output.json {
            ProgressBar::hidden()
        } else {
            progress::bar(length.as_secs(), "measuring")
        };
        Self {
            bar,
            next: Duration::ZERO,
        }
    }

    /// When it wants to be told the next time; never, if nobody looks.
    pub(super) fn due(&self) -> Duration {
        if self.bar.is_hidden() {
            Duration::MAX
        } else {
            self.next
        }
    }

    /// Says how far it is. Costs nothing before it is due.
    pub(super) fn tell(&mut self, now: Duration, sent: usize, answered: usize) {
        if now < self.due() {
            return;
        }
        self.next = now + PACE;
        let length = self.bar.length().unwrap_or(0);
        let doing = if now.as_secs() < length {
            "measuring"
        } else {
            "waiting for the last answers"
        };
        self.bar
            .set_message(format!("{doing}: {answered} of {sent} probes answered"));
        self.bar.set_position(now.as_secs().min(length));
    }
}

impl Drop for Progress {
    /// Leaves no trace on the terminal.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use indicatif::ProgressDrawTarget;

    use super::*;

    #[test]
    fn nobody_is_told_with_json() {
        let mut progress = Progress::new(Output { json: true }, Duration::from_secs(9));
        assert_eq!(progress.due(), Duration::MAX);
        progress.tell(Duration::from_secs(3), 30, 29);
        assert_eq!(progress.bar.position(), 0);
    }

    #[test]
    fn a_terminal_is_told_now_and_then() {
        let target = ProgressDrawTarget::term_like(Box::new(Terminal));
        let mut progress = Progress {
            bar: ProgressBar::with_draw_target(Some(9), target),
            next: Duration::ZERO,
        };
        progress.tell(Duration::from_secs(3), 30, 29);
        assert_eq!(progress.bar.position(), 3);
        assert_eq!(
            progress.bar.message(),
            "measuring: 29 of 30 probes answered"
        );
        progress.tell(Duration::from_millis(3_100), 31, 30);
        assert!(progress.bar.message().contains("29 of 30"));
        progress.tell(Duration::from_secs(10), 90, 89);
        assert_eq!(progress.bar.position(), 9);
        assert!(progress.bar.message().starts_with("waiting"));
    }

    /// One that shows nothing.
    #[derive(Debug)]
    struct Terminal;

    impl indicatif::TermLike for Terminal {
        fn width(&self) -> u16 {
            80
        }

        fn move_cursor_up(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }

        fn write_line(&self, _: &str) -> std::io::Result<()> {
            Ok(())
        }

        fn write_str(&self, _: &str) -> std::io::Result<()> {
            Ok(())
        }

        fn clear_line(&self) -> std::io::Result<()> {
            Ok(())
        }

        fn flush(&self) -> std::io::Result<()> {
            Ok(())
        }
    }
}
