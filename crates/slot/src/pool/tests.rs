use proptest::prelude::*;

use super::*;

fn tenant(name: &str) -> LeaseKey {
    LeaseKey {
        owner_uid: 1000,
        name: name.parse().unwrap(),
    }
}

fn rest(name: &str, until_seconds: u64) -> Rest {
    Rest {
        tenant: tenant(name),
        until: seconds(until_seconds),
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Builds all that the pool lacks.
fn fill(pool: &mut Pool, now: Duration) {
    while let Some(number) = pool.next_build(now) {
        pool.built(number);
    }
}

fn filled(size: u32, slots_max: u32) -> Pool {
    let mut pool = Pool::new(size, slots_max);
    fill(&mut pool, seconds(0));
    pool
}

fn release(pool: &mut Pool, number: SlotNumber, name: &str, until_seconds: u64, now: Duration) {
    pool.hold(number);
    pool.release(number, rest(name, until_seconds));
    pool.torn_down(number, now);
}

#[test]
fn a_pool_is_filled_to_its_size_and_refilled_as_slots_go_out() {
    let mut pool = filled(3, 10);
    assert_eq!(pool.counts().ready, 3);
    assert_eq!(pool.take_ready(), Some(SlotNumber(0)));
    assert_eq!(pool.next_build(seconds(0)), Some(SlotNumber(3)));
    assert_eq!(pool.next_build(seconds(0)), None);
}

#[test]
fn what_no_lease_has_is_discarded_as_a_whole_longest_ready_first() {
    let mut pool = filled(4, 10);
    let leased = pool.take_ready().unwrap();
    let undone = pool.take_ready().unwrap();
    pool.put_back(undone);
    pool.claim(SlotNumber(7), None);
    fill(&mut pool, seconds(0));
    pool.claim(SlotNumber(8), None);
    let ready: Vec<_> = pool.ready.iter().copied().collect();
    let discarded = pool.discard_all();
    assert_eq!(discarded, [&ready[..], &[SlotNumber(7)]].concat());
    for number in &discarded {
        assert_eq!(pool.state(*number), Some(&SlotState::TearingDown(None)));
    }
    assert_eq!(pool.state(leased), Some(&SlotState::Leased));
    assert_eq!(pool.state(SlotNumber(8)), Some(&SlotState::Wanted));
    let counts = pool.counts();
    assert_eq!((counts.ready, counts.leased, counts.building), (0, 1, 1));
}

#[test]
fn a_released_number_is_used_again_after_all_others() {
    let mut pool = filled(1, 3);
    let first = pool.take_ready().unwrap();
    release(&mut pool, first, "a", 0, seconds(1));
    for expected in [1, 2, 0] {
        fill(&mut pool, seconds(1));
        assert_eq!(pool.take_ready(), Some(SlotNumber(expected)));
    }
    assert!(pool.is_exhausted());
}

#[test]
fn a_released_number_rests_for_its_time() {
    let mut pool = filled(1, 1);
    let number = pool.take_ready().unwrap();
    release(&mut pool, number, "a", 5, seconds(2));
    assert_eq!(pool.counts().quarantined, 1);
    assert_eq!(pool.next_rest_end(), Some(seconds(5)));
    assert_eq!(pool.end_rests(seconds(4)), []);
    assert_eq!(pool.next_build(seconds(4)), None);
    assert_eq!(pool.end_rests(seconds(5)), [number]);
    assert_eq!(pool.next_build(seconds(5)), Some(number));
}

#[test]
fn only_the_last_tenant_gets_a_resting_number_back() {
    let mut pool = filled(1, 10);
    let number = pool.take_ready().unwrap();
    pool.hold(number);
    pool.release(number, rest("mine", 100));
    assert_eq!(pool.claim(number, Some(&tenant("mine"))), Claim::Wait);
    assert_eq!(pool.claim(number, Some(&tenant("other"))), Claim::InUse);
    pool.torn_down(number, seconds(1));
    assert_eq!(pool.claim(number, Some(&tenant("other"))), Claim::InUse);
    assert_eq!(pool.claim(number, None), Claim::InUse);
    assert_eq!(pool.claim(number, Some(&tenant("mine"))), Claim::Building);
    assert_eq!(pool.next_build(seconds(1)), Some(number));
    assert_eq!(pool.take_reserved(number), Reserved::Building);
    pool.built(number);
    assert_eq!(pool.take_reserved(number), Reserved::Taken);
    assert_eq!(pool.state(number), Some(&SlotState::Leased));
}

fn build(pool: &mut Pool, number: SlotNumber) {
    assert_eq!(pool.next_build(seconds(1)), Some(number));
    assert!(!pool.built(number));
}

#[test]
fn a_rest_that_was_interrupted_in_vain_goes_on() {
    // Each returns whether a slot is to be torn down.
    type Vain = fn(&mut Pool, SlotNumber) -> bool;
    let ways: [(&str, Vain); 6] = [
        ("given up before its build", |pool, number| {
            pool.unreserve(number)
        }),
        ("not built", |pool, number| {
            assert_eq!(pool.next_build(seconds(1)), Some(number));
            pool.build_failed(number, "no".to_owned(), seconds(1));
            false
        }),
        ("given up during its build", |pool, number| {
            assert_eq!(pool.next_build(seconds(1)), Some(number));
            assert!(!pool.unreserve(number));
            assert_eq!(pool.claim(number, Some(&tenant("other"))), Claim::InUse);
            pool.built(number)
        }),
        ("given up after its build", |pool, number| {
            build(pool, number);
            pool.unreserve(number)
        }),
        ("not journaled", |pool, number| {
            build(pool, number);
            assert_eq!(pool.take_reserved(number), Reserved::Taken);
            pool.put_back(number)
        }),
        ("taken back", |pool, number| {
            build(pool, number);
            assert_eq!(pool.take_reserved(number), Reserved::Taken);
            pool.take_back(number);
            true
        }),
    ];
    for (what, vain) in ways {
        let mut pool = filled(1, 1);
        let number = pool.take_ready().unwrap();
        release(&mut pool, number, "mine", 100, seconds(1));
        assert_eq!(pool.claim(number, Some(&tenant("mine"))), Claim::Building);
        let is_down = vain(&mut pool, number);
        assert_eq!(pool.take_ready(), None, "{what}");
        if is_down {
            assert!(pool.torn_down(number, seconds(2)), "{what}");
        }
        let state = SlotState::Resting(rest("mine", 100));
        assert_eq!(pool.state(number), Some(&state), "{what}");
        assert_eq!(pool.end_rests(seconds(100)), [number], "{what}");
        assert_eq!(pool.state(number), Some(&SlotState::Free), "{what}");
    }
}

#[test]
fn a_number_that_is_being_built_goes_to_who_asked_for_it() {
    let mut pool = Pool::new(1, 10);
    let number = pool.next_build(seconds(0)).unwrap();
    assert_eq!(pool.claim(number, None), Claim::Building);
    assert_eq!(pool.claim(number, None), Claim::OfAnother);
    pool.built(number);
    assert_eq!(pool.take_ready(), None, "it is not for all");
    pool.unreserve(number);
    assert_eq!(pool.take_ready(), Some(number), "now it is");
}

#[test]
fn a_number_that_is_asked_for_is_built_though_the_pool_is_full_and_building_fails() {
    let mut pool = Pool::new(1, 10);
    let failing = pool.next_build(seconds(0)).unwrap();
    pool.build_failed(failing, "no".to_owned(), seconds(0));
    assert_eq!(pool.next_build(seconds(0)), None);
    assert_eq!(pool.claim(SlotNumber(7), None), Claim::Building);
    assert_eq!(pool.next_build(seconds(0)), Some(SlotNumber(7)));
    pool.build_failed(SlotNumber(7), "no".to_owned(), seconds(0));
    assert_eq!(pool.take_reserved(SlotNumber(7)), Reserved::Failed);
}

#[test]
fn failures_slow_building_down_and_a_success_ends_that() {
    let mut pool = Pool::new(1, 100);
    let mut now = seconds(0);
    let mut waits = Vec::new();
    for expected in 0..9 {
        let number = pool.next_build(now).unwrap();
        assert_eq!(number, SlotNumber(expected), "another number each time");
        pool.build_failed(number, "no".to_owned(), now);
        let retry_at = pool.next_retry(now).unwrap();
        assert_eq!(pool.next_build(retry_at - Duration::from_nanos(1)), None);
        waits.push((retry_at - now).as_millis());
        now = retry_at;
    }
    assert_eq!(
        waits,
        [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]
    );
    assert_eq!(pool.last_error(), Some("no"));
    let number = pool.next_build(now).unwrap();
    pool.built(number);
    assert_eq!((pool.last_error(), pool.next_retry(now)), (None, None));
}

#[test]
fn a_smaller_pool_gives_up_its_oldest_ready_slots() {
    let mut pool = filled(4, 10);
    pool.resize(1);
    assert_eq!(pool.trim(), [0, 1, 2].map(SlotNumber));
    assert_eq!(pool.counts().tearing_down, 3);
    assert!(!pool.torn_down(SlotNumber(0), seconds(0)), "nobody had it");
    assert_eq!(pool.next_build(seconds(0)), None);
}

#[test]
fn a_slot_that_was_not_handed_out_after_all_is_the_next_to_go() {
    let mut pool = filled(3, 10);
    let number = pool.take_ready().unwrap();
    pool.put_back(number);
    assert_eq!(pool.take_ready(), Some(number));
}

/// One thing that the service may do to a pool.
#[derive(Clone, Debug)]
enum Step {
    NextBuild,
    Built(usize),
    BuildFailed(usize),
    TakeReady,
    PutBack(usize),
    TakeBack(usize),
    Claim(u32, u8),
    TakeReserved(usize),
    Unreserve(usize),
    Hold(usize),
    Release(usize, u8, u64),
    Retire(u32),
    Resize(u32),
    TornDown(usize),
    EndRests,
    Advance(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let pick = 0usize..100;
    prop_oneof![
        4 => Just(Step::NextBuild),
        4 => pick.clone().prop_map(Step::Built),
        1 => pick.clone().prop_map(Step::BuildFailed),
        4 => Just(Step::TakeReady),
        1 => pick.clone().prop_map(Step::PutBack),
        1 => pick.clone().prop_map(Step::TakeBack),
        2 => (0u32..12, 0u8..3).prop_map(|(number, tenant)| Step::Claim(number, tenant)),
        2 => pick.clone().prop_map(Step::TakeReserved),
        1 => pick.clone().prop_map(Step::Unreserve),
        3 => pick.clone().prop_map(Step::Hold),
        3 => (pick.clone(), 0u8..3, 0u64..5)
            .prop_map(|(pick, tenant, rest)| Step::Release(pick, tenant, rest)),
        1 => (0u32..12).prop_map(Step::Retire),
        1 => (0u32..8).prop_map(Step::Resize),
        3 => pick.prop_map(Step::TornDown),
        2 => Just(Step::EndRests),
        2 => (0u64..3).prop_map(Step::Advance),
    ]
}

/// The pool beside the plainest possible account of who has what.
struct Checked {
    pool: Pool,
    slots_max: u32,
    now: Duration,
    leased: BTreeSet<SlotNumber>,
    reserved: BTreeSet<SlotNumber>,
}

impl Checked {
    /// Some number in a state, if there is one.
    fn pick(&self, pick: usize, is_wanted: impl Fn(&SlotState) -> bool) -> Option<SlotNumber> {
        let states = self.pool.states();
        let numbers: Vec<_> = states.filter(|(_, state)| is_wanted(state)).collect();
        let index = pick.checked_rem(numbers.len())?;
        Some(numbers[index].0)
    }

    fn lease(&mut self, number: SlotNumber) {
        assert!(self.leased.insert(number), "{number} is leased twice");
    }

    fn apply(&mut self, step: Step) -> Option<()> {
        let name = |tenant: u8| format!("t{tenant}");
        let is_building = |state: &SlotState| matches!(state, SlotState::Building { .. });
        match step {
            Step::NextBuild => {
                let number = self.pool.next_build(self.now)?;
                assert!(
                    !self.leased.contains(&number),
                    "{number} is built under its lease"
                );
            }
            Step::Built(pick) => {
                self.pool.built(self.pick(pick, is_building)?);
            }
            Step::BuildFailed(pick) => {
                let number = self.pick(pick, is_building)?;
                self.pool.build_failed(number, "no".to_owned(), self.now);
                self.reserved.remove(&number);
            }
            Step::TakeReady => {
                let number = self.pool.take_ready()?;
                self.lease(number);
            }
            Step::PutBack(pick) => {
                let number = self.pick(pick, |state| *state == SlotState::Leased)?;
                self.pool.put_back(number);
                self.leased.remove(&number);
            }
            Step::TakeBack(pick) => {
                let number = self.pick(pick, |state| *state == SlotState::Leased)?;
                self.pool.take_back(number);
                self.leased.remove(&number);
            }
            Step::Claim(number, who) => {
                let number = SlotNumber(number % self.slots_max);
                match self.pool.claim(number, Some(&tenant(&name(who)))) {
                    Claim::Taken => self.lease(number),
                    Claim::Building => assert!(self.reserved.insert(number), "{number}"),
                    Claim::Wait | Claim::OfAnother | Claim::InUse => {}
                }
            }
            Step::TakeReserved(pick) => {
                let index = pick.checked_rem(self.reserved.len())?;
                let number = *self.reserved.iter().nth(index)?;
                if self.pool.take_reserved(number) == Reserved::Taken {
                    self.reserved.remove(&number);
                    self.lease(number);
                }
            }
            Step::Unreserve(pick) => {
                let index = pick.checked_rem(self.reserved.len())?;
                let number = *self.reserved.iter().nth(index)?;
                self.pool.unreserve(number);
                self.reserved.remove(&number);
            }
            Step::Hold(pick) => {
                let number = self.pick(pick, |state| *state == SlotState::Leased)?;
                self.pool.hold(number);
            }
            Step::Release(pick, who, seconds) => {
                let number = self.pick(pick, |state| *state == SlotState::Held)?;
                let until = self.now + Duration::from_secs(seconds);
                let tenant = tenant(&name(who));
                self.pool.release(number, Rest { tenant, until });
                self.leased.remove(&number);
            }
            Step::Retire(number) => {
                let number = SlotNumber(number % self.slots_max);
                let was_ready = self.pool.state(number) == Some(&SlotState::Ready);
                assert_eq!(self.pool.retire(number), was_ready);
            }
            Step::Resize(size) => {
                self.pool.resize(size);
                self.pool.trim();
                assert!(self.pool.counts().ready <= size);
            }
            Step::TornDown(pick) => {
                let is_down = |state: &SlotState| matches!(state, SlotState::TearingDown(_));
                let number = self.pick(pick, is_down)?;
                self.pool.torn_down(number, self.now);
            }
            Step::EndRests => {
                self.pool.end_rests(self.now);
                assert!(self.pool.next_rest_end().is_none_or(|end| end > self.now));
            }
            Step::Advance(by) => self.now += Duration::from_secs(by),
        }
        Some(())
    }

    fn check(&self) {
        let mut counts = SlotCounts::default();
        let mut queued = [Vec::new(), Vec::new(), Vec::new()];
        let mut resting = BTreeSet::new();
        for (number, state) in self.pool.states() {
            assert!(number.0 < self.slots_max, "{number}");
            match state {
                SlotState::Free => queued[0].push(number),
                SlotState::Wanted => {
                    queued[1].push(number);
                    counts.building += 1;
                }
                SlotState::Building { .. } | SlotState::Reserved => counts.building += 1,
                SlotState::Ready => {
                    queued[2].push(number);
                    counts.ready += 1;
                }
                SlotState::Leased => counts.leased += 1,
                SlotState::Held => counts.held += 1,
                SlotState::TearingDown(_) => counts.tearing_down += 1,
                SlotState::Resting(rest) => {
                    resting.insert((rest.until, number));
                    counts.quarantined += 1;
                }
            }
            let is_leased = matches!(state, SlotState::Leased | SlotState::Held);
            assert_eq!(
                self.leased.contains(&number),
                is_leased,
                "{number}: {state:?}"
            );
        }
        assert_eq!(self.pool.counts(), counts);
        assert_eq!(self.pool.resting, resting);
        let queues = [&self.pool.free, &self.pool.wanted, &self.pool.ready];
        for (queue, expected) in queues.into_iter().zip(queued) {
            let mut sorted: Vec<_> = queue.iter().copied().collect();
            sorted.sort_unstable();
            assert_eq!(
                sorted, expected,
                "each number is queued once, where its state says"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn in_any_order_of_steps_each_number_is_in_one_place(
        slots_max in 1u32..12,
        size in 0u32..8,
        steps in prop::collection::vec(any_step(), 0..200),
    ) {
        let mut checked = Checked {
            pool: Pool::new(size, slots_max),
            slots_max,
            now: Duration::ZERO,
            leased: BTreeSet::new(),
            reserved: BTreeSet::new(),
        };
        for step in steps {
            // A step for which no number is in the right state is none.
            let _ = checked.apply(step);
            checked.check();
        }
    }
}
