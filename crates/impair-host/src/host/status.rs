//! What is told of targets: how they are impaired, and what became of their packets.

use std::collections::BTreeMap;

use sandwire_kernel_net::{
    interface::{self, InterfaceIndex},
    tc::Hook,
};

use super::{Entry, Host};
use crate::{
    control::{Owner, Status, Way},
    diversion::hooks_of,
    error::Error,
    worker::LaneReport,
};

impl Host {
    /// All targets as they are now, or one owner's, without the content of traces, but for those of that owner. The kernel
    /// is asked about each, while everybody else waits.
    pub(crate) fn list(
        &self,
        only_of: Option<&Owner>,
        traces_of: Option<&Owner>,
    ) -> Result<Vec<Status>, Error> {
        let entries = self.entries.values();
        let is_meant = |entry: &&Entry| only_of.is_none_or(|of| entry.remembered.owner == *of);
        let entries: Vec<&Entry> = entries.filter(is_meant).collect();
        let mut reports = BTreeMap::new();
        for (number, worker) in self.workers.iter().enumerate() {
            let has = |entry: &&Entry| entry.worker == number;
            let ids: Vec<_> = entries
                .iter()
                .copied()
                .filter(has)
                .map(|entry| entry.id)
                .collect();
            if only_of.is_none() || !ids.is_empty() {
                reports.extend(worker.report(ids)?);
            }
        }
        let mut found: Vec<Status> = entries
            .into_iter()
            .map(|entry| {
                let reports = reports.remove(&entry.id).unwrap_or_default();
                let mut status = entry.status(reports);
                if traces_of == Some(&entry.remembered.owner) {
                    status.impairment = entry.remembered.impairment.clone();
                }
                status
            })
            .collect();
        found.sort_by(|left, right| left.target.cmp(&right.target));
        Ok(found)
    }
}

impl Entry {
    fn status(&self, reports: [LaneReport; 2]) -> Status {
        let (unread, name) = self.unread();
        let [ingress, egress] = reports;
        let way = |hook, report: LaneReport, unread: u64| {
            let counters = self.diversion.counters(hook);
            Way {
                diverted: counters.diverted,
                returned: counters.returned,
                dead_dropped: counters.dead_dropped,
                dead_passed: counters.dead_passed,
                unread: unread + report.unread,
                too_long: report.too_long,
                uncut: counters.uncut,
                refused: report.refused,
                line: report.line,
            }
        };
        let by_hook = (
            way(Hook::Ingress, ingress, unread[0]),
            way(Hook::Egress, egress, unread[1]),
        );
        let remembered = &self.remembered;
        let (egress, ingress) = match hooks_of(remembered.target.side) {
            (Hook::Egress, _) => (by_hook.1, by_hook.0),
            (Hook::Ingress, _) => by_hook,
        };
        let mut target = remembered.target.clone();
        if let (Some(name), false) = (name, self.is_of_lease()) {
            target.interface = name;
        }
        Status {
            target,
            owner: remembered.owner.clone(),
            state: self.state.clone(),
            impairment: remembered.impairment.without_contents(),
            ifindex: remembered.ifindex,
            thread: self.worker,
            egress,
            ingress,
        }
    }

    /// Packets that the TAPs dropped since the engine didn't read them in time, by ingress and egress. Also what the
    /// interface is called now, if it is there.
    fn unread(&self) -> ([u64; 2], Option<String>) {
        let count = || -> Result<_, Error> {
            let mut socket = self.lock_route();
            let mut counts = [0; 2];
            for (count, (name, _)) in counts.iter_mut().zip(&self.taps) {
                let found = interface::find_with_traffic(&mut socket, name)?;
                *count = found.map_or(0, |found| found.traffic.sent_dropped);
            }
            let index = InterfaceIndex(self.remembered.ifindex);
            let interface = interface::find_by_index(&mut socket, index)?;
            Ok((counts, interface.map(|found| found.name)))
        };
        count().unwrap_or_default()
    }
}
