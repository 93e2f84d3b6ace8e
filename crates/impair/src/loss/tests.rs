use super::*;
use crate::random::{Direction, Flow, Impairment, Stream};

fn verdicts(model: LossModel, seed: u64, packets: u64) -> Vec<bool> {
    let flow = Flow {
        seed,
        link: 0,
        direction: Direction::Ingress,
        rule: 0,
    };
    let stream = Stream::new(flow, Impairment::Loss);
    let mut loss = Loss::new(model);
    (0..packets)
        .map(|packet| loss.is_lost(packet, &mut stream.draw(packet)))
        .collect()
}

fn lost(model: LossModel, seed: u64, packets: u64) -> Vec<u64> {
    (0..)
        .zip(verdicts(model, seed, packets))
        .filter_map(|(packet, lost)| lost.then_some(packet))
        .collect()
}

fn share(verdicts: &[bool]) -> f64 {
    let count = verdicts.iter().filter(|lost| **lost).count();
    f64::from(u32::try_from(count).unwrap()) / f64::from(u32::try_from(verdicts.len()).unwrap())
}

/// Lengths of the runs of `true`.
fn bursts(verdicts: &[bool]) -> Vec<u32> {
    verdicts
        .split(|lost| !lost)
        .filter(|run| !run.is_empty())
        .map(|run| u32::try_from(run.len()).unwrap())
        .collect()
}

const GILBERT: LossModel = LossModel::GilbertElliott {
    p: 0.02,
    r: 0.25,
    loss_bad: 1.0,
    loss_good: 0.0,
};
const FOUR: FourState = FourState {
    p13: 0.01,
    p31: 0.2,
    p32: 0.3,
    p23: 0.4,
    p14: 0.005,
};

/// Anybody who changes these changes every recorded run.
#[test]
fn the_same_seed_loses_the_same_packets_for_ever() {
    let ten = LossModel::Independent { probability: 0.1 };
    assert_eq!(lost(ten.clone(), 1, 60), GOLDEN_INDEPENDENT_1);
    assert_eq!(lost(ten, 2, 60), GOLDEN_INDEPENDENT_2);
    assert_eq!(lost(GILBERT, 2, 300), GOLDEN_GILBERT);
    assert_eq!(lost(LossModel::FourState(FOUR), 2, 300), GOLDEN_FOUR);
}

const GOLDEN_INDEPENDENT_1: &[u64] = &[0, 7, 24, 29, 39, 41];
const GOLDEN_INDEPENDENT_2: &[u64] = &[3, 6, 27, 42, 43];
const GOLDEN_GILBERT: &[u64] = &[
    4, 5, 6, 28, 43, 67, 68, 69, 70, 82, 142, 143, 145, 146, 165, 166, 167, 168, 170, 171, 172,
    173, 174, 175, 176, 177, 178, 179, 180, 230, 231, 232, 233, 234, 235, 236, 237,
];
const GOLDEN_FOUR: &[u64] = &[
    3, 27, 29, 30, 34, 35, 39, 40, 66, 81, 84, 86, 87, 89, 90, 141, 144, 145, 147, 164, 165, 166,
    167, 169, 170, 180, 183, 184, 229,
];

/// Four deviations of a binomial share: one seed in 16,000 would fail.
#[test]
fn independent_loss_has_its_share_and_no_memory() {
    for probability in [0.001, 0.01, 0.3, 0.9] {
        let verdicts = verdicts(LossModel::Independent { probability }, 5, 200_000);
        let deviation = (probability * (1.0 - probability) / 200_000.0).sqrt();
        assert!((share(&verdicts) - probability).abs() < 4.0 * deviation);
        let both = verdicts.windows(2).map(|two| two[0] && two[1]);
        let expected = probability * probability;
        let deviation = (expected / 200_000.0).sqrt() * 2.0;
        assert!((share(&both.collect::<Vec<_>>()) - expected).abs() < 4.0 * deviation);
    }
}

#[test]
fn nothing_is_lost_at_zero_and_everything_at_one() {
    let at = |probability| share(&verdicts(LossModel::Independent { probability }, 9, 10_000));
    assert!(at(0.0) <= 0.0);
    assert!(at(1.0) >= 1.0);
}

