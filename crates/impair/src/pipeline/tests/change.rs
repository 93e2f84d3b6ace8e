//! Other settings, a drain, a flush, with packets inside.

use super::*;
use crate::reorder::ReorderModel;

const MS: u64 = 1_000_000;

struct Line {
    pipeline: Pipeline<Frame>,
    out: Vec<(u64, u64)>,
    drops: Vec<(u64, DropCause)>,
}

impl Line {
    fn new(settings: Settings) -> Self {
        Self {
            pipeline: Pipeline::new(flow(0), settings),
            out: Vec::new(),
            drops: Vec::new(),
        }
    }

    /// Offers so many packets of 125 bytes at that moment.
    fn offer(&mut self, now: u64, packets: usize) {
        for _ in 0..packets {
            let frame = Frame {
                bytes: 125,
                flow: 1,
            };
            let drops = &mut self.drops;
            self.pipeline.offer(now, frame, &mut |packet| {
                drops.push((packet.number, packet.cause));
            });
        }
    }

    fn reconfigure(&mut self, now: u64, settings: Settings) {
        self.pipeline
            .reconfigure(now, settings, &mut |_| panic!("a change drops nothing"));
    }

    /// Runs until nothing is left; numbers and deadlines in ms.
    fn finish(mut self) -> Vec<(u64, u64)> {
        while let Some(deadline) = self.pipeline.next_deadline() {
            let drops = &mut self.drops;
            while let Some(packet) = self.pipeline.release(deadline, &mut |packet| {
                drops.push((packet.number, packet.cause));
            }) {
                self.out.push((packet.number, packet.deadline / MS));
            }
        }
        assert!(self.pipeline.is_empty());
        self.out
    }
}

/// A packet of 125 bytes takes 1 ms at 1 Mbit/s.
fn rate(bits_per_second: u64, packets: usize) -> Settings {
    let limit = Limit {
        packets,
        ..Limit::default()
    };
    Settings {
        bottleneck: Some(Bottleneck {
            capacity: Capacity::Rate {
                bits_per_second,
                overhead: Overhead::default(),
            },
            queue: QueueModel::DropTail(limit),
        }),
        ..Settings::default()
    }
}

fn delay(ms: u64) -> Settings {
    Settings {
        delay: Some(DelayModel::constant(ms * MS)),
        ..Settings::default()
    }
}

#[test]
fn a_new_rate_counts_at_once_for_what_is_queued() {
    let mut line = Line::new(rate(1_000_000, 100));
    line.offer(0, 4);
    // The first is being sent, the others wait.
    line.reconfigure(MS / 2, rate(100_000, 100));
    assert_eq!(line.finish(), [(0, 1), (1, 11), (2, 21), (3, 31)]);
}

#[test]
fn a_queue_keeps_what_it_has_when_its_limit_or_kind_changes() {
    let codel = |mut settings: Settings, fq| {
        let codel = CodelSettings::default();
        settings.bottleneck.as_mut().unwrap().queue = if fq {
            QueueModel::FqCodel(FqCodelSettings::default())
        } else {
            QueueModel::Codel(codel)
        };
        settings
    };
    let base = rate(1_000_000, 100);
    for new in [
        rate(1_000_000, 2),
        codel(base.clone(), false),
        codel(base.clone(), true),
    ] {
        let mut line = Line::new(base.clone());
        line.offer(0, 5);
        line.reconfigure(0, new.clone());
        assert_eq!(line.pipeline.queued().0, 4);
        assert_eq!(line.finish(), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]);
        let mut back = Line::new(new);
        back.offer(0, 3);
        back.reconfigure(0, base.clone());
        assert_eq!(back.finish(), [(0, 1), (1, 2), (2, 3)]);
    }
}

/// 125 bytes at 3 Mbit/s take a third of a millisecond: the last of 90 leaves after 30 ms, to the nanosecond, however
/// often the queue's limit changes.
#[test]
fn a_line_that_stays_keeps_its_fractions() {
    let mut line = Line::new(rate(3_000_000, 100));
    line.offer(0, 90);
    let mut last = 0;
    for tick in 0..40_000 {
        let limit = 50 + usize::try_from(tick % 2).unwrap();
        line.reconfigure(tick * 1000, rate(3_000_000, limit));
        while let Some(packet) = line.pipeline.release(tick * 1000, &mut |_| {}) {
            last = packet.deadline;
        }
    }
    assert_eq!((last, line.pipeline.counters.released), (30 * MS, 90));
}

#[test]
fn without_a_bottleneck_the_queue_leaves_behind_the_frame_on_the_line() {
    let mut line = Line::new(rate(1_000_000, 100));
    line.offer(0, 3);
    line.reconfigure(MS / 2, Settings::default());
    line.offer(MS / 2, 1);
    line.offer(2 * MS, 1);
    assert_eq!(line.finish(), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]);
}

