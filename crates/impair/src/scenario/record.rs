//! A scenario out of what was measured on a live link: probes that were answered or not, and bytes that passed.
//!
//! Nothing here has a clock or a socket: who probes passes in what it saw. One end sees round trips only. So each
//! direction gets half the round trip, and the loss that makes the measured share of both; how the two really
//! differ can't be known from here, and the file says so.

use std::fmt::Write;

use sandwire_api::impairment::{BitRate, Percent, TimeSpan};

use super::STEPS_MAX;
use crate::Nanoseconds;

/// One probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// When it was sent, from the start of the recording.
    pub sent: Nanoseconds,
    /// How long its answer took; none if none came.
    pub round_trip: Option<Nanoseconds>,
}

/// A reading of an interface's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// When, from the start of the recording.
    pub at: Nanoseconds,
    /// Bytes that had left, since whenever.
    pub egress: u64,
    /// Bytes that had come.
    pub ingress: u64,
}

/// All that was measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// In the order in which they were sent.
    pub probes: Vec<Probe>,
    /// In the order of their moments; fewer than two if rates are not to be in the scenario.
    pub readings: Vec<Reading>,
    /// How long it was measured.
    pub length: Nanoseconds,
}

/// Figures of a whole recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Probes that were sent.
    pub sent: usize,
    /// Those that were answered.
    pub answered: usize,
    /// The shortest round trip.
    pub least: Nanoseconds,
    /// The one that half of them don't exceed.
    pub median: Nanoseconds,
    /// The longest.
    pub most: Nanoseconds,
}

/// Why nothing can be made of a recording.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Without one answer no delay is known.
    #[error("none of {sent} probes was answered")]
    NoAnswer {
        /// Probes that were sent.
        sent: usize,
    },
    /// A scenario couldn't be read again.
    #[error("{steps} steps: a scenario has at most {STEPS_MAX}; make them longer")]
    TooManySteps {
        /// Those that it would take.
        steps: u64,
    },
}

/// Answers of a step from which on their spread says something.
const ANSWERS_FOR_JITTER: usize = 5;
/// Less jitter than this is that of the measuring.
const JITTER_MIN: Nanoseconds = 10_000;
/// Median of the absolute deviations to standard deviation, if the distribution is normal.
const DEVIATIONS: f64 = 1.4826;
/// Rates that a rule may have.
const RATES: std::ops::RangeInclusive<u64> = 10_000..=10_000_000_000;

/// What was seen within one step.
#[derive(Clone, Debug, Default, PartialEq)]
struct Seen {
    sent: usize,
    /// In order of length.
    round_trips: Vec<Nanoseconds>,
    /// Bytes that left and came, and for how long they were counted.
    egress: u64,
    ingress: u64,
    counted: Nanoseconds,
}

/// What each direction gets in one step.
#[derive(Clone, Debug, PartialEq)]
struct Settings {
    delay: TimeSpan,
    jitter: TimeSpan,
    loss: Percent,
    egress: Option<BitRate>,
    ingress: Option<BitRate>,
}

impl Recording {
    /// Figures of all of it.
    ///
    /// # Errors
    /// If no probe was answered.
    pub fn summary(&self) -> Result<Summary, RecordError> {
        let sent = self.probes.len();
        let mut round_trips: Vec<_> = self.probes.iter().filter_map(|it| it.round_trip).collect();
        round_trips.sort_unstable();
        match (round_trips.first(), round_trips.last()) {
            (Some(&least), Some(&most)) => Ok(Summary {
                sent,
                answered: round_trips.len(),
                least,
                median: median(&round_trips),
                most,
            }),
            _ => Err(RecordError::NoAnswer { sent }),
        }
    }

