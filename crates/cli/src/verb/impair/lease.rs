//! Bad networks of leases, by way of the daemon.

use std::time::Duration;

use clap::Args;
use sandwire_api::{
    impairment::{Impairment, ImpairmentCleared, LeaseImpairment},
    name::Name,
};

use super::{
    clear::outcome_text,
    show::{Row, table_text},
};
use crate::{Context, connection::cannot, failure::Outcome};

/// How long packets under way are waited for.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Which lease.
#[derive(Clone, Debug, Args)]
#[group(id = "lease_which", conflicts_with = "which")]
pub(crate) struct Which {
    /// Name of a lease, whose interfaces are meant; then the daemon is asked.
    #[arg(value_name = "LEASE")]
    pub(super) lease: Option<Name>,

    /// Numeric user that holds the lease, if not you; for root.
    #[arg(long, value_name = "UID", requires = "lease")]
    pub(super) owner_uid: Option<u32>,
}

pub(super) fn set(
    context: &Context,
    name: &Name,
    owner_uid: Option<u32>,
    impairment: &Impairment,
) -> Outcome {
    let answer = context
        .client()
        .impair(name, owner_uid, impairment)
        .map_err(cannot(format!("impair lease {name}")))?;
    context
        .output
        .answer(&answer, |_| format!("{name}: {impairment}\n"))
}

pub(super) fn show(context: &Context, name: &Name, owner_uid: Option<u32>) -> Outcome {
    let shown = context
        .client()
        .impairment(name, owner_uid)
        .map_err(cannot(format!("show the impairment of lease {name}")))?;
    context.output.answer(&shown, text)
}

fn text(shown: &LeaseImpairment) -> String {
    let name = &shown.lease;
    let Some(impairment) = &shown.impairment else {
        return format!("{name} is not impaired\n");
    };
    let rows = shown.interfaces.iter().map(|one| Row {
        interface: one.interface.clone(),
        state: &one.state,
        egress: &one.egress,
        ingress: &one.ingress,
    });
    format!("{name}: {impairment}\n{}", table_text(rows))
}

pub(super) fn clear(
    context: &Context,
    name: &Name,
    owner_uid: Option<u32>,
    flush: bool,
) -> Outcome {
    let cleared = context
        .client()
        .with_timeout(PATIENCE)
        .end_impairment(name, owner_uid, flush)
        .map_err(cannot(format!("end the impairment of lease {name}")))?;
    context.output.answer(&cleared, |cleared| {
        let ImpairmentCleared {
            was_impaired,
            released,
            flushed,
        } = *cleared;
        format!(
            "{name}: {}\n",
            outcome_text(was_impaired, released, flushed)
        )
    })
}
