//! `sandwire vsock list`: connections, like `ss`, or the channels themselves.

use clap::Args;
use sandwire_api::{
    name::Name,
    vsock::{LeaseVsock, VsockConnection, VsockKind, VsockState, VsockType},
};

use crate::{Context, connection::cannot, failure::Outcome, render};

/// Command line of `sandwire vsock list`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Only of this lease.
    name: Option<Name>,

    /// Numeric user that holds it, if not you; for root.
    #[arg(long, value_name = "UID", requires = "name")]
    owner_uid: Option<u32>,

    /// List channels with their sums instead of connections.
    #[arg(long)]
    channels: bool,
}

pub(crate) fn run(context: &Context, arguments: &Arguments) -> Outcome {
    let client = context.client();
    let owner = arguments.owner_uid;
    match (&arguments.name, arguments.channels) {
        (None, true) => {
            let channels = client
                .vsock_channels()
                .map_err(cannot("list vsock channels"))?;
            context.output.answer(&channels, |all| channels_text(all))
        }
        (Some(name), true) => {
            let operation = format!("list the vsock channel of lease {name}");
            let channel = client.vsock(name, owner).map_err(cannot(operation))?;
            let channels = vec![channel];
            context.output.answer(&channels, |all| channels_text(all))
        }
        (None, false) => {
            let found = client
                .vsock_connections()
                .map_err(cannot("list vsock connections"))?;
            context.output.answer(&found, |all| connections_text(all))
        }
        (Some(name), false) => {
            let operation = format!("list vsock connections of lease {name}");
            let found = client
                .lease_vsock_connections(name, owner)
                .map_err(cannot(operation))?;
            context.output.answer(&found, |all| connections_text(all))
        }
    }
}

/// A table of connections.
fn connections_text(connections: &[VsockConnection]) -> String {
    if connections.is_empty() {
        return "no vsock connections\n".to_owned();
    }
    let mut table = render::table(&[
        "LEASE",
        "TYPE",
        "STATE",
        "GUEST",
        "",
        "OTHER",
        "IS",
        "OUT",
        "IN",
        "CREDIT",
        "QUEUED OUT",
        "QUEUED IN",
        "AGE",
    ]);
    for connection in connections {
        let arrow = if connection.from_guest { "->" } else { "<-" };
        table.add_row([
            connection.lease.to_string(),
            type_text(connection.socket_type).to_owned(),
            state_text(connection.state).to_owned(),
            format!("{}:{}", connection.guest_cid, known(connection.guest_port)),
            arrow.to_owned(),
            format!("{}:{}", connection.peer_cid, connection.peer_port),
            connection.peer.clone(),
            render::bytes(connection.egress_bytes),
            render::bytes(connection.ingress_bytes),
            credit_text(connection),
            render::bytes(connection.queued_bytes),
            known(connection.queued_ingress_bytes.map(render::bytes)),
            age_text(connection.age_milliseconds),
        ]);
    }
    render::table_text(&table)
}

/// A table of channels.
fn channels_text(channels: &[LeaseVsock]) -> String {
    if channels.is_empty() {
        return "no vsock channels\n".to_owned();
    }
    let mut table = render::table(&[
        "LEASE",
        "KIND",
        "CID",
        "VMM",
        "CONNECTIONS",
        "OUT",
        "IN",
        "REFUSED",
        "SOCKET",
    ]);
    for row in channels {
        let [attached, connections, egress, ingress, refused] = match &row.traffic {
            None => std::array::from_fn(|_| "-".to_owned()),
            Some(traffic) => [
                if traffic.attached { "yes" } else { "no" }.to_owned(),
                traffic.connections.to_string(),
                render::bytes(traffic.egress_bytes),
                render::bytes(traffic.ingress_bytes),
                traffic.refusals.values().sum::<u64>().to_string(),
            ],
        };
        table.add_row([
            row.lease.to_string(),
            kind_text(row.channel.kind).to_owned(),
            row.channel.cid.to_string(),
            attached,
            connections,
            egress,
            ingress,
            refused,
            row.channel.socket.clone(),
        ]);
    }
    render::table_text(&table)
}

/// A channel's kind in a word.
pub(crate) fn kind_text(kind: VsockKind) -> &'static str {
    match kind {
        VsockKind::VhostUser => "vhost-user",
        VsockKind::Hybrid => "hybrid",
    }
}

fn type_text(kind: VsockType) -> &'static str {
    match kind {
        VsockType::Stream => "stream",
        VsockType::Seqpacket => "seqpacket",
    }
}

fn state_text(state: VsockState) -> &'static str {
    match state {
        VsockState::Connecting => "connecting",
        VsockState::Established => "established",
        VsockState::GuestClosed => "guest closed",
        VsockState::PeerClosed => "peer closed",
        VsockState::Closing => "closing",
    }
}

/// What the guest may still send, and be sent.
fn credit_text(connection: &VsockConnection) -> String {
    match (connection.own_credit, connection.peer_credit) {
        (None, None) => known(None::<u32>),
        (own, peer) => format!("{}/{}", known(own), known(peer)),
    }
}

fn known(figure: Option<impl ToString>) -> String {
    figure.map_or_else(|| "-".to_owned(), |figure| figure.to_string())
}

/// Most connections live for less than a second or for hours.
fn age_text(milliseconds: u64) -> String {
    match milliseconds {
        0..1000 => format!("{milliseconds}ms"),
        _ => render::span(milliseconds / 1000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_a_row_with_who_asked_whom() {
        let mut connection = VsockConnection {
            lease: "web-1".parse().unwrap(),
            owner_uid: 1000,
            socket_type: VsockType::Seqpacket,
            from_guest: true,
            guest_cid: 3,
            guest_port: Some(40_000),
            peer_cid: 2,
            peer_port: 1024,
            peer: "/run/log.sock".to_owned(),
            state: VsockState::GuestClosed,
            egress_bytes: 2048,
            ingress_bytes: 3,
            peer_credit: Some(65_536),
            own_credit: Some(262_144),
            queued_bytes: 0,
            queued_ingress_bytes: Some(1024),
            age_milliseconds: 61_500,
        };
        let row = |connection: &VsockConnection| {
            let text = connections_text(std::slice::from_ref(connection));
            let row = text.lines().nth(1).unwrap();
            row.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            row(&connection),
            "web-1 seqpacket guest closed 3:40000 -> 2:1024 /run/log.sock 2.0 KiB 3 B 262144/65536 0 B 1.0 KiB 1m 1s"
        );
        // As with a hybrid channel.
        connection.guest_port = None;
        (connection.own_credit, connection.peer_credit) = (None, None);
        connection.queued_ingress_bytes = None;
        assert_eq!(
            row(&connection),
            "web-1 seqpacket guest closed 3:- -> 2:1024 /run/log.sock 2.0 KiB 3 B - 0 B - 1m 1s"
        );
        assert_eq!(age_text(12), "12ms");
    }

    #[test]
    fn nothing_is_said_to_be_nothing() {
        assert_eq!(connections_text(&[]), "no vsock connections\n");
        assert_eq!(channels_text(&[]), "no vsock channels\n");
    }
}