#[test]
fn what_is_under_way_keeps_its_deadline_and_its_place() {
    let cases = [
        (delay(10), 100, 115),
        (Settings::default(), 100, 105),
        (delay(200), 250, 305),
    ];
    for (new, second, later) in cases {
        let mut line = Line::new(delay(100));
        line.offer(0, 1);
        line.reconfigure(50 * MS, new);
        line.offer(50 * MS, 1);
        line.offer(105 * MS, 1);
        assert_eq!(line.finish(), [(0, 100), (1, second), (2, later)]);
    }
    // Who doesn't keep order lets them overtake.
    let mut free = delay(10);
    free.delay.as_mut().unwrap().keep_order = false;
    let mut line = Line::new(delay(100));
    line.offer(0, 1);
    line.reconfigure(50 * MS, free);
    line.offer(50 * MS, 1);
    assert_eq!(line.finish(), [(1, 60), (0, 100)]);
}

#[test]
fn what_is_held_back_leaves_no_later_than_the_new_settings_say() {
    let hold = |wait_max| Settings {
        reorder: Some(ReorderModel {
            probability: 1.0,
            distance: 5,
            wait_max,
        }),
        ..Settings::default()
    };
    for (new, expected) in [
        (Settings::default(), 50),
        (hold(20 * MS), 70),
        (hold(9000 * MS), 1000),
    ] {
        let mut line = Line::new(hold(1000 * MS));
        line.offer(0, 1);
        line.reconfigure(50 * MS, new);
        assert_eq!(line.finish(), [(0, expected)]);
    }
}

/// The numbers go on, and a model that stays keeps its state: as if nothing had been changed.
#[test]
fn losses_go_on_over_changes_of_other_things() {
    let gilbert = |delay| Settings {
        loss: Some(LossModel::GilbertElliott {
            p: 0.05,
            r: 0.1,
            loss_bad: 1.0,
            loss_good: 0.0,
        }),
        delay,
        ..Settings::default()
    };
    let lost = |is_changed: bool| {
        let mut line = Line::new(gilbert(None));
        for tick in 0..2000 {
            if is_changed && tick % 7 == 0 {
                line.reconfigure(tick * MS, gilbert(Some(DelayModel::constant(tick))));
            }
            line.offer(tick * MS, 1);
        }
        line.drops
    };
    assert!(lost(false).len() > 300);
    assert_eq!(lost(false), lost(true));
}

/// Another model begins in its first state, but its random numbers are those of the packets' numbers.
#[test]
fn a_new_loss_model_goes_by_packet_number() {
    let mut line = Line::new(Settings::default());
    line.offer(0, 1000);
    line.reconfigure(MS, lossy(0.3));
    line.offer(MS, 1000);
    let mut always = Line::new(lossy(0.3));
    always.offer(0, 2000);
    always.drops.retain(|drop| drop.0 >= 1000);
    assert_eq!(line.drops, always.drops);
}

#[test]
fn a_drain_impairs_nothing_new_and_keeps_the_order() {
    let settings = Settings {
        delay: Some(DelayModel::constant(100 * MS)),
        duplicate: 0.0,
        ..lossy(0.5)
    };
    let mut line = Line::new(settings);
    line.offer(0, 10);
    let inside = line.pipeline.packets();
    assert!((1..10).contains(&inside));
    line.pipeline.begin_drain(10 * MS, &mut |_| {});
    line.offer(20 * MS, 5);
    line.offer(99 * MS, 5);
    assert_eq!(line.pipeline.packets(), inside + 10);
    assert_eq!(line.pipeline.next_deadline(), Some(100 * MS));
    line.offer(150 * MS, 1);
    let out = line.finish();
    assert_eq!(out.len(), inside + 11);
    assert!(out.is_sorted());
    assert!(out[..inside + 10].iter().all(|packet| packet.1 == 100));
    assert_eq!(out.last(), Some(&(20, 150)));
}

#[test]
fn a_drain_is_over_when_the_queue_is_and_holds_no_more_than_the_limit() {
    let mut settings = rate(1_000_000, 100);
    settings.delay_limit.packets = 3;
    let mut line = Line::new(settings);
    line.offer(0, 4);
    line.pipeline.begin_drain(0, &mut |_| {});
    line.offer(2 * MS, 5);
    assert_eq!(line.drops.len(), 3);
    assert!(line.drops.iter().all(|drop| drop.1 == DropCause::DelayFull));
    let out = line.finish();
    assert_eq!(out, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4), (5, 4)]);
}

#[test]
fn new_settings_end_a_drain_and_lose_nothing() {
    let mut line = Line::new(delay(100));
    line.offer(0, 2);
    line.pipeline.begin_drain(0, &mut |_| {});
    line.offer(MS, 2);
    line.reconfigure(2 * MS, delay(10));
    line.offer(100 * MS, 1);
    assert_eq!(
        line.finish(),
        [(0, 100), (1, 100), (2, 100), (3, 100), (4, 110)]
    );
}

#[test]
fn a_flush_drops_all_and_what_comes_then_waits_for_nobody() {
    let mut settings = rate(1_000_000, 100);
    settings.delay = Some(DelayModel::constant(3600 * 1000 * MS));
    let mut line = Line::new(settings);
    line.offer(0, 10);
    assert_eq!(line.pipeline.next_deadline(), Some(MS));
    let mut causes = Vec::new();
    let flushed = line
        .pipeline
        .flush(5 * MS, &mut |packet| causes.push(packet.cause));
    assert_eq!((flushed, causes), (10, vec![DropCause::Flushed; 10]));
    line.reconfigure(6 * MS, delay(10));
    line.offer(6 * MS, 1);
    assert_eq!(line.finish(), [(10, 16)]);
}
