use super::*;

fn compiled(text: &str, direction: Direction) -> Vec<CompiledRule> {
    compile(&text.parse().unwrap(), direction).unwrap()
}

#[test]
fn words_become_models() {
    let text = "delay 50ms 10ms normal correlation 25% order any rate 10mbit codel limit 100 packets loss gilbert-elliott 1% 20% \
                reorder 5% distance 3 duplicate 1% corrupt 2% bits 3 repaired mtu 1400 silent flap up 2s down 1s after 3s";
    let rule = compiled(text, Direction::Egress).remove(0);
    let settings = rule.settings_from(1_000);
    assert_eq!(
        settings.delay,
        Some(DelayModel {
            constant: 50_000_000,
            jitter: 10_000_000,
            distribution: Distribution::Normal,
            correlation: 0.25,
            keep_order: false,
        })
    );
    assert_eq!(
        settings.bottleneck,
        Some(Bottleneck {
            capacity: Capacity::Rate {
                bits_per_second: 10_000_000,
                overhead: Overhead::default(),
            },
            queue: QueueModel::Codel(CodelSettings {
                limit: Limit {
                    packets: 100,
                    bytes: 1 << 30,
                },
                ..CodelSettings::default()
            }),
        })
    );
    let share = settings.loss.unwrap().expected_share().unwrap();
    assert!((share - 1.0 / 21.0).abs() < 1e-12);
    assert_eq!(settings.reorder.unwrap().wait_max, 100_000_000);
    assert_eq!(settings.duplicate.to_bits(), 0.01f64.to_bits());
    assert_eq!(settings.flap.unwrap().start, 3_000_001_000);
    assert!(!settings.mtu.unwrap().answer);
    assert!(rule.repairs_checksums);
}

#[test]
fn sides_are_those_of_the_sandbox() {
    let text = "match local=10.0.0.0/8 peer=192.0.2.0/24 port=5 peer_port=7-9 loss 1%";
    let egress = &compiled(text, Direction::Egress)[0].matches[0];
    assert_eq!(egress.source_ports, Some(5..=5));
    assert_eq!(egress.destination, Some("192.0.2.0/24".parse().unwrap()));
    assert_eq!(
        compiled(text, Direction::Ingress)[0].matches[0],
        egress.reversed()
    );
    let icmp = &compiled("match protocol=icmp loss 1%", Direction::Egress)[0];
    assert_eq!(icmp.matches.len(), 2);
    assert_eq!(
        compiled("egress loss 1%; ingress loss 2%", Direction::Ingress).len(),
        1
    );
}

#[test]
fn a_budget_is_a_hundredth_of_the_delay_and_a_millisecond_at_least() {
    let budget = |text: &str| compiled(text, Direction::Egress)[0].budget;
    assert_eq!(budget("loss 1%"), 1_000_000);
    assert_eq!(budget("delay 50ms"), 1_000_000);
    assert_eq!(budget("delay 600ms"), 6_000_000);
    assert_eq!(budget("budget 100us; delay 600ms"), 100_000);
}

#[test]
fn a_trace_that_is_none_is_refused_with_rule_and_line() {
    let mut impairment: Impairment = "name up trace x.trace".parse().unwrap();
    let error = compile(&impairment, Direction::Egress).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("rule 'up', trace x.trace: its content"),
        "{error}"
    );
    impairment.rules[0].trace.as_mut().unwrap().content = Some("1\ntwo\n".to_owned());
    let error = compile(&impairment, Direction::Egress).unwrap_err();
    assert_eq!(
        error.to_string().split(':').take(2).collect::<String>(),
        "rule 'up', trace x.trace line 2 of the trace is 'two'"
    );
    impairment.rules[0].trace.as_mut().unwrap().content = Some("1\n2\n".to_owned());
    assert!(compile(&impairment, Direction::Egress).is_ok());
}

/// The numbers of FNV-1a's authors for "" and "foobar".
#[test]
fn streams_are_numbered_by_name() {
    let stream = |name: &str| {
        let mut rule = compiled("loss 1%", Direction::Egress).remove(0);
        rule.name = name.to_owned();
        rule.stream()
    };
    assert_eq!((stream(""), stream("foobar")), (0x811c_9dc5, 0xbf9c_f968));
}

#[test]
fn what_cannot_be_is_refused() {
    let impairment: Impairment = "loss 101%".parse().unwrap();
    assert!(matches!(
        compile(&impairment, Direction::Egress),
        Err(CompileError::Invalid(_))
    ));
}

#[test]
fn a_rule_with_a_preset_translates_both_ways() {
    for direction in [Direction::Egress, Direction::Ingress] {
        let rules = compiled("preset lte nat-rebind 30s", direction);
        assert_eq!(rules.len(), 1);
        assert!(rules[0].translates());
    }
}

/// Reading one takes long, and a scenario changes all else ten times a second.
#[test]
fn a_trace_is_read_once_for_both_directions_and_for_what_comes_after_it() {
    let with_trace = |text: &str, content: &str| {
        let mut impairment: Impairment = text.parse().unwrap();
        let read = impairment.read_files(|_| Ok::<_, &str>(content.to_owned()));
        read.unwrap();
        impairment
    };
    let trace = |compiled: &Compiled, direction, rule: usize| {
        let settings = &compiled.rules(direction)[rule].settings;
        match &settings.bottleneck.as_ref().unwrap().capacity {
            Capacity::Trace { trace, .. } => trace.clone(),
            Capacity::Rate { .. } => panic!("no trace"),
        }
    };
    let before = with_trace("loss 1% trace a.trace", "1\n2\n");
    let compiled = Compiled::new(&before).unwrap();
    let read = trace(&compiled, Direction::Egress, 0);
    assert!(trace(&compiled, Direction::Ingress, 0).shares(&read));

    let two = "name x match port=1 trace b.trace; name y delay 5ms trace a.trace";
    let mut after = with_trace(two, "1\n2\n");
    after.rules[0].trace.as_mut().unwrap().content = Some("3\n".to_owned());
    let changed = Compiled::after(&after, &before, &compiled).unwrap();
    for direction in [Direction::Egress, Direction::Ingress] {
        assert!(trace(&changed, direction, 1).shares(&read));
        let other = trace(&changed, direction, 0);
        assert_eq!(other, crate::trace::Trace::parse("3\n").unwrap());
    }
    // And on.
    let again = Compiled::after(&before, &after, &changed).unwrap();
    assert!(trace(&again, Direction::Egress, 0).shares(&read));
}
