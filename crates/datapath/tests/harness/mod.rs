//! Runs the programs in the kernel on the frames of a case, beside the model, and compares.

pub(crate) mod compare;
pub(crate) mod encode;
pub(crate) mod host;
pub(crate) mod programs;
pub(crate) mod sys;

use std::{collections::BTreeMap, io, os::fd::AsFd, rc::Rc};

use aya::maps::{MapData, RingBuf};
use sandwire_datapath::abi;

use crate::{
    generator::{Case, Change, Step, scene},
    model::{
        self, Hook, Input, Origin, World,
        answers::Answer,
        world::{Counters, Credit, Policy, Prefix, State},
    },
};
use compare::Observed;
use encode::Event;
use programs::Programs;

/// The programs with the scene of the generator set up in their maps.
pub(crate) struct Harness {
    programs: Programs,
    trace: RingBuf<MapData>,
    ifindex: [u32; 5],
    policies: Rc<Vec<Policy>>,
    /// The world of each variant.
    worlds: BTreeMap<usize, World>,
    generation: u32,
    variant: Option<usize>,
    counted: Vec<Counters>,
    /// The one that runs the programs, and its lines as they were read last.
    processor: u32,
    own_ledgers: Vec<Vec<u8>>,
    /// The value of `noted` in which no flow is, of all processors.
    nothing_noted: Vec<u8>,
    /// Whether XDP gets a frame as well, after tc has decided over it.
    pub(crate) by_xdp: bool,
    /// Frames that XDP has taken.
    pub(crate) taken_by_xdp: u64,
    /// Frames that the kernel refuses to test-run, by class of length.
    pub(crate) refused: u64,
}

/// A difference between program and model.
#[derive(Clone, Debug)]
pub(crate) struct Difference {
    pub(crate) step: usize,
    pub(crate) frame: Vec<u8>,
    pub(crate) text: String,
}

impl Harness {
    /// Fills the maps of fresh programs.
    pub(crate) fn new(programs: Programs, ifindex: [u32; 5], policies: Rc<Vec<Policy>>) -> Self {
        Self::with(programs, ifindex, policies, false)
    }

    /// The same, where every frame also goes to the programs on XDP.
    pub(crate) fn by_xdp(programs: Programs, ifindex: [u32; 5], policies: Rc<Vec<Policy>>) -> Self {
        Self::with(programs, ifindex, policies, true)
    }

    fn with(
        programs: Programs,
        ifindex: [u32; 5],
        policies: Rc<Vec<Policy>>,
        by_xdp: bool,
    ) -> Self {
        let trace = programs.trace();
        let processors = aya::util::nr_cpus().expect("the kernel tells");
        let mut harness = Self {
            programs,
            trace,
            ifindex,
            policies,
            worlds: BTreeMap::new(),
            generation: 0,
            variant: None,
            counted: vec![Counters::default(); scene::NICS],
            processor: sys::stay_on_a_processor().expect("the kernel lets it"),
            own_ledgers: vec![vec![0; encode::LEDGER]; scene::NICS],
            nothing_noted: vec![0; size_of::<abi::Noted>() * processors],
            by_xdp,
            taken_by_xdp: 0,
            refused: 0,
        };
        harness.fill().expect("maps take what fits them");
        harness
    }

    fn put(&self, map: &str, key: &[u8], value: &[u8]) -> io::Result<()> {
        sys::update(self.programs.map(map), key, value)
    }

    fn fill(&mut self) -> io::Result<()> {
        let world = scene::world(scene::HOST_SLOT, &self.ifindex, &self.policies);
        let mut list = 0;
        for (number, policy) in (0..).zip(self.policies.iter()) {
            let mut bytes = encode::policy(policy);
            if number == 0 {
                bytes[0] |= encode::REDIRECTS;
            }
            self.put("policies", &encode::number(number), &bytes)?;
            for prefix in &policy.prefixes {
                self.put_prefix(number, prefix, &mut list)?;
            }
            // As the daemon does: IPv6 prefixes must not cover IPv4 as ::ffff:0:0/96 shows it.
            if policy.prefixes.iter().any(scene::covers_mapped)
                && !policy.prefixes.iter().any(scene::covers_ipv4)
            {
                let (key, value) = encode::prefix(number, &scene::otherwise(policy), 0);
                self.put("prefixes", &key, &value)?;
            }
        }
        let mut sets = BTreeMap::new();
        for redirect in world.redirects.iter() {
            let next = encode::SETS + 1 + sets.len() as u32;
            let set = *sets.entry(redirect.from).or_insert(next);
            let (key, value) = encode::source(redirect.from, set);
            self.put("prefixes", &key, &value)?;
            self.put_prefix(set, &redirect.to, &mut list)?;
        }
        for (from, to) in &world.group_pairs {
            let pair = [encode::number(*from), encode::number(*to)].concat();
            self.put("group_pairs", &pair, &[1])?;
        }
        for (ifindex, fq) in &world.uplinks {
            let flags = u32::from(*fq) | u32::from(self.by_xdp) << 1;
            let flags = [encode::number(flags), [0; 4]].concat();
            self.put("uplinks", &encode::number(*ifindex), &flags)?;
        }
        // Test runs of XDP come from the loopback, which is the first interface.
        self.put("xdp_nics", &encode::number(1), &encode::number(0))?;
        for number in 2..scene::NICS {
            self.write_nic(&world, number)?;
        }
        self.write_clones(&world)
    }