    /// The text of a scenario that does in steps of this length what was measured. `origin` says how and when that was,
    /// and becomes a comment. `has_jitter`: also the spread of round trips within a step, with packets that overtake each
    /// other. If their order were kept, those that are closer together than the jitter would all wait for the latest.
    ///
    /// # Errors
    /// If no probe was answered, or there would be too many steps.
    pub fn scenario(
        &self,
        step: Nanoseconds,
        has_jitter: bool,
        origin: &str,
    ) -> Result<String, RecordError> {
        let summary = self.summary()?;
        let step = step.max(1);
        let count = (self.length.saturating_add(step / 2) / step).max(1);
        let count = usize::try_from(count)
            .ok()
            .filter(|count| *count <= STEPS_MAX)
            .ok_or(RecordError::TooManySteps { steps: count })?;
        let has_rates = self.readings.len() > 1;
        let course = settings(&self.seen(step, count), has_rates, has_jitter && !has_rates);
        let mut text = comments(&summary, step, has_rates, origin);
        // Steps begin before the end, even if that is cut to a whole millisecond.
        let length = self.length.div_ceil(1_000_000).max(1) * 1_000_000;
        line(&mut text, &format!("duration = \"{}\"", span(length)));
        let mut last = None;
        for (number, settings) in (0u64..).zip(&course) {
            match last {
                None => text.push_str(&settings.tables(has_rates)),
                Some(last) if last == settings => {}
                Some(_) => {
                    let at = span(number * step);
                    let set = settings.words(has_rates);
                    line(
                        &mut text,
                        &format!("\n[[step]]\nat = \"{at}\"\nset = \"{set}\""),
                    );
                }
            }
            last = Some(settings);
        }
        Ok(text)
    }

    /// What belongs to each step. What was seen after the last belongs to it.
    fn seen(&self, step: Nanoseconds, count: usize) -> Vec<Seen> {
        let index =
            |at: Nanoseconds| usize::try_from(at / step).map_or(count - 1, |it| it.min(count - 1));
        let mut seen = vec![Seen::default(); count];
        for probe in &self.probes {
            let seen = &mut seen[index(probe.sent)];
            seen.sent += 1;
            seen.round_trips.extend(probe.round_trip);
        }
        for pair in self.readings.windows(2) {
            let [before, after] = pair else { continue };
            let seen = &mut seen[index(before.at.midpoint(after.at))];
            // An interface that was made anew counts from 0 again.
            seen.egress += after.egress.saturating_sub(before.egress);
            seen.ingress += after.ingress.saturating_sub(before.ingress);
            seen.counted += after.at.saturating_sub(before.at);
        }
        for seen in &mut seen {
            seen.round_trips.sort_unstable();
        }
        seen
    }
}

/// What comes of it. A step that no probe fell into is as the one before it; where none was answered the delay is.
fn settings(seen: &[Seen], has_rates: bool, has_jitter: bool) -> Vec<Settings> {
    let first = seen.iter().find(|seen| !seen.round_trips.is_empty());
    let mut delay = first.map_or(0, |seen| seen.delay(has_rates));
    let mut loss = Percent::default();
    let mut course = Vec::with_capacity(seen.len());
    for seen in seen {
        if !seen.round_trips.is_empty() {
            delay = seen.delay(has_rates);
        }
        if seen.sent > 0 {
            loss = seen.loss();
        }
        // The queue before a rate makes its own.
        let jitter = if has_jitter { seen.jitter() } else { 0 };
        course.push(Settings {
            delay: span(delay),
            jitter: span(jitter),
            loss,
            egress: seen.rate(seen.egress).filter(|_| has_rates),
            ingress: seen.rate(seen.ingress).filter(|_| has_rates),
        });
    }
    course
}

impl Seen {
    /// Of each direction, in whole microseconds. With rates the shortest round trip counts, since what is longer
    /// than that waited in the queue that the rate has too.
    fn delay(&self, has_rates: bool) -> Nanoseconds {
        let round_trip = match self.round_trips.first() {
            Some(&least) if has_rates => least,
            _ => median(&self.round_trips),
        };
        (round_trip / 2).div_ceil(1_000).max(1) * 1_000
    }

