//! Rule sets as Docker, ufw, firewalld and people make them.

use serde_json::{Value, json};

use super::*;

fn chain(family: &str, table: &str, name: &str) -> Value {
    json!({ "chain": { "family": family, "table": table, "name": name, "handle": 1 } })
}

fn base(family: &str, table: &str, name: &str, hook: &str, policy: &str) -> Value {
    json!({ "chain": {
        "family": family, "table": table, "name": name, "handle": 1,
        "type": "filter", "hook": hook, "prio": 0, "policy": policy,
    }})
}

fn rule(place: (&str, &str, &str), handle: u64, expr: Value) -> Value {
    let (family, table, chain) = place;
    json!({ "rule": { "family": family, "table": table, "chain": chain, "handle": handle, "expr": expr } })
}

fn interface(key: &str, op: &str, name: &str) -> Value {
    json!({ "match": { "op": op, "left": { "meta": { "key": key } }, "right": name } })
}

fn counter() -> Value {
    json!({ "counter": { "packets": 0, "bytes": 0 } })
}

fn established() -> Value {
    json!({ "match": { "op": "in", "left": { "ct": { "key": "state" } }, "right": ["established", "related"] } })
}

fn jump(target: &str) -> Value {
    json!({ "jump": { "target": target } })
}

fn found(objects: Vec<Value>) -> Vec<Obstacle> {
    let text = json!({ "nftables": objects }).to_string();
    obstacles(&nft::parse(&text).unwrap(), &["eth0".to_owned()])
}

/// What Docker 24 to 28 leave in `ip filter` by iptables-nft.
fn docker() -> Vec<Value> {
    let forward = ("ip", "filter", "FORWARD");
    vec![
        json!({ "metainfo": { "version": "1.0.6" } }),
        json!({ "table": { "family": "ip", "name": "filter", "handle": 1 } }),
        base("ip", "filter", "FORWARD", "forward", "drop"),
        chain("ip", "filter", "DOCKER-USER"),
        chain("ip", "filter", "DOCKER"),
        chain("ip", "filter", "DOCKER-ISOLATION-STAGE-1"),
        chain("ip", "filter", "DOCKER-ISOLATION-STAGE-2"),
        rule(forward, 10, json!([counter(), jump("DOCKER-USER")])),
        rule(
            forward,
            11,
            json!([counter(), jump("DOCKER-ISOLATION-STAGE-1")]),
        ),
        rule(
            forward,
            12,
            json!([interface("oifname", "==", "docker0"), established(), counter(), { "accept": null }]),
        ),
        rule(
            forward,
            13,
            json!([
                interface("oifname", "==", "docker0"),
                counter(),
                jump("DOCKER")
            ]),
        ),
        rule(
            forward,
            14,
            json!([interface("iifname", "==", "docker0"), interface("oifname", "!=", "docker0"), { "accept": null }]),
        ),
        rule(
            ("ip", "filter", "DOCKER-USER"),
            20,
            json!([counter(), { "return": null }]),
        ),
        rule(
            ("ip", "filter", "DOCKER-ISOLATION-STAGE-1"),
            21,
            json!([
                interface("iifname", "==", "docker0"),
                interface("oifname", "!=", "docker0"),
                jump("DOCKER-ISOLATION-STAGE-2")
            ]),
        ),
        rule(
            ("ip", "filter", "DOCKER-ISOLATION-STAGE-2"),
            22,
            json!([interface("oifname", "==", "docker0"), { "drop": null }]),
        ),
    ]
}

#[test]
fn dockers_forward_policy_is_named_with_the_command_for_its_user_chain() {
    let found = found(docker());
    assert_eq!(found.len(), 1, "{found:#?}");
    let obstacle = &found[0];
    assert_eq!(
        (
            obstacle.table.as_str(),
            obstacle.chain.as_str(),
            obstacle.rule
        ),
        ("filter", "FORWARD", None)
    );
    assert_eq!(
        obstacle.advice,
        "iptables -I DOCKER-USER -i sw+ -o sw+ -j ACCEPT && iptables -I DOCKER-USER -i sw+ -o eth0 -j ACCEPT && \
         iptables -I DOCKER-USER -i eth0 -o sw+ -j ACCEPT"
    );
}

