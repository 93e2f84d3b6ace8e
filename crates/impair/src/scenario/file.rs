//! The file of a scenario: TOML, read with the place of everything that can be wrong.

use std::{collections::BTreeSet, fmt, ops::Range};

use sandwire_api::impairment::{
    BitRate, Direction, Flap, Impairment, OnDeath, Percent, Rule, TimeSpan,
};
use serde::{Deserialize, Deserializer, de};
use toml::Spanned;

use super::{
    Action, EVENTS_MAX, GRANULARITY, GRANULARITY_MIN, LENGTH_MAX, PARTITION_RULE, Repeat,
    STEPS_MAX, Scenario, ScenarioError, Step,
};
use crate::Nanoseconds;

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    seed: Option<Spanned<u64>>,
    #[serde(default)]
    on_death: OnDeath,
    #[serde(default)]
    budget: Option<Spanned<TimeSpan>>,
    #[serde(default)]
    duration: Option<Spanned<TimeSpan>>,
    #[serde(default)]
    repeat: Option<Spanned<RepeatText>>,
    #[serde(default)]
    granularity: Option<Spanned<TimeSpan>>,
    /// What holds at the start.
    #[serde(default, rename = "rule")]
    rules: Option<Spanned<Vec<Rule>>>,
    #[serde(default, rename = "step")]
    steps: Vec<StepTable>,
}

/// A step as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StepTable {
    at: Spanned<TimeSpan>,
    #[serde(default)]
    target: Option<Spanned<String>>,
    #[serde(default)]
    direction: Option<Spanned<Direction>>,
    #[serde(default, rename = "for")]
    lasts: Option<Spanned<TimeSpan>>,
    #[serde(default)]
    over: Option<Spanned<TimeSpan>>,
    #[serde(default)]
    rule: Option<Spanned<String>>,
    #[serde(default)]
    set: Option<Spanned<SetText>>,
    #[serde(default)]
    ramp: Option<Spanned<Values>>,
    #[serde(default)]
    partition: Option<Spanned<bool>>,
    #[serde(default)]
    heal: Option<Spanned<bool>>,
    #[serde(default)]
    flap: Option<Spanned<Flap>>,
    #[serde(default)]
    clear: Option<Spanned<bool>>,
}

/// Numbers that a ramp goes to. What is absent stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Values {
    pub(super) delay: Option<TimeSpan>,
    pub(super) jitter: Option<TimeSpan>,
    pub(super) loss: Option<Percent>,
    pub(super) rate: Option<BitRate>,
    pub(super) duplicate: Option<Percent>,
    pub(super) corrupt: Option<Percent>,
    pub(super) reorder: Option<Percent>,
}

/// Rules, as a line of text or as a table.
#[derive(Debug)]
struct SetText(Impairment);

#[derive(Debug)]
struct RepeatText(Repeat);

impl<'de> Deserialize<'de> for SetText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Impairment;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("rules as a text, such as \"delay 50ms loss 1%\", or a table with them")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Impairment, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Impairment, A::Error> {
                Impairment::deserialize(de::value::MapAccessDeserializer::new(map))
            }
        }

        deserializer.deserialize_any(Visitor).map(Self)
    }
}

impl<'de> Deserialize<'de> for RepeatText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = Repeat;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("how often, such as 3, or \"forever\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Repeat, E> {
                match text {
                    "forever" => Ok(Repeat::Forever),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Repeat, E> {
                let times = u32::try_from(number).ok().filter(|times| *times > 0);
                let problem = "repeat is a number from 1 to 4294967295, or \"forever\"";
                times.map(Repeat::Times).ok_or_else(|| E::custom(problem))
            }
        }

        deserializer.deserialize_any(Visitor).map(Self)
    }
}

/// Knows where lines end: each step asks for its own, so the text is looked through once.
struct Lines(Vec<usize>);

impl Lines {
    fn new(text: &str) -> Self {
        Self(text.match_indices('\n').map(|(at, _)| at).collect())
    }

    fn of(&self, span: &Range<usize>) -> usize {
        self.0.partition_point(|end| *end < span.start) + 1
    }

