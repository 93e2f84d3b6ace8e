use proptest::prelude::*;

use super::*;

const S: u64 = 1_000_000_000;

/// What comes of a scenario of one target: seconds, and the impairment as a text.
fn course(text: &str) -> Vec<(u64, String)> {
    let scenario = Scenario::parse(text, &["it"]).unwrap();
    let changes = scenario.changes().take(1000);
    changes
        .map(|change| (change.at / S, change.impairment.to_string()))
        .collect()
}

fn as_text(course: &[(u64, String)]) -> Vec<(u64, &str)> {
    course
        .iter()
        .map(|(at, text)| (*at, text.as_str()))
        .collect()
}

const CUT: &str = "name scenario-partition partition; name rule-1 delay 50ms";

#[test]
fn steps_follow_each_other() {
    let course = course(
        r#"
        seed = 7
        [[rule]]
        delay = "50ms"
        [[step]]
        at = "30s"
        clear = true
        [[step]]
        at = "10s"
        set = "loss 1%; match peer_port=53 delay 2s"
        [[step]]
        at = "20s"
        set = { rules = [{ name = "x", rate = "1mbit" }] }
        "#,
    );
    assert_eq!(
        as_text(&course),
        [
            (0, "seed 7; delay 50ms"),
            (10, "seed 7; loss 1%; match peer_port=53 delay 2s"),
            (20, "seed 7; name x rate 1mbit"),
            (30, "seed 7"),
        ]
    );
}

#[test]
fn a_ramp_goes_evenly_and_ends_where_it_should() {
    let course = course(
        r#"
        granularity = "5s"
        [[rule]]
        delay = "50ms"
        rate = "10mbit"
        [[step]]
        at = "10s"
        over = "12s"
        ramp = { delay = "170ms", loss = "12%", rate = "4mbit" }
        "#,
    );
    assert_eq!(
        as_text(&course),
        [
            (0, "rate 10mbit delay 50ms"),
            (15, "loss 5% rate 7.5mbit delay 100ms"),
            (20, "loss 10% rate 5mbit delay 150ms"),
            (22, "loss 12% rate 4mbit delay 170ms"),
        ]
    );
}

#[test]
fn a_partition_is_before_all_rules_until_it_heals() {
    let course = course(
        r#"
        [[rule]]
        delay = "50ms"
        [[step]]
        at = "10s"
        partition = true
        for = "5s"
        [[step]]
        at = "20s"
        partition = true
        direction = "egress"
        [[step]]
        at = "21s"
        partition = true
        direction = "ingress"
        [[step]]
        at = "30s"
        heal = true
        direction = "egress"
        [[step]]
        at = "40s"
        heal = true
        "#,
    );
    let egress = "name scenario-partition egress partition; name rule-1 delay 50ms";
    let ingress = "name scenario-partition ingress partition; name rule-1 delay 50ms";
    let open = "delay 50ms";
    assert_eq!(
        as_text(&course),
        [
            (0, open),
            (10, CUT),
            (15, open),
            (20, egress),
            (21, CUT),
            (30, ingress),
            (40, open)
        ]
    );
}

#[test]
fn a_flap_comes_and_goes_until_its_end_or_until_healed() {
    let with = |more: &str| {
        course(&format!(
            "[[rule]]\ndelay = \"50ms\"\n[[step]]\nat = \"10s\"\nflap = \"up 2s down 1s\"\nfor = \"7s\"\n{more}"
        ))
    };
    let open = "delay 50ms";
    let whole = with("");
    assert_eq!(
        as_text(&whole),
        [(0, open), (12, CUT), (13, open), (15, CUT), (16, open)]
    );
    let healed = with("[[step]]\nat = \"13s\"\nheal = true");
    assert_eq!(as_text(&healed), [(0, open), (12, CUT), (13, open)]);
    let set = with("[[step]]\nat = \"14s\"\nset = \"loss 1%\"");
    assert_eq!(
        as_text(&set)[3..],
        [
            (14, "loss 1%"),
            (15, "name scenario-partition partition; name rule-1 loss 1%"),
            (16, "loss 1%")
        ]
    );
}

