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

/// All presets, the slow ones first. Delays are half of the round trip that the source tells.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "dial-up",
        title: "Telephone modem",
        egress: "rate 30kbit delay 60ms",
        ingress: "rate 49kbit delay 60ms",
        source: "Profile Dial of [WebPageTest]: 49/30 kbit/s, 120 ms.",
    },
    Preset {
        name: "edge",
        title: "2G with EDGE",
        egress: "rate 200kbit delay 420ms",
        ingress: "rate 240kbit delay 420ms",
        source: "Profile Edge of [WebPageTest]: 240/200 kbit/s, 840 ms.",
    },
    Preset {
        name: "3g-slow",
        title: "3G, slow",
        egress: "rate 400kbit delay 200ms",
        ingress: "rate 400kbit delay 200ms",
        source: "Profile 3GSlow of [WebPageTest]: 400/400 kbit/s, 400 ms.",
    },
    Preset {
        name: "3g",
        title: "3G",
        egress: "rate 768kbit delay 150ms",
        ingress: "rate 1.6mbit delay 150ms",
        source: "Profile 3G of [WebPageTest]: 1600/768 kbit/s, 300 ms.",
    },
    Preset {
        name: "4g",
        title: "4G, slow",
        egress: "rate 9mbit delay 85ms",
        ingress: "rate 9mbit delay 85ms",
        source: "Profile 4G of [WebPageTest]: 9/9 Mbit/s, 170 ms.",
    },
    Preset {
        name: "lte",
        title: "LTE",
        egress: "rate 12mbit delay 35ms",
        ingress: "rate 12mbit delay 35ms",
        source: "Profile LTE of [WebPageTest]: 12/12 Mbit/s, 70 ms.",
    },
    Preset {
        name: "5g",
        title: "5G",
        egress: "rate 21.08mbit delay 25ms",
        ingress: "rate 166.13mbit delay 25ms",
        source: "Medians of Speedtest: 166.13/21.08 Mbit/s over 5G worldwide in 3Q 2021 ([Ookla 2021]); 50 ms over T-Mobile's 5G in the USA in 3Q 2023 ([Ookla 2023]).",
    },
    Preset {
        name: "adsl",
        title: "ADSL",
        egress: "rate 384kbit overhead 18 cells delay 25ms",
        ingress: "rate 1.5mbit overhead 18 cells delay 25ms",
        source: "Profile DSL of [WebPageTest]: 1500/384 kbit/s, 50 ms. Ours: ATM cells, and 18 bytes around each frame for bridging, LLC and AAL5 (RFC 2684 §5.2).",
    },
    Preset {
        name: "cable-slow",
        title: "Cable of 2012",
        egress: "rate 1mbit delay 14ms",
        ingress: "rate 5mbit delay 14ms",
        source: "Profile Cable of [WebPageTest]: 5/1 Mbit/s, 28 ms.",
    },
    Preset {
        name: "cable",
        title: "Cable",
        egress: "rate 30.6mbit delay 12.5ms",
        ingress: "rate 260.09mbit delay 12.5ms",
        source: "Medians of Speedtest for Cox in the USA in 3Q 2023: 260.09/30.60 Mbit/s, 25 ms ([Ookla 2023]).",
    },
    Preset {
        name: "fibre",
        title: "Fibre to the home",
        egress: "rate 91.36mbit delay 8ms",
        ingress: "rate 184.86mbit delay 8ms",
        source: "Medians of Speedtest for Verizon in the USA in 3Q 2023: 184.86/91.36 Mbit/s, 16 ms ([Ookla 2023]).",
    },
    Preset {
        name: "wifi-good",
        title: "Wi-Fi, quiet",
        egress: "rate 100mbit delay 5ms 1ms normal",
        ingress: "rate 100mbit delay 5ms 1ms normal",
        source: "A median of 10 ms over the Wi-Fi hop, there and back, as in a repaired case of [Pei 2016]. Ours: rate and jitter.",
    },
    Preset {
        name: "wifi-bad",
        title: "Wi-Fi, crowded",
        egress: "rate 10mbit delay 0ms correlation 80% samples 2ms,4ms,6ms,8ms,10ms,12ms,16ms,24ms,40ms,60ms loss gilbert-elliott 0.5% 25%",
        ingress: "rate 10mbit delay 0ms correlation 80% samples 2ms,4ms,6ms,8ms,10ms,12ms,16ms,24ms,40ms,60ms loss gilbert-elliott 0.5% 25%",
        source: "More than half of packets over 20 ms on the Wi-Fi hop, there and back, and a tenth over 100 ms ([Pei 2016]): drawn each way from ten delays of ours. Ours too: rate, correlation, and losses in bursts, 2% in all.",
    },
    Preset {
        name: "geo",
        title: "Geostationary satellite",
        egress: "rate 2.96mbit delay 314.5ms",
        ingress: "rate 18.75mbit delay 314.5ms",
        source: "Medians of Speedtest for Viasat in the USA in 3Q 2021: 18.75/2.96 Mbit/s, 629 ms ([Ookla satellites 2021]). The way up and down alone takes 239.6 ms to 279 ms (RFC 2488 §2).",
    },
    Preset {
        name: "leo",
        title: "Satellites in low orbit",
        egress: "rate 13.54mbit delay 22ms 4ms normal loss gilbert-elliott 0.05% 10%",
        ingress: "rate 87.25mbit delay 22ms 4ms normal loss gilbert-elliott 0.05% 10%",
        source: "Medians of Speedtest for Starlink in the USA in 3Q 2021: 87.25/13.54 Mbit/s, 44 ms ([Ookla satellites 2021]). Ours: jitter, and losses in bursts, 0.5% in all; bursts go with changes of satellite ([Kassem 2022]).",
    },
    Preset {
        name: "datacentre-lossy",
        title: "Datacentre with a bad switch",
        egress: "rate 10gbit delay 100us loss 0.1%",
        ingress: "rate 10gbit delay 100us loss 0.1%",
        source: "Usual were losses of 0.001% to 0.01% ([Guo 2015]); ours: ten times the worst of that, as from a switch that drops silently, and delay and rate.",
    },
];

