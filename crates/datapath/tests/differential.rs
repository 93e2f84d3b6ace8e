//! Two implementations of the data path get the same packets and must do the same with them: the
//! programs in C, run by the kernel, and a model in Rust that is written to be right rather than fast.
//!
//! `SANDWIRE_SEED` sets the seed of a run; a failure prints it, with the class and the number that make
//! the case again. `SANDWIRE_CASES` sets how many cases of each class are run, `SANDWIRE_CLASS` names the
//! only class to run.

#![expect(
    clippy::cast_possible_truncation,
    reason = "packets are small, and a number that does not fit shows as a difference"
)]

mod generator;
mod harness;
mod model;
mod mutants;

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    rc::Rc,
    time::Duration,
};

use generator::{CLASSES, random::Random, random_of, scene};
use harness::{Harness, compare::hex, host, programs::Programs};
use model::{Input, Verdict};
use sandwire_testlab::lab;

/// Cases of each class: with two packets and more in each, a good quarter of a million packets.
const CASES: u64 = 2_200;

fn number_from(variable: &str, usual: u64) -> u64 {
    match env::var(variable) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{variable} must be a number")),
        Err(_) => usual,
    }
}

/// The same for XDP, where each frame is run twice.
const CASES_BY_XDP: u64 = 500;

/// Each test takes much less alone; other work on the machine must not end it.
const DEADLINE: Duration = Duration::from_secs(1800);

/// What a run has seen.
#[derive(Default)]
struct Report {
    packets: BTreeMap<&'static str, u64>,
    outcomes: BTreeSet<String>,
    differences: Vec<String>,
}

impl Report {
    #[track_caller]
    fn assert_no_difference(&self, seed: u64) {
        assert!(
            self.differences.is_empty(),
            "SANDWIRE_SEED={seed}: {} differences\n{}",
            self.differences.len(),
            self.differences.join("\n")
        );
    }
}

/// Runs cases of every class, and stops in a class that has shown enough differences.
fn run_classes(harness: &mut Harness, seed: u64, cases: u64, enough: usize) -> Report {
    let mut report = Report::default();
    let only = env::var("SANDWIRE_CLASS").ok();
    // Children have no XDP.
    let runs = |class: &str| !harness.by_xdp || !class.starts_with("child-");
    let wanted: Vec<_> = CLASSES
        .iter()
        .filter(|(class, _)| only.as_ref().is_none_or(|only| only == class) && runs(class))
        .collect();
    for (class, make) in wanted {
        let mut different = 0;
        for number in 0..cases {
            let case = make(&mut random_of(seed, class, number));
            *report.packets.entry(class).or_default() += case.steps.len() as u64;
            match harness.run(&case) {
                Ok(outcomes) => report.outcomes.extend(
                    outcomes
                        .iter()
                        .map(|outcome| format!("{:?} {:?}", outcome.verdict, outcome.reason)),
                ),
                Err(difference) => {
                    report.differences.push(format!(
                        "class {class}, number {number}, step {}, variant {}, policy {}\n  {}\n  frame {}",
                        difference.step,
                        case.variant,
                        case.policy,
                        difference.text,
                        hex(&difference.frame)
                    ));
                    different += 1;
                }
            }
            if different >= enough {
                break;
            }
        }
    }
    report
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn programs_and_model_agree() {
    lab::run_within(DEADLINE, |lab| {
        let seed = number_from("SANDWIRE_SEED", 1);
        println!("SANDWIRE_SEED={seed}");
        let ifindex = host::set_up(lab);
        let programs = Programs::open("differential").expect("they load");
        let policies = Rc::new(scene::policies(&mut Random::new(seed)));
        let mut harness = Harness::new(programs, ifindex, policies);
        let cases = number_from("SANDWIRE_CASES", CASES);
        let report = run_classes(&mut harness, seed, cases, 3);
        for (class, packets) in &report.packets {
            println!("{class}: {packets} packets");
        }
        let total: u64 = report.packets.values().sum();
        println!("{total} packets, {} not run by the kernel", harness.refused);
        report.assert_no_difference(seed);
        let all =
            env::var_os("SANDWIRE_CASES").is_none() && env::var_os("SANDWIRE_CLASS").is_none();
        let fewest = report.packets.values().min().copied().unwrap_or(0);
        assert!(
            !all || (fewest >= 2_000 && total >= 200_000),
            "only {total} packets, {fewest} of a class"
        );
        assert!(
            harness.refused * 50 < total,
            "the kernel runs too few of them"
        );
    });
}

/// Cases of each class on a processor without lines of its own.
const CASES_LATE: u64 = 300;

/// A processor that was plugged in after the maps were made counts where all may, pays nothing ahead, and keeps few decisions.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn programs_on_a_processor_that_came_later_and_model_agree() {
    lab::run_within(DEADLINE, |lab| {
        let seed = number_from("SANDWIRE_SEED", 1);
        println!("SANDWIRE_SEED={seed}");
        let ifindex = host::set_up(lab);
        let programs = Programs::before_processors("late").expect("they load");
        let policies = Rc::new(scene::policies(&mut Random::new(seed)));
        let mut harness = Harness::new(programs, ifindex, policies);
        let cases = number_from("SANDWIRE_CASES", CASES_LATE);
        let report = run_classes(&mut harness, seed, cases, 3);
        report.assert_no_difference(seed);
    });
}

