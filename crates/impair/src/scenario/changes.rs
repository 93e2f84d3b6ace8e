//! A scenario in the course of time: each moment's impairments, worked out when somebody asks for them.

use std::{cmp::Reverse, collections::BinaryHeap, collections::VecDeque};

use sandwire_api::impairment::{
    BitRate, Corrupt, Delay, Direction, Impairment, Loss, Percent, Reorder, Rule, TimeSpan,
};

use super::{Action, Change, PARTITION_RULE, Repeat, Scenario, ScenarioError, Values};
use crate::Nanoseconds;

/// Changes of a [`Scenario`], in the order of their moments.
#[derive(Clone, Debug)]
pub struct Changes<'a> {
    scenario: &'a Scenario,
    targets: Vec<Target>,
    /// Of the repetition that runs.
    events: BinaryHeap<Reverse<Event>>,
    /// Index of the next step of the repetition that runs.
    next_step: usize,
    repetition: u32,
    ready: VecDeque<Change>,
    /// The repetition has begun, and the moment it began.
    start: Nanoseconds,
    has_begun: bool,
    /// Whether the repetition that runs changed anything.
    has_changed: bool,
}

/// What goes on within a repetition after its step began.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: Nanoseconds,
    /// Index of its step; later steps win.
    step: usize,
    /// 0 for a cut that ends and 1 for one that begins, so that one that begins at the same moment holds; of a ramp, which
    /// of its steps.
    part: u64,
}

/// What a target has.
#[derive(Clone, Debug)]
struct Target {
    impairment: Impairment,
    /// Ramps that go on: their step, and what they started from.
    ramps: Vec<Ramp>,
    /// Steps of cuts that hold, by way.
    cuts: [Vec<usize>; 2],
    /// Cuts of steps up to this one are healed, by way.
    healed: [Option<usize>; 2],
    told: Option<Impairment>,
}

#[derive(Clone, Debug)]
struct Ramp {
    step: usize,
    /// Index of its rule.
    rule: usize,
    from: Values,
}

const WAYS: [Direction; 2] = [Direction::Egress, Direction::Ingress];

