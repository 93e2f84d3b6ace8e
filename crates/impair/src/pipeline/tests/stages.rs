//! What each stage does to packets, alone.

use super::{everything::Wire, *};
use crate::{
    flap::FlapModel,
    mtu::{MtuModel, WithoutDf},
    reorder::ReorderModel,
    test_frames::{udp, with_df},
    trace::Trace,
};

const MS: u64 = 1_000_000;

fn reordering(probability: f64, distance: u32, wait_max: u64) -> Settings {
    Settings {
        reorder: Some(ReorderModel {
            probability,
            distance,
            wait_max,
        }),
        ..Settings::default()
    }
}

fn bottleneck(capacity: Capacity) -> Settings {
    Settings {
        bottleneck: Some(Bottleneck {
            capacity,
            queue: QueueModel::DropTail(Limit::default()),
        }),
        ..Settings::default()
    }
}

fn rate(bits_per_second: u64) -> Settings {
    bottleneck(Capacity::Rate {
        bits_per_second,
        overhead: Overhead::default(),
    })
}

fn causes(settings: Settings, steps: &[Step]) -> BTreeMap<DropCause, u64> {
    run(0, settings, steps, 1).1.dropped
}

/// 20,000 packets; four deviations of a binomial share each. Only who is chosen at the very end finds nobody
/// to be overtaken by.
#[test]
fn the_share_that_is_asked_for_really_comes_out_of_order() {
    for (probability, distance) in [(0.01, 1), (0.1, 3), (0.25, 10)] {
        let settings = reordering(probability, distance, 1_000_000_000);
        let (_, counters) = run(3, settings, &regular(20_000, 1000, 100), 1);
        let deviation = (20_000.0 * probability * (1.0 - probability)).sqrt();
        let chosen = f64::from(u32::try_from(counters.held_back).unwrap());
        assert!(
            (chosen - 20_000.0 * probability).abs() < 4.0 * deviation,
            "{chosen}"
        );
        assert!(counters.held_back - counters.out_of_order <= 20);
        assert_eq!(counters.released, 20_000);
    }
}

/// A held packet leaves right behind the one that makes its distance full, at that one's deadline.
#[test]
fn a_held_packet_is_overtaken_by_as_many_as_asked() {
    for distance in [1, 2, 5] {
        let settings = reordering(0.02, distance, u64::MAX);
        let (log, counters) = run(3, settings, &regular(3000, 1000, 100), 1);
        let numbers: Vec<u64> = log.0.iter().map(|packet| packet.0).collect();
        let mut lone = 0;
        for (place, &number) in numbers.iter().enumerate() {
            let highest = numbers[..place].iter().max().copied().unwrap_or(0);
            let window = &numbers[place.saturating_sub(20)..(place + 20).min(numbers.len())];
            let late = window.windows(2).filter(|two| two[0] > two[1]).count();
            if number < highest && late == 1 && highest < 2970 {
                assert_eq!(highest - number, u64::from(distance));
                assert_eq!(log.0[place].2, log.0[place - 1].2);
                lone += 1;
            }
        }
        assert!(lone > 10 && counters.out_of_order > 30, "{lone}");
    }
}

#[test]
fn a_held_packet_that_nobody_overtakes_leaves_in_time() {
    let settings = reordering(1.0, 3, 5 * MS);
    let (log, counters) = run(0, settings, &regular(3, 20 * MS, 100), 1);
    let deadlines: Vec<u64> = log.0.iter().map(|packet| packet.2 / MS).collect();
    assert_eq!(deadlines, [25, 45, 65]);
    assert_eq!((counters.held_back, counters.out_of_order), (3, 0));
}

/// Anybody who changes these changes every recorded run.
#[test]
fn the_same_seed_reorders_alike_for_ever() {
    let order = |rule| {
        let (log, _) = run(rule, reordering(0.3, 2, MS), &regular(16, 1000, 100), 1);
        log.0.iter().map(|packet| packet.0).collect::<Vec<u64>>()
    };
    assert_eq!(
        order(1),
        [0, 1, 3, 5, 2, 9, 4, 10, 6, 7, 8, 11, 12, 13, 14, 15]
    );
    assert_eq!(
        order(2),
        [0, 2, 3, 1, 4, 6, 7, 5, 9, 10, 8, 11, 15, 12, 13, 14]
    );
}