#[test]
fn a_cut_that_begins_the_scenario_can_be_healed_and_cut_again() {
    let course = course(
        "[[step]]\nat = \"0s\"\npartition = true\n[[step]]\nat = \"1s\"\nheal = true\n[[step]]\nat = \"2s\"\npartition = true",
    );
    let cut = "name scenario-partition partition";
    assert_eq!(as_text(&course), [(0, cut), (1, ""), (2, cut)]);
}

#[test]
fn a_set_ends_ramps_of_its_target_only() {
    let text = r#"
        granularity = "10s"
        [[rule]]
        delay = "100ms"
        [[step]]
        at = "0s"
        over = "30s"
        ramp = { delay = "400ms" }
        [[step]]
        at = "15s"
        target = "b"
        set = "loss 1%"
    "#;
    let scenario = Scenario::parse(text, &["a", "b"]).unwrap();
    let changes = scenario.changes();
    let told: Vec<(u64, String, String)> = changes
        .map(|change| (change.at / S, change.target, change.impairment.to_string()))
        .collect();
    let told: Vec<(u64, &str, &str)> = told
        .iter()
        .map(|(at, target, text)| (*at, target.as_str(), text.as_str()))
        .collect();
    assert_eq!(
        told,
        [
            (0, "a", "delay 100ms"),
            (0, "b", "delay 100ms"),
            (10, "a", "delay 200ms"),
            (10, "b", "delay 200ms"),
            (15, "b", "loss 1%"),
            (20, "a", "delay 300ms"),
            (30, "a", "delay 400ms"),
        ]
    );
}

#[test]
fn repetitions_begin_as_the_first_did() {
    let text = |repeat: &str| {
        format!(
            "duration = \"10s\"\nrepeat = {repeat}\n[[step]]\nat = \"4s\"\nset = \"loss 1%\"\n[[step]]\nat = \"10s\"\nclear = true"
        )
    };
    let twice = course(&text("2"));
    assert_eq!(
        as_text(&twice),
        [(0, ""), (4, "loss 1%"), (10, ""), (14, "loss 1%"), (20, "")]
    );
    let forever = course(&text("\"forever\""));
    assert_eq!(forever.len(), 1000);
    assert_eq!(forever[999].0, 4994);
    let scenario = Scenario::parse(&text("3"), &["it"]).unwrap();
    assert_eq!(scenario.length(), Some(30 * S));
    assert_eq!(scenario.seed(), 0);
    let seeded = Scenario::parse("seed = 7", &["it"]).unwrap();
    assert_eq!(seeded.seed(), 7);
    assert_eq!(
        Scenario::parse(&text("\"forever\""), &["it"])
            .unwrap()
            .length(),
        None
    );
}

#[test]
fn a_scenario_that_changes_nothing_comes_to_its_end() {
    let course = course(
        "duration = \"10s\"\nrepeat = \"forever\"\n[[rule]]\nloss = \"1%\"\n[[step]]\nat = \"4s\"\nset = \"loss 1%\"",
    );
    assert_eq!(as_text(&course), [(0, "loss 1%")]);
    assert_eq!(Scenario::parse("", &["it"]).unwrap().changes().count(), 1);
    assert_eq!(Scenario::parse("", &[]).unwrap().changes().count(), 0);
}

