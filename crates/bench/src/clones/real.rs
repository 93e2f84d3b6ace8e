//! The same with real guests: a Linux in user mode on each active slot.
//!
//! The guests of the ways that take turns stay up all the time; those whose turn it isn't are frozen,
//! so that they cost nothing.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use super::{COMPARED, Sizes, Subject, case};
use crate::{
    guest::linux::{self, Linux},
    progress::Step,
    record::Record,
    way::{Place, Way},
};

/// How long it may take until a guest is up, and for each further one.
const BOOT_PATIENCE: Duration = Duration::from_secs(60);
const BOOT_PATIENCE_EACH: Duration = Duration::from_secs(3);
/// Guests that boot at the same time.
const BOOT_TOGETHER: usize = 8;

/// Measures `active` real guests by each way.
pub(super) fn run(
    sizes: &Sizes,
    active: u32,
    places: &[(Way, Place)],
    record: &mut Record,
) -> Result<()> {
    if let Some(reason) = linux::missing() {
        record.not_run(&format!("{active} real guests"), &reason);
        return Ok(());
    }
    let folder = tempfile::tempdir_in("/run")?;
    linux::prepare(folder.path())?;
    let mut kept = Vec::new();
    for (way, place) in places {
        let guests = boot(*way, place, active, folder.path())?;
        measure(sizes, *way, place, &guests, true, record)?;
        if COMPARED.contains(way) && sizes.rounds > 1 {
            freeze(&guests, true)?;
            kept.push((*way, place, guests));
        }
    }
    for _ in 1..sizes.rounds {
        // So that a drift of the machine's speed falls on all.
        kept.reverse();
        for (way, place, guests) in &kept {
            freeze(guests, false)?;
            measure(sizes, *way, place, guests, false, record)?;
            freeze(guests, true)?;
        }
    }
    Ok(())
}

fn boot(way: Way, place: &Place, count: u32, folder: &Path) -> Result<Vec<Linux>> {
    let step = Step::begin(&format!("boot {count} guests by {}", case(way)), count);
    let sandboxes = &place.sandboxes[..count as usize];
    let patience = BOOT_PATIENCE + BOOT_PATIENCE_EACH * count;
    let deadline = Instant::now() + patience;
    let mut guests = Vec::new();
    for (batch, together) in sandboxes.chunks(BOOT_TOGETHER).enumerate() {
        let first = guests.len();
        for (index, sandbox) in together.iter().enumerate() {
            let name = format!("{}-{batch}-{index}", way.name().replace('_', "-"));
            guests.push(Linux::start(sandbox, folder, &name, None)?);
        }
        for guest in &mut guests[first..] {
            guest.wait_ready(deadline)?;
        }
        step.at(u32::try_from(guests.len()).unwrap_or(count));
    }
    Ok(guests)
}

fn measure(
    sizes: &Sizes,
    way: Way,
    place: &Place,
    guests: &[Linux],
    with_ping: bool,
    record: &mut Record,
) -> Result<()> {
    for client in sizes.clients.iter().copied() {
        let label = format!("{}_{}_linux", client.name(), guests.len());
        let targets = &place.sandboxes[..guests.len()];
        let subject = Subject {
            way,
            place,
            client,
            targets,
        };
        let measured = subject.measure(sizes, &label, with_ping, record);
        measured.with_context(|| {
            let words = guests.iter().map(Linux::last_words);
            let unusual = words.filter(|words| !words.ends_with(linux::READY));
            format!("guests say: {:?}", unusual.collect::<Vec<_>>())
        })?;
    }
    Ok(())
}

fn freeze(guests: &[Linux], is_frozen: bool) -> Result<()> {
    guests.iter().try_for_each(|guest| guest.freeze(is_frozen))
}
