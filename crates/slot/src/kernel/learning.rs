//! Slots of which it isn't known whom they answer: for a while any packet towards them counts as a call.

use std::time::{Duration, Instant};

use sandwire_datapath::{
    NicIndex,
    abi::{Nic, NicFlag},
};

use super::{
    ebpf::{Ebpf, Place, place_of},
    lock,
};
use crate::{error::NetworkError, plan::SlotPlan};

/// How long any packet towards a slot that has moved may open the way for answers.
const LEARN_FOR: Duration = Duration::from_secs(60);

/// Those that learned under an earlier daemon.
pub(super) fn of_before(used: &[(NicIndex, Nic)]) -> Vec<(Instant, Place)> {
    let until = Instant::now() + LEARN_FOR;
    let learns = |nic: &Nic| nic.flags & NicFlag::Learn.number() != 0;
    let learning = used.iter().filter(|(_, nic)| learns(nic));
    learning
        .map(|(_, nic)| (until, (nic.pool, nic.slot)))
        .collect()
}

impl Ebpf {
    /// Lets any packet towards a slot open the way for answers, for a while.
    pub(super) fn learn(&self, slot: &SlotPlan) -> Result<(), NetworkError> {
        self.set_flag(slot, NicFlag::Learn, true)?;
        lock(&self.learning).push((Instant::now() + LEARN_FOR, place_of(slot)));
        Ok(())
    }

    /// Ends learning where its time is over.
    pub(super) fn end_learning(&self) {
        let now = Instant::now();
        let due: Vec<_> = lock(&self.learning)
            .extract_if(.., |(until, _)| *until <= now)
            .collect();
        for (_, place) in due {
            if let Some((first, count)) = lock(&self.slots).get(&place).copied() {
                for number in first.0..first.0 + u32::from(count) {
                    self.datapath
                        .set_flag(NicIndex(number), NicFlag::Learn, false);
                }
            }
        }
    }
}
