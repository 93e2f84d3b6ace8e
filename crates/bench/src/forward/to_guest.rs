//! The way back: what one packet from the uplink to a guest's TAP costs.
//!
//! The guest speaks first, as whoever tracks connections expects; then answers are written to the uplink that is a TAP, as its
//! driver hands over what has come, until they lie in the guest's TAP.

use anyhow::{Context, Result};
use sandwire_kernel_net::interface;

use super::{
    Exit, Sizes, add_sample, add_trial,
    lane::{Lane, TRIAL_LOADS, Trial, clocked},
    load::Load,
    tell_discarded,
};
use crate::{packet::Frame, progress::Step, record::Record, way::Way, world};

/// The beginning of its figures' names.
pub(super) const TO_GUEST: &str = "to_guest";

/// A guest, and the answers that it gets.
struct Receiver<'a> {
    lane: &'a Lane,
    load: Load,
    answers: Vec<Frame>,
}

/// Sends answers to all guests that have a whole way. They take turns within a round.
pub(super) fn measure(sizes: &Sizes, lanes: &[Lane], record: &mut Record) -> Result<()> {
    for load in Load::ALL {
        let step = Step::begin(&format!("{TO_GUEST}, {}", load.name()), sizes.rounds + 1);
        let mut running = Vec::new();
        for lane in lanes.iter().filter(|lane| is_whole(lane)) {
            let receiver = Receiver::prepare(lane, load)?;
            let trial = receiver.examine()?;
            if add_trial(record, TO_GUEST, load, lane.name(), &trial) {
                running.push(receiver);
            }
        }
        for round in 0..sizes.rounds {
            step.at(round + 1);
            for receiver in &running {
                let name = receiver.lane.name();
                let clocked = clocked(
                    sizes.sample_us,
                    load,
                    || receiver.batch(),
                    || receiver.lane.empty_own_tap(),
                )
                .with_context(|| format!("cannot measure the way to {name}"))?;
                let sample = clocked.sample(receiver.answers.len());
                add_sample(record, TO_GUEST, load, name, &sample);
            }
        }
        for receiver in &running {
            tell_discarded(record, TO_GUEST, load, receiver.lane.name());
        }
    }
    Ok(())
}

/// Whether both uplinks are reached with full packets, which is so for whole ways alone: not for a stage, nor for a program of the
/// bench's own. What is in generic mode is the TAP's program; this way has the uplink's.
fn is_whole(lane: &Lane) -> bool {
    let mut exits = Exit::ALL.into_iter();
    lane.name() != Way::XdpGeneric.name() && exits.all(|exit| lane.takes(exit, Load::Tcp1514))
}

impl<'a> Receiver<'a> {
    /// Has the guest speak, so that what follows is an answer.
    fn prepare(lane: &'a Lane, load: Load) -> Result<Self> {
        let host = &mut world::netlink_of(lane.host())?;
        let uplink = interface::find(host, world::TAP)?.context("the uplink is gone")?;
        let mac = uplink.mac.context("the uplink has no Ethernet address")?;
        lane.speak(load)?;
        Ok(Self {
            lane,
            load,
            answers: load.answers(lane.sandbox(), mac),
        })
    }

    /// Sends a few answers and looks at each frame that arrives.
    fn examine(&self) -> Result<Trial> {
        let mut trial = Trial::default();
        self.lane.empty_own_tap()?;
        for _ in 0..TRIAL_LOADS {
            for answer in &self.answers {
                self.lane.receive(answer)?;
                trial.sent += 1;
            }
            let look = self.lane.look_at_answers()?;
            trial.arrived += look.frames;
            trial.wrong += look.wrong;
        }
        Ok(trial)
    }

    fn batch(&self) -> Result<()> {
        for _ in 0..self.load.batch() {
            for answer in &self.answers {
                self.lane.receive(answer)?;
            }
        }
        Ok(())
    }
}
