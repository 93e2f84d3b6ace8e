//! Where a packet goes: another sandbox, an uplink, the host's stack, or nowhere.

use std::net::IpAddr;

use ipnet::IpNet;
use sandwire_api::drop_reason::DropReason;

use super::{
    Mac, Packet, answers,
    packet::{ICMP, ICMPV6},
    policy,
    world::{Nic, Policy, State, TABLE_LOCAL, TABLE_MAIN, Uplink, Way, World},
};

/// What was decided for a packet of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Uplink {
        ifindex: u32,
        neighbour: Option<Mac>,
    },
    /// Entry of `nics`.
    Sandbox(usize),
    Stack,
}

/// Decides over a packet that has come past antispoofing.
pub(crate) fn decide(
    world: &mut World,
    sender: usize,
    frame: &[u8],
    packet: &Packet,
    now: u64,
) -> Result<Decision, DropReason> {
    let nic = &world.nics[sender];
    if let Some(receiver) = world.clones.get(&packet.destination) {
        return other_sandbox(world, nic, *receiver);
    }
    let own = &routed_by(world, nic, packet);
    let way = match look_up(world, own, packet.destination) {
        // Whatever routes say.
        Way::Out { .. } if is_for_relay(world, nic, packet) => Way::Refused,
        way => way,
    };
    let judged = judge(world, nic, frame, packet, way)
        .and_then(|judged| to_one(world, packet, judged))
        .and_then(|judged| within_share(world, sender, packet, way, judged));
    let nic = &world.nics[sender];
    let unasked = match judged {
        // A table may lead out what is for the host.
        Ok(Judged::Goes(uplink @ Decision::Uplink { .. })) if nic.published || own.table != 0 => {
            Ok(uplink)
        }
        Ok(Judged::Goes(decision)) => return Ok(decision),
        Ok(Judged::Masquerade) => Ok(Decision::Stack),
        Err(reason) if may_be_an_answer(own, reason) => Err(reason),
        Err(reason) => return Err(reason),
    };
    if !nic.remembers(&world.policies) {
        return unasked;
    }
    match answers::find(world, sender, frame, packet, now, unasked.is_err()) {
        Some(answers::Via::Uplink) => {
            let nic = &world.nics[sender];
            let judged = by_route(world, nic, frame, packet, way, Uplink::Route)?;
            let judged = to_one(world, packet, judged)?;
            match within_share(world, sender, packet, way, judged)? {
                Judged::Goes(decision) => Ok(decision),
                Judged::Masquerade => unreachable!("it was to be routed"),
            }
        }
        // Only there a published port is translated back.
        Some(answers::Via::Stack) => Ok(Decision::Stack),
        None => unasked,
    }
}

/// Neighbours that a sandbox's interface may have the host look for in a while. No case takes that long.
pub(crate) const NEIGHBOURS_MAX: usize = 32;

/// A table of the policy's own doesn't tell broadcast addresses from others on its links.
fn to_one(world: &World, packet: &Packet, judged: Judged) -> Result<Judged, DropReason> {
    match judged {
        Judged::Goes(Decision::Uplink { ifindex, .. })
            if world.broadcasts.contains(&(ifindex, packet.destination)) =>
        {
            Err(DropReason::Multicast)
        }
        other => Ok(other),
    }
}

/// Whether the interface may have one more neighbour looked for, if it is a new one.
fn within_share(
    world: &mut World,
    sender: usize,
    packet: &Packet,
    way: Way,
    judged: Judged,
) -> Result<Judged, DropReason> {
    let is_new = matches!(
        way,
        Way::Out {
            neighbour: None,
            ..
        }
    );
    let nic = &mut world.nics[sender];
    if !is_new || nic.asked.contains(&packet.destination) {
        return Ok(judged);
    }
    if nic.asked.len() + nic.asked_before >= NEIGHBOURS_MAX {
        return Err(DropReason::NeighbourLimit);
    }
    nic.asked.insert(packet.destination);
    Ok(judged)
}