#[test]
fn every_cut_has_a_cause_of_its_own() {
    let steps = regular(10, MS, 100);
    let cut = |partition, blackhole| Settings {
        partition,
        blackhole,
        ..lossy(1.0)
    };
    let cases = [
        (cut(true, true), DropCause::Partition),
        (cut(false, true), DropCause::Blackhole),
        (cut(false, false), DropCause::Loss),
    ];
    for (settings, cause) in cases {
        assert_eq!(causes(settings, &steps), BTreeMap::from([(cause, 10)]));
    }
    // Packets come at 1, 2, … 10 ms; down from 5 to 7 and from 9 to 11.
    let flapping = Settings {
        flap: Some(FlapModel {
            up: 2 * MS,
            down: 2 * MS,
            start: 3 * MS,
        }),
        ..Settings::default()
    };
    let (log, _) = run(0, flapping, &steps, 1);
    let down: Vec<u64> = log.1.iter().map(|drop| drop.0 + 1).collect();
    assert_eq!(down, [5, 6, 9, 10]);
}

/// A cut takes packets before the loss model sees them, but those after it are lost as without it.
#[test]
fn a_cut_does_not_change_later_losses() {
    let gilbert = Settings {
        loss: Some(LossModel::GilbertElliott {
            p: 0.1,
            r: 0.3,
            loss_bad: 1.0,
            loss_good: 0.0,
        }),
        ..Settings::default()
    };
    let steps = regular(500, MS, 100);
    let flapping = Settings {
        flap: Some(FlapModel {
            up: 10 * MS,
            down: 5 * MS,
            start: 0,
        }),
        ..gilbert.clone()
    };
    let (alone, _) = run(1, gilbert, &steps, 1);
    let (both, _) = run(1, flapping, &steps, 1);
    let lost = |log: &Log| {
        let lost = log.1.iter().filter(|drop| drop.1 == DropCause::Loss);
        lost.map(|drop| drop.0).collect::<Vec<u64>>()
    };
    let mut expected = lost(&alone);
    expected.retain(|number| (number + 1) % 15 < 10);
    assert_eq!(lost(&both), expected);
}

/// 1028 bytes in parts of 596, 452: one number, one loss, a deadline for each behind its own serialisation.
#[test]
fn fragments_share_a_number_and_its_loss() {
    let mut settings = rate(1_000_000);
    settings.mtu = Some(MtuModel {
        bytes: 600,
        answer: true,
        without_df: WithoutDf::Fragment,
    });
    settings.loss = Some(LossModel::Exact(PacketList::new([(1, 1)])));
    let mut pipeline = Pipeline::new(flow(0), settings);
    let frame = udp("10.0.0.1:1", "10.0.0.2:9", &[0; 1000]);
    let (mut out, mut drops, mut answered) = (Vec::new(), Vec::new(), 0);
    let mut dropped = |packet: Dropped<Wire>| {
        drops.push((packet.number, packet.part, packet.cause));
        answered += u64::from(packet.answer.is_some());
    };
    for df in [false, false, false, true] {
        let wire = Wire(with_df(frame.clone(), df));
        pipeline.offer(0, wire, &mut dropped);
    }
    while let Some(packet) = pipeline.release(1_000 * MS, &mut dropped) {
        out.push((packet.number, packet.part, packet.deadline / 8000));
    }
    assert_eq!(out, [(0, 0, 610), (0, 1, 1076), (2, 0, 1686), (2, 1, 2152)]);
    assert_eq!(drops, [(1, 0, DropCause::Loss), (3, 0, DropCause::Mtu)]);
    let counters = pipeline.counters();
    assert_eq!((counters.offered, counters.made), (4, 2));
    assert_eq!((counters.answers, answered), (1, 1));
    assert_eq!((counters.released, counters.out_of_order), (4, 0));
}

/// Opportunities at 1, 1, 5, 10, 11, … ms. The first packet comes at 0.5 ms.
#[test]
fn a_trace_serves_the_queue_at_its_opportunities() {
    let settings = bottleneck(Capacity::Trace {
        trace: Trace::parse("1\n1\n5\n10\n").unwrap(),
        start: 0,
    });
    let mut steps = regular(4, MS / 2, 1514);
    // A frame that fills a quarter of an opportunity: 376 of 1504 bytes.
    steps.extend(regular(4, 1000, 386));
    let (log, counters) = run(0, settings, &steps, 1);
    let deadlines: Vec<u64> = log.0.iter().map(|packet| packet.2 / MS).collect();
    assert_eq!(deadlines, [1, 1, 5, 10, 11, 11, 11, 11]);
    assert_eq!(counters.released, 8);
}