    /// Writes a prefix of a policy, and its rules as the next list.
    fn put_prefix(&self, policy: u32, prefix: &Prefix, list: &mut u32) -> io::Result<()> {
        let mut own = 0;
        if !prefix.rules.is_empty() {
            *list += 1;
            own = *list;
            let rules = encode::rule_list(&prefix.rules);
            self.put("rule_lists", &encode::number(own), &rules)?;
        }
        let (key, value) = encode::prefix(policy, prefix, own);
        self.put("prefixes", &key, &value)
    }

    fn write_clones(&self, world: &World) -> io::Result<()> {
        for number in 0..scene::NICS {
            for version in [4, 6] {
                let clone = scene::clone(version, number);
                let key = encode::address(clone);
                if world.clones.contains_key(&clone) {
                    self.put("clones", &key, &encode::number(number as u32))?;
                } else {
                    sys::delete(self.programs.map("clones"), &key)?;
                }
            }
        }
        Ok(())
    }

    fn write_nic(&self, world: &World, number: usize) -> io::Result<()> {
        let nic = encode::nic(&world.nics[number], self.generation, self.by_xdp);
        self.put("nics", &encode::number(number as u32), &nic)
    }

    /// Runs one case. The outcome of every step is compared; the first difference ends it.
    pub(crate) fn run(&mut self, case: &Case) -> Result<Vec<model::Outcome>, Difference> {
        let began = sys::now();
        let outcome = self.run_once(case);
        // The programs forget whom a sandbox had asked for within four seconds, and the model doesn't.
        let was_held_up = case.asked > 0 && sys::now() - began > 3_000_000_000;
        if outcome.is_err() && was_held_up {
            return self.run_once(case);
        }
        outcome
    }

    fn run_once(&mut self, case: &Case) -> Result<Vec<model::Outcome>, Difference> {
        let mut world = self.arrange(case).expect("maps take what fits them");
        let mut outcomes = Vec::new();
        let mut known = BTreeMap::new();
        for (number, step) in case.steps.iter().enumerate() {
            let differs = |frame: &[u8], text| Difference {
                step: number,
                frame: frame.to_vec(),
                text,
            };
            if let Some(change) = step.change {
                self.change(&mut world, change)
                    .expect("maps take what fits them");
            }
            let input = self.input(step);
            let before = sys::now();
            let sends = matches!(step.hook, Hook::HostEnd | Hook::FromChild);
            let may_learn = !sends || !world.answers.is_empty();
            let observed = match self.observe(&input, step, may_learn) {
                Ok(observed) => observed,
                // Shorter than an IP header: some kernels don't run that.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    self.refused += 1;
                    continue;
                }
                Err(error) => return Err(differs(&input.frame, format!("test run: {error}"))),
            };
            let now = observed.events.first().map_or(before, |event| event.time);
            let input = Input { now, ..input };
            let outcome = model::run(&mut world, &input);
            let decided = known.entry(self.generation).or_insert(before);
            let warm = now.saturating_sub(*decided) < 80_000_000;
            compare::compare(&world, &input, &outcome, &observed, warm)
                .map_err(|text| differs(&input.frame, text))?;
            if self.by_xdp && step.gso_size == 0 {
                self.repeat_by_xdp(&mut world, &input)
                    .map_err(|text| differs(&input.frame, format!("by XDP: {text}")))?;
            }
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }

