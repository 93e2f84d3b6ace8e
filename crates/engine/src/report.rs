//! Reports: what an engine, its links and its apps have done, to be read as numbers or printed.

#![forbid(unsafe_code)]

use std::fmt;
use std::time::Duration;

use crate::app::Figure;
use crate::graph::LinkName;
use crate::link::LinkCounters;
use crate::pool::PoolCounters;
use crate::time::Time;

/// The load of an engine over some time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Load {
    /// How long.
    pub time: Duration,
    /// Packets freed; each packet that came in is, whatever became of it.
    pub frees: u64,
    /// Bytes of their frames.
    pub bytes: u64,
    /// What they take on a wire: frames padded to 60 bytes, and 24 for preamble, check sequence and gap.
    pub wire_bytes: u64,
    /// Breaths taken.
    pub breaths: u64,
    /// What the runner slept last; zero while it is busy.
    pub sleep: Duration,
}

impl Load {
    pub(crate) fn between(from: &Mark, to: &Mark) -> Self {
        Self {
            time: to.time.since(from.time),
            frees: to.pool.freed - from.pool.freed,
            bytes: to.pool.freed_bytes - from.pool.freed_bytes,
            wire_bytes: to.pool.freed_wire_bytes - from.pool.freed_wire_bytes,
            breaths: to.breaths - from.breaths,
            sleep: Duration::ZERO,
        }
    }

    /// Frees per second.
    #[must_use]
    pub fn fps(&self) -> f64 {
        ratio(self.frees, self.time.as_secs_f64())
    }

    /// Gigabits per second that the freed packets take on a wire.
    #[must_use]
    pub fn fp_gbps(&self) -> f64 {
        ratio(self.wire_bytes, self.time.as_secs_f64()) * 8.0 / 1e9
    }

    /// Frees per breath.
    #[must_use]
    pub fn fpb(&self) -> f64 {
        ratio(self.frees, real(self.breaths))
    }

    /// Bytes per packet.
    #[must_use]
    pub fn bpp(&self) -> f64 {
        ratio(self.bytes, real(self.frees))
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "load: time: {:.2} fps: {} fpGbps: {:.3} fpb: {} bpp: {} sleep: {}",
            self.time.as_secs_f64(),
            Grouped(whole(self.fps())),
            self.fp_gbps(),
            Grouped(whole(self.fpb())),
            Grouped(whole(self.bpp())),
            self.sleep.as_micros(),
        )
    }
}

/// What had been counted at some time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Mark {
    pub(crate) time: Time,
    pub(crate) breaths: u64,
    pub(crate) pool: PoolCounters,
}

/// All links of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Links(pub Vec<LinkReport>);

impl fmt::Display for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link report:")?;
        self.0.iter().try_for_each(|link| write!(f, "\n  {link}"))
    }
}

/// One link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkReport {
    /// Which.
    pub link: LinkName,
    /// What it has counted.
    pub counters: LinkCounters,
}

impl LinkReport {
    /// Packets that found the link full, of all that were sent to it, in percent.
    #[must_use]
    pub fn loss_percent(&self) -> f64 {
        let offered = self.counters.packets_in + self.counters.dropped;
        ratio(self.counters.dropped, real(offered)) * 100.0
    }
}

impl fmt::Display for LinkReport {
    /// Loss to a hundredth of a percent; what is lost but rounds to none is shown as `<0.01`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sent = Grouped(self.counters.packets_in);
        write!(f, "{sent} sent on {} (loss rate: ", self.link)?;
        match self.loss_percent() {
            0.0 => write!(f, "0%)"),
            percent if percent < 0.01 => write!(f, "<0.01%)"),
            percent => write!(f, "{percent:.2}%)"),
        }
    }
}

/// One app.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppReport {
    /// Its name.
    pub app: String,
    /// Packets that it sent to ports without a link; they were dropped.
    pub sent_nowhere: u64,
    /// What it counts itself.
    pub figures: Vec<Figure>,
}

impl fmt::Display for AppReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.app)?;
        for Figure { name, value } in &self.figures {
            write!(f, " {name}: {}", Grouped(*value))?;
        }
        if self.sent_nowhere > 0 {
            write!(f, " sent nowhere: {}", Grouped(self.sent_nowhere))?;
        }
        Ok(())
    }
}

/// A number with a comma at every thousand.
struct Grouped(u64);

impl fmt::Display for Grouped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        for (index, digit) in digits.chars().enumerate() {
            if index > 0 && (digits.len() - index).is_multiple_of(3) {
                f.write_str(",")?;
            }
            write!(f, "{digit}")?;
        }
        Ok(())
    }
}

/// The quotient, or zero where there is nothing to divide by.
fn ratio(count: u64, by: f64) -> f64 {
    if by > 0.0 { real(count) / by } else { 0.0 }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts are below 2^53, or are read by people"
)]
fn real(count: u64) -> f64 {
    count as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a quotient of counts, to be read by people; the cast saturates"
)]
fn whole(value: f64) -> u64 {
    value.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_reads_as_engines_of_this_kind_write_it() {
        let load = Load {
            time: Duration::from_secs(1),
            frees: 273_891,
            bytes: 273_891 * 1490,
            wire_bytes: 273_891 * 1514,
            breaths: 2685,
            sleep: Duration::ZERO,
        };
        let line = "load: time: 1.00 fps: 273,891 fpGbps: 3.317 fpb: 102 bpp: 1,490 sleep: 0";
        assert_eq!(load.to_string(), line);
    }

    #[test]
    fn a_load_over_no_time_is_none() {
        let line = "load: time: 0.00 fps: 0 fpGbps: 0.000 fpb: 0 bpp: 0 sleep: 0";
        assert_eq!(Load::default().to_string(), line);
    }

    #[test]
    fn loss_is_of_what_was_offered_and_never_rounds_to_none() {
        let mut links = Links(vec![LinkReport {
            link: "if2.output -> if1.input".parse().unwrap(),
            counters: LinkCounters {
                packets_in: 2_723_476,
                ..LinkCounters::default()
            },
        }]);
        let lossless = "Link report:\n  2,723,476 sent on if2.output -> if1.input (loss rate: 0%)";
        assert_eq!(links.to_string(), lossless);
        links.0[0].counters.dropped = 1;
        assert!(links.to_string().ends_with("(loss rate: <0.01%)"));
        links.0[0].counters.dropped = 2_723_476;
        assert!(links.to_string().ends_with("(loss rate: 50.00%)"));
    }
}