    fn refuse<T>(
        &self,
        span: &Range<usize>,
        problem: impl Into<String>,
    ) -> Result<T, ScenarioError> {
        Err(ScenarioError {
            line: self.of(span),
            problem: problem.into(),
        })
    }

    /// A time in these bounds.
    fn time(
        &self,
        name: &str,
        time: &Spanned<TimeSpan>,
        least: TimeSpan,
    ) -> Result<Nanoseconds, ScenarioError> {
        let value = *time.get_ref();
        if value < least || value > LENGTH_MAX {
            let problem = format!("{name} is {value}: it must be between {least} and {LENGTH_MAX}");
            return self.refuse(&time.span(), problem);
        }
        Ok(value.as_nanoseconds())
    }
}

const NANOSECOND: TimeSpan = TimeSpan { nanoseconds: 1 };

/// Reads a file. What it comes to in the course of time isn't checked yet.
pub(super) fn read(text: &str, targets: &[&str]) -> Result<Scenario, ScenarioError> {
    let lines = Lines::new(text);
    let file: File = toml::from_str(text).map_err(|error| ScenarioError {
        line: error.span().map_or(1, |span| lines.of(&span)),
        problem: error.message().to_owned(),
    })?;
    if file.steps.len() > STEPS_MAX {
        let count = file.steps.len();
        let problem = format!("{count} steps: at most {STEPS_MAX} are possible");
        return lines.refuse(&file.steps[STEPS_MAX].at.span(), problem);
    }
    let granularity = match &file.granularity {
        Some(granularity) => lines.time("granularity", granularity, GRANULARITY_MIN)?,
        None => GRANULARITY.as_nanoseconds(),
    };
    let duration = match &file.duration {
        Some(duration) => Some(lines.time("duration", duration, GRANULARITY_MIN)?),
        None => None,
    };
    let mut steps = Vec::with_capacity(file.steps.len());
    for table in &file.steps {
        steps.push(read_step(table, &lines, targets, duration)?);
    }
    steps.sort_by_key(|step| step.at);
    let length = length(&file, &steps, duration, &lines)?;
    check_events(&steps, granularity)?;
    let initial = Impairment {
        seed: file.seed.as_ref().map_or(0, |seed| *seed.get_ref()),
        on_death: file.on_death,
        budget: file.budget.as_ref().map(|budget| *budget.get_ref()),
        rules: file
            .rules
            .as_ref()
            .map(|rules| rules.get_ref().clone())
            .unwrap_or_default(),
    };
    let spans = [
        file.rules.as_ref().map(Spanned::span),
        file.budget.as_ref().map(Spanned::span),
        file.seed.as_ref().map(Spanned::span),
    ];
    let place = spans.into_iter().flatten().next().unwrap_or(0..0);
    check_impairment(&initial, &place, &lines)?;
    Ok(Scenario {
        targets: targets.iter().map(|&target| target.to_owned()).collect(),
        initial,
        steps,
        length,
        repeat: file
            .repeat
            .map_or(Repeat::Times(1), |repeat| repeat.get_ref().0),
        granularity,
    })
}

/// How long one repetition is: as the file says, or until the last step has ended.
fn length(
    file: &File,
    steps: &[Step],
    duration: Option<Nanoseconds>,
    lines: &Lines,
) -> Result<Nanoseconds, ScenarioError> {
    let last = steps.iter().max_by_key(|step| step.end());
    let end = last.map_or(0, Step::end);
    if let (Some(duration), Some(last)) = (duration, last)
        && end > duration
    {
        let time = |nanoseconds: Nanoseconds| TimeSpan {
            nanoseconds: i64::try_from(nanoseconds).unwrap_or(i64::MAX),
        };
        let problem = format!(
            "the step ends at {}, after the scenario, which lasts {}",
            time(end),
            time(duration)
        );
        let line = last.line;
        return Err(ScenarioError { line, problem });
    }
    let length = duration.unwrap_or(end);
    match &file.repeat {
        Some(repeat) if length < GRANULARITY_MIN.as_nanoseconds() => lines.refuse(
            &repeat.span(),
            "a scenario without duration ends before it starts: say how long one repetition is, as duration = \"60s\"",
        ),
        _ => Ok(length),
    }
}