/// The queue of a trace is the bottleneck's: what doesn't fit is dropped as its own cause, and CoDel works at
/// the moments of the opportunities.
#[test]
fn a_trace_has_the_same_queues() {
    let trace = Capacity::Trace {
        trace: Trace::parse("20").unwrap(),
        start: 0,
    };
    let mut settings = bottleneck(trace);
    let steps = regular(2000, 10 * MS, 1514);
    let queue = |settings: &mut Settings, queue| {
        settings.bottleneck.as_mut().unwrap().queue = queue;
    };
    let limit = Limit {
        packets: 10,
        ..Limit::default()
    };
    queue(&mut settings, QueueModel::DropTail(limit));
    let full = causes(settings.clone(), &steps);
    assert_eq!(
        full.keys().copied().collect::<Vec<_>>(),
        [DropCause::QueueFull]
    );
    assert!((980..=1000).contains(&full[&DropCause::QueueFull]));
    queue(&mut settings, QueueModel::Codel(CodelSettings::default()));
    let short = causes(settings, &steps);
    assert_eq!(
        short.keys().copied().collect::<Vec<_>>(),
        [DropCause::Codel]
    );
}

/// Of packets that always wait, the last leaves at the time that one division gives, to the nanosecond.
#[test]
fn a_rate_is_exact_from_the_slowest_to_the_fastest() {
    for bits_per_second in [10_000, 123_457, 1_000_000, 999_999_937, 10_000_000_000] {
        let (log, _) = run(0, rate(bits_per_second), &regular(9000, 1, 1514), 1);
        let bits = 9000 * 1514 * 8 * 1_000_000_000u128;
        let exact = bits.div_ceil(u128::from(bits_per_second));
        let last = log.0.last().unwrap().2;
        assert_eq!(u128::from(last), 1 + exact, "{bits_per_second}");
    }
}

/// A delay line that was asked to hold ten million packets holds what it may, and says what became of the others.
#[test]
fn ten_million_packets_under_way_are_bounded() {
    struct Nothing;

    impl Packet for Nothing {
        fn frame_bytes(&self) -> u32 {
            60
        }

        fn flow_hash(&self) -> u64 {
            0
        }

        fn bytes(&self) -> &[u8] {
            &[]
        }

        fn copy(&self) -> Option<Self> {
            None
        }

        fn with_bytes(&self, _frame: &[u8]) -> Option<Self> {
            None
        }
    }

    let settings = Settings {
        delay: Some(DelayModel::constant(3600 * 1000 * MS)),
        delay_limit: Limit {
            packets: usize::MAX,
            bytes: u64::MAX,
        },
        ..Settings::default()
    };
    let mut pipeline = Pipeline::new(flow(0), settings);
    let mut full = 0;
    for now in 0..1_200_000 {
        pipeline.offer(now, Nothing, &mut |packet| {
            assert_eq!(packet.cause, DropCause::DelayFull);
            full += 1;
        });
    }
    assert_eq!(pipeline.packets(), DELAY_PACKETS_MAX);
    assert_eq!(full, 1_200_000 - DELAY_PACKETS_MAX);
    assert_eq!(
        pipeline.flush(2_000_000, &mut |_| {}),
        DELAY_PACKETS_MAX as u64
    );
}

/// Hundreds of links, most of them idle: an idle pipeline is its own struct, whatever its queue, and nothing on the heap.
#[test]
fn an_idle_pipeline_is_small() {
    assert!(size_of::<Pipeline<Box<[u8]>>>() <= 1280);
    let mut settings = rate(1_000_000);
    settings.bottleneck.as_mut().unwrap().queue = QueueModel::FqCodel(FqCodelSettings::default());
    let pipeline = Pipeline::<Frame>::new(flow(0), settings);
    assert_eq!(pipeline.due.capacity() + pipeline.behind.capacity(), 0);
    let (_, queue) = pipeline.bottleneck.as_ref().unwrap();
    assert_eq!(queue.places(), 0);
}
