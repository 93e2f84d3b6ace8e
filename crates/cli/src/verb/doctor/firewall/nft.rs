//! Reads what `nft -j list ruleset` prints.

use serde_json::Value;

use super::{Chain, InterfaceMatch, Program, Rule, Ruleset, Verdict};

/// Reads a rule set; tables of ours are left out.
pub(in crate::verb::doctor) fn parse(text: &str) -> Result<Ruleset, String> {
    let document: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let objects = document
        .get("nftables")
        .and_then(Value::as_array)
        .ok_or("it has no list 'nftables'")?;
    let mut ruleset = Ruleset::default();
    for object in objects {
        if let Some(chain) = object.get("chain") {
            ruleset.chains.extend(parse_chain(chain));
        }
    }
    for object in objects {
        let Some(rule) = object.get("rule") else {
            continue;
        };
        let of = |key| rule.get(key).and_then(Value::as_str).unwrap_or_default();
        let (family, table, name) = (of("family"), of("table"), of("chain"));
        let chain = ruleset
            .chains
            .iter_mut()
            .find(|chain| chain.family == family && chain.table == table && chain.name == name);
        if let Some(chain) = chain {
            chain.rules.push(parse_rule(rule));
        }
    }
    Ok(ruleset)
}

fn parse_chain(chain: &Value) -> Option<Chain> {
    let of = |key| chain.get(key).and_then(Value::as_str);
    let (family, table, name) = (of("family")?, of("table")?, of("name")?);
    let is_ours = family == "inet" && (table == "sandwire" || table.starts_with("sandwire-"));
    // Bridge, arp and netdev chains don't see what is routed.
    if is_ours || !matches!(family, "ip" | "ip6" | "inet") {
        return None;
    }
    Some(Chain {
        program: Program::Nft,
        family: family.to_owned(),
        table: table.to_owned(),
        name: name.to_owned(),
        hook: of("hook").map(str::to_owned),
        drops_by_policy: of("policy") == Some("drop"),
        rules: Vec::new(),
    })
}

fn parse_rule(rule: &Value) -> Rule {
    let mut parsed = Rule {
        handle: rule.get("handle").and_then(Value::as_u64).unwrap_or(0),
        input: Vec::new(),
        output: Vec::new(),
        conditional: false,
        verdict: Verdict::Continue,
    };
    let statements = rule.get("expr").and_then(Value::as_array);
    for statement in statements.into_iter().flatten() {
        let Some((kind, value)) = statement
            .as_object()
            .and_then(|object| object.iter().next())
        else {
            parsed.conditional = true;
            continue;
        };
        read_statement(&mut parsed, kind, value);
    }
    parsed
}

fn read_statement(rule: &mut Rule, kind: &str, value: &Value) {
    let target = || {
        value
            .get("target")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    match kind {
        "accept" => rule.verdict = Verdict::Accept,
        "drop" | "reject" => rule.verdict = Verdict::Drop,
        "return" => rule.verdict = Verdict::Return,
        "jump" => rule.verdict = Verdict::Jump(target()),
        "goto" => rule.verdict = Verdict::Goto(target()),
        // Of iptables' own targets nft tells no more than the name.
        "xt" if is_reject(value) => rule.verdict = Verdict::Drop,
        "match" => match interface_match(value) {
            Some((true, found)) => rule.input.push(found),
            Some((false, found)) => rule.output.push(found),
            None => rule.conditional = true,
        },
        // What looks at a packet or changes it, and lets it go on.
        "counter" | "log" | "comment" | "mangle" | "notrack" => {}
        // Limits, sets, verdict maps, matches of iptables' own, and what is yet to be invented.
        _ => rule.conditional = true,
    }
}

fn is_reject(xt: &Value) -> bool {
    let is = |key, wanted| xt.get(key).and_then(Value::as_str) == Some(wanted);
    is("type", "target") && is("name", "REJECT")
}

/// A match on an interface's name: whether on the input side, and its names.
fn interface_match(value: &Value) -> Option<(bool, InterfaceMatch)> {
    let key = value.pointer("/left/meta/key")?.as_str()?;
    let is_input = match key {
        "iifname" | "iif" => true,
        "oifname" | "oif" => false,
        _ => return None,
    };
    let right = value.get("right")?;
    let names: Option<Vec<String>> = match right {
        Value::String(name) => Some(vec![name.clone()]),
        Value::Object(_) => right
            .get("set")?
            .as_array()?
            .iter()
            .map(|name| name.as_str().map(str::to_owned))
            .collect(),
        _ => None,
    };
    Some((
        is_input,
        InterfaceMatch {
            // A name "@set" is a reference to elements that we don't look up.
            names: names.filter(|names| names.iter().all(|name| !name.starts_with('@')))?,
            negated: value.get("op")?.as_str()? == "!=",
        },
    ))
}
