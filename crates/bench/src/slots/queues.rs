//! What the queues of TAPs cost: of plain ones with the discipline that the host gives them, of plain ones without any,
//! and of slots.

use std::time::Instant;

use anyhow::Result;
use sandwire_kernel_net::{
    interface::{self, Change, InterfaceIndex},
    netlink::{Request, Socket},
    tap::{self, Options},
    tc,
};

use super::{Round, flatness::kibibytes_per_slot, with_daemon};
use crate::{
    daemon_process::{Families, Kind, pool_of},
    host::Memory,
    private_host,
    record::Record,
};

/// Out of the way of whatever else there is.
const FIRST_INDEX: u32 = 1_000_000;

/// How TAPs are made.
#[derive(Clone, Copy, Debug)]
struct Taps {
    case: &'static str,
    multi_queue: bool,
    /// Whether they get no discipline instead of the host's.
    without_discipline: bool,
}

const PLAIN: [Taps; 4] = [
    Taps {
        case: "tap",
        multi_queue: false,
        without_discipline: false,
    },
    Taps {
        case: "tap_noqueue",
        multi_queue: false,
        without_discipline: true,
    },
    Taps {
        case: "tap_multi_queue",
        multi_queue: true,
        without_discipline: false,
    },
    Taps {
        case: "tap_multi_queue_noqueue",
        multi_queue: true,
        without_discipline: true,
    },
];
const SLOTS: [(&str, bool); 2] = [("host_v4", false), ("host_v4_multi_queue", true)];

/// Makes plain TAPs and raises them, then fills pools of host slots.
pub(super) fn run(round: &Round, record: &mut Record) -> Result<()> {
    let count = round.sizes.queue_slots;
    for taps in PLAIN {
        let step = round.step(&format!("raise {count} TAPs, {}", taps.case), count);
        let (milliseconds, kibibytes) = taps.raise(count, |raised| step.at(raised))?;
        record.add(taps.case, "raise_per_tap", "ms", &[milliseconds]);
        record.add(taps.case, "slab_per_tap", "KiB", &[kibibytes]);
    }
    for (case, multi_queue) in SLOTS {
        let step = round.step(&format!("fill {count} slots, {case}"), count);
        let filled = with_daemon(|daemon| {
            daemon.warm_up(Kind::HostEbpf, &step)?;
            let mut spec = pool_of(Kind::HostEbpf, count, Families::V4)?;
            spec.tap.multi_queue = multi_queue;
            let before = slab()?;
            let ready_at = daemon.fill(&spec, &step)?;
            let slab = slab()? - before;
            daemon.delete(&spec.name)?;
            Ok((ready_at.last().copied().unwrap_or_default(), slab))
        });
        match filled {
            Ok((seconds, slab)) => {
                let milliseconds = seconds * 1000.0 / f64::from(count);
                record.add(case, "fill_per_slot", "ms", &[milliseconds]);
                let slab = kibibytes_per_slot(slab, count);
                record.add(case, "slab_per_slot", "KiB", &[slab]);
            }
            Err(error) => record.not_run(case, &format!("{error:#}")),
        }
    }
    Ok(())
}

impl Taps {
    /// Makes so many, and returns what raising took of time and of memory for each.
    fn raise(self, count: u32, progress: impl Fn(u32)) -> Result<(f64, f64)> {
        private_host::settle()?;
        let socket = &mut Socket::route()?;
        for number in 0..count {
            self.make(socket, number)?;
        }
        let (before, started) = (slab()?, Instant::now());
        for number in 0..count {
            let mut request = Request::new();
            let up = Change {
                name: &name(number),
                up: Some(true),
                ..Change::default()
            };
            up.apply(&mut request);
            socket.execute(request)?;
            progress(number + 1);
        }
        let milliseconds = started.elapsed().as_secs_f64() * 1000.0 / f64::from(count);
        let slab = slab()? - before;
        for number in 0..count {
            let mut request = Request::new();
            interface::delete(&mut request, &name(number));
            socket.execute(request)?;
        }
        Ok((milliseconds, kibibytes_per_slot(slab, count)))
    }

    fn make(self, socket: &mut Socket, number: u32) -> Result<()> {
        let index = InterfaceIndex(FIRST_INDEX + number);
        let options = Options {
            vnet_header: true,
            multi_queue: self.multi_queue,
            owner: None,
            group: None,
        };
        tap::create(&name(number), Some(index), options)?;
        if self.without_discipline {
            let mut request = Request::new();
            tc::add_noqueue(&mut request, index);
            socket.execute(request)?;
        }
        Ok(())
    }
}

fn name(number: u32) -> String {
    format!("tap{number}")
}

/// Kernel memory in slabs, in KiB.
fn slab() -> Result<i64> {
    Ok(Memory::read()?.slab.cast_signed())
}
