//! Impairments in a line of text, for flags and for people.
//!
//! ```text
//! IMPAIRMENT   [seed N;] [on-death open;] [budget 1ms;] RULE [; RULE]…
//! RULE         [name NAME] [egress|ingress|both] [match KEY=VALUE…] WHAT…, or `pass`
//! WHAT         loss 1% · delay 50ms 10ms normal · rate 10mbit codel · …
//! ```
//!
//! The words of each impairment are those of its fields. What is written by `Display` is read as an equal value; only the content of
//! a trace that was read from a file isn't written.

mod models;

use std::{fmt, str::FromStr};

use super::{
    Corrupt, Delay, Direction, Flap, Impairment, Loss, Match, Mtu, NatRebind, OnDeath, QueueLimit,
    Rate, Reorder, Rule, Trace, models::InvalidLoss, presentation::network_of,
};

/// Why a text is no impairment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidText {
    /// A word that nothing is called.
    #[error("'{word}' is no impairment: write {KNOWN}")]
    Unknown {
        /// The word.
        word: String,
    },
    /// A word where there can't be one.
    #[error("after '{before}' there can be no '{word}'")]
    Unexpected {
        /// What was read before.
        before: String,
        /// The word.
        word: String,
    },
    /// Something lacks.
    #[error("'{before}' needs {needed}")]
    Missing {
        /// What was read before.
        before: String,
        /// What should follow.
        needed: &'static str,
    },
    /// A word that isn't what it should be.
    #[error("after '{before}': {problem}")]
    Value {
        /// What was read before.
        before: String,
        /// What is wrong with what follows.
        problem: String,
    },
    /// A rule has the same impairment twice.
    #[error("'{word}' is there twice in one rule; separate rules by ';'")]
    Twice {
        /// The word.
        word: String,
    },
    /// A rule says twice which way it is for.
    #[error(
        "'{first}' and '{second}' are in one rule, which is for one of egress, ingress and both; separate rules by ';'"
    )]
    Directions {
        /// What it says first.
        first: String,
        /// What it says then.
        second: String,
    },
    /// A table of a loss model that doesn't fit together.
    #[error(transparent)]
    Loss(#[from] InvalidLoss),
}

const KNOWN: &str = "loss, delay, rate, trace, reorder, duplicate, corrupt, partition, blackhole, flap, mtu, nat-rebind, preset or \
                     pass, after a name, egress or ingress, and match";

/// The words of a text, one after the other.
#[derive(Clone, Debug)]
struct Words<'a> {
    rest: &'a str,
    /// The last words read, for messages.
    before: Vec<&'a str>,
}

type Read<T> = Result<T, InvalidText>;

impl<'a> Words<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            rest: text.trim(),
            before: Vec::new(),
        }
    }

    /// The next word without its quotes, and what follows it.
    fn split(&self) -> (&'a str, &'a str) {
        if let Some((word, rest)) = self
            .rest
            .strip_prefix('"')
            .and_then(|rest| rest.split_once('"'))
        {
            return (word, rest.trim_start());
        }
        let end = self
            .rest
            .find(char::is_whitespace)
            .unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        (word, rest.trim_start())
    }

    fn peek(&self) -> Option<&'a str> {
        (!self.rest.is_empty()).then(|| self.split().0)
    }

    fn next(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let (word, rest) = self.split();
        self.rest = rest;
        self.before.push(word);
        Some(word)
    }

    /// Takes the next word if it is this one.
    fn take(&mut self, word: &str) -> bool {
        let is_next = self.peek() == Some(word);
        if is_next {
            self.next();
        }
        is_next
    }

    /// The next word as a value, if it can be one of a kind that starts with a digit.
    fn number<T: FromStr<Err: fmt::Display>>(&mut self) -> Read<Option<T>> {
        let is_number =
            |word: &str| word.starts_with(|first: char| first.is_ascii_digit() || first == '-');
        if self.peek().is_some_and(is_number) {
            self.value("a number").map(Some)
        } else {
            Ok(None)
        }
    }

    fn value<T: FromStr<Err: fmt::Display>>(&mut self, needed: &'static str) -> Read<T> {
        let before = self.so_far();
        let word = self.next().ok_or(InvalidText::Missing {
            before: before.clone(),
            needed,
        })?;
        word.parse().map_err(|error: T::Err| InvalidText::Value {
            before,
            problem: error.to_string(),
        })
    }

    /// A list of values with commas and no blanks.
    fn list<T: FromStr<Err: fmt::Display>>(&mut self, needed: &'static str) -> Read<Vec<T>> {
        let before = self.so_far();
        let word: String = self.value(needed)?;
        let values: Result<Vec<T>, T::Err> = word.split(',').map(str::parse).collect();
        values.map_err(|error: T::Err| InvalidText::Value {
            before,
            problem: error.to_string(),
        })
    }

    /// All pairs of number and unit that follow.
    fn limit(&mut self) -> Read<QueueLimit> {
        let before = self.so_far();
        let mut text = String::new();
        while let Some(word) = self.peek() {
            let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
            let starts = word.starts_with(|first: char| first.is_ascii_digit());
            // The unit of the number before, or another number.
            let is_unit = text.ends_with(|last: char| last.is_ascii_digit()) && !is_digits(word);
            if !starts && !is_unit {
                break;
            }
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(word);
            self.next();
        }
        text.parse()
            .map_err(|error: super::InvalidQuantity| InvalidText::Value {
                before,
                problem: error.to_string(),
            })
    }

    /// The last words, at most three.
    fn so_far(&self) -> String {
        let first = self.before.len().saturating_sub(3);
        self.before[first..].join(" ").chars().take(80).collect()
    }

    fn end(&mut self) -> Read<()> {
        let before = self.so_far();
        match self.next() {
            None => Ok(()),
            Some(word) => Err(InvalidText::Unexpected {
                before,
                word: cut(word),
            }),
        }
    }
}