/// That ramps and flaps don't make too many moments.
fn check_events(steps: &[Step], granularity: Nanoseconds) -> Result<(), ScenarioError> {
    let mut events = 0u64;
    for step in steps {
        events = events.saturating_add(match &step.action {
            Action::Ramp { over, .. } => over / granularity + 1,
            Action::Flap {
                up, down, lasts, ..
            } => (lasts / (up + down) + 1).saturating_mul(2),
            _ => 2,
        });
        if events > EVENTS_MAX {
            return Err(ScenarioError {
                line: step.line,
                problem: format!(
                    "with this step there are more than {EVENTS_MAX} changes: make granularity coarser, or ramps and flaps shorter"
                ),
            });
        }
    }
    Ok(())
}

fn read_step(
    table: &StepTable,
    lines: &Lines,
    targets: &[&str],
    duration: Option<Nanoseconds>,
) -> Result<Step, ScenarioError> {
    let at = lines.time("at", &table.at, TimeSpan::default())?;
    let target = match &table.target {
        None => None,
        Some(name) => {
            let found = targets.iter().position(|target| target == name.get_ref());
            if found.is_none() {
                let problem = format!(
                    "there is no target '{}': there is {}",
                    name.get_ref().chars().take(80).collect::<String>(),
                    targets.join(", ")
                );
                return lines.refuse(&name.span(), problem);
            }
            found
        }
    };
    let (action, span) = read_action(table, lines, at, duration)?;
    Ok(Step {
        at,
        target,
        action,
        line: lines.of(&span),
    })
}

/// What the step does, and where it says so.
fn read_action(
    table: &StepTable,
    lines: &Lines,
    at: Nanoseconds,
    duration: Option<Nanoseconds>,
) -> Result<(Action, Range<usize>), ScenarioError> {
    let (name, span) = only_action(table, lines)?;
    check_companions(table, name, lines)?;
    let ways = table
        .direction
        .as_ref()
        .map_or(Direction::Both, |direction| *direction.get_ref());
    let lasts = match &table.lasts {
        Some(lasts) => Some(lines.time("for", lasts, NANOSECOND)?),
        None => None,
    };
    let action = if let Some(set) = &table.set {
        let impairment = set.get_ref().0.clone();
        let rules_only = Impairment {
            rules: impairment.rules.clone(),
            ..Impairment::default()
        };
        if impairment != rules_only {
            return lines.refuse(
                &span,
                "seed, on_death and budget stand at the top of the file, for all steps",
            );
        }
        check_impairment(&impairment, &span, lines)?;
        Action::Set(impairment)
    } else if let Some(ramp) = &table.ramp {
        let to = *ramp.get_ref();
        if to == Values::default() {
            let known = "delay, jitter, loss, rate, duplicate, corrupt or reorder";
            return lines.refuse(&span, format!("a ramp to nothing: say {known}"));
        }
        let Some(over) = &table.over else {
            return lines.refuse(&span, "a ramp needs over, such as over = \"10s\"");
        };
        Action::Ramp {
            rule: table.rule.as_ref().map(|rule| rule.get_ref().clone()),
            to,
            over: lines.time("over", over, GRANULARITY_MIN)?,
        }
    } else if let Some(flap) = &table.flap {
        read_flap(flap, ways, lasts, at, duration, lines)?
    } else {
        match name {
            "partition" => Action::Partition { ways, lasts },
            "heal" => Action::Heal { ways },
            _ => Action::Clear,
        }
    };
    Ok((action, span))
}