/// Bursts are geometric with mean 1/r; the variance of a Markov chain's share is that of independent
/// losses times (1+λ)/(1-λ), λ = 1-p-r. Four deviations each.
#[test]
fn gilberts_bursts_and_share_are_those_of_theory() {
    let verdicts = verdicts(GILBERT, 11, 500_000);
    let expected = GILBERT.expected_share().unwrap();
    assert!((expected - 0.02 / 0.27).abs() < 1e-12);
    let deviation = (expected * (1.0 - expected) / 500_000.0 * (1.73 / 0.27)).sqrt();
    assert!((share(&verdicts) - expected).abs() < 4.0 * deviation);
    let bursts = bursts(&verdicts);
    let count = f64::from(u32::try_from(bursts.len()).unwrap());
    let mean = f64::from(bursts.iter().sum::<u32>()) / count;
    // Deviation of a geometric length: sqrt(1-r)/r.
    let deviation = 0.75f64.sqrt() / 0.25 / count.sqrt();
    assert!((mean - 4.0).abs() < 4.0 * deviation, "{mean}");
}

#[test]
fn elliotts_states_have_losses_of_their_own() {
    let model = LossModel::GilbertElliott {
        p: 0.05,
        r: 0.2,
        loss_bad: 0.5,
        loss_good: 0.01,
    };
    let expected = 0.2 * 0.5 + 0.8 * 0.01;
    assert!((model.expected_share().unwrap() - expected).abs() < 1e-12);
    // The variance is at most that of a chain that loses everything in its bad state.
    let deviation = (0.2 * 0.8 / 500_000.0 * (1.75 / 0.25f64)).sqrt();
    assert!((share(&verdicts(model, 3, 500_000)) - expected).abs() < 4.0 * deviation);
}

/// The share, within 3 %: some 6000 bursts, whose deviation in this run is under 1 %.
#[test]
fn the_four_states_have_the_share_of_their_balance() {
    let model = LossModel::FourState(FOUR);
    let expected = model.expected_share().unwrap();
    let balance = (0.05 + 0.005) / (1.0 + 0.05 + 0.05 * 0.75 + 0.005);
    assert!((expected - balance).abs() < 1e-12);
    let measured = share(&verdicts(model, 21, 1_000_000));
    assert!(
        (measured / expected - 1.0).abs() < 0.03,
        "{measured} {expected}"
    );
}

/// Runs in state 3 are geometric and end with p31 + p32; those between the losses of a burst end with p23.
/// Without single losses they can be told apart from gaps, which are a hundred times longer. Four deviations each.
#[test]
fn the_bursts_of_the_four_states_are_those_of_theory() {
    let model = LossModel::FourState(FourState {
        p13: 0.0005,
        p14: 0.0,
        ..FOUR
    });
    let verdicts = verdicts(model, 8, 2_000_000);
    let mean_of = |runs: &[u32], expected_end: f64| {
        let count = f64::from(u32::try_from(runs.len()).unwrap());
        let mean = f64::from(runs.iter().sum::<u32>()) / count;
        let deviation = (1.0 - expected_end).sqrt() / expected_end / count.sqrt();
        assert!(
            (mean - 1.0 / expected_end).abs() < 4.0 * deviation,
            "{mean}"
        );
    };
    mean_of(&bursts(&verdicts), 0.2 + 0.3);
    let received: Vec<bool> = verdicts.iter().map(|lost| !lost).collect();
    // Of 40 received in a row none is in a burst: 0.6⁴⁰ is one in a billion. Of gaps one in 50 is shorter.
    let mut within = bursts(&received);
    within.retain(|&run| run <= 40);
    let count = f64::from(u32::try_from(within.len()).unwrap());
    let ones = within.iter().filter(|&&run| run == 1).count();
    let ones = f64::from(u32::try_from(ones).unwrap()) / count;
    assert!((ones - 0.4).abs() < 0.03, "{ones}");
}

#[test]
fn the_fourth_state_loses_one_packet_and_returns() {
    let model = LossModel::FourState(FourState {
        p13: 0.0,
        p31: 1.0,
        p32: 0.0,
        p23: 1.0,
        p14: 0.2,
    });
    assert!(
        bursts(&verdicts(model, 1, 50_000))
            .iter()
            .all(|&run| run == 1)
    );
}

#[test]
fn a_state_that_is_never_left_has_no_expected_share() {
    let stuck = FourState { p31: 0.0, ..FOUR };
    assert_eq!(LossModel::FourState(stuck).expected_share(), None);
}

#[test]
fn an_exact_list_loses_what_it_names() {
    let list = PacketList::new([(7, 9), (2, 2), (10, 10), (30, 20), (8, 8)]);
    assert_eq!(lost(LossModel::Exact(list), 0, 100), [2, 7, 8, 9, 10]);
    let all = PacketList::new([(0, u64::MAX), (5, 5)]);
    assert!(all.contains(0) && all.contains(u64::MAX));
    assert!(!PacketList::default().contains(0));
}