    /// Standard deviation of each direction's delay, in whole microseconds, by the median of deviations: one answer
    /// that came late since a processor was busy doesn't count. Two directions together have √2 of it.
    fn jitter(&self) -> Nanoseconds {
        if self.round_trips.len() < ANSWERS_FOR_JITTER {
            return 0;
        }
        let middle = median(&self.round_trips);
        let mut deviations: Vec<_> = self
            .round_trips
            .iter()
            .map(|round_trip| round_trip.abs_diff(middle))
            .collect();
        deviations.sort_unstable();
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a time of seconds, and a part of it"
        )]
        let jitter =
            (median(&deviations) as f64 * DEVIATIONS / std::f64::consts::SQRT_2) as Nanoseconds;
        if jitter < JITTER_MIN {
            return 0;
        }
        jitter / 1_000 * 1_000
    }

    /// Of each direction, such that both together lose what was lost, in hundredths of a percent.
    fn loss(&self) -> Percent {
        if self.round_trips.is_empty() {
            return Percent::all();
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53 probes")]
        let answered = self.round_trips.len() as f64 / self.sent as f64;
        #[expect(clippy::cast_possible_truncation, reason = "a number from 0 to 10,000")]
        let hundredths = ((1.0 - answered.sqrt()) * 1e4).round() as i64;
        Percent::thousandths(hundredths * 10)
    }

    /// None if so few bytes passed that they say nothing.
    fn rate(&self, bytes: u64) -> Option<BitRate> {
        let bits = u128::from(bytes) * 8 * 1_000_000_000;
        let rate = bits.checked_div(u128::from(self.counted))?;
        let rate = u64::try_from(rate).unwrap_or(u64::MAX).min(*RATES.end());
        // Four digits are more than was measured.
        let unit = 10u64.pow(rate.checked_ilog10()?.saturating_sub(3));
        Some(BitRate {
            bits_per_second: rate / unit * unit,
        })
        .filter(|rate| RATES.contains(&rate.bits_per_second))
    }
}

impl Settings {
    /// Rules, each with its name, direction, and keys and values of what it does.
    fn rules(&self, has_rates: bool) -> Vec<(&'static str, Option<&'static str>, Keys)> {
        if !has_rates {
            return vec![("recorded", None, self.keys(None))];
        }
        vec![
            ("recorded-egress", Some("egress"), self.keys(self.egress)),
            ("recorded-ingress", Some("ingress"), self.keys(self.ingress)),
        ]
    }

    fn keys(&self, rate: Option<BitRate>) -> Keys {
        let mut delay = self.delay.to_string();
        if self.jitter != TimeSpan::default() {
            delay += &format!(" {} normal order any", self.jitter);
        }
        let mut keys = Vec::new();
        if self.loss != Percent::default() {
            keys.push(("loss", self.loss.to_string()));
        }
        keys.extend(rate.map(|rate| ("rate", rate.to_string())));
        keys.push(("delay", delay));
        keys
    }

    /// As tables of TOML.
    fn tables(&self, has_rates: bool) -> String {
        let mut text = String::new();
        for (name, direction, keys) in self.rules(has_rates) {
            line(&mut text, &format!("\n[[rule]]\nname = \"{name}\""));
            let direction = direction.map(|direction| ("direction", direction.to_owned()));
            for (key, value) in direction.into_iter().chain(keys) {
                line(&mut text, &format!("{key} = \"{value}\""));
            }
        }
        text
    }

    /// As a line of text.
    fn words(&self, has_rates: bool) -> String {
        let rules = self.rules(has_rates).into_iter();
        let rules = rules.map(|(name, direction, keys)| {
            let mut words = vec![format!("name {name}")];
            words.extend(direction.map(str::to_owned));
            words.extend(keys.iter().map(|(key, value)| format!("{key} {value}")));
            words.join(" ")
        });
        rules.collect::<Vec<_>>().join("; ")
    }
}

