mod change;
mod everything;
mod stages;

use proptest::prelude::*;

use super::*;
use crate::{
    corrupt::CorruptModel,
    delay::{DelayModel, Distribution},
    line::Capacity,
    loss::{LossModel, PacketList},
    queue::{CodelSettings, FqCodelSettings, Limit, QueueModel},
    random::Direction,
    rate::Overhead,
};

#[derive(Clone, Debug, PartialEq, Eq)]
struct Frame {
    bytes: u32,
    flow: u64,
}

impl Packet for Frame {
    fn frame_bytes(&self) -> u32 {
        self.bytes
    }

    fn flow_hash(&self) -> u64 {
        self.flow
    }

    fn bytes(&self) -> &[u8] {
        &[]
    }

    fn copy(&self) -> Option<Self> {
        (self.bytes < 1400).then(|| self.clone())
    }

    fn with_bytes(&self, frame: &[u8]) -> Option<Self> {
        let bytes = u32::try_from(frame.len()).ok()?;
        Some(Self { bytes, ..*self })
    }
}

/// A packet to offer: nanoseconds after the one before, and its frame.
type Step = (u64, Frame);

/// What became of packets: number, whether a copy, deadline, flips; and number and cause.
type Log = (Vec<(u64, bool, u64, Vec<u64>)>, Vec<(u64, DropCause)>);

fn flow(rule: u32) -> Flow {
    Flow {
        seed: 99,
        link: 3,
        direction: Direction::Egress,
        rule,
    }
}

/// Offers all, fetching what is due after every `fetch_every` packets, then runs dry.
fn run(rule: u32, settings: Settings, steps: &[Step], fetch_every: usize) -> (Log, Counters) {
    let mut pipeline = Pipeline::new(flow(rule), settings);
    let (mut out, mut drops) = (Vec::new(), Vec::new());
    let mut now = 0;
    for (index, (later, frame)) in steps.iter().enumerate() {
        now += later;
        let mut dropped = |dropped: Dropped<Frame>| drops.push((dropped.number, dropped.cause));
        pipeline.offer(now, frame.clone(), &mut dropped);
        while index % fetch_every == 0
            && let Some(packet) = pipeline.release(now, &mut dropped)
        {
            assert!(packet.deadline <= now);
            out.push((
                packet.number,
                packet.is_copy,
                packet.deadline,
                packet.bit_flips,
            ));
        }
        check_conservation(&pipeline);
    }
    while let Some(deadline) = pipeline.next_deadline() {
        let mut dropped = |dropped: Dropped<Frame>| drops.push((dropped.number, dropped.cause));
        now = now.max(deadline);
        while let Some(packet) = pipeline.release(now, &mut dropped) {
            out.push((
                packet.number,
                packet.is_copy,
                packet.deadline,
                packet.bit_flips,
            ));
        }
    }
    check_conservation(&pipeline);
    assert_eq!(pipeline.packets(), 0);
    drops.sort_unstable();
    ((out, drops), pipeline.counters)
}

fn check_conservation(pipeline: &Pipeline<Frame>) {
    let counters = pipeline.counters();
    assert_eq!(
        counters.offered + counters.copies + counters.made,
        counters.released + counters.dropped_in_all() + pipeline.packets() as u64
    );
}

