use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;

fn packet(number: u64, bytes: u32, flow_hash: u64, arrived: u64) -> Queued<u64> {
    Queued {
        item: number,
        bytes,
        flow_hash,
        arrived,
    }
}

/// Offers a packet of 1000 bytes every `gap` and serves one every millisecond; longest wait of those served
/// in the second half, and what was dropped.
fn run(model: QueueModel, gap: u64) -> (u64, Vec<DropCause>) {
    let mut queue = Queue::new(model);
    let mut causes = Vec::new();
    let (mut longest, mut next) = (0, 0);
    for now in (0..20_000).map(|tick| tick * MS) {
        while next <= now {
            queue.push(packet(next, 1000, 1, next), &mut |_, cause| {
                causes.push(cause)
            });
            next += gap;
        }
        if let Some(served) = queue.pop(now, &mut |_, cause| causes.push(cause))
            && now > 10_000 * MS
        {
            longest = longest.max(now - served.arrived);
        }
    }
    (longest, causes)
}

#[test]
fn a_full_drop_tail_queue_makes_every_packet_wait_for_all_of_it() {
    let limit = Limit {
        packets: 200,
        ..Limit::default()
    };
    let (longest, causes) = run(QueueModel::DropTail(limit), MS * 9 / 10);
    assert!((198 * MS..=201 * MS).contains(&longest), "{longest}");
    assert!(!causes.is_empty() && causes.iter().all(|&cause| cause == DropCause::QueueFull));
}

#[test]
fn a_drop_tail_queue_counts_bytes_too() {
    let limit = Limit {
        bytes: 2500,
        ..Limit::default()
    };
    let mut queue = Queue::new(QueueModel::DropTail(limit));
    let mut lost = Vec::new();
    for number in 0..4 {
        queue.push(packet(number, 1000, 0, 0), &mut |packet, _| {
            lost.push(packet.item)
        });
    }
    queue.push(packet(4, 500, 0, 0), &mut |packet, _| {
        lost.push(packet.item)
    });
    assert_eq!(
        (queue.packets(), queue.bytes(), lost),
        (3, 2500, vec![2, 3])
    );
}

/// RFC 8289 §1: with a moderate overload the wait comes down to the order of the target; drop-tail above
/// has 200 ms here.
#[test]
fn codel_keeps_the_wait_short_and_names_its_drops() {
    let (longest, causes) = run(QueueModel::Codel(CodelSettings::default()), MS * 9 / 10);
    assert!(longest < 60 * MS, "{longest}");
    assert!(!causes.is_empty() && causes.iter().all(|&cause| cause == DropCause::Codel));
    // Without overload it drops nothing.
    assert!(
        run(QueueModel::Codel(CodelSettings::default()), MS)
            .1
            .is_empty()
    );
}

/// By hand from RFC 8289 §5: the wait of the head is above the target from 6 ms on; the first drop comes an
/// interval later, the second an interval after it, the third 100/√2 ms after the second.
#[test]
fn codels_first_drops_come_when_the_law_says() {
    let mut queue = Queue::new(QueueModel::Codel(CodelSettings::default()));
    for number in 0..2000 {
        queue.push(packet(number, 1000, 0, 0), &mut |_, _| {
            panic!("it is not full")
        });
    }
    let mut at = Vec::new();
    for now in (6..400).map(|tick| tick * MS) {
        queue.pop(now, &mut |_, _| at.push(now / MS));
    }
    assert_eq!(at[..3], [106, 206, 277]);
}

#[test]
fn a_flow_that_sends_little_does_not_wait_for_one_that_sends_much() {
    let mut queue = Queue::new(QueueModel::FqCodel(FqCodelSettings::default()));
    for number in 0..100 {
        queue.push(packet(number, 1500, 7, 0), &mut |_, _| {
            panic!("it is not full")
        });
    }
    let pop = |queue: &mut Queue<u64>| queue.pop(1, &mut |_, _| {}).unwrap().item;
    assert_eq!((pop(&mut queue), pop(&mut queue)), (0, 1));
    queue.push(packet(1000, 100, 8, 1), &mut |_, _| {
        panic!("it is not full")
    });
    assert_eq!((pop(&mut queue), pop(&mut queue)), (1000, 2));
}

#[test]
fn two_greedy_flows_get_equal_bytes_whatever_their_packets() {
    let mut queue = Queue::new(QueueModel::FqCodel(FqCodelSettings::default()));
    for number in 0..3000 {
        queue.push(packet(number, 500, 1, 0), &mut |_, _| {});
        queue.push(packet(number, 1500, 2, 0), &mut |_, _| {});
    }
    let mut bytes = [0u64; 2];
    for _ in 0..1000 {
        let packet = queue.pop(1, &mut |_, _| {}).unwrap();
        bytes[usize::from(packet.flow_hash == 2)] += u64::from(packet.bytes);
    }
    assert!(bytes[0].abs_diff(bytes[1]) <= 4 * 1514, "{bytes:?}");
}

#[test]
fn a_full_fq_codel_takes_from_the_longest_flow() {
    let mut settings = FqCodelSettings::default();
    settings.codel.limit.packets = 100;
    let mut queue = Queue::new(QueueModel::FqCodel(settings));
    queue.push(packet(0, 1000, 2, 0), &mut |_, _| panic!("it is not full"));
    let mut hit = Vec::new();
    for number in 0..200 {
        queue.push(packet(number, 1000, 1, 0), &mut |packet, cause| {
            assert_eq!(cause, DropCause::QueueFull);
            hit.push(packet.flow_hash);
        });
    }
    assert!(queue.packets() <= 100);
    assert!(!hit.is_empty() && hit.iter().all(|&flow| flow == 1));
}

fn models() -> impl Strategy<Value = QueueModel> {
    let limit = Limit {
        packets: 20,
        bytes: 20_000,
    };
    let codel = CodelSettings {
        target: 5,
        interval: 30,
        limit,
    };
    let fq = FqCodelSettings {
        codel,
        flows: 4,
        quantum: 300,
    };
    prop::sample::select(vec![
        QueueModel::DropTail(limit),
        QueueModel::Codel(codel),
        QueueModel::FqCodel(fq),
    ])
}

proptest! {
    #[test]
    fn every_packet_is_served_or_dropped_or_still_there(
        model in models(),
        steps in prop::collection::vec((any::<bool>(), 1u32..3000, 0u64..9, 0u64..20), 0..400),
    ) {
        let mut queue = Queue::new(model);
        let (mut pushed, mut served, mut dropped, mut now) = (0, 0, 0, 0);
        for (is_push, bytes, flow, later) in steps {
            now += later;
            if is_push {
                queue.push(packet(pushed, bytes, flow, now), &mut |_, _| dropped += 1);
                pushed += 1;
            } else {
                let waits = !queue.is_empty();
                let popped = queue.pop(now, &mut |_, _| dropped += 1);
                prop_assert!(waits || popped.is_none());
                served += u64::from(popped.is_some());
            }
            prop_assert_eq!(pushed, served + dropped + queue.packets() as u64);
            prop_assert!(queue.packets() <= 20 && queue.bytes() <= 20_000);
        }
        while queue.pop(now, &mut |_, _| dropped += 1).is_some() {
            served += 1;
        }
        prop_assert_eq!((queue.packets(), queue.bytes()), (0, 0));
        prop_assert_eq!(pushed, served + dropped);
    }
}