/// XDP takes plain packets whose way is known, and leaves the others to tc: each frame goes to tc first.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn programs_on_xdp_and_model_agree() {
    lab::run_within(DEADLINE, |lab| {
        let seed = number_from("SANDWIRE_SEED", 1);
        println!("SANDWIRE_SEED={seed}");
        let ifindex = host::set_up(lab);
        let programs = Programs::open("differential").expect("they load");
        let policies = Rc::new(scene::policies(&mut Random::new(seed)));
        let mut harness = Harness::by_xdp(programs, ifindex, policies);
        let cases = number_from("SANDWIRE_CASES", CASES_BY_XDP);
        let report = run_classes(&mut harness, seed, cases, 3);
        let total: u64 = report.packets.values().sum();
        let taken = harness.taken_by_xdp;
        println!("{total} packets, {taken} of them taken by XDP");
        report.assert_no_difference(seed);
        assert!(
            taken * 10 > total,
            "XDP takes only {taken} of {total} packets"
        );
    });
}

/// Cases of each class that a mutant gets, first of the classes that should see it.
const CASES_FOR_MUTANTS: u64 = 150;
/// The same of classes that should see it.
const CASES_LIKELY: u64 = 1_000;

/// The first difference between a faulty program and the model.
fn first_difference(harness: &mut Harness, seed: u64, likely: &[&str]) -> Option<String> {
    let (first, then): (Vec<_>, Vec<_>) = CLASSES
        .iter()
        .partition(|(class, _)| likely.contains(class));
    for &(class, make) in first.into_iter().chain(then) {
        let cases = if likely.contains(&class) {
            CASES_LIKELY
        } else {
            CASES_FOR_MUTANTS
        };
        for number in 0..cases {
            let case = make(&mut random_of(seed, class, number));
            if let Err(difference) = harness.run(&case) {
                return Some(format!("{class} {number}: {}", difference.text));
            }
        }
    }
    None
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn every_mutant_is_caught() {
    lab::run_within(DEADLINE, |lab| {
        let seed = number_from("SANDWIRE_SEED", 1);
        let ifindex = host::set_up(lab);
        let policies = Rc::new(scene::policies(&mut Random::new(seed)));
        let mut wrong = Vec::new();
        // One is compiled while another runs.
        let (send, compiled) = std::sync::mpsc::sync_channel(2);
        std::thread::spawn(move || {
            for mutant in mutants::faults::MUTANTS {
                if send.send((mutant, mutants::compile(mutant))).is_err() {
                    return;
                }
            }
        });
        for (number, (mutant, objects)) in compiled.iter().enumerate() {
            let caught = objects
                .and_then(|objects| Programs::load(&objects, &format!("mutant{number}")))
                .map(|programs| {
                    let mut harness = Harness::new(programs, ifindex, Rc::clone(&policies));
                    first_difference(&mut harness, seed, mutant.classes)
                });
            match caught {
                Ok(Some(difference)) => println!("{}: {difference}", mutant.name),
                Ok(None) => wrong.push(format!("{}: not caught", mutant.name)),
                Err(error) => wrong.push(format!("{}: {error}", mutant.name)),
            }
        }
        assert!(
            wrong.is_empty(),
            "SANDWIRE_SEED={seed}\n{}",
            wrong.join("\n")
        );
    });
}

/// The model and the generator alone: every verdict and every reason that a packet can meet is met.
#[test]
fn the_generator_reaches_every_verdict() {
    let policies = Rc::new(scene::policies(&mut Random::new(1)));
    let mut seen = BTreeSet::new();
    for (class, make) in CLASSES {
        for number in 0..200 {
            let case = make(&mut random_of(1, class, number));
            let mut world = scene::world(case.variant, &[1, 2, 3, 4, 5], &policies);
            world.nics[0].policy = case.policy;
            world.nics[0].asked_before = case.asked;
            let now = 1_000_000_000_000_000;
            for meter in &case.meters {
                let nic = &mut world.nics[meter.nic];
                let filled = meter.filled(now);
                *(if meter.ingress {
                    &mut nic.ingress
                } else {
                    &mut nic.egress
                }) = filled;
            }
            for step in &case.steps {
                let input = Input {
                    hook: step.hook,
                    class: 0,
                    to_this_host: step.to_this_host,
                    origin: step.origin,
                    frame: step.frame.clone(),
                    gso_size: step.gso_size,
                    gso_segs: step.gso_segs,
                    now,
                };
                let outcome = model::run(&mut world, &input);
                seen.insert(format!("{:?} {:?}", outcome.verdict, outcome.reason));
                assert!(outcome.verdict != Verdict::Drop || outcome.target == 0);
            }
        }
    }
    println!("{seen:?}");
    // All but a failing helper, with the six ways to go on and silent drops.
    let reasons = sandwire_api::drop_reason::DropReason::ALL.len();
    assert_eq!(seen.len(), reasons - 1 + 7, "{seen:#?}");
}