fn settings() -> impl Strategy<Value = Settings> {
    let limit = Limit {
        packets: 20,
        bytes: 20_000,
    };
    let codel = CodelSettings {
        target: 1_000_000,
        interval: 5_000_000,
        limit,
    };
    let queues = vec![
        QueueModel::DropTail(limit),
        QueueModel::Codel(codel),
        QueueModel::FqCodel(FqCodelSettings {
            codel,
            flows: 4,
            quantum: 500,
        }),
    ];
    let bottleneck = (10_000_000u64..1_000_000_000, prop::sample::select(queues)).prop_map(
        |(bits_per_second, queue)| Bottleneck {
            capacity: Capacity::Rate {
                bits_per_second,
                overhead: Overhead::default(),
            },
            queue,
        },
    );
    let delay = (0u64..3_000_000, any::<bool>(), 0.0..0.9).prop_map(
        |(constant, keep_order, correlation)| DelayModel {
            constant,
            jitter: 1_000_000,
            distribution: Distribution::ParetoNormal,
            correlation,
            keep_order,
        },
    );
    (
        prop::option::of(0.0..0.5),
        prop::option::of(bottleneck),
        prop::option::of(delay),
        0.0..0.5,
        prop::option::of(0.0..0.5),
        1usize..40,
    )
        .prop_map(
            |(loss, bottleneck, delay, duplicate, corrupt, packets)| Settings {
                loss: loss.map(|probability| LossModel::Independent { probability }),
                bottleneck,
                delay,
                delay_limit: Limit {
                    packets,
                    bytes: 30_000,
                },
                duplicate,
                corrupt: corrupt.map(|probability| CorruptModel {
                    probability,
                    bits: 2,
                    first_byte: 14,
                }),
                unread_packets_max: 10_000,
                ..Settings::default()
            },
        )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (0u64..200_000, 60u32..1515, 0u64..8);
    prop::collection::vec(
        step.prop_map(|(later, bytes, flow)| (later, Frame { bytes, flow })),
        0..300,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Also checks conservation after every packet.
    #[test]
    fn when_packets_are_fetched_changes_nothing(
        settings in settings(),
        steps in steps(),
        fetch_every in 2usize..400,
    ) {
        let (often, counters) = run(0, settings.clone(), &steps, 1);
        let (seldom, same) = run(0, settings, &steps, fetch_every);
        prop_assert_eq!(&often, &seldom);
        prop_assert_eq!(counters, same);
        prop_assert!(often.0.is_sorted_by_key(|packet| packet.2));
    }

    /// A rule's verdicts are a function of its own packets: twice the same, and other rules have others.
    #[test]
    fn the_same_input_gives_the_same_verdicts(settings in settings(), steps in steps()) {
        prop_assert_eq!(run(7, settings.clone(), &steps, 1), run(7, settings, &steps, 1));
    }
}

fn regular(packets: usize, gap: u64, bytes: u32) -> Vec<Step> {
    vec![(gap, Frame { bytes, flow: 1 }); packets]
}

fn lossy(probability: f64) -> Settings {
    Settings {
        loss: Some(LossModel::Independent { probability }),
        ..Settings::default()
    }
}

#[test]
fn another_impairment_does_not_change_which_packets_are_lost() {
    let steps = regular(2000, 1_000_000, 100);
    let (alone, _) = run(1, lossy(0.1), &steps, 1);
    let busy = Settings {
        delay: Some(DelayModel::constant(7)),
        duplicate: 0.5,
        corrupt: Some(CorruptModel {
            probability: 0.5,
            bits: 3,
            first_byte: 14,
        }),
        ..lossy(0.1)
    };
    assert_eq!(alone.1, run(1, busy, &steps, 1).0.1);
    assert_ne!(alone.1, run(2, lossy(0.1), &steps, 1).0.1);
}

#[test]
fn a_packet_alone_takes_its_serialisation_and_its_delay() {
    let settings = Settings {
        bottleneck: Some(Bottleneck {
            capacity: Capacity::Rate {
                bits_per_second: 1_000_000,
                overhead: Overhead::default(),
            },
            queue: QueueModel::DropTail(Limit::default()),
        }),
        delay: Some(DelayModel::constant(50_000_000)),
        ..Settings::default()
    };
    let (log, counters) = run(0, settings, &regular(3, 500_000, 125), 1);
    let deadlines: Vec<u64> = log.0.iter().map(|packet| packet.2).collect();
    assert_eq!(deadlines, [51_500_000, 52_500_000, 53_500_000]);
    assert_eq!((counters.released, counters.out_of_order), (3, 0));
}

#[test]
fn nothing_set_means_nothing_happens() {
    let (log, counters) = run(0, Settings::default(), &regular(50, 10, 1514), 1);
    assert_eq!((log.0.len(), log.1.len(), counters.copies), (50, 0, 0));
    assert!(
        (0..)
            .zip(&log.0)
            .all(|(number, packet)| packet.0 == number && packet.2 == (number + 1) * 10)
    );
}

#[test]
fn a_limit_never_poses_as_loss() {
    let settings = Settings {
        delay: Some(DelayModel::constant(1_000_000_000)),
        delay_limit: Limit {
            packets: 10,
            bytes: 1 << 20,
        },
        ..Settings::default()
    };
    let (_, counters) = run(0, settings, &regular(30, 10, 100), 1);
    assert_eq!(
        counters.dropped,
        BTreeMap::from([(DropCause::DelayFull, 20)])
    );
    let lazy = Settings {
        unread_packets_max: 5,
        ..Settings::default()
    };
    let (_, counters) = run(0, lazy, &regular(30, 10, 100), 1000);
    // The first is fetched at once.
    assert_eq!(counters.dropped, BTreeMap::from([(DropCause::Unread, 24)]));
}

#[test]
fn jitter_without_order_is_counted_as_reordering() {
    let settings = |keep_order| Settings {
        delay: Some(DelayModel {
            constant: 10_000,
            jitter: 5_000,
            distribution: Distribution::Uniform,
            correlation: 0.0,
            keep_order,
        }),
        ..Settings::default()
    };
    let steps = regular(1000, 1000, 100);
    assert!(run(0, settings(false), &steps, 1).1.out_of_order > 300);
    assert_eq!(run(0, settings(true), &steps, 1).1.out_of_order, 0);
}

/// 5000 of 10,000 and 1000 of 15,000: four deviations each.
#[test]
fn copies_and_corruption_have_their_shares() {
    let settings = Settings {
        duplicate: 0.5,
        corrupt: Some(CorruptModel {
            probability: 0.1,
            bits: 1,
            first_byte: 14,
        }),
        ..Settings::default()
    };
    let (_, counters) = run(0, settings.clone(), &regular(10_000, 1000, 100), 1);
    assert!(counters.copies.abs_diff(5000) < 200, "{}", counters.copies);
    assert!((counters.corrupted * 10).abs_diff(counters.released) < 1470);
    let (_, counters) = run(0, settings, &regular(100, 1000, 1500), 1);
    assert!(counters.copies == 0 && counters.copies_refused > 0);
}