impl<'a> Changes<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> Self {
        let target = Target::new(&scenario.initial);
        Self {
            scenario,
            targets: vec![target; scenario.targets.len()],
            events: BinaryHeap::new(),
            next_step: 0,
            repetition: 0,
            ready: VecDeque::new(),
            start: 0,
            has_begun: false,
            has_changed: false,
        }
    }

    /// Whether everything that it comes to can be.
    pub(super) fn check(mut self) -> Result<(), ScenarioError> {
        // Between the ends of a ramp nothing is worse than at its ends, so only these are looked at.
        while let Some(at) = self.next_moment() {
            let touched = self.step_to(at)?;
            let Some(line) = touched else { continue };
            for target in &self.targets {
                let effective = target.effective();
                let checked = effective.check().map_err(|error| error.to_string());
                checked.map_err(|problem| ScenarioError { line, problem })?;
            }
        }
        Ok(())
    }

    /// The next moment of this repetition.
    fn next_moment(&self) -> Option<Nanoseconds> {
        let step = self.scenario.steps.get(self.next_step).map(|step| step.at);
        let event = self.events.peek().map(|Reverse(event)| event.at);
        step.into_iter().chain(event).min()
    }

    /// Does all that is to be done at that moment; the line of the last step that began or ended, if one did.
    fn step_to(&mut self, at: Nanoseconds) -> Result<Option<usize>, ScenarioError> {
        let mut touched = None;
        while let Some(Reverse(event)) = self.events.peek().filter(|Reverse(event)| event.at == at)
        {
            let event = event.clone();
            self.events.pop();
            if self.go_on(&event) {
                touched = Some(self.scenario.steps[event.step].line);
            }
        }
        while let Some(step) = self
            .scenario
            .steps
            .get(self.next_step)
            .filter(|step| step.at == at)
        {
            let index = self.next_step;
            self.next_step += 1;
            touched = Some(step.line);
            self.begin(index).map_err(|problem| ScenarioError {
                line: step.line,
                problem,
            })?;
            // What begins may have a first event now.
            while let Some(Reverse(event)) =
                self.events.peek().filter(|Reverse(event)| event.at == at)
            {
                let event = event.clone();
                self.events.pop();
                self.go_on(&event);
            }
        }
        Ok(touched)
    }

    /// Begins a step.
    fn begin(&mut self, index: usize) -> Result<(), String> {
        let step = &self.scenario.steps[index];
        let indices = match step.target {
            Some(target) => target..target + 1,
            None => 0..self.targets.len(),
        };
        for target in &mut self.targets[indices] {
            match &step.action {
                Action::Set(impairment) => target.set(&impairment.rules),
                Action::Clear => {
                    target.set(&[]);
                    target.heal(Direction::Both, index);
                }
                Action::Heal { ways } => target.heal(*ways, index),
                Action::Ramp { rule, to, .. } => target.begin_ramp(index, rule.as_deref(), to)?,
                Action::Partition { .. } | Action::Flap { .. } => {}
            }
        }
        let event = |after: Nanoseconds, part| {
            Reverse(Event {
                at: step.at.saturating_add(after),
                step: index,
                part,
            })
        };
        match &step.action {
            Action::Ramp { over, .. } => {
                self.events
                    .push(event(self.scenario.granularity.min(*over), 1));
            }
            Action::Partition { lasts, .. } => {
                self.events.push(event(0, 1));
                self.events.extend(lasts.map(|lasts| event(lasts, 0)));
            }
            Action::Flap {
                up, after, lasts, ..
            } => {
                let first = after.saturating_add(*up);
                if first < *lasts {
                    self.events.push(event(first, 1));
                }
            }
            Action::Set(_) | Action::Heal { .. } | Action::Clear => {}
        }
        Ok(())
    }

    /// Goes on with a step; whether that was its last part.
    fn go_on(&mut self, event: &Event) -> bool {
        let index = event.step;
        let step = &self.scenario.steps[index];
        let targets = match step.target {
            Some(target) => &mut self.targets[target..=target],
            None => &mut self.targets[..],
        };
        match &step.action {
            Action::Ramp { to, over, .. } => {
                let elapsed = event.at - step.at;
                for target in targets {
                    target.go_on_with_ramp(index, to, elapsed, *over);
                }
                if elapsed < *over {
                    let later = elapsed.saturating_add(self.scenario.granularity).min(*over);
                    self.events.push(Reverse(Event {
                        at: step.at.saturating_add(later),
                        step: index,
                        part: event.part + 1,
                    }));
                }
                elapsed >= *over
            }
            Action::Partition { ways, .. } => {
                for target in targets {
                    target.cut(*ways, index, event.part == 1);
                }
                event.part == 1
            }
            Action::Flap {
                ways,
                up,
                down,
                after,
                lasts,
            } => {
                let begins = event.part == 1;
                for target in targets {
                    target.cut(*ways, index, begins);
                }
                let end = step.at.saturating_add(*lasts);
                let next = event.at.saturating_add(if begins { *down } else { *up });
                if begins || next < end {
                    self.events.push(Reverse(Event {
                        at: next.min(end),
                        step: index,
                        part: u64::from(!begins),
                    }));
                }
                event.at - step.at == after.saturating_add(*up)
            }
            Action::Set(_) | Action::Heal { .. } | Action::Clear => false,
        }
    }

    /// Notes what is new to those who ask.
    fn tell(&mut self, at: Nanoseconds) {
        for (target, name) in self.targets.iter_mut().zip(&self.scenario.targets) {
            let effective = target.effective();
            if target.told.as_ref() != Some(&effective) {
                self.ready.push_back(Change {
                    at: self.start.saturating_add(at),
                    target: name.clone(),
                    impairment: effective.clone(),
                });
                target.told = Some(effective);
                self.has_changed = true;
            }
        }
    }

    /// Whether there is no repetition after the one that runs.
    fn is_last(&self) -> bool {
        match self.scenario.repeat {
            Repeat::Times(times) => self.repetition.saturating_add(1) >= times,
            Repeat::Forever => false,
        }
    }

    /// Begins the first repetition, or the next if there is one. One that changed nothing isn't repeated.
    fn begin_repetition(&mut self) -> bool {
        if self.has_begun {
            if self.is_last() || !self.has_changed {
                return false;
            }
            self.repetition = self.repetition.saturating_add(1);
            self.start = self.start.saturating_add(self.scenario.length);
        }
        self.has_changed = false;
        self.has_begun = true;
        self.next_step = 0;
        self.events.clear();
        for target in &mut self.targets {
            let told = target.told.take();
            *target = Target::new(&self.scenario.initial);
            target.told = told;
        }
        true
    }
}

