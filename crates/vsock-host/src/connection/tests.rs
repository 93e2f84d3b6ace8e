//! What each side may still hear, in every order of events.

use proptest::prelude::*;

use super::*;

const PROMISE: u32 = 8192;

fn established() -> Connection {
    let mut connection = Connection::dialing(PROMISE);
    connection.dialed();
    connection.told(Operation::Response, 0);
    connection.credit.hear(1000, 0);
    connection
}

/// Tells all that there is to tell.
fn hear(connection: &mut Connection, backlog: bool) -> Vec<(Operation, u32)> {
    let mut heard = Vec::new();
    while let Some((operation, bits)) = connection.next_packet(backlog) {
        connection.told(operation, bits);
        connection.credit.tell();
        heard.push((operation, bits));
    }
    heard
}

#[test]
fn a_guest_is_answered_when_the_peer_was_reached() {
    let mut connection = Connection::dialing(PROMISE);
    assert_eq!(connection.state(), VsockState::Connecting);
    assert_eq!(hear(&mut connection, false), []);
    connection.dialed();
    assert!(!connection.may_send_data(), "the answer comes first");
    assert_eq!(hear(&mut connection, false), [(Operation::Response, 0)]);
    assert!(connection.may_send_data());
    assert_eq!(connection.state(), VsockState::Established);
}

#[test]
fn a_guest_that_asks_again_is_answered_once() {
    let mut connection = Connection::dialing(PROMISE);
    let again = connection.from_guest(Operation::Request, 0, 0);
    assert_eq!(again, Verdict::Accept);
    assert_eq!(hear(&mut connection, false), []);
    connection.dialed();
    assert_eq!(hear(&mut connection, false), [(Operation::Response, 0)]);
}

#[test]
fn a_guest_that_is_asked_answers_once() {
    let mut connection = Connection::asking(PROMISE);
    let early = connection.clone().from_guest(Operation::Response, 0, 0);
    assert_eq!(
        early,
        Verdict::Refuse(VsockRefusal::NoConnection),
        "it wasn't asked yet"
    );
    assert_eq!(hear(&mut connection, false), [(Operation::Request, 0)]);
    assert_eq!(
        connection.from_guest(Operation::Response, 0, 0),
        Verdict::Accept
    );
    assert!(connection.is_established());
    let again = connection.from_guest(Operation::Response, 0, 0);
    assert_eq!(again, Verdict::Refuse(VsockRefusal::NoConnection));
    assert_eq!(hear(&mut connection, false), [(Operation::Reset, 0)]);
    assert!(connection.is_gone());
}

#[test]
fn a_client_that_leaves_before_the_guest_was_asked_leaves_no_trace() {
    let mut connection = Connection::asking(PROMISE);
    connection.reset();
    assert!(connection.is_gone());
    assert_eq!(hear(&mut connection, false), []);
}

#[test]
fn each_half_closes_by_itself() {
    let mut connection = established();
    connection.peer_ended();
    assert_eq!(
        hear(&mut connection, false),
        [(Operation::Shutdown, flags::SHUTDOWN_SEND)]
    );
    assert!(!connection.may_send_data());
    assert_eq!(
        connection.from_guest(Operation::ReadWrite, 0, 100),
        Verdict::Accept
    );
    assert_eq!(connection.state(), VsockState::PeerClosed);
    assert_eq!(connection.shut_peer(false), (false, false));
    connection.from_guest(Operation::Shutdown, flags::SHUTDOWN_SEND, 0);
    assert_eq!(
        connection.shut_peer(true),
        (false, false),
        "data still waits"
    );
    assert_eq!(connection.shut_peer(false), (false, true));
    assert_eq!(
        hear(&mut connection, false),
        [],
        "the guest may still receive"
    );
    let late = connection.from_guest(Operation::ReadWrite, 0, 1);
    assert_eq!(
        late,
        Verdict::Refuse(VsockRefusal::NoConnection),
        "it said that it sends no more"
    );
}

#[test]
fn a_guests_full_shutdown_is_confirmed_once_its_data_was_passed_on() {
    let mut connection = established();
    connection.from_guest(Operation::Shutdown, flags::SHUTDOWN_BOTH, 0);
    assert!(connection.is_closing(), "a time limit applies");
    assert_eq!(hear(&mut connection, true), []);
    assert_eq!(hear(&mut connection, false), [(Operation::Reset, 0)]);
    assert!(connection.is_gone());
}

#[test]
fn a_guest_that_resets_after_its_end_leaves_what_it_sent_to_be_passed_on() {
    let mut connection = established();
    connection.from_guest(Operation::Shutdown, flags::SHUTDOWN_SEND, 0);
    connection.from_guest(Operation::Reset, 0, 0);
    assert!(connection.is_gone() && connection.is_lingering());
    let mut connection = established();
    connection.from_guest(Operation::Reset, 0, 0);
    assert!(!connection.is_lingering(), "it aborted");
}