#[test]
fn what_the_advice_does_removes_the_obstacle() {
    let mut objects = docker();
    let user = ("ip", "filter", "DOCKER-USER");
    let position = objects
        .iter()
        .position(|object| object["rule"]["handle"] == 20)
        .unwrap();
    let accept = |input, output| json!([interface("iifname", "==", input), interface("oifname", "==", output), counter(), { "accept": null }]);
    objects.insert(position, rule(user, 31, accept("sw*", "eth0")));
    objects.insert(position, rule(user, 30, accept("eth0", "sw*")));
    let between = found(objects.clone());
    assert_eq!(between.len(), 1, "{between:#?}");
    objects.insert(position, rule(user, 32, accept("sw*", "sw*")));
    assert_eq!(found(objects), []);
}

#[test]
fn what_blocks_sandboxes_from_each_other_alone_is_named_with_the_command_for_that() {
    let forward = ("ip", "filter", "FORWARD");
    let accept = |key, name| json!([interface(key, "==", name), counter(), { "accept": null }]);
    let by_uplink = |policy, last: Value| {
        found(vec![
            base("ip", "filter", "FORWARD", "forward", policy),
            rule(forward, 2, accept("iifname", "eth0")),
            rule(forward, 3, accept("oifname", "eth0")),
            rule(forward, 4, last),
        ])
    };
    let reject = json!([counter(), { "reject": null }]);
    for (policy, last, at) in [
        ("drop", json!([counter()]), None),
        ("accept", reject, Some(4)),
    ] {
        let found = by_uplink(policy, last);
        assert_eq!(found.len(), 1, "{found:#?}");
        let Obstacle {
            rule,
            problem,
            uplinks,
            advice,
            ..
        } = &found[0];
        assert!(problem.contains("clone_to_clone"), "{problem}");
        assert_eq!((*rule, uplinks.is_empty()), (at, true));
        assert_eq!(advice, "iptables -I FORWARD -i sw+ -o sw+ -j ACCEPT");
    }
}

#[test]
fn ufws_forward_policy_is_named_with_its_file() {
    let forward = ("ip", "filter", "FORWARD");
    let found = found(vec![
        base("ip", "filter", "INPUT", "input", "drop"),
        base("ip", "filter", "FORWARD", "forward", "drop"),
        chain("ip", "filter", "ufw-before-forward"),
        chain("ip", "filter", "ufw-reject-forward"),
        rule(forward, 5, json!([counter(), jump("ufw-before-forward")])),
        rule(forward, 6, json!([counter(), jump("ufw-reject-forward")])),
        rule(
            ("ip", "filter", "ufw-before-forward"),
            7,
            json!([established(), { "accept": null }]),
        ),
    ]);
    let hooks: Vec<&str> = found
        .iter()
        .map(|obstacle| obstacle.hook.as_str())
        .collect();
    assert_eq!(hooks, ["input", "forward"]);
    assert!(found[0].problem.contains("host_services"));
    assert_eq!(found[0].advice, "iptables -I INPUT -i sw+ -j ACCEPT");
    assert!(found[1].advice.contains("/etc/ufw/before.rules"));
}