impl Iterator for Changes<'_> {
    type Item = Change;

    fn next(&mut self) -> Option<Change> {
        loop {
            if let Some(change) = self.ready.pop_front() {
                return Some(change);
            }
            // What would end together with a repetition ends by the beginning of the next.
            let end = self.scenario.length;
            let is_over = |at: &Nanoseconds| *at >= end && !self.is_last();
            let moment = self.next_moment().filter(|_| self.has_begun);
            let at = match moment.filter(|at| !is_over(at)) {
                Some(at) => at,
                None if !self.begin_repetition() => return None,
                None => 0,
            };
            // All of it was checked when the file was read.
            self.step_to(at).ok()?;
            self.tell(at);
        }
    }
}

impl Target {
    fn new(initial: &Impairment) -> Self {
        Self {
            impairment: initial.clone(),
            ramps: Vec::new(),
            cuts: [Vec::new(), Vec::new()],
            healed: [None; 2],
            told: None,
        }
    }

    fn set(&mut self, rules: &[Rule]) {
        self.impairment.rules = rules.to_vec();
        self.ramps.clear();
    }

    /// Ends cuts of steps up to this one.
    fn heal(&mut self, ways: Direction, step: usize) {
        for (way, (cuts, healed)) in WAYS.iter().zip(self.cuts.iter_mut().zip(&mut self.healed)) {
            if ways.covers(*way) {
                cuts.clear();
                *healed = Some(step);
            }
        }
    }

    fn cut(&mut self, ways: Direction, step: usize, begins: bool) {
        for (way, (cuts, healed)) in WAYS.iter().zip(self.cuts.iter_mut().zip(&self.healed)) {
            cuts.retain(|cut| *cut != step || !ways.covers(*way));
            if begins && ways.covers(*way) && healed.is_none_or(|healed| step > healed) {
                cuts.push(step);
            }
        }
    }

    fn begin_ramp(&mut self, step: usize, name: Option<&str>, to: &Values) -> Result<(), String> {
        let names = (0..self.impairment.rules.len()).map(|index| self.impairment.rule_name(index));
        let names: Vec<String> = names.collect();
        let rule = match name {
            Some(name) => names
                .iter()
                .position(|known| known == name)
                .ok_or_else(|| {
                    format!(
                        "there is no rule '{name}' to ramp: there is {}",
                        list(&names)
                    )
                })?,
            None if names.len() == 1 => 0,
            None => {
                return Err(format!(
                    "say which rule is ramped, as rule = \"…\": there is {}",
                    list(&names)
                ));
            }
        };
        let from = from_values(&self.impairment.rules[rule], to)?;
        // It may never get there; but all that is between is possible if this is.
        let mut end = self.impairment.clone();
        put_between(&mut end.rules[rule], &from, to, 1, 1);
        end.check().map_err(|error| error.to_string())?;
        self.ramps.retain(|ramp| ramp.rule != rule);
        self.ramps.push(Ramp { step, rule, from });
        Ok(())
    }

    fn go_on_with_ramp(
        &mut self,
        step: usize,
        to: &Values,
        elapsed: Nanoseconds,
        over: Nanoseconds,
    ) {
        let Some(place) = self.ramps.iter().position(|ramp| ramp.step == step) else {
            return;
        };
        let ramp = &self.ramps[place];
        if let Some(rule) = self.impairment.rules.get_mut(ramp.rule) {
            put_between(rule, &ramp.from, to, elapsed, over);
        }
        if elapsed >= over {
            self.ramps.remove(place);
        }
    }

    /// All that happens now.
    fn effective(&self) -> Impairment {
        let mut impairment = self.impairment.clone();
        let direction = match self.cuts.each_ref().map(Vec::is_empty) {
            [true, true] => return impairment,
            [false, false] => Direction::Both,
            [false, true] => Direction::Egress,
            [true, false] => Direction::Ingress,
        };
        for index in 0..impairment.rules.len() {
            // Its place is another one now.
            let name = impairment.rule_name(index);
            impairment.rules[index].name = name.parse().ok();
        }
        let cut = Rule {
            name: PARTITION_RULE.parse().ok(),
            direction,
            partition: true,
            ..Rule::default()
        };
        impairment.rules.insert(0, cut);
        impairment
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        "none at that moment".to_owned()
    } else {
        names.join(", ")
    }
}