/// Where the numbers of presets were published: how they are cited, and what that is.
pub const SOURCES: &[(&str, &str)] = &[
    (
        "WebPageTest",
        "`www/settings/connectivity.ini.sample` in github.com/catchpoint/WebPageTest",
    ),
    (
        "Ookla 2021",
        "I. McKetta, \"Growing and Slowing: The State of 5G Worldwide in 2021\", Ookla, 20 December 2021",
    ),
    (
        "Ookla satellites 2021",
        "Ookla, Speedtest Intelligence, USA, 3Q 2021, published in December 2021",
    ),
    (
        "Ookla 2023",
        "Ookla, Speedtest Global Index, United States: market analysis of 3Q 2023",
    ),
    (
        "Pei 2016",
        "C. Pei et al., \"WiFi can be the weakest link of round trip network latency in the wild\", INFOCOM 2016",
    ),
    (
        "Kassem 2022",
        "M. Kassem et al., \"A browser-side view of Starlink connectivity\", IMC 2022",
    ),
    (
        "Guo 2015",
        "C. Guo et al., \"Pingmesh: A Large-Scale System for Data Center Network Latency Measurement and Analysis\", SIGCOMM 2015",
    ),
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

#[cfg(test)]
mod tests {
    use std::{env, fmt::Write, fs, path::PathBuf};

    use super::*;

    #[test]
    fn every_preset_is_possible_and_cites_what_is_listed() {
        for preset in PRESETS {
            for text in [preset.egress, preset.ingress] {
                let rule = text.parse::<Rule>();
                assert!(rule.is_ok(), "{}: {rule:?}", preset.name);
            }
            assert_eq!(preset.impairment().check(), Ok(()), "{}", preset.name);
            let by_name: Impairment = format!("preset {}", preset.name).parse().unwrap();
            let rules = by_name.resolved().unwrap().rules;
            let unnamed = rules.into_iter().map(|rule| Rule { name: None, ..rule });
            assert_eq!(unnamed.collect::<Vec<_>>(), preset.impairment().rules);
            let cited = preset.source.split('[').skip(1);
            for cited in cited.filter_map(|rest| rest.split(']').next()) {
                assert!(SOURCES.iter().any(|(name, _)| *name == cited), "{cited}");
            }
        }
    }

    /// The table of docs/impair-presets.md.
    fn page() -> String {
        let mut page = "# Networks by name\n\n\
            What each preset of `sandwire impair` means. This page is made from the same data as `sandwire impair presets`: \
            `UPDATE_DOCS=1 cargo test -p sandwire-api preset`.\n\n\
            Sources tell round trips; half of each is the delay each way. Rates are those of Ethernet frames. Queues are drop-tail \
            with 10,000 packets: as bloated as a home router's. What a rule sets beside its preset wins \
            (`preset lte loss 2% rate 12mbit codel`).\n\n\
            | name | network | egress | ingress | source |\n|---|---|---|---|---|\n"
            .to_owned();
        for preset in PRESETS {
            let Preset {
                name,
                title,
                egress,
                ingress,
                source,
            } = preset;
            let _ = writeln!(
                page,
                "| `{name}` | {title} | `{egress}` | `{ingress}` | {source} |"
            );
        }
        page.push_str("\n## Sources\n\n");
        for (name, source) in SOURCES {
            let _ = writeln!(page, "- [{name}]: {source}.");
        }
        page
    }

    #[test]
    fn the_page_about_presets_is_up_to_date() {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/impair-presets.md");
        let page = page();
        if env::var_os("UPDATE_DOCS").is_some() {
            fs::write(&path, &page).unwrap();
        }
        let is_up_to_date = fs::read_to_string(&path).unwrap() == page;
        let advice = "run: UPDATE_DOCS=1 cargo test -p sandwire-api preset";
        assert!(
            is_up_to_date,
            "docs/impair-presets.md is out of date; {advice}"
        );
    }
}