fn cut(word: &str) -> String {
    word.chars().take(40).collect()
}

/// What can be read as a part of a text, and as a whole one.
trait FromWords: Sized {
    fn read(words: &mut Words<'_>) -> Read<Self>;

    fn whole(text: &str) -> Read<Self> {
        let mut words = Words::new(text);
        let value = Self::read(&mut words)?;
        words.end()?;
        Ok(value)
    }
}

macro_rules! from_words {
    ($($type:ty),*) => {$(
        impl FromStr for $type {
            type Err = InvalidText;

            fn from_str(text: &str) -> Read<Self> {
                Self::whole(text)
            }
        }
    )*};
}

from_words!(
    Loss, Delay, Rate, Trace, Reorder, Corrupt, Flap, Mtu, NatRebind, Rule
);

const SHARE: &str = "a share, such as 1%";
const TIME: &str = "a time, such as 50ms";
const COUNT: &str = "a whole number";

impl FromWords for Match {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        let mut matches = Self::default();
        while let Some((key, value)) = words.peek().and_then(|word| word.split_once('=')) {
            let before = words.so_far();
            matches
                .set(key, value)
                .map_err(|problem| InvalidText::Value { before, problem })?;
            words.next();
        }
        if matches.is_all() {
            return Err(InvalidText::Missing {
                before: words.so_far(),
                needed: "what to match, such as protocol=udp peer=10.0.0.0/8 peer_port=53",
            });
        }
        Ok(matches)
    }
}

