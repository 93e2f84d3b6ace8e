//! The report for people.

use super::{EBPF, ESSENTIAL, Finding, GUESTS, HOST, KERNEL, Obstacle, Report, Warning};

impl Report {
    /// For people.
    pub(in crate::verb::doctor) fn text(&self, colour: bool) -> String {
        let mut text = format!("sandwire {} on Linux {}\n", self.version, self.kernel);
        for group in [ESSENTIAL, EBPF, KERNEL, GUESTS, HOST] {
            text.push_str(&format!("\n{group}\n"));
            for finding in self
                .findings
                .iter()
                .filter(|finding| finding.group == group)
            {
                text.push_str(&finding.text(colour));
            }
        }
        text.push_str("\nwhat may block sandboxes' traffic\n");
        for warning in &self.warnings {
            let Warning {
                subject,
                problem,
                advice,
            } = warning;
            text.push_str(&format!("  ! {subject}: {problem}\n      {advice}\n"));
        }
        for obstacle in &self.firewall {
            text.push_str(&obstacle_text(obstacle));
        }
        if self.warnings.is_empty() && self.firewall.is_empty() {
            text.push_str("  nothing found\n");
        }
        let is_certain = |finding: &Finding| !finding.essential || finding.found.is_some();
        text.push_str(if !self.works {
            "\nsandwire cannot work here: something essential is missing\n"
        } else if self.findings.iter().all(is_certain) {
            "\nsandwire can work here\n"
        } else {
            "\nnothing essential is known to be missing; run this as root to be certain\n"
        });
        text
    }
}

impl Finding {
    pub(in crate::verb::doctor) fn text(&self, colour: bool) -> String {
        let (mark, code) = match self.found {
            Some(true) => ("✓", 32),
            Some(false) if self.essential => ("✗", 31),
            Some(false) => ("✗", 33),
            None => ("–", 90),
        };
        let mark = if colour {
            format!("\x1b[{code}m{mark}\x1b[0m")
        } else {
            mark.to_owned()
        };
        let mut text = format!("  {mark} {}", self.name);
        // That it was tried is said by the mark.
        if self.detail != "tried" {
            text.push_str(&format!(": {}", self.detail));
        }
        text.push('\n');
        if let Some(instead) = &self.used_instead {
            text.push_str(&format!("      used instead: {instead}\n"));
        }
        if let Some(how) = &self.how_to_get {
            text.push_str(&format!("      to get it: {how}\n"));
        }
        text
    }
}

fn obstacle_text(obstacle: &Obstacle) -> String {
    let Obstacle {
        family,
        table,
        chain,
        hook,
        problem,
        uplinks,
        advice,
        ..
    } = obstacle;
    let uplinks = match uplinks.as_slice() {
        [] => String::new(),
        names => format!(" (uplinks: {})", names.join(", ")),
    };
    let rule = obstacle
        .rule
        .map_or(String::new(), |handle| format!(", rule {handle}"));
    format!(
        "  ! table {family} {table}, chain {chain} (hook {hook}){rule}: {problem}{uplinks}\n      to allow it: {advice}\n"
    )
}