    /// Gives the frame to XDP. Either it leaves it to tc without a trace, or it does as tc would.
    fn repeat_by_xdp(&mut self, world: &mut World, input: &Input) -> Result<(), String> {
        let Some(xdp) = &self.programs.xdp else {
            return Err("these programs have none".to_owned());
        };
        let program = match input.hook {
            Hook::HostEnd => &xdp.from_guest,
            Hook::Uplink if input.to_this_host => &xdp.to_guest,
            _ => return Ok(()),
        };
        let ran =
            sys::test_run_xdp(program.as_fd(), &input.frame).map_err(|error| error.to_string())?;
        let may_learn = input.hook != Hook::HostEnd || !world.answers.is_empty();
        let observed = self
            .look_around(ran, may_learn)
            .map_err(|error| error.to_string())?;
        if observed.ran.returned == compare::XDP_PASS {
            return compare::untouched(world, input, &observed);
        }
        self.taken_by_xdp += 1;
        let outcome = model::run(world, input);
        compare::compare_xdp(world, &outcome, &observed)
    }

    fn input(&self, step: &Step) -> Input {
        let mut frame = step.frame.clone();
        if step.hook == Hook::Uplink && step.to_this_host {
            frame[..6].copy_from_slice(&scene::INTERFACES[0].1);
        }
        Input {
            hook: step.hook,
            class: 0,
            to_this_host: step.to_this_host,
            origin: step.origin,
            frame,
            gso_size: step.gso_size,
            gso_segs: step.gso_segs,
            now: 0,
        }
    }

    /// Makes maps and world as the case wants them.
    fn arrange(&mut self, case: &Case) -> io::Result<World> {
        let pays_ahead = self.programs.processors > 0;
        let fresh = || World {
            pays_ahead,
            ..scene::world(case.variant, &self.ifindex, &self.policies)
        };
        let mut world = self
            .worlds
            .entry(case.variant)
            .or_insert_with(fresh)
            .clone();
        world.nics[0].policy = case.policy;
        world.nics[0].learn = case.learn;
        world.nics[0].published = case.published;
        self.generation += 1;
        for number in [0, 1] {
            self.write_nic(&world, number)?;
        }
        if self.variant != Some(case.variant) {
            self.write_nic(&world, scene::NEIGHBOUR)?;
            self.write_clones(&world)?;
            self.variant = Some(case.variant);
        }
        for key in sys::keys(self.programs.map("answers"), encode::ANSWER_KEY)? {
            sys::delete(self.programs.map("answers"), &key)?;
        }
        // Each case has its own share: a case enters less than that.
        let shares = vec![vec![0; size_of::<u64>()]; scene::NICS];
        sys::update_first(self.programs.map("answer_shares"), &shares)?;
        let shares: Vec<_> = (0..scene::NICS)
            .map(|nic| encode::neighbour_share(if nic == 0 { case.asked } else { 0 }, sys::now()))
            .collect();
        sys::update_first(self.programs.map("neighbour_shares"), &shares)?;
        world.nics[0].asked_before = case.asked;
        if !case.answers.is_empty() {
            // The last case may have had the same flow, at another age.
            self.put("noted", &encode::number(0), &self.nothing_noted)?;
        }
        let now = sys::now();
        for known in &case.answers {
            let answer = Answer {
                // An age beyond the time since the machine started means never.
                seen: now.saturating_sub(known.age),
                via: known.via,
                own: known.own,
                fragment: 0,
                lease: world.nics[known.flow.nic].lease - u32::from(known.by_last_lease),
            };
            self.put(
                "answers",
                &encode::answer_key(&known.flow),
                &encode::answer_value(&answer),
            )?;
            world.answers.insert(known.flow, answer);
        }
        for meter in &case.meters {
            let mut filled = meter.filled(now);
            if self.programs.processors == 0 {
                filled.credit = Credit::default();
            }
            let nic = &mut world.nics[meter.nic];
            *(if meter.ingress {
                &mut nic.ingress
            } else {
                &mut nic.egress
            }) = filled;
        }
        for (nic, counted) in world.nics.iter_mut().zip(&self.counted) {
            nic.counters = counted.clone();
        }
        let meters: Vec<Vec<u8>> = world
            .nics
            .iter()
            .map(|nic| encode::meters(nic.egress, nic.ingress))
            .collect();
        sys::update_first(self.programs.map("meters"), &meters)?;
        self.write_credits(&world)?;
        Ok(world)
    }

    /// Writes what this processor has paid ahead, where it is something else.
    fn write_credits(&mut self, world: &World) -> io::Result<()> {
        for (number, nic) in (0..).zip(&world.nics) {
            let credits = encode::credits(nic.egress.credit, nic.ingress.credit);
            let line = &mut self.own_ledgers[number as usize];
            if line[encode::CREDITS..] != credits[..] {
                line[encode::CREDITS..].copy_from_slice(&credits);
                let key = encode::number(self.processor * self.programs.nics_max + number);
                sys::update(self.programs.map("ledgers"), &key, line)?;
            }
        }
        Ok(())
    }