/// The policy as far as routes are asked by it: the relay comes before a table of its own.
fn routed_by(world: &World, nic: &Nic, packet: &Packet) -> Policy {
    let own = world.policies[nic.policy].clone();
    let table = match is_for_relay(world, nic, packet) {
        true => 0,
        false => own.table,
    };
    Policy { table, ..own }
}

/// Whether the relay's rules on the host have a say in packets of this protocol between these addresses.
fn is_for_relay(world: &World, nic: &Nic, packet: &Packet) -> bool {
    let Some(own) = nic.addresses(packet.version) else {
        return false;
    };
    let of_source = world.redirects.iter();
    let of_source = of_source.filter(|redirect| redirect.from.contains(&own.clone));
    let to: Vec<_> = of_source.map(|redirect| redirect.to.clone()).collect();
    policy::longest(&to, packet.destination).is_some_and(|prefix| {
        prefix.rules.is_empty()
            || matches!(packet.protocol, ICMP | ICMPV6)
            || prefix
                .rules
                .iter()
                .any(|rule| rule.protocol == packet.protocol)
    })
}

pub(crate) fn may_be_an_answer(own: &Policy, reason: DropReason) -> bool {
    match reason {
        DropReason::Policy
        | DropReason::Metadata
        | DropReason::HostService
        | DropReason::UplinkDenied => true,
        // The call may have come by a way that a table of the policy's own doesn't have.
        DropReason::NoRoute => own.table != 0,
        _ => false,
    }
}

fn other_sandbox(world: &World, nic: &Nic, receiver: usize) -> Result<Decision, DropReason> {
    let other = &world.nics[receiver];
    if other.state != State::Active {
        return Err(DropReason::NoSuchSandbox);
    }
    if !may_reach(world, nic, other) {
        return Err(DropReason::OtherSandbox);
    }
    // Only its parent's network leads to a child.
    if other.child {
        return Err(DropReason::NoRoute);
    }
    Ok(Decision::Sandbox(receiver))
}

/// Whether one sandbox may send to another.
pub(crate) fn may_reach(world: &World, nic: &Nic, other: &Nic) -> bool {
    let policy = &world.policies[nic.policy];
    let same_sandbox = (nic.pool, nic.slot) == (other.pool, other.slot);
    let same_group = policy.same_group && nic.group == other.group;
    let friends = policy.other_groups && world.group_pairs.contains(&(nic.group, other.group));
    same_sandbox || same_group || friends
}

enum Judged {
    Goes(Decision),
    /// To the stack, so that it masquerades it.
    Masquerade,
}

fn judge(
    world: &World,
    nic: &Nic,
    frame: &[u8],
    packet: &Packet,
    way: Way,
) -> Result<Judged, DropReason> {
    let own = &world.policies[nic.policy];
    policy::egress(own, frame, packet)?;
    by_route(world, nic, frame, packet, way, own.uplink)
}

/// Where the route leads, and whether the policy lets it leave the host there. A table of the policy's own says nothing
/// of the host's addresses.
fn by_route(
    world: &World,
    nic: &Nic,
    frame: &[u8],
    packet: &Packet,
    way: Way,
    uplink: Uplink,
) -> Result<Judged, DropReason> {
    let judged = by_way(world, nic, frame, packet, way, uplink)?;
    let own = &routed_by(world, nic, packet);
    match judged {
        _ if own.table == 0 => {}
        Judged::Goes(Decision::Uplink { .. }) => {}
        _ if is_hosts(world, own, packet) => policy::host_service(own, frame, packet)?,
        Judged::Masquerade => {}
        // The stack goes by the host's rules, which would lead it elsewhere.
        Judged::Goes(_) => return Err(DropReason::NoRoute),
    }
    Ok(judged)
}