#[test]
fn firewallds_final_reject_is_named_by_its_handle() {
    let forward = ("inet", "firewalld", "filter_FORWARD");
    let found = found(vec![
        base("inet", "firewalld", "filter_FORWARD", "forward", "accept"),
        chain("inet", "firewalld", "filter_FORWARD_ZONES"),
        rule(forward, 40, json!([established(), { "accept": null }])),
        rule(
            forward,
            41,
            json!([interface("iifname", "==", "lo"), { "accept": null }]),
        ),
        rule(forward, 42, json!([jump("filter_FORWARD_ZONES")])),
        rule(
            forward,
            43,
            json!([{ "reject": { "type": "icmpx", "expr": "admin-prohibited" } }]),
        ),
        rule(
            ("inet", "firewalld", "filter_FORWARD_ZONES"),
            44,
            json!([interface("iifname", "==", "virbr0"), { "drop": null }]),
        ),
    ]);
    let rules: Vec<Option<u64>> = found.iter().map(|obstacle| obstacle.rule).collect();
    // Once for each direction.
    assert_eq!(rules, [Some(43), Some(43)]);
    // A zone of their own opens no service of the host's, and policies lead to the uplink's zone and from there alone.
    let advice = &found[0].advice;
    for part in [
        "--delete-policy=sandwire 2>/dev/null || true",
        "--zone=sandwire --change-interface=sw+",
        "--get-zones | grep -qw sandwire || firewall-cmd --permanent --new-zone=sandwire",
        "--zone=sandwire --add-forward",
        "--get-policies | grep -qw sandwire-in ||",
        "zone=$(firewall-cmd --get-zone-of-interface=eth0)",
        "--policy=sandwire-out --add-egress-zone=$zone",
        "--policy=sandwire-in --add-ingress-zone=$zone",
    ] {
        assert!(advice.contains(part), "{part} is missing in {advice}");
    }
    for part in ["trusted", "ANY"] {
        assert!(!advice.contains(part), "{part} in {advice}");
    }
}

#[test]
fn a_users_own_table_is_answered_with_an_nft_command() {
    let found = found(vec![base("inet", "mine", "fwd", "forward", "drop")]);
    assert_eq!(
        found[0].advice,
        "nft insert rule inet mine fwd iifname \"sw*\" oifname \"sw*\" accept && \
         nft insert rule inet mine fwd iifname \"sw*\" oifname \"eth0\" accept && \
         nft insert rule inet mine fwd iifname \"eth0\" oifname \"sw*\" accept"
    );
}

#[test]
fn a_rule_on_the_uplink_alone_blocks_and_on_another_interface_does_not() {
    let forward = ("inet", "mine", "fwd");
    let with = |name| {
        found(vec![
            base("inet", "mine", "fwd", "forward", "accept"),
            rule(
                forward,
                3,
                json!([interface("iifname", "==", name), { "drop": null }]),
            ),
        ])
        .len()
    };
    assert_eq!(
        (with("eth0"), with("eth*"), with("eth1"), with("swp1")),
        (1, 1, 0, 0)
    );
}

#[test]
fn each_uplink_is_judged_for_itself() {
    let forward = ("inet", "mine", "fwd");
    let objects = json!({ "nftables": [
        base("inet", "mine", "fwd", "forward", "drop"),
        rule(forward, 3, json!([interface("iifname", "==", "eth0"), { "accept": null }])),
        rule(forward, 4, json!([interface("oifname", "==", "eth0"), { "accept": null }])),
        rule(forward, 5, json!([interface("iifname", "==", "sw*"), interface("oifname", "==", "sw*"), { "accept": null }])),
    ]});
    let ruleset = nft::parse(&objects.to_string()).unwrap();
    let of = |uplinks: &[&str]| {
        let uplinks: Vec<String> = uplinks.iter().map(|name| (*name).to_owned()).collect();
        obstacles(&ruleset, &uplinks)
    };
    assert_eq!(of(&["eth0"]), []);
    let found = of(&["eth0", "eth1", "eth2"]);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].uplinks, ["eth1", "eth2"]);
    // What no rule names is dropped.
    assert_eq!(of(&[]).len(), 1);
}

#[test]
fn a_reject_by_iptables_target_blocks() {
    // As `iptables -A FORWARD -j REJECT` shows, with which some clouds' images come.
    let forward = ("ip", "filter", "FORWARD");
    let found = found(vec![
        base("ip", "filter", "FORWARD", "forward", "accept"),
        rule(
            forward,
            2,
            json!([counter(), { "xt": { "type": "target", "name": "LOG" } }]),
        ),
        rule(
            forward,
            3,
            json!([counter(), { "xt": { "type": "target", "name": "REJECT" } }]),
        ),
    ]);
    let rules: Vec<Option<u64>> = found.iter().map(|obstacle| obstacle.rule).collect();
    assert_eq!(rules, [Some(3), Some(3)], "{found:#?}");
    assert!(
        found[0]
            .advice
            .starts_with("iptables -I FORWARD -i sw+ -o sw+ -j ACCEPT"),
        "{}",
        found[0].advice
    );
}