/// Where a ramp to these values starts in this rule.
fn from_values(rule: &Rule, to: &Values) -> Result<Values, String> {
    let delay = rule.delay.clone().unwrap_or_default();
    let loss = match &rule.loss {
        None => Percent::default(),
        Some(Loss::Independent { share }) => *share,
        Some(_) if to.loss.is_none() => Percent::default(),
        Some(_) => {
            return Err(
                "only independent loss can be ramped; the rule has another model".to_owned(),
            );
        }
    };
    let rate = rule.rate.as_ref().map(|rate| rate.rate);
    if to.rate.is_some() && rate.is_none() {
        return Err("the rule has no rate to start from: set one before the ramp".to_owned());
    }
    if rule.preset.is_some() {
        return Err("a preset can't be ramped: set its numbers instead".to_owned());
    }
    Ok(Values {
        delay: to.delay.map(|_| delay.mean),
        jitter: to.jitter.map(|_| delay.jitter),
        loss: to.loss.map(|_| loss),
        rate: to.rate.and(rate),
        duplicate: to.duplicate.map(|_| rule.duplicate.unwrap_or_default()),
        corrupt: to.corrupt.map(|_| {
            rule.corrupt
                .as_ref()
                .map_or(Percent::default(), |corrupt| corrupt.share)
        }),
        reorder: to.reorder.map(|_| {
            rule.reorder
                .as_ref()
                .map_or(Percent::default(), |reorder| reorder.share)
        }),
    })
}

/// Puts into the rule what a ramp has come to.
fn put_between(
    rule: &mut Rule,
    from: &Values,
    to: &Values,
    elapsed: Nanoseconds,
    over: Nanoseconds,
) {
    let number = |from: i64, to: i64| between(from, to, elapsed, over);
    let time = |from: Option<TimeSpan>, to: Option<TimeSpan>| {
        let (from, to) = from.zip(to)?;
        let nanoseconds = number(from.nanoseconds, to.nanoseconds);
        Some(TimeSpan { nanoseconds })
    };
    let share = |from: Option<Percent>, to: Option<Percent>| {
        let (from, to) = from.zip(to)?;
        let billionths = number(from.billionths, to.billionths);
        Some(Percent { billionths })
    };
    if let Some(mean) = time(from.delay, to.delay) {
        rule.delay.get_or_insert_with(Delay::default).mean = mean;
    }
    if let Some(jitter) = time(from.jitter, to.jitter) {
        rule.delay.get_or_insert_with(Delay::default).jitter = jitter;
    }
    if let Some(share) = share(from.loss, to.loss) {
        rule.loss = Some(Loss::Independent { share });
    }
    if let (Some(rate), Some((from, to))) = (&mut rule.rate, from.rate.zip(to.rate)) {
        let whole = |rate: BitRate| i64::try_from(rate.bits_per_second).unwrap_or(i64::MAX);
        let bits = number(whole(from), whole(to));
        rate.rate.bits_per_second = u64::try_from(bits).unwrap_or(0);
    }
    if let Some(share) = share(from.duplicate, to.duplicate) {
        rule.duplicate = Some(share);
    }
    if let Some(share) = share(from.corrupt, to.corrupt) {
        let new = || Corrupt {
            bits: 1,
            ..Corrupt::default()
        };
        rule.corrupt.get_or_insert_with(new).share = share;
    }
    if let Some(share) = share(from.reorder, to.reorder) {
        let new = || Reorder {
            distance: 1,
            ..Reorder::default()
        };
        rule.reorder.get_or_insert_with(new).share = share;
    }
}

/// The number on the straight line between two.
fn between(from: i64, to: i64, elapsed: Nanoseconds, over: Nanoseconds) -> i64 {
    let distance = (i128::from(to) - i128::from(from)) * i128::from(elapsed.min(over));
    let number = i128::from(from) + distance / i128::from(over.max(1));
    i64::try_from(number).unwrap_or(to)
}
