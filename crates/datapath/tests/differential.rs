//! Two implementations of the data path get the same packets and must do the same with them: the
//! programs in C, run by the kernel, and a model in Rust that is written to be right rather than fast.
//!
//! `SANDWIRE_SEED` sets the seed of a run; a failure prints it, with the class and the number that make
//! the case again. `SANDWIRE_CASES` sets how many cases of each class are run.

#![expect(
    clippy::cast_possible_truncation,
    reason = "packets are small, and a number that does not fit shows as a difference"
)]

mod generator;
mod model;

use std::rc::Rc;

use generator::{CLASSES, random::Random, random_of, scene};
use model::{Input, Verdict};

/// The model and the generator alone: every class is made and judged, and the model says what each class is for.
#[test]
fn every_class_reaches_its_verdicts() {
    let policies = Rc::new(scene::policies(&mut Random::new(1)));
    for (class, make) in CLASSES {
        let mut seen = std::collections::BTreeMap::<_, u32>::new();
        for number in 0..400 {
            let case = make(&mut random_of(1, class, number));
            let mut world = scene::world(case.variant, &[1, 2, 3, 4, 5], &policies);
            world.nics[0].policy = case.policy;
            for step in &case.steps {
                let input = Input {
                    hook: step.hook,
                    class: 0,
                    to_this_host: step.to_this_host,
                    frame: step.frame.clone(),
                    gso_size: step.gso_size,
                    now: 1_000_000_000_000,
                };
                let outcome = model::run(&mut world, &input);
                assert!(outcome.verdict != Verdict::Drop || outcome.target == 0);
                *seen.entry((outcome.verdict, outcome.reason)).or_default() += 1;
            }
        }
        println!("{class}: {seen:?}");
    }
}