/// Whether the host's rules lead to the host itself, whatever a table of the policy's own says.
fn is_hosts(world: &World, own: &Policy, packet: &Packet) -> bool {
    let by_rules = Policy {
        table: 0,
        ..own.clone()
    };
    matches!(look_up(world, &by_rules, packet.destination), Way::Local)
}

/// Whether the host's stack may have what can't leave by its uplink as it is. It may tell the sender that no hop is left,
/// but not send by its own rules what a table of the policy's own has led out.
pub(crate) fn stack_may_have(
    world: &World,
    nic: &Nic,
    frame: &[u8],
    packet: &Packet,
) -> Result<(), DropReason> {
    let own = &world.policies[nic.policy];
    if own.table == 0 {
        return Ok(());
    }
    if is_hosts(world, own, packet) {
        policy::host_service(own, frame, packet)?;
    }
    match packet.ttl > 1 {
        true => Err(DropReason::NoRoute),
        false => Ok(()),
    }
}

fn by_way(
    world: &World,
    nic: &Nic,
    frame: &[u8],
    packet: &Packet,
    way: Way,
    uplink: Uplink,
) -> Result<Judged, DropReason> {
    let has_table = routed_by(world, nic, packet).table != 0;
    match (way, uplink) {
        // It says nothing of the destination.
        (Way::Local, Uplink::Masquerade) if has_table => Ok(Judged::Masquerade),
        (Way::Local, _) if has_table => Ok(Judged::Goes(Decision::Stack)),
        (Way::Local, _) => {
            policy::host_service(&world.policies[nic.policy], frame, packet)?;
            Ok(Judged::Goes(Decision::Stack))
        }
        // What may not leave isn't refused by the stack, which may have it relayed.
        (Way::Refused, Uplink::Deny) => Err(DropReason::UplinkDenied),
        (Way::Refused, _) => Ok(Judged::Goes(Decision::Stack)),
        (Way::Out { ifindex, .. }, _) if ifindex == nic.shared_ifindex => {
            Err(DropReason::NoSuchSandbox)
        }
        (Way::Out { .. }, Uplink::Deny) => Err(DropReason::UplinkDenied),
        (Way::Out { .. }, Uplink::Masquerade) => Ok(Judged::Masquerade),
        (Way::Out { ifindex, neighbour }, Uplink::Route)
            if world.uplinks.contains_key(&ifindex) =>
        {
            Ok(Judged::Goes(Decision::Uplink { ifindex, neighbour }))
        }
        (Way::Out { .. }, Uplink::Route) => Ok(Judged::Goes(Decision::Stack)),
    }
}

/// The longest prefix of the first table that has one.
pub(crate) fn look_up(world: &World, policy: &Policy, destination: IpAddr) -> Way {
    let marked = world.rules.get(&policy.mark).copied();
    let tables = match (policy.table, marked) {
        (0, None) => vec![TABLE_LOCAL, TABLE_MAIN],
        (0, Some(table)) => vec![TABLE_LOCAL, table, TABLE_MAIN],
        (table, _) => vec![table],
    };
    for table in tables {
        let covering = world.routes.iter().filter(|route| {
            route.table == table
                && match (route.net, destination) {
                    (IpNet::V4(net), IpAddr::V4(address)) => net.contains(&address),
                    (IpNet::V6(net), IpAddr::V6(address)) => net.contains(&address),
                    _ => false,
                }
        });
        if let Some(route) = covering.max_by_key(|route| route.net.prefix_len()) {
            return resolved(world, route.to, destination);
        }
    }
    Way::Local
}

/// A route to a whole network names no neighbour: the destination itself is it.
fn resolved(world: &World, way: Way, destination: IpAddr) -> Way {
    match way {
        Way::Out {
            ifindex,
            neighbour: None,
        } => Way::Out {
            ifindex,
            neighbour: world.neighbours.get(&(ifindex, destination)).copied(),
        },
        other => other,
    }
}