#[test]
fn what_is_wrong_is_said_with_its_line() {
    for (text, line, why) in [
        (
            "duration = \"60s\"\n[[step]]\nat = \"70s\"\nclear = true",
            4,
            "ends at 70s, after the scenario, which lasts 60s",
        ),
        (
            "duration = \"60s\"\n[[step]]\nat = \"50s\"\npartition = true\nfor = \"11s\"",
            4,
            "ends at 61s",
        ),
        ("\nduration = \"0s\"", 2, "duration is 0ms"),
        ("repeat = 2", 1, "ends before it starts"),
        ("repeat = 0", 1, "repeat is a number from 1"),
        ("repeat = \"often\"", 1, "how often"),
        ("seed = 7\nsede = 8", 2, "unknown field `sede`"),
        ("[[step]]\nat = \"-1s\"\nclear = true", 2, "at is -1s"),
        (
            "[[step]]\nat = \"soon\"\nclear = true",
            2,
            "'soon' is no time",
        ),
        ("[[step]]\nat = \"1s\"", 2, "does nothing"),
        (
            "[[step]]\nat = \"1s\"\nclear = true\nheal = true",
            3,
            "the step has heal and clear",
        ),
        (
            "[[step]]\nat = \"1s\"\nclear = false",
            3,
            "can only be true",
        ),
        (
            "[[step]]\nat = \"1s\"\nset = \"loss 1%\"\nfor = \"2s\"",
            4,
            "for belongs to partition, flap, not to set",
        ),
        (
            "[[step]]\nat = \"1s\"\ntarget = \"that\"\nclear = true",
            3,
            "no target 'that': there is it, other",
        ),
        (
            "[[step]]\nat = \"1s\"\nset = \"loss 101%\"",
            3,
            "rule 'rule-1', loss: 101%",
        ),
        (
            "[[step]]\nat = \"1s\"\n\nset = \"lost 1%\"",
            4,
            "'lost' is no impairment",
        ),
        (
            "[[step]]\nat = \"1s\"\nset = \"seed 3; loss 1%\"",
            3,
            "stand at the top",
        ),
        (
            "[[step]]\nat = \"1s\"\nset = \"name scenario-partition loss 1%\"",
            3,
            "no rule may be called",
        ),
        (
            "\n[[rule]]\nloss = \"1%\"\nrate = \"1bit\"",
            2,
            "rule 'rule-1', rate: 1bit",
        ),
        (
            "[[step]]\nat = \"1s\"\nramp = { loss = \"1%\" }",
            3,
            "needs over",
        ),
        (
            "[[step]]\nat = \"1s\"\nramp = {}\nover = \"1s\"",
            3,
            "a ramp to nothing",
        ),
        (
            "[[step]]\nat = \"1s\"\nramp = { loss = \"1%\" }\nover = \"1s\"",
            3,
            "say which rule is ramped",
        ),
        (
            "[[rule]]\nloss = \"1%\"\n[[step]]\nat = \"1s\"\nrule = \"x\"\nramp = { loss = \"1%\" }\nover = \"1s\"",
            6,
            "no rule 'x' to ramp: there is rule-1",
        ),
        (
            "[[rule]]\nloss = \"1%\"\n[[step]]\nat = \"1s\"\nramp = { rate = \"1mbit\" }\nover = \"1s\"",
            5,
            "no rate to start from",
        ),
        (
            "[[rule]]\nloss = \"1%\"\n[[step]]\nat = \"1s\"\nramp = { loss = \"200%\" }\nover = \"1s\"\n[[step]]\nat = \"1.9s\"\nclear = true",
            5,
            "200%",
        ),
        (
            "[[rule]]\nloss = \"4-state 1%\"\n[[step]]\nat = \"1s\"\nramp = { loss = \"2%\" }\nover = \"1s\"",
            5,
            "only independent loss",
        ),
        (
            "[[step]]\nat = \"1s\"\nflap = \"up 1s down 1s\"",
            3,
            "the flap has no end",
        ),
        (
            "[[step]]\nat = \"1s\"\nflap = \"up 1us down 1s\"\nfor = \"9s\"",
            3,
            "flap: up is 1us",
        ),
        (
            "granularity = \"1ms\"\n[[rule]]\nloss = \"1%\"\n[[step]]\nat = \"0s\"\nramp = { loss = \"2%\" }\nover = \"1h\"",
            6,
            "more than 200000 changes",
        ),
        ("granularity = \"1us\"", 1, "granularity is 1us"),
        ("budget = \"0s\"", 1, "budget is 0ms"),
        ("duration = \"60s", 1, ""),
    ] {
        let error = Scenario::parse(text, &["it", "other"]).unwrap_err();
        assert!(error.problem.contains(why), "{text}\n{error}");
        assert_eq!(error.line, line, "{text}\n{error}");
    }
}

