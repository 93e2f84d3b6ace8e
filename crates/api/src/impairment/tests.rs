use proptest::prelude::*;

use super::*;

fn time() -> impl Strategy<Value = TimeSpan> {
    (1_000i64..60_000_000_000).prop_map(|nanoseconds| TimeSpan { nanoseconds })
}

fn share() -> impl Strategy<Value = Percent> {
    (0i64..=1_000_000_000).prop_map(|billionths| Percent { billionths })
}

fn loss() -> impl Strategy<Value = Loss> {
    let ranges = (0u64..100, 0u64..100).prop_map(|(first, more)| PacketRange {
        first,
        last: first + more,
    });
    let half = (0i64..=500_000_000).prop_map(|billionths| Percent { billionths });
    prop_oneof![
        share().prop_map(|share| Loss::Independent { share }),
        (share(), share(), share(), share()).prop_map(|(p, r, loss_bad, loss_good)| {
            Loss::GilbertElliott {
                p,
                r,
                loss_bad,
                loss_good,
            }
        }),
        (half.clone(), half.clone(), half.clone(), share(), half).prop_map(
            |(p13, p31, p32, p23, p14)| Loss::FourState {
                p13,
                p31,
                p32,
                p23,
                p14,
            }
        ),
        prop::collection::vec(ranges, 1..4).prop_map(|packets| Loss::Packets { packets }),
    ]
}

fn limit() -> impl Strategy<Value = Option<QueueLimit>> {
    let limit =
        (prop::option::of(1u64..1 << 20), 64u64..1 << 30).prop_map(|(packets, bytes)| QueueLimit {
            packets,
            bytes: packets
                .is_none_or(|packets| packets % 2 == 0)
                .then_some(bytes),
        });
    prop::option::of(limit)
}

fn delay() -> impl Strategy<Value = Delay> {
    let distribution = prop::sample::select(vec![
        Distribution::Uniform,
        Distribution::Normal,
        Distribution::Pareto,
        Distribution::ParetoNormal,
    ]);
    let order = prop::sample::select(vec![Order::Keep, Order::Any]);
    let samples = prop::collection::vec(time(), 0..4);
    let below = (0i64..1_000_000_000).prop_map(|billionths| Percent { billionths });
    (time(), time(), distribution, samples, below, order, limit()).prop_map(
        |(mean, jitter, distribution, samples, correlation, order, limit)| Delay {
            mean,
            jitter: if samples.is_empty() {
                jitter
            } else {
                TimeSpan::default()
            },
            distribution: if samples.is_empty() {
                distribution
            } else {
                Distribution::Uniform
            },
            samples,
            correlation,
            order,
            limit,
        },
    )
}

fn queue() -> impl Strategy<Value = Queue> {
    let kinds = vec![QueueKind::DropTail, QueueKind::Codel, QueueKind::FqCodel];
    let target = (1_000i64..1_000_000).prop_map(|nanoseconds| TimeSpan { nanoseconds });
    let interval = (1_000_000i64..1_000_000_000).prop_map(|nanoseconds| TimeSpan { nanoseconds });
    (
        prop::sample::select(kinds),
        limit(),
        prop::option::of(target),
        prop::option::of(interval),
        prop::option::of(1u32..=65_536),
        prop::option::of(64u32..=65_536),
    )
        .prop_map(|(kind, limit, target, interval, flows, quantum)| {
            let (is_codel, is_fair) = (kind != QueueKind::DropTail, kind == QueueKind::FqCodel);
            Queue {
                kind,
                limit,
                target: target.filter(|_| is_codel),
                interval: interval.filter(|_| is_codel),
                flows: flows.filter(|_| is_fair),
                quantum: quantum.filter(|_| is_fair),
            }
        })
}

