//! Reads what `iptables-legacy-save` prints.

use super::{Chain, InterfaceMatch, Program, Rule, Ruleset, Verdict};

/// Reads the rules of one family, `ip` or `ip6`.
pub(in crate::verb::doctor) fn parse(text: &str, family: &str) -> Ruleset {
    let mut ruleset = Ruleset::default();
    let mut table = "";
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name.trim();
        } else if let Some(chain) = line.strip_prefix(':') {
            ruleset.chains.extend(parse_chain(chain, table, family));
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let (name, rest) = rule.split_once(' ').unwrap_or((rule, ""));
            let chain = ruleset
                .chains
                .iter_mut()
                .find(|chain| chain.table == table && chain.name == name);
            if let Some(chain) = chain {
                let position = chain.rules.len() as u64 + 1;
                chain.rules.push(parse_rule(rest, position));
            }
        }
    }
    ruleset
}

fn parse_chain(line: &str, table: &str, family: &str) -> Option<Chain> {
    let mut words = line.split_whitespace();
    let (name, policy) = (words.next()?, words.next()?);
    let hook = match (policy, name) {
        // Chains of users have no policy.
        ("-", _) => None,
        (_, "FORWARD") => Some("forward"),
        (_, "INPUT") => Some("input"),
        (_, "OUTPUT") => Some("output"),
        (_, "PREROUTING") => Some("prerouting"),
        (_, "POSTROUTING") => Some("postrouting"),
        _ => None,
    };
    Some(Chain {
        program: Program::IptablesLegacy,
        family: family.to_owned(),
        table: table.to_owned(),
        name: name.to_owned(),
        hook: hook.map(str::to_owned),
        drops_by_policy: policy == "DROP",
        rules: Vec::new(),
    })
}

fn parse_rule(text: &str, position: u64) -> Rule {
    let mut rule = Rule {
        handle: position,
        input: Vec::new(),
        output: Vec::new(),
        conditional: false,
        verdict: Verdict::Continue,
    };
    let mut words = text.split_whitespace();
    let mut negated = false;
    while let Some(word) = words.next() {
        let mut interface = || InterfaceMatch {
            names: words.next().map(str::to_owned).into_iter().collect(),
            negated,
        };
        match word {
            "!" => {
                negated = true;
                continue;
            }
            "-i" => rule.input.push(interface()),
            "-o" => rule.output.push(interface()),
            "-g" => {
                rule.verdict = Verdict::Goto(words.next().unwrap_or_default().to_owned());
                return rule;
            }
            "-j" => {
                rule.verdict = verdict(words.next().unwrap_or_default());
                // What follows are options of the target.
                return rule;
            }
            _ => rule.conditional = true,
        }
        negated = false;
    }
    rule
}

fn verdict(target: &str) -> Verdict {
    match target {
        "ACCEPT" => Verdict::Accept,
        "DROP" | "REJECT" => Verdict::Drop,
        "RETURN" => Verdict::Return,
        "LOG" | "NFLOG" | "MARK" | "CONNMARK" | "TCPMSS" | "CT" | "MASQUERADE" | "SNAT"
        | "DNAT" | "REDIRECT" => Verdict::Continue,
        chain => Verdict::Jump(chain.to_owned()),
    }
}