/// Keys and values of a rule.
type Keys = Vec<(&'static str, String)>;

/// What stands at the top of the file.
fn comments(summary: &Summary, step: Nanoseconds, has_rates: bool, origin: &str) -> String {
    let Summary {
        sent,
        answered,
        least,
        median,
        most,
    } = *summary;
    let mut text = String::new();
    let mut comment = |words: &str| {
        for words in words.lines() {
            let words: String = words
                .chars()
                .filter(|letter| !letter.is_control())
                .collect();
            line(&mut text, &format!("# {words}"));
        }
    };
    comment(origin);
    comment(&format!(
        "{sent} probes, {answered} answered; round trip: least {}, median {}, most {}. In steps of {}.",
        span(least),
        span(median),
        span(most),
        span(step)
    ));
    comment(
        "Each direction has half the round trip, and the loss that makes the measured share of both. One end cannot\n\
         know how the two directions differ, nor what happens only to packets that are larger or closer together than\n\
         probes. A late answer is a lost one.",
    );
    if has_rates {
        comment(
            "Rates are what passed, the least that the link can; a step without one had next to no traffic. Delay is the\n\
             shortest round trip of each step: what took longer waited in a queue, and the rate has one.",
        );
    } else {
        comment("Rates were not measured.");
    }
    text.push('\n');
    text
}

fn line(text: &mut String, words: &str) {
    // A string takes everything.
    let _ = writeln!(text, "{words}");
}

fn span(nanoseconds: Nanoseconds) -> TimeSpan {
    TimeSpan {
        nanoseconds: i64::try_from(nanoseconds).unwrap_or(i64::MAX),
    }
}

/// The middle of what is in order; between two, the middle of both.
fn median(sorted: &[Nanoseconds]) -> Nanoseconds {
    let half = sorted.len() / 2;
    match (sorted.get(half), sorted.len() % 2) {
        (Some(&middle), 1) => middle,
        (Some(&above), _) => sorted[half - 1].midpoint(above),
        (None, _) => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::scenario::Scenario;

    const MS: Nanoseconds = 1_000_000;
    const S: Nanoseconds = 1_000 * MS;

    /// Ten probes a second for so many seconds, the answers of which take what `round_trip` says.
    fn recording(seconds: u64, round_trip: impl Fn(u64) -> Option<Nanoseconds>) -> Recording {
        let probe = |number| Probe {
            sent: number * 100 * MS,
            round_trip: round_trip(number),
        };
        Recording {
            probes: (0..seconds * 10).map(probe).collect(),
            readings: Vec::new(),
            length: seconds * S,
        }
    }

    /// Milliseconds and impairments of what a recording comes to, read as any scenario is.
    fn course(recording: &Recording) -> Vec<(u64, String)> {
        let text = recording.scenario(S, true, "from a test").unwrap();
        let scenario =
            Scenario::parse(&text, &["it"]).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(scenario.length(), Some(recording.length.div_ceil(MS) * MS));
        let changes = scenario.changes();
        changes
            .map(|change| (change.at / MS, change.impairment.to_string()))
            .collect()
    }

    fn as_text(course: &[(u64, String)]) -> Vec<(u64, &str)> {
        course
            .iter()
            .map(|(at, text)| (*at, text.as_str()))
            .collect()
    }

    #[test]
    fn each_direction_has_half_the_round_trip_and_equal_steps_are_one() {
        let recording = recording(4, |number| {
            Some(if number < 30 { 40 * MS } else { 51 * MS })
        });
        assert_eq!(
            as_text(&course(&recording)),
            [
                (0, "name recorded delay 20ms"),
                (3000, "name recorded delay 25.5ms"),
            ]
        );
    }

    /// 36 % of round trips lost is what two directions make that lose 20 % each: 1 − 0.8².
    #[test]
    fn both_directions_together_lose_what_was_lost() {
        let probe = |number: u64| Probe {
            sent: number * 10 * MS,
            round_trip: (number % 25 >= 9).then_some(10 * MS),
        };
        let recording = Recording {
            probes: (0..100).map(probe).collect(),
            readings: Vec::new(),
            length: S,
        };
        assert_eq!(
            as_text(&course(&recording)),
            [(0, "name recorded loss 20% delay 5ms")]
        );
    }

    #[test]
    fn jitter_is_the_spread_without_the_one_that_came_much_too_late() {
        // Deviations of 0, 2 and 4 ms, the median of which is 3 ms, and one of almost 900 ms.
        let late = [0, 2, 4, 6, 8, 4, 0, 8, 2, 900];
        let spread = recording(1, |number| {
            Some((20 + late[usize::try_from(number).unwrap()]) * MS)
        });
        let text = course(&spread).remove(0).1;
        // Half of 24 ms; 3 ms · 1.4826 / √2.
        assert_eq!(text, "name recorded delay 12ms 3.145ms normal order any");
        let few = recording(1, |number| (number < 4).then_some((20 + 5 * number) * MS));
        assert!(!course(&few)[0].1.contains("normal"));
    }

    #[test]
    fn an_outage_loses_everything_and_keeps_the_delay() {
        let outage = |number: u64| (!(20..40).contains(&number)).then_some(30 * MS);
        assert_eq!(
            as_text(&course(&recording(5, outage))),
            [
                (0, "name recorded delay 15ms"),
                (2000, "name recorded loss 100% delay 15ms"),
                (4000, "name recorded delay 15ms"),
            ]
        );
        let late = |number: u64| (number >= 10).then_some(30 * MS);
        assert_eq!(
            as_text(&course(&recording(2, late)))[0],
            (0, "name recorded loss 100% delay 15ms")
        );
    }

    #[test]
    fn a_step_without_probes_is_as_the_one_before() {
        let mut recording = recording(3, |_| Some(30 * MS));
        recording.probes.retain(|probe| probe.sent / S != 1);
        assert_eq!(
            as_text(&course(&recording)),
            [(0, "name recorded delay 15ms")]
        );
    }

    #[test]
    fn rates_are_those_of_each_direction_and_only_where_something_passed() {
        let mut recording = recording(2, |number| Some((20 + number) * MS));
        let reading = |at, egress, ingress| Reading {
            at,
            egress,
            ingress,
        };
        recording.readings = vec![
            reading(0, 5_000, 70),
            reading(S, 1_255_000, 70 + 12_345_678),
            reading(2 * S, 1_255_100, 5),
        ];
        assert_eq!(
            as_text(&course(&recording)),
            [
                (
                    0,
                    "name recorded-egress egress rate 10mbit delay 10ms; name recorded-ingress ingress rate 98.76mbit delay 10ms"
                ),
                (
                    1000,
                    "name recorded-egress egress delay 15ms; name recorded-ingress ingress delay 15ms"
                ),
            ]
        );
    }

    #[test]
    fn the_file_says_where_it_comes_from_and_nothing_leaves_its_comment() {
        let recording = recording(1, |_| Some(30 * MS));
        let text = recording
            .scenario(S, false, "Measured on a day.\nFrom here\rduration = 1")
            .unwrap();
        assert!(text.starts_with(
            "# Measured on a day.\n# From hereduration = 1\n# 10 probes, 10 answered"
        ));
        assert!(text.contains("cannot\n# know how the two directions differ"));
    }

    #[test]
    fn without_an_answer_or_with_too_many_steps_there_is_no_scenario() {
        let silent = recording(2, |_| None);
        assert_eq!(
            silent.scenario(S, false, ""),
            Err(RecordError::NoAnswer { sent: 20 })
        );
        assert_eq!(
            Recording::default().scenario(S, false, ""),
            Err(RecordError::NoAnswer { sent: 0 })
        );
        let long = recording(11, |_| Some(MS));
        assert_eq!(
            long.scenario(MS, false, ""),
            Err(RecordError::TooManySteps { steps: 11_000 })
        );
    }

    proptest! {
        /// Whatever was measured, the scenario can be read, and has the whole length.
        #[test]
        fn every_recording_with_an_answer_is_a_scenario(
            probes in prop::collection::vec((0..20 * S, prop::option::of(0..4 * S)), 1..100),
            readings in prop::collection::vec((0..20 * S, any::<u64>(), any::<u64>()), 0..10),
            length in 1..20 * S,
            step in 1_000_000..5 * S,
        ) {
            let probes = probes.into_iter().map(|(sent, round_trip)| Probe { sent, round_trip });
            let mut readings: Vec<_> = readings
                .into_iter()
                .map(|(at, egress, ingress)| Reading { at, egress: egress >> 8, ingress: ingress >> 8 })
                .collect();
            readings.sort_by_key(|reading| reading.at);
            let recording = Recording { probes: probes.collect(), readings, length };
            match recording.scenario(step, true, "any") {
                Ok(text) => {
                    let scenario = Scenario::parse(&text, &["it"]);
                    let scenario = scenario.map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
                    prop_assert_eq!(scenario.length(), Some(length.div_ceil(MS) * MS));
                }
                Err(RecordError::NoAnswer { .. }) => {
                    prop_assert!(recording.probes.iter().all(|probe| probe.round_trip.is_none()));
                }
                Err(RecordError::TooManySteps { steps }) => prop_assert!(steps > 10_000),
            }
        }
    }
}