#[test]
fn what_falls_through_a_goto_meets_the_policy() {
    let forward = ("ip", "filter", "FORWARD");
    let found = found(vec![
        base("ip", "filter", "FORWARD", "forward", "drop"),
        chain("ip", "filter", "mine"),
        rule(forward, 2, json!([{ "goto": { "target": "mine" } }])),
        rule(forward, 3, json!([{ "accept": null }])),
    ]);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].rule, None);
    let legacy = "*filter\n:FORWARD DROP [0:0]\n:mine - [0:0]\n-A FORWARD -g mine\n-A FORWARD -j ACCEPT\nCOMMIT\n";
    let found = obstacles(&legacy::parse(legacy, "ip"), &["eth0".to_owned()]);
    assert_eq!(found.len(), 1, "{found:#?}");
}

#[test]
fn conditional_drops_and_our_own_tables_are_no_obstacle() {
    let forward = ("inet", "mine", "fwd");
    let found = found(vec![
        base("inet", "sandwire-default", "forward", "forward", "drop"),
        base("inet", "mine", "fwd", "forward", "accept"),
        base("bridge", "mine", "fwd", "forward", "drop"),
        rule(forward, 3, json!([established(), { "drop": null }])),
        rule(
            forward,
            4,
            json!([{ "xt": { "type": "match", "name": "physdev" } }, { "drop": null }]),
        ),
        rule(
            forward,
            5,
            json!([{ "vmap": { "key": { "meta": { "key": "iifname" } }, "data": {} } }]),
        ),
    ]);
    assert_eq!(found, []);
}

#[test]
fn chains_that_jump_in_circles_end() {
    let found = found(vec![
        base("inet", "mine", "fwd", "forward", "drop"),
        chain("inet", "mine", "a"),
        rule(("inet", "mine", "fwd"), 3, json!([jump("a")])),
        rule(("inet", "mine", "a"), 4, json!([jump("a")])),
    ]);
    assert_eq!(found.len(), 1);
}

#[test]
fn what_is_no_rule_set_is_refused() {
    for text in ["", "{}", "[1]", "{\"nftables\": 3}"] {
        assert!(nft::parse(text).is_err(), "{text:?} was taken");
    }
}

const LEGACY: &str = "\
# Generated by iptables-save v1.8.9 on Sat Nov 21 03:00:00 2026
*nat
:PREROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:mine - [0:0]
-A FORWARD -i lo -j ACCEPT
-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD ! -i virbr0 -j mine
-A mine -o eth0 -j REJECT --reject-with icmp-port-unreachable
COMMIT
";

#[test]
fn a_rule_of_the_older_iptables_is_named_by_its_position() {
    let found = obstacles(&legacy::parse(LEGACY, "ip"), &["eth0".to_owned()]);
    assert_eq!(found.len(), 1, "{found:#?}");
    let obstacle = &found[0];
    assert_eq!((obstacle.chain.as_str(), obstacle.rule), ("mine", Some(1)));
    assert!(
        obstacle
            .advice
            .starts_with("iptables-legacy -I FORWARD -i sw+ -o sw+ -j ACCEPT")
    );
}

#[test]
fn a_policy_of_the_older_iptables_is_named() {
    let text = LEGACY.replace(":FORWARD ACCEPT", ":FORWARD DROP");
    let found = obstacles(&legacy::parse(&text, "ip6"), &[]);
    let policy: Vec<&Obstacle> = found
        .iter()
        .filter(|obstacle| obstacle.rule.is_none())
        .collect();
    assert_eq!(policy.len(), 1);
    assert!(policy[0].advice.starts_with("ip6tables-legacy -I FORWARD"));
}
