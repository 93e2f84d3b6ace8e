//! Networks by name, each with its numbers and where they come from.

use super::{Direction, Impairment, Rule};

/// A network by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// What one writes.
    pub name: &'static str,
    /// What it stands for.
    pub title: &'static str,
    /// What happens to what leaves the sandbox, as the text of a rule.
    pub egress: &'static str,
    /// What happens to what enters it.
    pub ingress: &'static str,
    /// Where the numbers come from, and which of them are ours.
    pub source: &'static str,
}

/// All presets, the slow ones first.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "edge",
        title: "2G with EDGE",
        egress: "rate 200kbit delay 420ms",
        ingress: "rate 240kbit delay 420ms",
        source: "profile `Edge` in `connectivity.ini.sample` of WebPageTest (github.com/WPO-Foundation/webpagetest): 240/200 kbit/s, 840 ms round trip",
    },
    Preset {
        name: "3g",
        title: "3G",
        egress: "rate 768kbit delay 150ms",
        ingress: "rate 1.6mbit delay 150ms",
        source: "profile `3G` in `connectivity.ini.sample` of WebPageTest (github.com/WPO-Foundation/webpagetest): 1600/768 kbit/s, 300 ms round trip",
    },
    Preset {
        name: "3g-slow",
        title: "3G far from the mast",
        egress: "rate 400kbit delay 200ms",
        ingress: "rate 400kbit delay 200ms",
        source: "profile `3GSlow` in `connectivity.ini.sample` of WebPageTest (github.com/WPO-Foundation/webpagetest): 400/400 kbit/s, 400 ms round trip",
    },
    Preset {
        name: "4g",
        title: "4G, shared with many",
        egress: "rate 9mbit delay 85ms",
        ingress: "rate 9mbit delay 85ms",
        source: "profile `4G` in `connectivity.ini.sample` of WebPageTest (github.com/WPO-Foundation/webpagetest): 9/9 Mbit/s, 170 ms round trip",
    },
    Preset {
        name: "lte",
        title: "LTE",
        egress: "rate 12mbit delay 35ms",
        ingress: "rate 12mbit delay 35ms",
        source: "profile `LTE` in `connectivity.ini.sample` of WebPageTest (github.com/WPO-Foundation/webpagetest): 12/12 Mbit/s, 70 ms round trip",
    },
    Preset {
        name: "adsl",
        title: "ADSL",
        egress: "rate 384kbit overhead 18 cells delay 25ms",
        ingress: "rate 1.5mbit overhead 18 cells delay 25ms",
        source: "profile `DSL` in `connectivity.ini.sample` of WebPageTest (github.com/WPO-Foundation/webpagetest): 1500/384 kbit/s, 50 ms round trip. ATM cells and 18 bytes more per frame (LLC/SNAP-bridged AAL5, RFC 2684 §5.2) are ours",
    },
    Preset {
        name: "cable",
        title: "Cable",
        egress: "rate 1mbit delay 14ms",
        ingress: "rate 5mbit delay 14ms",
        source: "profile `Cable` in `connectivity.ini.sample` of WebPageTest (github.com/WPO-Foundation/webpagetest): 5/1 Mbit/s, 28 ms round trip",
    },
    Preset {
        name: "fibre",
        title: "Fibre to the home",
        egress: "rate 5mbit delay 2ms",
        ingress: "rate 20mbit delay 2ms",
        source: "profile `FIOS` in `connectivity.ini.sample` of WebPageTest (github.com/WPO-Foundation/webpagetest): 20/5 Mbit/s, 4 ms round trip",
    },
];

impl Preset {
    /// The preset of this name.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        PRESETS.iter().find(|preset| preset.name == name)
    }

    /// What happens one way; for both ways, what happens to egress.
    #[must_use]
    pub fn rule(&self, way: Direction) -> Rule {
        let text = match way {
            Direction::Ingress => self.ingress,
            Direction::Egress | Direction::Both => self.egress,
        };
        // A test reads them all.
        let mut rule: Rule = text.parse().unwrap_or_default();
        rule.direction = way;
        rule
    }

    /// The preset as an impairment of its own, with all its numbers.
    #[must_use]
    pub fn impairment(&self) -> Impairment {
        Impairment {
            rules: vec![self.rule(Direction::Egress), self.rule(Direction::Ingress)],
            ..Impairment::default()
        }
    }
}
