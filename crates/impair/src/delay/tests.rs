use super::*;
use crate::random::{Direction, Flow, Impairment, Stream};

const CONSTANT: u64 = 50_000_000;
const JITTER: u64 = 1_000_000;
const PACKETS: u32 = 20_000;

fn stream() -> Stream {
    let flow = Flow {
        seed: 4,
        link: 0,
        direction: Direction::Egress,
        rule: 0,
    };
    Stream::new(flow, Impairment::Delay)
}

fn model(distribution: Distribution, correlation: f64) -> DelayModel {
    DelayModel {
        constant: CONSTANT,
        jitter: JITTER,
        distribution,
        correlation,
        keep_order: false,
    }
}

fn delays(model: DelayModel, packets: u32) -> Vec<u64> {
    let mut delay = Delay::new(model);
    (0..u64::from(packets))
        .map(|packet| delay.deadline(packet, &mut stream().draw(packet)) - packet)
        .collect()
}

/// In jitters from the constant.
fn deviations(distribution: Distribution, correlation: f64) -> Vec<f64> {
    delays(model(distribution, correlation), PACKETS)
        .into_iter()
        .map(|delay| (precise(delay) - precise(CONSTANT)) / precise(JITTER))
        .collect()
}

/// Kolmogorov's distance to a distribution, times the root of the number of samples: above 1.95 for one
/// seed in 1000 if the samples are of that distribution and independent.
fn kolmogorov(mut samples: Vec<f64>, distribution: impl Fn(f64) -> f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let count = precise(samples.len() as u64);
    let distance = (0u32..)
        .zip(&samples)
        .map(|(index, sample)| {
            let expected = distribution(*sample);
            let (below, above) = (f64::from(index) / count, (f64::from(index) + 1.0) / count);
            (expected - below).abs().max((above - expected).abs())
        })
        .fold(0.0, f64::max);
    distance * count.sqrt()
}

fn uniform(value: f64) -> f64 {
    f64::midpoint(value, 1.0).clamp(0.0, 1.0)
}

fn shifted_pareto(value: f64) -> f64 {
    let value = value * PARETO_DEVIATION + PARETO_MEAN;
    if value < 1.0 {
        0.0
    } else {
        1.0 - value.powi(-3)
    }
}

#[test]
fn every_distribution_is_that_of_theory() {
    assert!(kolmogorov(deviations(Distribution::Uniform, 0.0), uniform) < 1.95);
    assert!(
        kolmogorov(
            deviations(Distribution::Normal, 0.0),
            distribution_of_normal
        ) < 1.95
    );
    assert!(kolmogorov(deviations(Distribution::Pareto, 0.0), shifted_pareto) < 1.95);
}

/// The distribution of the sum, by summing over 2000 slices of the normal part.
#[test]
fn pareto_and_normal_mix_one_to_three() {
    let sum = |value: f64| -> f64 {
        (0..2000u32)
            .map(|slice| {
                let normal = -6.0 + 12.0 * (f64::from(slice) + 0.5) / 2000.0;
                let weight = (-normal * normal / 2.0).exp() / core::f64::consts::TAU.sqrt();
                let rest = (value * MIXED_DEVIATION - 0.25 * normal) / 0.75;
                let share = shifted_pareto(rest / PARETO_DEVIATION);
                weight * share * 12.0 / 2000.0
            })
            .sum()
    };
    let samples = deviations(Distribution::ParetoNormal, 0.0);
    let few: Vec<f64> = samples.into_iter().take(4000).collect();
    assert!(kolmogorov(few, sum) < 1.95);
}

/// Correlated samples are worth fewer: (1-ρ)/(1+ρ) of them, so the bound is wider by the root of that.
#[test]
fn correlation_leaves_the_distribution_as_it_is() {
    let wider = (1.8f64 / 0.2).sqrt() * 1.95;
    assert!(kolmogorov(deviations(Distribution::Uniform, 0.8), uniform) < wider);
    assert!(kolmogorov(deviations(Distribution::Pareto, 0.8), shifted_pareto) < wider);
}

/// Of normal numbers: four deviations of an estimated correlation.
#[test]
fn successive_packets_are_as_correlated_as_asked() {
    for correlation in [0.0, 0.5, 0.9] {
        let samples = deviations(Distribution::Normal, correlation);
        let both: f64 = samples.windows(2).map(|two| two[0] * two[1]).sum();
        let square: f64 = samples.iter().map(|value| value * value).sum();
        let deviation = 1.0 / f64::from(PACKETS).sqrt();
        assert!(
            (both / square - correlation).abs() < 4.0 * deviation,
            "{correlation}"
        );
    }
}

#[test]
fn a_table_gives_its_samples_equally_often() {
    let table = Distribution::Table(Samples::new(vec![30, 10, 20, 10]));
    let all = delays(model(table, 0.0), PACKETS);
    let count = |value: u64| {
        all.iter()
            .filter(|&&delay| delay == CONSTANT + value)
            .count()
    };
    assert_eq!(count(10) + count(20) + count(30), all.len());
    // 5000 ± 4 deviations of 61.2.
    assert!((4755..5245).contains(&count(20)) && (4755..5245).contains(&count(30)));
    let empty = Distribution::Table(Samples::new(vec![]));
    assert_eq!(delays(model(empty, 0.0), 3), [CONSTANT; 3]);
}

#[test]
fn a_deadline_is_never_before_the_departure() {
    let wild = DelayModel {
        constant: 0,
        jitter: 10_000_000,
        ..model(Distribution::Normal, 0.0)
    };
    let mut delay = Delay::new(wild);
    let early = (0..1000)
        .filter(|&packet| {
            let now = packet * 1000;
            let deadline = delay.deadline(now, &mut stream().draw(packet));
            assert!(deadline >= now);
            deadline == now
        })
        .count();
    assert!(early > 400);
    let mut late = Delay::new(DelayModel::constant(u64::MAX));
    assert_eq!(late.deadline(5, &mut stream().draw(0)), u64::MAX);
}

#[test]
fn order_is_kept_if_the_user_says_so() {
    for keep_order in [true, false] {
        let mut delay = Delay::new(DelayModel {
            keep_order,
            ..model(Distribution::Uniform, 0.0)
        });
        let deadlines: Vec<u64> = (0..1000)
            .map(|packet| delay.deadline(packet * 1000, &mut stream().draw(packet)))
            .collect();
        assert_eq!(deadlines.is_sorted(), keep_order);
    }
}

/// Anybody who changes these changes every recorded run.
#[test]
fn the_same_seed_delays_alike_for_ever() {
    assert_eq!(delays(model(Distribution::Uniform, 0.0), 4), GOLDEN[0]);
    assert_eq!(delays(model(Distribution::Normal, 0.5), 4), GOLDEN[1]);
    assert_eq!(delays(model(Distribution::Pareto, 0.0), 4), GOLDEN[2]);
    assert_eq!(delays(model(Distribution::ParetoNormal, 0.0), 4), GOLDEN[3]);
}

const GOLDEN: [[u64; 4]; 4] = [
    [50_206_579, 50_708_449, 49_011_703, 50_595_126],
    [50_261_871, 51_044_355, 48_338_939, 49_890_824],
    [49_839_439, 50_461_973, 49_424_911, 50_234_504],
    [49_489_369, 49_868_351, 49_797_869, 50_269_433],
];
