//! One impairment out of texts, one for each way between two ends or for both.
//!
//! Both doors that have two ends, `sandwire forward` and the links of a lab, are told what happens from the first to
//! the second (`ab`) and back (`ba`). The models know a sandbox and what leaves it: the first end is the sandbox here, so
//! `ab` is egress.

use sandwire_api::{
    impairment::{Direction, Impairment, InvalidImpairment, InvalidText, OnDeath},
    name::Name,
};

/// What is wrong with the texts.
#[derive(Debug, thiserror::Error)]
pub enum WaysError {
    /// Not a text of an impairment.
    #[error("{key}: {source}")]
    Text {
        /// Which of the texts.
        key: &'static str,
        /// What is wrong with it.
        source: InvalidText,
    },
    /// A rule says which way it is for, as the key does.
    #[error("{key}: '{direction}' can't be said here: {key} is the direction")]
    Direction {
        /// Which of the texts.
        key: &'static str,
        /// What it says.
        direction: Direction,
    },
    /// Two seeds.
    #[error("there are two seeds, {one} and {other}: a link has one, so give it once")]
    Seeds {
        /// One.
        one: u64,
        /// The other.
        other: u64,
    },
    /// It can't be done.
    #[error(transparent)]
    Impairment(#[from] InvalidImpairment),
}

/// What is said of a link, as texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ways<'a> {
    /// From its first end to the second.
    pub ab: Option<&'a str>,
    /// Back.
    pub ba: Option<&'a str>,
    /// Both ways, for packets that no rule of the others matches.
    pub both: Option<&'a str>,
}

impl Ways<'_> {
    /// The impairment of the link.
    ///
    /// # Errors
    /// What is wrong, with the key.
    pub fn combine(self) -> Result<Impairment, WaysError> {
        let parts = [
            read("ab", Direction::Egress, self.ab)?,
            read("ba", Direction::Ingress, self.ba)?,
            read("both", Direction::Both, self.both)?,
        ];
        let mut combined = Impairment::default();
        for part in parts {
            if combined.seed != 0 && part.seed != 0 && combined.seed != part.seed {
                return Err(WaysError::Seeds {
                    one: combined.seed,
                    other: part.seed,
                });
            }
            combined.seed |= part.seed;
            combined.budget = combined.budget.or(part.budget);
            if part.on_death == OnDeath::Open {
                combined.on_death = OnDeath::Open;
            }
            combined.rules.extend(part.rules);
        }
        combined.check()?;
        Ok(combined)
    }
}

/// One way. Its rules get names that don't depend on the other, since their random numbers depend on their names.
fn read(key: &'static str, way: Direction, text: Option<&str>) -> Result<Impairment, WaysError> {
    let Some(text) = text else {
        return Ok(Impairment::default());
    };
    let parsed = text.parse::<Impairment>();
    let mut impairment = parsed.map_err(|source| WaysError::Text { key, source })?;
    for (index, rule) in impairment.rules.iter_mut().enumerate() {
        if rule.direction != Direction::Both {
            let direction = rule.direction;
            return Err(WaysError::Direction { key, direction });
        }
        rule.direction = way;
        if rule.name.is_none() {
            let name: Option<Name> = format!("{key}-{}", index + 1).parse().ok();
            rule.name = name;
        }
    }
    Ok(impairment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_its_rules_and_names_that_the_other_does_not_change() {
        let both = Ways {
            ab: Some("seed 7; name dns match protocol=udp peer_port=53 loss 1%; delay 50ms"),
            ba: Some("on-death open; rate 10mbit"),
            both: Some("preset lte"),
        };
        let both = both.combine().unwrap();
        assert_eq!((both.seed, both.on_death), (7, OnDeath::Open));
        let rules: Vec<(String, Direction)> = both
            .rules
            .iter()
            .enumerate()
            .map(|(index, rule)| (both.rule_name(index), rule.direction))
            .collect();
        let expected = [
            ("dns", Direction::Egress),
            ("ab-2", Direction::Egress),
            ("ba-1", Direction::Ingress),
            ("both-1", Direction::Both),
        ];
        let expected = expected.map(|(name, direction)| (name.to_owned(), direction));
        assert_eq!(rules, expected);
        let alone = Ways {
            ba: Some("rate 10mbit"),
            ..Ways::default()
        };
        assert_eq!(alone.combine().unwrap().rules, both.rules[2..3]);
        assert!(Ways::default().combine().unwrap().is_nothing());
    }

    #[test]
    fn what_is_wrong_is_said_with_its_key() {
        let refusal = |ab: &str, ba: &str| {
            let ways = Ways {
                ab: Some(ab),
                ba: Some(ba),
                both: None,
            };
            ways.combine().unwrap_err().to_string()
        };
        assert!(refusal("delay 5ms", "los 1%").starts_with("ba: "));
        assert!(refusal("ingress loss 1%", "pass").contains("ab is the direction"));
        assert!(refusal("seed 1; loss 1%", "seed 2; loss 1%").contains("give it once"));
        assert!(refusal("loss 101%", "pass").contains("loss"));
    }
}
