//! A table beside the relay's, for what the kernel sends of TCP connections that a cgroup's processes have closed.
//!
//! Of a connection that is over for its process the kernel keeps little, and no cgroup. To what still comes for it, it
//! answers in its own name: by an acknowledgement where it awaits the end (`TIME_WAIT`), by a reset where there is nothing
//! left. No rule about a cgroup meets these. They would go to the destination in the clear, and the relay, which they
//! are for, would send for a minute to a process that is gone.
//!
//! | where | what |
//! |---|---|
//! | chain `output` | the ends of redirected connections are noted down in a set; what the kernel itself sends for one of these gets the relay's mark |
//! | chain `prerouting` | what the relay sends goes to sockets of processes, and to what is noted down; else the kernel's answer would leave |
//!
//! The table doesn't depend on what is configured, so that a set outlives changes of the other table: a cgroup is made
//! anew at the very moment when many connections end.

use std::time::Duration;

use sandwire_kernel_net::{
    netlink::Socket,
    nft::{
        Batch, Chain, ChainKind, Direction, Family, Field, Hook, KeyPart, Policy, Protocol,
        RELAY_MARK_FIRST, RELAY_MARK_MASK, Rule, Set, SetKind,
    },
};

use super::{
    MARK_PASS, OUTPUT, PREROUTING, PRIORITY, SteeringError, written::Content, written::commit,
};
use crate::config::Egress;

/// Name of the table.
pub(super) const TABLE_ENDS: &str = "sandwire-relay-ends";
/// Behind the chains of the relay's table, which mark what is redirected.
const PRIORITY_ENDS: i32 = PRIORITY + 1;
const KERNEL: &str = "kernel";
/// Half a minute at 2000 connections a second, and some 10 MiB. What there is no room for isn't known.
const ENDS_MAX: u32 = 65_536;
/// The kernel awaits the other end for a minute (`net.ipv4.tcp_fin_timeout`), and then what was under way for another
/// one (`TCP_TIMEWAIT_LEN`).
const KNOWN_FOR: Duration = Duration::from_secs(120);

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const PSH: u8 = 0x08;

/// Brings the rules up to date, in what is there or anew. What was noted down stays.
fn write(batch: &mut Batch<'_>) {
    batch.add_table();
    for (name, kind, hook) in [
        (PREROUTING, ChainKind::Filter, Hook::Prerouting),
        (OUTPUT, ChainKind::Route, Hook::Output),
    ] {
        batch.ensure_chain(&Chain::Base {
            name,
            kind,
            hook,
            priority: PRIORITY_ENDS,
            policy: Policy::Accept,
        });
        batch.clear_chain(name);
    }
    batch.ensure_chain(&Chain::Regular(KERNEL));
    batch.clear_chain(KERNEL);
    for family in Family::ALL {
        let address = Field::Address(family);
        let keys_max = ENDS_MAX;
        let idle = Some(KNOWN_FOR);
        batch.add_set(&Set {
            name: set(family),
            kind: SetKind::Entered { keys_max, idle },
            key: &[address, Field::Port, address, Field::Port],
        });
    }
    write_output(batch);
    write_prerouting(batch);
}

/// Tells the kernel, or takes the table away where no cgroup is a sender. Returns what it has then.
///
/// # Errors
/// The kernel refuses; nothing has changed then.
pub(super) fn tell(egress: &Egress, netfilter: &mut Socket) -> Result<Content, SteeringError> {
    let mut batch = Batch::new(TABLE_ENDS);
    if is_needed(egress) {
        write(&mut batch);
    } else {
        remove(&mut batch);
    }
    commit(batch, netfilter)
}

/// Whether there is anything to know.
pub(super) fn is_needed(egress: &Egress) -> bool {
    egress.cgroups().next().is_some()
}

/// Takes the table away, if it is there.
pub(super) fn remove(batch: &mut Batch<'_>) {
    // One that isn't there can't be deleted.
    batch.add_table();
    batch.delete_table();
}

fn set(family: Family) -> &'static str {
    match family {
        Family::Ipv4 => "ends4",
        Family::Ipv6 => "ends6",
    }
}

/// A connection, by a packet of the process's side or by one to it.
fn connection(family: Family, process: Direction) -> [KeyPart; 4] {
    let source = [
        KeyPart::Address(family, Direction::Source),
        KeyPart::SourcePort,
    ];
    let destination = [
        KeyPart::Address(family, Direction::Destination),
        KeyPart::DestinationPort,
    ];
    let [[a, b], [c, d]] = match process {
        Direction::Source => [source, destination],
        Direction::Destination => [destination, source],
    };
    [a, b, c, d]
}

fn write_output(batch: &mut Batch<'_>) {
    for family in Family::ALL {
        let key = connection(family, Direction::Source);
        // Most packets of a host are about nothing of this.
        let unmarked = Rule::new().mark_is(0, RELAY_MARK_MASK);
        let bare = unmarked.without_tcp_flags(FIN | SYN | PSH);
        let over = bare.key_in(&key, set(family));
        batch.add_rule(OUTPUT, &over.jump(KERNEL));
        let redirected = [0, MARK_PASS, RELAY_MARK_FIRST]
            .into_iter()
            .fold(Rule::new(), |rule, mark| {
                rule.mark_is_not(mark, RELAY_MARK_MASK)
            });
        let end = redirected.with_tcp_flags(FIN | RST);
        batch.add_rule(OUTPUT, &end.enter_key(&key, set(family)));
    }
    // Somebody's new connection of the same two ends, which isn't redirected.
    let other = Rule::new().of_a_process();
    batch.add_rule(KERNEL, &other.back());
    // Connections that are there find the relay's socket by any of its marks.
    let own = Rule::new().comment("what the kernel says of a closed connection");
    let own = own.counter().set_mark(RELAY_MARK_FIRST, RELAY_MARK_MASK);
    batch.add_rule(KERNEL, &own.accept());
}

fn write_prerouting(batch: &mut Batch<'_>) {
    let ours = || {
        let ours = Rule::new().mark_is(MARK_PASS, RELAY_MARK_MASK);
        let ours = ours.interface(Direction::Source, "lo");
        ours.protocol(Protocol::Tcp)
    };
    batch.add_rule(PREROUTING, &ours().for_a_socket().accept());
    for family in Family::ALL {
        let key = connection(family, Direction::Destination);
        let over = ours().key_in(&key, set(family));
        batch.add_rule(PREROUTING, &over.accept());
    }
    let late = ours().comment("nobody waits for it");
    batch.add_rule(PREROUTING, &late.counter().drop());
}
