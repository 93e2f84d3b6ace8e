//! `sandwire list`: lists leases.

use clap::Args;
use sandwire_api::{
    lease::{Lease, LeaseState},
    name::Name,
};

use crate::{Context, connection::cannot, failure::Outcome, render};

/// Command line of `sandwire list`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Only leases of this pool.
    #[arg(long)]
    pool: Option<Name>,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let mut leases = context.client().leases().map_err(cannot("list leases"))?;
    leases.retain(|lease| {
        arguments
            .pool
            .as_ref()
            .is_none_or(|pool| lease.pool == *pool)
    });
    let now = render::now();
    context
        .output
        .answer(&leases, |leases| leases_text(leases, now))
}

/// A table of leases.
fn leases_text(leases: &[Lease], now: u64) -> String {
    if leases.is_empty() {
        return "no leases\n".to_owned();
    }
    let headings = [
        "NAME",
        "POOL",
        "SLOT",
        "STATE",
        "CLONE ADDRESSES",
        "AGE",
        "ENDS IN",
        "OWNER",
    ];
    let mut table = render::table(&headings);
    for lease in leases {
        let addresses: Vec<String> = lease
            .nics
            .iter()
            .flat_map(|nic| nic.clone_addresses())
            .map(|address| address.to_string())
            .collect();
        let ends = lease
            .expires_at
            .map_or("-".to_owned(), |end| render::span(end.saturating_sub(now)));
        table.add_row([
            lease.name.to_string(),
            lease.pool.to_string(),
            lease.slot.to_string(),
            state_of(lease),
            addresses.join(" "),
            render::span(now.saturating_sub(lease.acquired_at)),
            ends,
            lease.owner_uid.to_string(),
        ]);
    }
    render::table_text(&table)
}

/// Its state, with what a tester must not overlook.
fn state_of(lease: &Lease) -> String {
    let state = state_text(lease.state);
    match &lease.impairment {
        None => state.to_owned(),
        Some(impairment) if impairment.service_alive => format!("{state}, impaired"),
        Some(_) => format!("{state}, impaired, SERVICE DEAD"),
    }
}

/// A lease's state in a word.
pub(crate) fn state_text(state: LeaseState) -> &'static str {
    match state {
        LeaseState::Active => "active",
        LeaseState::Releasing => "releasing",
    }
}

#[cfg(test)]
mod tests {
    use sandwire_api::impairment::ImpairmentSummary;

    use super::*;
    use crate::verb::show::tests::lease;

    #[test]
    fn each_lease_is_a_row_with_its_addresses() {
        let mut lease = lease();
        lease.expires_at = Some(1_000_090);
        let text = leases_text(std::slice::from_ref(&lease), 1_000_030);
        let row = text.lines().nth(1).unwrap();
        let cells: Vec<&str> = row.split_whitespace().collect();
        let expected = [
            "a7",
            "web",
            "17",
            "active",
            "10.64.0.19",
            "fd00:c10e::13",
            "30s",
            "1m",
            "0s",
            "1000",
        ];
        assert_eq!(cells, expected);
        let impairment = "delay 50ms".parse().unwrap();
        for (alive, state) in [
            (true, "active, impaired "),
            (false, "impaired, SERVICE DEAD"),
        ] {
            lease.impairment = Some(ImpairmentSummary::new(&impairment, alive));
            let text = leases_text(std::slice::from_ref(&lease), 1_000_030);
            assert!(text.contains(state), "{text}");
        }
    }

    #[test]
    fn no_leases_are_said_to_be_none() {
        assert_eq!(leases_text(&[], 0), "no leases\n");
    }
}
