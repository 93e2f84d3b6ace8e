//! Ingress: what reaches a sandbox from an uplink or from the host's own stack.

use sandwire_api::drop_reason::DropReason;

use super::{
    Dropped, Hook, Input, Macs, Origin, Outcome, Packet, Stage, Verdict, World,
    answers::{self, Via},
    nat::{self, Changes, Replacement},
    packet::destination_of,
    police,
    world::State,
};

/// Judges a frame on the ingress of an uplink or the egress of the shared interface.
pub(crate) fn run(world: &mut World, input: &Input) -> Outcome {
    let outside = input.hook == Hook::Uplink;
    let destination = destination_of(&input.frame);
    let known = destination.and_then(|destination| world.clones.get(&destination).copied());
    let ours = !outside || input.to_this_host;
    match known {
        Some(receiver) if ours => match judge(world, receiver, input) {
            Ok(outcome) => outcome,
            Err(dropped) => Outcome::dropped(world, input, dropped),
        },
        _ => not_ours(input),
    }
}

/// From an uplink it is somebody else's. On the shared interface there is nobody else.
fn not_ours(input: &Input) -> Outcome {
    let verdict = match input.hook {
        Hook::Uplink => Verdict::Pass,
        _ => Verdict::Drop,
    };
    Outcome {
        verdict,
        reason: None,
        stage: Stage::Parse,
        nic: None,
        ingress: true,
        target: 0,
        receiver: None,
        frame: input.frame.clone(),
        macs: Macs::Path,
        mark: None,
        departure: None,
    }
}

fn judge(world: &mut World, number: usize, input: &Input) -> Result<Outcome, Dropped> {
    let by_receiver = |reason| Dropped::ingress(number, reason);
    let outside = input.hook == Hook::Uplink;
    let packet = &Packet::parse(&input.frame);
    let nic = &world.nics[number];
    if outside && (packet.is_err() || nic.child) {
        // The stack drops it, or the kernel gives it to the uplink's child, which judges it.
        return Ok(not_ours(input));
    }
    if nic.state != State::Active {
        return Err(by_receiver(DropReason::NotLeased));
    }
    let packet = packet.as_ref().map_err(|reason| by_receiver(*reason))?;
    let size = police::size(input, packet);
    if let Some(sender) = world.clones.get(&packet.source)
        && !may_come_from(world, *sender, input)
    {
        return Err(by_receiver(DropReason::SourceAddress));
    }
    if nic.child {
        return Err(by_receiver(DropReason::NoRoute));
    }
    let too_big = size.ip > nic.mtu as usize;
    // The stack puts fragments together before it cuts them anew: it gets all of a datagram or none.
    let all_or_none = packet.is_fragment() && world.mtu_of_way_in() > nic.mtu;
    if outside && (packet.ttl <= 1 || too_big || all_or_none) {
        return Ok(not_ours(input));
    }
    if too_big {
        return Err(by_receiver(DropReason::TooBig));
    }
    let via = if outside { Via::Uplink } else { Via::Stack };
    let from_host = !outside && input.origin == Origin::Host;
    answers::learn(
        world,
        number,
        &input.frame,
        packet,
        via,
        from_host,
        input.now,
    );

    let shift = world.pays_ahead.then_some(world.credit_shift);
    let limit = world.policies[world.nics[number].policy].ingress;
    let meter = &mut world.nics[number].ingress;
    police::police(&limit, meter, size, input.now, false, shift).map_err(by_receiver)?;
    let ingress = &mut world.nics[number].counters.ingress;
    ingress.add(input.frame.len(), size.segments);
    Ok(deliver(world, number, input, packet))
}

/// Whether what a sandbox has sent may come this way.
fn may_come_from(world: &World, sender: usize, input: &Input) -> bool {
    input.hook == Hook::Shared
        && match input.origin {
            Origin::Host | Origin::Shared => true,
            Origin::HostEnd(ifindex) => world.nics[sender].ifindex == ifindex,
            Origin::Uplink => false,
        }
}

fn deliver(world: &World, number: usize, input: &Input, packet: &Packet) -> Outcome {
    let nic = &world.nics[number];
    let own = nic
        .addresses(packet.version)
        .expect("it has a clone address");
    let changes = Changes {
        source: None,
        destination: (!nic.process).then_some(Replacement {
            from: own.clone,
            to: own.guest,
        }),
        hop: input.hook == Hook::Uplink,
    };
    let mut frame = nat::translate(&input.frame, packet, &changes);
    let to = if nic.process {
        nic.veth_mac
    } else {
        nic.guest_mac
    };
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&nic.gateway_mac);
    Outcome {
        verdict: Verdict::Guest,
        reason: None,
        stage: Stage::Redirect,
        nic: Some(number),
        ingress: true,
        target: nic.ifindex,
        receiver: None,
        frame,
        macs: Macs::Path,
        mark: None,
        departure: None,
    }
}
