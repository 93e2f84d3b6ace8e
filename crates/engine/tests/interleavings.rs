//! The ring of an interlink, the source that is shipped, under loom: every order in which two threads can get at it.

#![expect(clippy::unwrap_used, reason = "a helper of tests")]

#[path = "../src/interlink/ring.rs"]
mod ring;

/// What the ring is made of.
mod sync {
    pub(super) use loom::sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    };
}

use std::collections::VecDeque;

use loom::thread;

use ring::{Received, Sent, ring};

/// Sends batches of one number each until the reader is gone; how many it took.
fn send_all(mut writer: ring::Writer<u32>, numbers: u32) -> u32 {
    let mut batch = VecDeque::new();
    for number in 0..numbers {
        batch.push_back(number);
        loop {
            match writer.send(&mut batch) {
                Sent::Done => break,
                Sent::Full => thread::yield_now(),
                Sent::ReaderGone => return number,
            }
        }
        assert!(batch.is_empty(), "what comes back is empty: {batch:?}");
    }
    numbers
}

fn check_transfer(slots: usize, numbers: u32) {
    loom::model(move || {
        let (writer, mut reader) = ring(slots);
        let sender = thread::spawn(move || send_all(writer, numbers));
        let mut received = Vec::new();
        let mut batch = VecDeque::new();
        loop {
            match reader.receive(&mut batch) {
                Received::Batch => received.extend(batch.drain(..)),
                Received::Nothing => thread::yield_now(),
                Received::Ended => break,
            }
        }
        assert_eq!(sender.join().unwrap(), numbers);
        assert!(received.into_iter().eq(0..numbers));
    });
}

#[test]
fn everything_arrives_once_and_in_order_with_one_slot() {
    check_transfer(1, 3);
}

#[test]
fn everything_arrives_once_and_in_order_with_two_slots() {
    check_transfer(2, 3);
}

#[test]
fn a_reader_that_goes_is_noticed() {
    loom::model(|| {
        let (writer, mut reader) = ring(1);
        let sender = thread::spawn(move || send_all(writer, 3));
        let mut batch = VecDeque::new();
        let first = reader.receive(&mut batch);
        drop(reader);
        let sent = sender.join().unwrap();
        assert!(sent <= 2, "one read, one in the ring");
        match first {
            Received::Batch => assert_eq!(batch, [0]),
            other => assert_eq!(other, Received::Nothing),
        }
    });
}

#[test]
fn a_batch_is_either_sent_whole_or_untouched() {
    loom::model(|| {
        let (mut writer, mut reader) = ring(1);
        let sender = thread::spawn(move || {
            let mut outcomes = Vec::new();
            for pair in [[1, 2], [3, 4]] {
                let mut batch = VecDeque::from(pair);
                let sent = writer.send(&mut batch);
                assert_eq!(sent == Sent::Done, batch.is_empty());
                assert!(batch.is_empty() || batch == pair);
                outcomes.push(sent);
            }
            outcomes
        });
        let mut received = Vec::new();
        let mut batch = VecDeque::new();
        for _ in 0..2 {
            if reader.receive(&mut batch) == Received::Batch {
                assert_eq!(batch.len(), 2, "a batch comes whole");
                received.extend(batch.drain(..));
            }
        }
        let outcomes = sender.join().unwrap();
        while reader.receive(&mut batch) == Received::Batch {
            received.extend(batch.drain(..));
        }
        let sent = [[1, 2], [3, 4]].into_iter().zip(outcomes);
        let sent: Vec<u32> = sent
            .filter(|(_, outcome)| *outcome == Sent::Done)
            .flat_map(|(pair, _)| pair)
            .collect();
        assert_eq!(received, sent);
    });
}