#[test]
fn a_peer_that_is_gone_ends_both_ways_and_data_is_dropped_with_its_credit_given_back() {
    let mut connection = established();
    connection.peer_ended();
    connection.peer_stopped_receiving();
    assert_eq!(
        connection.from_guest(Operation::ReadWrite, 0, PROMISE),
        Verdict::Discard
    );
    assert_eq!(connection.credit.waiting(), 0);
    let heard = hear(&mut connection, false);
    assert!(
        heard.contains(&(Operation::Shutdown, flags::SHUTDOWN_BOTH)),
        "{heard:?}"
    );
    assert!(connection.is_closing());
}

#[test]
fn a_guest_without_room_is_asked_for_credit_once_until_it_has_had_room() {
    let mut connection = established();
    connection.set_starving(true);
    assert_eq!(
        hear(&mut connection, false),
        [(Operation::CreditRequest, 0)]
    );
    assert_eq!(hear(&mut connection, false), []);
    connection.from_guest(Operation::CreditUpdate, 0, 0);
    connection.set_starving(true);
    assert_eq!(hear(&mut connection, false), [], "it said that it has none");
    connection.set_starving(false);
    connection.set_starving(true);
    assert_eq!(
        hear(&mut connection, false),
        [(Operation::CreditRequest, 0)]
    );
    connection.set_starving(false);
    connection.from_guest(Operation::CreditRequest, 0, 0);
    assert_eq!(hear(&mut connection, false), [(Operation::CreditUpdate, 0)]);
}

#[derive(Clone, Debug)]
enum Event {
    Guest(u16, u32, u32),
    Dialed,
    PeerEnded,
    PeerStopped,
    Reset,
    Starving(bool),
    Forward(u32),
    Tell,
    Backlog(bool),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (2..=7_u16, 0..4_u32, 0..PROMISE + 2).prop_map(|(op, bits, len)| Event::Guest(op, bits, len)),
        1 => Just(Event::Dialed),
        1 => Just(Event::PeerEnded),
        1 => Just(Event::PeerStopped),
        1 => Just(Event::Reset),
        1 => any::<bool>().prop_map(Event::Starving),
        2 => (0..PROMISE).prop_map(Event::Forward),
        4 => Just(Event::Tell),
        1 => any::<bool>().prop_map(Event::Backlog),
    ]
}

proptest! {
    /// Whatever happens in whatever order, the guest hears a conversation that makes sense.
    #[test]
    fn the_guest_hears_sense(asking in any::<bool>(), events in proptest::collection::vec(event(), 0..60)) {
        let mut connection =
            if asking { Connection::asking(PROMISE) } else { Connection::dialing(PROMISE) };
        let mut heard: Vec<(Operation, u32)> = Vec::new();
        let (mut guest_reset, mut guest_ended, mut backlog) = (false, false, false);
        for event in events {
            match event {
                Event::Guest(op, bits, len) => {
                    let operation = Operation::from_number(op).expect("a known one");
                    let was_established = connection.is_established();
                    let verdict = connection.from_guest(operation, bits, len);
                    if operation == Operation::ReadWrite && verdict == Verdict::Accept {
                        prop_assert!(was_established && !guest_ended && !guest_reset);
                    }
                    guest_reset |= operation == Operation::Reset;
                    guest_ended |= operation == Operation::Shutdown
                        && was_established
                        && bits & flags::SHUTDOWN_SEND != 0;
                }
                Event::Dialed => connection.dialed(),
                Event::PeerEnded => connection.peer_ended(),
                Event::PeerStopped => connection.peer_stopped_receiving(),
                Event::Reset => connection.reset(),
                Event::Starving(starving) => connection.set_starving(starving),
                Event::Forward(bytes) => {
                    let waiting = connection.credit.waiting();
                    connection.credit.forward(bytes.min(waiting));
                }
                Event::Tell => heard.extend(hear(&mut connection, backlog)),
                Event::Backlog(some) => backlog = some,
            }
            prop_assert!(connection.credit.waiting() <= PROMISE);
            let told_end = heard.iter().any(|(operation, bits)| {
                *operation == Operation::Shutdown && bits & flags::SHUTDOWN_SEND != 0
            });
            if told_end || guest_reset {
                prop_assert!(!connection.may_send_data());
            }
            if connection.is_gone() {
                prop_assert_eq!(connection.next_packet(backlog), None);
            }
        }
        let place = |wanted| heard.iter().position(|(operation, _)| *operation == wanted);
        let count = |wanted| heard.iter().filter(|(operation, _)| *operation == wanted).count();
        prop_assert!(count(Operation::Request) <= usize::from(asking));
        prop_assert!(count(Operation::Response) <= usize::from(!asking));
        prop_assert!(count(Operation::Reset) <= 1);
        if let Some(reset) = place(Operation::Reset) {
            prop_assert_eq!(reset, heard.len() - 1, "nothing comes after RST");
        }
        if let Some(first) = heard.first() {
            let opening = if asking { Operation::Request } else { Operation::Response };
            prop_assert!([opening, Operation::Reset].contains(&first.0), "{:?}", first);
        }
        prop_assert!(heard.iter().all(|(operation, _)| *operation != Operation::ReadWrite));
    }
}