fn matches() -> impl Strategy<Value = Match> {
    let nets = ["10.0.0.0/8", "192.0.2.7/32"].map(|net| net.parse::<IpNet>().unwrap());
    let protocols = vec![Protocol::Tcp, Protocol::Udp, Protocol::Number(132)];
    let ports = (0u16..100, 0u16..100).prop_map(|(first, more)| Ports {
        first,
        last: first + more,
    });
    (
        prop::option::of(Just(4u8)),
        prop::option::of(prop::sample::select(protocols)),
        prop::option::of(prop::sample::select(nets.to_vec())),
        prop::option::of(prop::sample::select(nets.to_vec())),
        prop::option::of(ports.clone()),
        prop::option::of(ports),
        prop::option::of(1u16..4095),
    )
        .prop_map(
            |(version, protocol, local, peer, port, peer_port, vlan)| Match {
                version,
                protocol,
                local,
                peer,
                port,
                peer_port,
                vlan,
            },
        )
}

/// A rate or a trace.
fn line() -> impl Strategy<Value = Result<Rate, Trace>> {
    let rate = (
        10_000u64..=10_000_000_000,
        queue(),
        -64i32..=256,
        any::<bool>(),
    );
    let rate = rate.prop_map(|(bits_per_second, queue, overhead, cells)| {
        let rate = BitRate { bits_per_second };
        Rate {
            rate,
            overhead,
            cells,
            ..Rate::default()
        }
        .with_queue(queue)
    });
    let trace = (
        prop::sample::select(vec!["a.trace", "/my traces/b; c"]),
        queue(),
    );
    let trace = trace.prop_map(|(file, queue)| {
        let file = file.to_owned();
        Trace {
            file,
            ..Trace::default()
        }
        .with_queue(queue)
    });
    prop_oneof![rate.prop_map(Ok), trace.prop_map(Err)]
}

fn rebind() -> impl Strategy<Value = NatRebind> {
    let addresses = prop::sample::subsequence(vec!["192.0.2.1", "2001:db8::1"], 0..=2);
    (time(), prop::option::of(time()), addresses).prop_map(|(every, after, list)| NatRebind {
        every: Some(TimeSpan {
            nanoseconds: every.nanoseconds.max(1_000_000),
        }),
        after,
        addresses: list
            .iter()
            .map(|address| address.parse().unwrap())
            .collect(),
    })
}

fn rule() -> impl Strategy<Value = Rule> {
    let directions = vec![Direction::Both, Direction::Egress, Direction::Ingress];
    let reorder =
        (share(), 1u32..=10_000, prop::option::of(time())).prop_map(|(share, distance, within)| {
            Reorder {
                share,
                distance,
                within,
            }
        });
    let checksum = prop::sample::select(vec![Checksum::Broken, Checksum::Repaired]);
    let corrupt = (share(), 1u32..=1000, checksum).prop_map(|(share, bits, checksum)| Corrupt {
        share,
        bits,
        checksum,
    });
    let flap = (time(), time(), time()).prop_map(|(up, down, after)| Flap { up, down, after });
    let mtu =
        (68u32..=65_535, any::<bool>(), any::<bool>()).prop_map(|(bytes, icmp, fragment)| Mtu {
            bytes,
            icmp,
            fragment,
        });
    let head = (
        prop::option::of("[a-z0-9][a-z0-9_-]{0,8}"),
        prop::sample::select(directions),
        matches(),
    );
    let flags = (any::<bool>(), any::<bool>());
    let first = (
        prop::option::of(flap),
        prop::option::of(mtu),
        prop::option::of(loss()),
        prop::option::of(line()),
    );
    let last = (
        prop::option::of(delay()),
        prop::option::of(reorder),
        prop::option::of(share()),
        prop::option::of(corrupt),
        prop::option::of(rebind()),
    );
    (head, flags, first, last).prop_map(|(head, flags, first, last)| Rule {
        name: head.0.map(|name| name.parse().unwrap()),
        direction: head.1,
        matches: head.2,
        preset: None,
        partition: flags.0,
        blackhole: flags.1,
        flap: first.0,
        mtu: first.1,
        loss: first.2,
        rate: first.3.clone().and_then(Result::ok),
        trace: first.3.and_then(Result::err),
        delay: last.0,
        reorder: last.1,
        duplicate: last.2,
        corrupt: last.3,
        nat_rebind: last.4.filter(|_| head.1 == Direction::Both),
    })
}