/// The one thing that the step says is to be done.
fn only_action(
    table: &StepTable,
    lines: &Lines,
) -> Result<(&'static str, Range<usize>), ScenarioError> {
    let flags = [
        ("partition", &table.partition),
        ("heal", &table.heal),
        ("clear", &table.clear),
    ];
    for (name, flag) in flags {
        if let Some(flag) = flag.as_ref().filter(|flag| !flag.get_ref()) {
            return lines.refuse(
                &flag.span(),
                format!("{name} can only be true: leave it out otherwise"),
            );
        }
    }
    let given = [
        ("set", table.set.as_ref().map(Spanned::span)),
        ("ramp", table.ramp.as_ref().map(Spanned::span)),
        ("partition", table.partition.as_ref().map(Spanned::span)),
        ("heal", table.heal.as_ref().map(Spanned::span)),
        ("flap", table.flap.as_ref().map(Spanned::span)),
        ("clear", table.clear.as_ref().map(Spanned::span)),
    ];
    let mut given = given
        .into_iter()
        .filter_map(|(name, span)| Some((name, span?)));
    let Some((name, span)) = given.next() else {
        let problem = "the step does nothing: say set, ramp, partition, heal, flap or clear";
        return lines.refuse(&table.at.span(), problem);
    };
    if let Some((other, span)) = given.next() {
        let problem = format!(
            "the step has {name} and {other}: make two steps, they may be at the same time"
        );
        return lines.refuse(&span, problem);
    }
    Ok((name, span))
}

/// A key, where it stands if it does, and the actions that it belongs to.
type Companion<'a> = (&'a str, Option<Range<usize>>, &'a [&'a str]);

/// That nothing stands beside an action that doesn't belong to it.
fn check_companions(table: &StepTable, name: &str, lines: &Lines) -> Result<(), ScenarioError> {
    let companions: [Companion<'_>; 4] = [
        (
            "for",
            table.lasts.as_ref().map(Spanned::span),
            &["partition", "flap"],
        ),
        ("over", table.over.as_ref().map(Spanned::span), &["ramp"]),
        ("rule", table.rule.as_ref().map(Spanned::span), &["ramp"]),
        (
            "direction",
            table.direction.as_ref().map(Spanned::span),
            &["partition", "flap", "heal"],
        ),
    ];
    for (companion, span, actions) in companions {
        if let Some(span) = span.filter(|_| !actions.contains(&name)) {
            let problem = format!(
                "{companion} belongs to {}, not to {name}",
                actions.join(", ")
            );
            return lines.refuse(&span, problem);
        }
    }
    Ok(())
}

fn read_flap(
    flap: &Spanned<Flap>,
    ways: Direction,
    lasts: Option<Nanoseconds>,
    at: Nanoseconds,
    duration: Option<Nanoseconds>,
    lines: &Lines,
) -> Result<Action, ScenarioError> {
    let span = flap.span();
    let flap = flap.get_ref();
    for (name, time, least) in [
        ("up", flap.up, GRANULARITY_MIN),
        ("down", flap.down, GRANULARITY_MIN),
        ("after", flap.after, TimeSpan::default()),
    ] {
        if time < least || time > LENGTH_MAX {
            let problem =
                format!("flap: {name} is {time}: it must be between {least} and {LENGTH_MAX}");
            return lines.refuse(&span, problem);
        }
    }
    let rest = duration.and_then(|duration| duration.checked_sub(at));
    let Some(lasts) = lasts.or(rest) else {
        let problem = "the flap has no end: say for how long, as for = \"20s\", or give the scenario a duration";
        return lines.refuse(&span, problem);
    };
    Ok(Action::Flap {
        ways,
        up: flap.up.as_nanoseconds(),
        down: flap.down.as_nanoseconds(),
        after: flap.after.as_nanoseconds(),
        lasts,
    })
}

/// That rules can be, and have no name that is taken.
fn check_impairment(
    impairment: &Impairment,
    span: &Range<usize>,
    lines: &Lines,
) -> Result<(), ScenarioError> {
    if let Err(error) = impairment.check() {
        return lines.refuse(span, error.to_string());
    }
    let names: BTreeSet<String> = (0..impairment.rules.len())
        .map(|index| impairment.rule_name(index))
        .collect();
    if names.contains(PARTITION_RULE) {
        let problem =
            format!("no rule may be called {PARTITION_RULE}: partitions of the scenario are");
        return lines.refuse(span, problem);
    }
    Ok(())
}

impl Step {
    /// When all that it does is done.
    pub(super) fn end(&self) -> Nanoseconds {
        let lasts = match &self.action {
            Action::Ramp { over, .. } => *over,
            Action::Partition { lasts, .. } => lasts.unwrap_or(0),
            Action::Flap { lasts, .. } => *lasts,
            Action::Set(_) | Action::Heal { .. } | Action::Clear => 0,
        };
        self.at.saturating_add(lasts)
    }
}