    fn change(&mut self, world: &mut World, change: Change) -> io::Result<()> {
        match change {
            Change::Policy(policy) => world.nics[0].policy = policy,
            Change::Generation => {}
            Change::Release => return self.release(world),
        }
        self.generation += 1;
        // What the programs have set stays.
        self.write_nic(world, 0)
    }

    /// Takes the lease of a sandbox as the daemon does, without a word to those who talk to it.
    fn release(&mut self, world: &mut World) -> io::Result<()> {
        world.nics[scene::NEIGHBOUR].state = State::Ready;
        world.clones.retain(|_, nic| *nic != scene::NEIGHBOUR);
        self.write_nic(world, scene::NEIGHBOUR)?;
        self.write_clones(world)?;
        // The next case puts it back.
        self.variant = None;
        Ok(())
    }

    /// Runs the program that belongs to the hook.
    fn observe(&mut self, input: &Input, step: &Step, may_learn: bool) -> io::Result<Observed> {
        let (program, ifindex) = match input.hook {
            Hook::HostEnd => (&self.programs.from_guest, host::HOST_END),
            Hook::Uplink => (&self.programs.from_uplink, self.ifindex[0]),
            Hook::Shared => (&self.programs.from_host, self.ifindex[4]),
            Hook::FromChild => (&self.programs.from_child, host::HOST_END),
            Hook::ToChild => (&self.programs.to_child, host::HOST_END),
        };
        let mut context = sys::Context::default();
        context.ifindex = ifindex;
        context.ingress_ifindex = match input.origin {
            Origin::Host => 0,
            Origin::Shared => self.ifindex[4],
            Origin::HostEnd(ifindex) => ifindex,
            Origin::Uplink => self.ifindex[0],
        };
        context.gso_size = step.gso_size;
        context.gso_segs = step.gso_segs;
        let ran = sys::test_run(program.as_fd(), &input.frame, &context)?;
        self.look_around(ran, may_learn)
    }

    /// What a run has left behind.
    fn look_around(&mut self, ran: sys::Ran, may_learn: bool) -> io::Result<Observed> {
        let mut events: Vec<Event> = Vec::new();
        while let Some(item) = self.trace.next() {
            events.push(encode::read_event(&item));
        }
        self.counted = self.read_counted()?;
        let map = self.programs.map("meters");
        let meters = sys::values(map, 0, scene::NICS, encode::METERS)?;
        let metered = meters.iter().zip(&self.own_ledgers);
        let metered = metered.map(|(one, ledger)| encode::read_meters(one, ledger));
        let metered = metered.collect();
        let mut answers = Vec::new();
        // The list is long to walk; one that was empty changes only by what comes in.
        let keys = if may_learn {
            sys::keys(self.programs.map("answers"), encode::ANSWER_KEY)?
        } else {
            Vec::new()
        };
        for key in keys {
            let mut value = vec![0; encode::ANSWER_VALUE];
            sys::look_up(self.programs.map("answers"), &key, &mut value)?;
            answers.push((key, encode::read_answer(&value)));
        }
        let mut nic = vec![0; encode::NIC];
        sys::look_up(self.programs.map("nics"), &encode::number(0), &mut nic)?;
        Ok(Observed {
            ran,
            events,
            watched: !self.by_xdp,
            counters: self.counted.clone(),
            meters: metered,
            answers,
            process: encode::is_process(&nic),
        })
    }

    /// What was counted, by all processors together.
    fn read_counted(&mut self) -> io::Result<Vec<Counters>> {
        let map = self.programs.map("counters");
        let counters = sys::values(map, 0, scene::NICS, encode::COUNTERS)?;
        let mut counted: Vec<Counters> = counters
            .iter()
            .map(|one| encode::read_counters(one))
            .collect();
        let map = self.programs.map("ledgers");
        for processor in 0..self.programs.processors {
            let first = processor * self.programs.nics_max;
            let ledgers = sys::values(map, first, scene::NICS, encode::LEDGER)?;
            for (counters, ledger) in counted.iter_mut().zip(&ledgers) {
                encode::add_traffic(counters, ledger);
            }
            if processor == self.processor {
                self.own_ledgers = ledgers;
            }
        }
        Ok(counted)
    }
}