fn impairment() -> impl Strategy<Value = Impairment> {
    let on_death = prop::sample::select(vec![OnDeath::Closed, OnDeath::Open]);
    let rules = prop::collection::vec(rule(), 0..4);
    (0u64..1 << 63, on_death, prop::option::of(time()), rules).prop_map(
        |(seed, on_death, budget, mut rules)| {
            for (number, rule) in rules.iter_mut().enumerate() {
                let unique = |name: &Name| format!("{name}-{number}").parse().unwrap();
                rule.name = rule.name.as_ref().map(unique);
            }
            Impairment {
                seed,
                on_death,
                budget,
                rules,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_form_is_read_as_it_was_written(impairment in impairment()) {
        prop_assert_eq!(impairment.check(), Ok(()));
        let text = impairment.to_string();
        prop_assert_eq!(text.parse(), Ok(impairment.clone()), "{}", text);
        let json = serde_json::to_string(&impairment).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Impairment>(&json).unwrap(), &impairment, "{}", json);
        let toml = toml::to_string(&impairment).unwrap();
        prop_assert_eq!(&toml::from_str::<Impairment>(&toml).unwrap(), &impairment, "{}", toml);
    }

    #[test]
    fn any_text_is_read_or_refused(text in "([a-z0-9%;=\"-]{0,6} ?){0,12}") {
        if let Ok(impairment) = text.parse::<Impairment>() {
            let again = impairment.to_string();
            prop_assert_eq!(again.parse::<Impairment>(), Ok(impairment));
        }
    }
}

#[test]
fn a_line_of_text_says_what_a_file_says() {
    let text = "seed 7; name dns egress match protocol=udp peer=10.0.0.0/8 peer_port=53 local=10.0.0.1 loss 1%; \
                delay 50ms 10ms normal correlation 25% rate 10mbit codel limit 100 packets";
    let file = r#"
        seed = 7
        [[rule]]
        name = "dns"
        direction = "egress"
        match = { protocol = "udp", peer = "10.0.0.0/8", peer_port = 53, local = "10.0.0.1" }
        loss = "1%"
        [[rule]]
        delay = { mean = "50ms", jitter = "10ms", distribution = "normal", correlation = "25%", order = "keep" }
        rate = { rate = "10mbit", queue = "codel", limit = "100 packets" }
    "#;
    let from_file: Impairment = toml::from_str(file).unwrap();
    assert_eq!(text.parse(), Ok(from_file.clone()));
    let text = from_file.to_string();
    assert_eq!(text.parse(), Ok(from_file));
}

#[test]
fn tables_of_losses_are_read() {
    let read = |loss: &str| {
        toml::from_str::<Rule>(&format!("loss = {loss}")).map(|rule| rule.loss.unwrap())
    };
    assert_eq!(
        read("\"gilbert-elliott 1% 20%\"").unwrap(),
        read(r#"{ model = "gilbert-elliott", p = "1%", r = "20%" }"#).unwrap()
    );
    assert_eq!(
        read("\"packets 3,17,20-29\"").unwrap(),
        read(r#"{ packets = [3, 17, "20-29"] }"#).unwrap()
    );
    assert_eq!(
        read("\"4-state 1%\"").unwrap(),
        read(r#"{ model = "4-state", p13 = "1%", p31 = "99%" }"#).unwrap()
    );
    for (wrong, why) in [
        (
            r#"{ model = "gilbert-elliott", p = "1%" }"#,
            "gilbert-elliott needs r",
        ),
        (r#"{ share = "1%", p = "1%" }"#, "independent has no p"),
        (r#"{ share = "1%", packets = [3] }"#, "packets has no share"),
        (r#"{ chance = "1%" }"#, "unknown field `chance`"),
        ("\"1\"", "'1' is no share"),
    ] {
        let error = read(wrong).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_wrong_text_is_refused_with_what_to_write() {
    for (text, why) in [
        ("dealy 50ms", "'dealy' is no impairment: write loss, delay"),
        ("delay", "'delay' needs a time, such as 50ms"),
        ("delay fast", "after 'delay': 'fast' is no time"),
        ("loss 1% loss 2%", "'loss' is there twice"),
        (
            "egress ingress loss 1%",
            "'egress' and 'ingress' are in one rule",
        ),
        ("ingress loss 1% both", "separate rules by ';'"),
        ("egress loss 1% egress", "'egress' is there twice"),
        ("name x", "needs what is to happen"),
        ("loss 1% pass", "pass alone"),
        ("match proto=udp loss 1%", "is called 'proto'"),
        (
            "match peer=10.0.0.0/33 loss 1%",
            "peer: '10.0.0.0/33' is neither an address nor a prefix",
        ),
        ("match loss 1%", "needs what to match"),
        ("flap up 10s", "needs down and a time"),
        ("seed 7 loss 1%", "after 'seed 7' there can be no 'loss'"),
        ("delay 50ms order sometimes", "not keep or any"),
    ] {
        let error = text.parse::<Impairment>().unwrap_err().to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
}

/// Texts, and a part of why they are refused.
const IMPOSSIBLE: &[(&str, &str)] = &[
    (
        "loss 101%",
        "rule 'rule-1', loss: 101% is not between 0% and 100%",
    ),
    ("pass; name dns loss -1%", "rule 'dns', loss: -1%"),
    (
        "delay -5ms",
        "rule 'rule-1', delay: -5ms is not between 0ms",
    ),
    ("delay 5ms -1ms", "delay.jitter: -1ms"),
    ("delay 5ms 1ms correlation 100%", "delay.correlation: 100%"),
    ("delay 5ms correlation 5%", "nothing to correlate"),
    (
        "delay 5ms limit 10000000 packets",
        "delay.limit: 10000000 packets: 1 to 1048576",
    ),
    ("delay 5ms 0ms normal", "normal needs jitter"),
    (
        "delay 0ms 1ms samples 2ms",
        "delay.samples: jitter is there too",
    ),
    ("rate 9kbit", "rate: 9kbit is not between 10kbit and 10gbit"),
    ("rate 11gbit", "rate: 11gbit is not between"),
    ("rate 1mbit limit 0 packets", "rate.limit: 0 packets"),
    (
        "rate 1mbit target 1ms",
        "rate.target: only a queue of codel",
    ),
    (
        "rate 1mbit codel target 1s",
        "rate.target: 1s is not between",
    ),
    ("rate 1mbit trace x", "trace: rate is there too"),
    (
        "loss 4-state 60% 1% 1% 1% 60%",
        "p13 and p14 leave one state, and are 120%",
    ),
    ("mtu 67", "mtu: 67 is not between 68"),
    ("flap up 0s down 1s", "flap.up: 0ms"),
    ("reorder 1% distance 0", "reorder.distance: 0"),
    ("corrupt 1% bits 1001", "corrupt.bits: 1001"),
    ("duplicate 200%", "duplicate: 200%"),
    (
        "egress nat-rebind 30s",
        "nat_rebind: the rule must be for both ways",
    ),
    (
        "ingress preset lte nat-rebind 30s",
        "nat_rebind: the rule must be for both ways",
    ),
    ("nat-rebind addresses 192.0.2.1", "nat_rebind: say when"),
    (
        "preset lte nat-rebind addresses 192.0.2.1",
        "nat_rebind: say when",
    ),
    ("match version=5 loss 1%", "match.version: 5"),
    (
        "match version=6 peer=10.0.0.1 loss 1%",
        "match.peer: 10.0.0.1/32 is IPv4",
    ),
    ("match local=::1 peer=10.0.0.1 loss 1%", "match.peer"),
    (
        "match protocol=icmp port=5 loss 1%",
        "match.port: the protocol has no ports",
    ),
    ("match vlan=4095 loss 1%", "match.vlan: 4095"),
    ("preset 9g", "rule 'rule-1', preset: there is no '9g': use"),
    (
        "name a loss 1%; name a loss 2%",
        "two rules for one way are called 'a'",
    ),
    ("budget 0ms", "budget is 0ms"),
    ("seed 9223372036854775808", "seed is 9223372036854775808"),
];

#[test]
fn what_cannot_be_is_refused_with_rule_and_field() {
    for (text, why) in IMPOSSIBLE {
        let error = text
            .parse::<Impairment>()
            .unwrap()
            .check()
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
    let many = Impairment {
        rules: vec![Rule::default(); RULES_MAX + 1],
        ..Impairment::default()
    };
    assert!(many.check().unwrap_err().to_string().contains("257 rules"));
    let preset = "preset lte".parse::<Rule>().unwrap();
    let many = Impairment {
        rules: vec![preset; RULES_MAX],
        ..Impairment::default()
    };
    assert!(many.check().unwrap_err().to_string().contains("512 rules"));
}

#[test]
fn a_file_error_names_its_line() {
    let error =
        toml::from_str::<Impairment>("seed = 7\n[[rule]]\nloss = \"1%\"\ndelay = \"soon\"\n")
            .unwrap_err();
    assert!(error.to_string().contains("line 4"), "{error}");
    assert!(toml::from_str::<Impairment>("[[rule]]\nlatency = \"5ms\"\n").is_err());
}

#[test]
fn a_preset_is_filled_in_each_way_and_what_is_set_wins() {
    let impairment: Impairment = "name phone match peer=10.0.0.0/8 preset 3g loss 2%"
        .parse()
        .unwrap();
    let resolved = impairment.resolved().unwrap();
    assert_eq!(resolved.rules.len(), 2);
    for (rule, way) in resolved
        .rules
        .iter()
        .zip([Direction::Egress, Direction::Ingress])
    {
        assert_eq!(
            (rule.direction, &rule.matches),
            (way, &impairment.rules[0].matches)
        );
        assert_eq!(rule.name.as_ref().unwrap().as_str(), "phone");
        assert_eq!(rule.loss, Some("2%".parse().unwrap()));
        assert_eq!(rule.delay, Preset::find("3g").unwrap().rule(way).delay);
    }
    assert_eq!(resolved.resolved().as_ref(), Ok(&resolved));
    let one_way: Impairment = "egress preset 3g".parse().unwrap();
    assert_eq!(one_way.resolved().unwrap().rules.len(), 1);
    let rebound: Impairment = "preset lte nat-rebind 30s".parse().unwrap();
    let halves = rebound.resolved().unwrap().rules;
    let rebind = Some("30s".parse().unwrap());
    assert_eq!(halves.len(), 2);
    assert!(halves.iter().all(|half| half.nat_rebind == rebind));
}

#[test]
fn files_of_traces_are_read_once() {
    let mut impairment: Impairment = "trace a.trace; name b trace b.trace".parse().unwrap();
    let read = |path: &str| {
        if path == "a.trace" {
            Ok("1\n")
        } else {
            Err("no such file")
        }
    };
    let error = impairment
        .read_files(|path| read(path).map(str::to_owned))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "rule 'b', trace: read b.trace: no such file"
    );
    assert_eq!(
        impairment.rules[0]
            .trace
            .as_ref()
            .unwrap()
            .content
            .as_deref(),
        Some("1\n")
    );
    impairment.rules.pop();
    assert_eq!(impairment.read_files(|_| Err("read again")), Ok(()));
}

/// Lists of what is impaired have none.
#[test]
fn without_the_content_of_traces_all_else_is_the_same() {
    let with_content = |text: &str| {
        let mut impairment: Impairment = text.parse().unwrap();
        impairment
            .read_files(|_| Ok::<_, &str>("1\n".to_owned()))
            .unwrap();
        impairment
    };
    for text in [
        "delay 5ms; egress trace a.trace loss 1%",
        "seed 7; trace a.trace codel limit 100 packets",
    ] {
        let without = with_content(text).without_contents();
        assert_eq!(without, text.parse().unwrap());
    }
    // Who has no file sends only content; what is listed of it is read again.
    let mut nameless = with_content("trace a.trace");
    nameless.rules[0].trace.as_mut().unwrap().file.clear();
    let listed = nameless.without_contents();
    let written = serde_json::to_string(&listed).unwrap();
    assert!(!written.contains("content"), "{written}");
    assert_eq!(
        serde_json::from_str::<Impairment>(&written).unwrap(),
        listed
    );
}

#[test]
fn the_openapi_document_says_text_or_table() {
    let schema = serde_json::to_value(<Rule as utoipa::PartialSchema>::schema()).unwrap();
    let delay = &schema["properties"]["delay"]["oneOf"];
    assert_eq!(delay[0]["type"], "string");
    assert!(delay[1]["properties"]["jitter"].is_object(), "{delay}");
    assert!(schema["required"].is_null(), "{schema}");
}
