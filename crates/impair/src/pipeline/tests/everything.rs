//! All models at once, and changes in between.

use super::*;
use crate::{
    decision::{Decision, Verdict},
    flap::FlapModel,
    mtu::{MtuModel, WithoutDf},
    reorder::ReorderModel,
    test_frames::{udp, with_df},
    trace::Trace,
};

#[derive(Clone)]
pub(super) struct Wire(pub(super) Vec<u8>);

impl std::fmt::Debug for Wire {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "{} bytes, flow {}",
            self.0.len(),
            self.flow_hash()
        )
    }
}

impl Packet for Wire {
    fn frame_bytes(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap()
    }

    fn flow_hash(&self) -> u64 {
        u64::from(self.0[29])
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn copy(&self) -> Option<Self> {
        (self.0.len() < 1000).then(|| self.clone())
    }

    fn with_bytes(&self, frame: &[u8]) -> Option<Self> {
        Some(Self(frame.to_vec()))
    }
}

#[derive(Clone, Debug)]
enum Act {
    Offer(Wire),
    Refuse(Wire),
    Reconfigure(Box<Settings>),
    Drain,
    Flush,
}

type Acts = Vec<(u64, Act)>;

fn wires() -> impl Strategy<Value = Wire> {
    (0usize..1400, 1u16..9, any::<bool>()).prop_map(|(bytes, flow, df)| {
        let frame = udp(&format!("10.0.0.{flow}:1"), "10.0.9.2:9", &vec![0; bytes]);
        Wire(with_df(frame, df))
    })
}

fn all_settings() -> impl Strategy<Value = Settings> {
    let cuts = (
        prop::bool::weighted(0.05),
        prop::bool::weighted(0.05),
        prop::option::of((0u64..9_000_000, 0u64..3_000_000, 0u64..9_000_000)),
    );
    let mtu = (300u32..1500, any::<bool>(), any::<bool>());
    let reorder = (0.0..1.0, 0u32..5, 0u64..3_000_000);
    let trace = prop::option::weighted(0.3, prop::sample::select(vec!["0\n1", "1\n1\n3", "5"]));
    let more = (
        cuts,
        prop::option::of(mtu),
        prop::option::of(reorder),
        trace,
    );
    (settings(), more).prop_map(|(mut settings, (cuts, mtu, reorder, trace))| {
        (settings.partition, settings.blackhole) = (cuts.0, cuts.1);
        settings.flap = cuts
            .2
            .map(|(up, down, start)| FlapModel { up, down, start });
        settings.mtu = mtu.map(|(bytes, answer, drop)| MtuModel {
            bytes,
            answer,
            without_df: if drop {
                WithoutDf::Drop
            } else {
                WithoutDf::Fragment
            },
        });
        settings.reorder = reorder.map(|(probability, distance, wait_max)| ReorderModel {
            probability,
            distance,
            wait_max,
        });
        if let (Some(bottleneck), Some(trace)) = (&mut settings.bottleneck, trace) {
            bottleneck.capacity = Capacity::Trace {
                trace: Trace::parse(trace).unwrap(),
                start: 2_000_000,
            };
        }
        settings
    })
}

fn acts() -> impl Strategy<Value = Acts> {
    let act = prop_oneof![
        60 => wires().prop_map(Act::Offer),
        2 => wires().prop_map(Act::Refuse),
        2 => all_settings().prop_map(|settings| Act::Reconfigure(Box::new(settings))),
        1 => Just(Act::Drain),
        1 => Just(Act::Flush),
    ];
    prop::collection::vec((0u64..200_000, act), 0..300)
}

/// Does it all, fetching what is due after every `fetch_every` acts and before a flush.
fn perform(first: Settings, acts: &Acts, fetch_every: usize) -> (Vec<Decision>, Counters) {
    let mut pipeline = Pipeline::new(flow(5), first);
    let (mut log, mut now, mut answers) = (Vec::new(), 0, 0);
    for (index, (later, act)) in acts.iter().enumerate() {
        now += later;
        let mut drops = Vec::new();
        if matches!(act, Act::Flush) {
            fetch(&mut pipeline, now, &mut log);
        }
        let before = pipeline.packets();
        let mut dropped = |packet: Dropped<Wire>| {
            answers += u64::from(packet.answer.is_some());
            drops.push(Decision::dropped(&packet));
        };
        match act.clone() {
            Act::Offer(wire) => pipeline.offer(now, wire, &mut dropped),
            Act::Refuse(wire) => pipeline.refuse(now, wire, DropCause::Nat, &mut dropped),
            Act::Reconfigure(settings) => pipeline.reconfigure(now, *settings, &mut dropped),
            Act::Drain => pipeline.begin_drain(now, &mut dropped),
            Act::Flush => {
                let flushed = pipeline.flush(now, &mut dropped);
                assert_eq!(flushed, before as u64);
                assert!(pipeline.is_empty() && pipeline.next_deadline().is_none());
            }
        }
        log.append(&mut drops);
        if index % fetch_every == 0 {
            fetch(&mut pipeline, now, &mut log);
        }
        check(&pipeline);
    }
    while let Some(deadline) = pipeline.next_deadline() {
        fetch(&mut pipeline, deadline.max(now), &mut log);
        check(&pipeline);
    }
    assert!(pipeline.is_empty());
    assert_eq!(answers, pipeline.counters.answers);
    (log, pipeline.counters)
}

fn fetch(pipeline: &mut Pipeline<Wire>, now: u64, log: &mut Vec<Decision>) {
    let mut drops = Vec::new();
    while let Some(packet) = pipeline.release(now, &mut |packet| {
        drops.push(Decision::dropped(&packet));
    }) {
        assert!(packet.deadline <= now);
        log.push(Decision::released(&packet, Some(now)));
    }
    log.append(&mut drops);
}

fn check(pipeline: &Pipeline<Wire>) {
    let counters = pipeline.counters();
    assert_eq!(
        counters.offered + counters.copies + counters.made,
        counters.released + counters.dropped_in_all() + pipeline.packets() as u64
    );
    let (packets, bytes) = pipeline.under_way();
    assert_eq!(packets == 0, bytes == 0);
}

/// Releases in their order, then drops in a fixed one: whoever fetches seldom hears of them later.
fn in_order(log: Vec<Decision>) -> Vec<Decision> {
    let planned = log.into_iter().map(Decision::planned);
    let (released, mut dropped): (Vec<_>, Vec<_>) =
        planned.partition(|decision| matches!(decision.verdict, Verdict::Released { .. }));
    dropped.sort_by_key(|decision| (decision.number, decision.part, decision.is_copy));
    released.into_iter().chain(dropped).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Packets in + copies + made = out + dropped + inside after every act; the recorded log of decisions is what the
    /// same input gives again, whenever it is fetched; what is released is in the order of deadlines.
    #[test]
    fn the_log_of_a_run_is_that_of_its_repetition(
        first in all_settings(),
        acts in acts(),
        fetch_every in 2usize..400,
    ) {
        let (log, counters) = perform(first.clone(), &acts, 1);
        let text: Vec<String> = log
            .into_iter()
            .map(|decision| serde_json::to_string(&decision).unwrap())
            .collect();
        let (again, same) = perform(first, &acts, fetch_every);
        let recorded = text.iter().map(|line| serde_json::from_str(line).unwrap());
        let recorded = in_order(recorded.collect());
        prop_assert_eq!(&recorded, &in_order(again));
        prop_assert_eq!(counters, same);
        let planned = recorded.iter().filter_map(|decision| match decision.verdict {
            Verdict::Released { planned, .. } => Some(planned),
            Verdict::Dropped { .. } => None,
        });
        prop_assert!(planned.is_sorted());
    }

    /// Whatever becomes of one rule's packets and settings, the other rule's are the same.
    #[test]
    fn a_rule_does_not_change_what_another_drops(
        mine in all_settings(),
        others in (all_settings(), all_settings()),
        acts in acts(),
    ) {
        let run = |other: &Settings, other_share: usize| {
            let mut pipelines = [(5, mine.clone()), (6, other.clone())]
                .map(|(rule, settings)| Pipeline::new(flow(rule), settings));
            let (mut now, mut log) = (0, Vec::new());
            for (index, (later, act)) in acts.iter().enumerate() {
                now += later;
                let Act::Offer(wire) = act else { continue };
                if index % other_share == 0 {
                    pipelines[1].offer(now, wire.clone(), &mut |_| {});
                    while pipelines[1].release(now, &mut |_| {}).is_some() {}
                }
                let mut drops = Vec::new();
                pipelines[0].offer(now, wire.clone(), &mut |packet| {
                    drops.push(Decision::dropped(&packet));
                });
                log.append(&mut drops);
                fetch(&mut pipelines[0], now, &mut log);
            }
            log
        };
        prop_assert_eq!(run(&others.0, 1), run(&others.1, 3));
    }
}

/// Anybody who changes these changes every recorded run.
#[test]
fn the_same_seed_gives_the_same_log_for_ever() {
    let settings = Settings {
        loss: Some(LossModel::Independent { probability: 0.2 }),
        bottleneck: Some(Bottleneck {
            capacity: Capacity::Rate {
                bits_per_second: 10_000_000,
                overhead: Overhead::default(),
            },
            queue: QueueModel::DropTail(Limit {
                packets: 2,
                bytes: 9000,
            }),
        }),
        delay: Some(DelayModel {
            constant: 1_000_000,
            jitter: 200_000,
            distribution: Distribution::Normal,
            correlation: 0.5,
            keep_order: false,
        }),
        reorder: Some(ReorderModel {
            probability: 0.3,
            distance: 2,
            wait_max: 400_000,
        }),
        duplicate: 0.2,
        corrupt: Some(CorruptModel {
            probability: 0.2,
            bits: 2,
            first_byte: 14,
        }),
        mtu: Some(MtuModel {
            bytes: 800,
            answer: false,
            without_df: WithoutDf::Fragment,
        }),
        ..Settings::default()
    };
    let frame = udp("10.0.0.1:1", "10.0.9.2:9", &[0; 900]);
    let acts: Acts = (0..12)
        .map(|_| (500_000, Act::Offer(Wire(with_df(frame.clone(), false)))))
        .collect();
    let log = in_order(perform(settings, &acts, 1).0);
    let lines: Vec<String> = log.iter().map(line).collect();
    assert_eq!(lines, GOLDEN);
}

/// `number.part`, a star for a copy, and the release with its flips, or the cause with its moment.
fn line(decision: &Decision) -> String {
    let star = if decision.is_copy { "*" } else { "" };
    let fate = match &decision.verdict {
        Verdict::Released {
            planned, bit_flips, ..
        } => format!("{planned} {bit_flips:?}"),
        Verdict::Dropped { at, cause } => format!("{at} {}", cause.name()),
    };
    format!("{}.{}{star} {fate}", decision.number, decision.part)
}

const GOLDEN: &[&str] = &[
    "0.0 2162078 []",
    "0.0* 2162078 []",
    "0.1 2544794 []",
    "0.1* 2544794 []",
    "2.0 3343608 []",
    "2.0* 3343608 []",
    "2.1 3574488 []",
    "3.0 3922355 [1087, 4490]",
    "4.1 4219265 []",
    "4.0 4696638 []",
    "5.0 5177880 []",
    "7.0 5581459 [631, 4691]",
    "7.1 5916941 [117, 300]",
    "8.0 6747893 []",
    "10.0 7630012 [615, 4688]",
    "10.1 7905386 []",
    "11.0 8390376 []",
    "1.0 1000000 loss",
    "3.1 2000000 queue_full",
    "5.1 3000000 queue_full",
    "6.0 3500000 queue_full",
    "6.1 3500000 queue_full",
    "8.1 4500000 queue_full",
    "9.0 5000000 queue_full",
    "9.1 5000000 queue_full",
    "11.1 6000000 queue_full",
];