impl Match {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        fn read<T: FromStr<Err: fmt::Display>>(
            key: &str,
            value: &str,
        ) -> Result<Option<T>, String> {
            let value = value.parse().map(Some);
            value.map_err(|error: T::Err| format!("{key}: {error}"))
        }
        let network = |value: &str| {
            let network = network_of(value).map(Some);
            network.map_err(|error| format!("{key}: {error}"))
        };
        match key {
            "version" => self.version = read(key, value)?,
            "protocol" => self.protocol = read(key, value)?,
            "local" => self.local = network(value)?,
            "peer" => self.peer = network(value)?,
            "port" => self.port = read(key, value)?,
            "peer_port" => self.peer_port = read(key, value)?,
            "vlan" => self.vlan = read(key, value)?,
            _ => {
                let key = cut(key);
                return Err(format!(
                    "nothing to match is called '{key}': use version, protocol, local, peer, port, peer_port or vlan"
                ));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Match {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        let mut add = |key: &str, value: Option<String>| {
            words.extend(value.map(|value| format!("{key}={value}")));
        };
        add("version", self.version.map(|value| value.to_string()));
        add("protocol", self.protocol.map(|value| value.to_string()));
        add("local", self.local.map(|value| value.to_string()));
        add("peer", self.peer.map(|value| value.to_string()));
        add("port", self.port.map(|value| value.to_string()));
        add("peer_port", self.peer_port.map(|value| value.to_string()));
        add("vlan", self.vlan.map(|value| value.to_string()));
        f.write_str(&words.join(" "))
    }
}

/// The direction that a word is, of which a rule has one at most.
fn direction_of(word: &str) -> Option<Direction> {
    match word {
        "both" => Some(Direction::Both),
        "egress" => Some(Direction::Egress),
        "ingress" => Some(Direction::Ingress),
        _ => None,
    }
}

impl FromWords for Rule {
    fn read(words: &mut Words<'_>) -> Read<Self> {
        let mut rule = Self::default();
        let mut seen: Vec<&str> = Vec::new();
        let mut passes = false;
        while let Some(word) = words.next() {
            if seen.contains(&word) {
                return Err(InvalidText::Twice { word: cut(word) });
            }
            if let Some(direction) = direction_of(word) {
                let said = seen.iter().find(|seen| direction_of(seen).is_some());
                if let Some(first) = said {
                    let (first, second) = ((*first).to_owned(), word.to_owned());
                    return Err(InvalidText::Directions { first, second });
                }
                rule.direction = direction;
                seen.push(word);
                continue;
            }
            seen.push(word);
            match word {
                "name" => rule.name = Some(words.value("a name")?),
                "match" => rule.matches = Match::read(words)?,
                "pass" => passes = true,
                "preset" => rule.preset = Some(words.value("the name of a preset")?),
                "partition" => rule.partition = true,
                "blackhole" => rule.blackhole = true,
                "flap" => rule.flap = Some(Flap::read(words)?),
                "mtu" => rule.mtu = Some(Mtu::read(words)?),
                "loss" => rule.loss = Some(Loss::read(words)?),
                "rate" => rule.rate = Some(Rate::read(words)?),
                "trace" => rule.trace = Some(Trace::read(words)?),
                "delay" => rule.delay = Some(Delay::read(words)?),
                "reorder" => rule.reorder = Some(Reorder::read(words)?),
                "duplicate" => rule.duplicate = Some(words.value(SHARE)?),
                "corrupt" => rule.corrupt = Some(Corrupt::read(words)?),
                "nat-rebind" => rule.nat_rebind = Some(NatRebind::read(words)?),
                _ => return Err(InvalidText::Unknown { word: cut(word) }),
            }
        }
        if rule.is_nothing() != passes {
            return Err(InvalidText::Missing {
                before: words.so_far(),
                needed: "what is to happen, such as delay 50ms, or pass alone if nothing is",
            });
        }
        Ok(rule)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        let flag = |is_set: bool, word: &str| is_set.then(|| word.to_owned());
        words.extend(self.name.as_ref().map(|name| format!("name {name}")));
        words.extend(flag(self.direction == Direction::Egress, "egress"));
        words.extend(flag(self.direction == Direction::Ingress, "ingress"));
        let mut add = |word: &str, value: Option<String>| {
            words.extend(value.map(|value| format!("{word} {value}").trim_end().to_owned()));
        };
        add(
            "match",
            (!self.matches.is_all()).then(|| self.matches.to_string()),
        );
        add("preset", self.preset.as_ref().map(ToString::to_string));
        add("partition", flag(self.partition, ""));
        add("blackhole", flag(self.blackhole, ""));
        add("flap", self.flap.as_ref().map(ToString::to_string));
        add("mtu", self.mtu.as_ref().map(ToString::to_string));
        add("loss", self.loss.as_ref().map(ToString::to_string));
        add("rate", self.rate.as_ref().map(ToString::to_string));
        add("trace", self.trace.as_ref().map(ToString::to_string));
        add("delay", self.delay.as_ref().map(ToString::to_string));
        add("reorder", self.reorder.as_ref().map(ToString::to_string));
        add(
            "duplicate",
            self.duplicate.as_ref().map(ToString::to_string),
        );
        add("corrupt", self.corrupt.as_ref().map(ToString::to_string));
        add(
            "nat-rebind",
            self.nat_rebind.as_ref().map(ToString::to_string),
        );
        words.extend(flag(self.is_nothing(), "pass"));
        f.write_str(&words.join(" "))
    }
}

impl FromStr for Impairment {
    type Err = InvalidText;

    fn from_str(text: &str) -> Read<Self> {
        let mut impairment = Self::default();
        for part in split_rules(text) {
            let mut words = Words::new(part);
            if words.take("seed") {
                impairment.seed = words.value(COUNT)?;
                words.end()?;
            } else if words.take("on-death") {
                impairment.on_death = match words.value::<String>("closed or open")?.as_str() {
                    "closed" => OnDeath::Closed,
                    "open" => OnDeath::Open,
                    word => return Err(unknown_value("on-death", word, "closed or open")),
                };
                words.end()?;
            } else if words.take("budget") {
                impairment.budget = Some(words.value(TIME)?);
                words.end()?;
            } else if words.peek().is_some() {
                impairment.rules.push(Rule::read(&mut words)?);
            }
        }
        Ok(impairment)
    }
}

impl fmt::Display for Impairment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.seed != 0 {
            parts.push(format!("seed {}", self.seed));
        }
        if self.on_death == OnDeath::Open {
            parts.push("on-death open".to_owned());
        }
        parts.extend(self.budget.map(|budget| format!("budget {budget}")));
        parts.extend(self.rules.iter().map(Rule::to_string));
        f.write_str(&parts.join("; "))
    }
}

/// Parts between semicolons that aren't in quotes.
fn split_rules(text: &str) -> Vec<&str> {
    let mut is_quoted = false;
    let parts = text.split(|letter| {
        is_quoted ^= letter == '"';
        letter == ';' && !is_quoted
    });
    parts.collect()
}

fn unknown_value(before: &str, word: &str, known: &str) -> InvalidText {
    InvalidText::Value {
        before: before.to_owned(),
        problem: format!("'{}' is not {known}", cut(word)),
    }
}