#[test]
fn files_of_traces_are_read_and_checked() {
    let text = "[[step]]\nat = \"1s\"\nset = \"trace up.trace\"";
    let mut scenario = Scenario::parse(text, &["it"]).unwrap();
    let error = scenario.read_files(|_| Err("no such file")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "line 3: rule 'rule-1', trace: read up.trace: no such file"
    );
    let mut wrong = scenario.clone();
    let error = wrong
        .read_files(|_| Ok::<_, String>("x\n".to_owned()))
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("line 3: rule 'rule-1', trace up.trace: line 1"),
        "{error}"
    );
    scenario
        .read_files(|_| Ok::<_, String>("1\n".to_owned()))
        .unwrap();
    let last = scenario.changes().last().unwrap();
    assert_eq!(
        last.impairment.rules[0]
            .trace
            .as_ref()
            .unwrap()
            .content
            .as_deref(),
        Some("1\n")
    );
}

fn step() -> impl Strategy<Value = String> {
    let actions = vec![
        "set = \"name a delay 50ms rate 10mbit; name b match peer_port=53 loss 1%\"",
        "set = \"name a loss 5% rate 1mbit\"",
        "rule = \"a\"\nramp = { delay = \"200ms\", rate = \"2mbit\" }\nover = \"3s\"",
        "rule = \"a\"\nramp = { jitter = \"20ms\", loss = \"50%\", corrupt = \"1%\" }\nover = \"1.5s\"",
        "partition = true",
        "partition = true\ndirection = \"ingress\"\nfor = \"2s\"",
        "heal = true\ndirection = \"egress\"",
        "heal = true",
        "flap = \"up 300ms down 200ms\"\nfor = \"3s\"",
        "clear = true",
    ];
    let targets = prop::sample::select(vec!["", "target = \"x\"\n", "target = \"y\"\n"]);
    (0u32..10_000, targets, prop::sample::select(actions))
        .prop_map(|(at, target, action)| format!("[[step]]\nat = \"{at}ms\"\n{target}{action}\n"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// And each of them can be.
    #[test]
    fn changes_come_in_order_and_differ(steps in prop::collection::vec(step(), 0..12), repeat in 1u32..4) {
        let text = format!(
            "duration = \"14s\"\nrepeat = {repeat}\n[[rule]]\nname = \"a\"\nrate = \"5mbit\"\n{}",
            steps.concat()
        );
        let Ok(scenario) = Scenario::parse(&text, &["x", "y"]) else {
            // A step ramps a rule that isn't there any more.
            prop_assume!(false);
            return Ok(());
        };
        let changes: Vec<Change> = scenario.changes().collect();
        prop_assert!(changes.is_sorted_by_key(|change| change.at));
        prop_assert!(changes.iter().all(|change| change.at <= scenario.length().unwrap()));
        for target in ["x", "y"] {
            let own: Vec<&Change> = changes.iter().filter(|change| change.target == target).collect();
            prop_assert_eq!(own[0].at, 0);
            for two in own.windows(2) {
                prop_assert!(two[0].impairment != two[1].impairment && two[0].at < two[1].at);
            }
        }
        for change in &changes {
            prop_assert_eq!(change.impairment.check(), Ok(()));
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in "(\\[\\[step\\]\\]\n|at = \"[0-9]s\"\n|set = \"loss 1%\"\n|heal = true\n|[a-z=\"]{0,5}\n){0,8}") {
        if let Ok(scenario) = Scenario::parse(&text, &["it"]) {
            prop_assert!(scenario.changes().count() > 0);
        }
    }
}
