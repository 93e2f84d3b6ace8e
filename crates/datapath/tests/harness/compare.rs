//! Where program and model must agree.

use super::{
    encode::{self, Event},
    sys::Ran,
};
use crate::model::{
    Hook, Input, Macs, Outcome, Verdict, World,
    answers::Answer,
    world::{Counters, Meter},
};

/// What a program did.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    pub(crate) ran: Ran,
    pub(crate) events: Vec<Event>,
    /// Whether there should be events.
    pub(crate) watched: bool,
    pub(crate) counters: Vec<Counters>,
    pub(crate) meters: Vec<(Meter, Meter)>,
    pub(crate) answers: Vec<(Vec<u8>, Answer)>,
    pub(crate) process: bool,
}

const ACT_SHOT: i32 = 2;
const ACT_REDIRECT: i32 = 7;
const ACT_UNSPEC: i32 = -1;

const XDP_DROP: i32 = 1;
pub(crate) const XDP_PASS: i32 = 2;
const XDP_REDIRECT: i32 = 4;

/// A clock read twice within one packet may differ by this; what limits are tested by is seconds.
const TOLERANCE: u64 = 500_000_000;

/// Says what differs first. `warm`: a decision of this generation would still hold.
pub(crate) fn compare(
    world: &World,
    input: &Input,
    outcome: &Outcome,
    observed: &Observed,
    warm: bool,
) -> Result<(), String> {
    let code = match outcome.verdict {
        Verdict::Drop => ACT_SHOT,
        Verdict::Pass => ACT_UNSPEC,
        _ if matches!(input.hook, Hook::FromChild | Hook::ToChild) => ACT_UNSPEC,
        _ => ACT_REDIRECT,
    };
    let Observed { ran, events, .. } = observed;
    let said: Vec<String> = events
        .iter()
        .map(|event| {
            format!(
                "verdict {} reason {} stage {} target {} nic {}",
                event.verdict, event.reason, event.stage, event.target, event.nic
            )
        })
        .collect();
    if ran.returned != code {
        return Err(format!(
            "returned {}, not {code}; it says {said:?}",
            ran.returned
        ));
    }
    if observed.watched {
        compare_events(input, outcome, events)?;
    }
    if code != ACT_SHOT {
        compare_frame(outcome, &ran.frame, warm)?;
    }
    compare_memory(world, observed)?;
    if let Some(mark) = outcome.mark {
        differ("mark", &mark, &ran.context.mark)?;
    }
    if let Some(departure) = outcome.departure {
        differ("departure time", &departure, &ran.context.tstamp)?;
    }
    if input.hook == Hook::HostEnd && outcome.nic == Some(0) && code == ACT_REDIRECT {
        differ("process", &world.nics[0].process, &observed.process)?;
    }
    Ok(())
}

/// Compares what is remembered: counters, meters, answers.
fn compare_memory(world: &World, observed: &Observed) -> Result<(), String> {
    for (number, (nic, counters)) in world.nics.iter().zip(&observed.counters).enumerate() {
        differ(&format!("counters of {number}"), &nic.counters, counters)?;
    }
    compare_meters(world, &observed.meters)?;
    compare_answers(world, &observed.answers)
}

/// Wants XDP to have left everything as it was.
pub(crate) fn untouched(world: &World, input: &Input, observed: &Observed) -> Result<(), String> {
    differ(
        "frame that passed",
        &hex(&input.frame),
        &hex(&observed.ran.frame),
    )?;
    compare_memory(world, observed)
}

/// Wants XDP to have done what the model says.
pub(crate) fn compare_xdp(
    world: &World,
    outcome: &Outcome,
    observed: &Observed,
) -> Result<(), String> {
    let code = match outcome.verdict {
        Verdict::Drop => XDP_DROP,
        Verdict::Uplink | Verdict::Sandbox | Verdict::Guest => XDP_REDIRECT,
        _ => return Err(format!("{:?} is for tc alone", outcome.verdict)),
    };
    differ("return code", &code, &observed.ran.returned)?;
    if code == XDP_REDIRECT {
        compare_frame(outcome, &observed.ran.frame, true)?;
    }
    compare_memory(world, observed)
}

fn differ<T: PartialEq + std::fmt::Debug>(
    what: &str,
    model: &T,
    program: &T,
) -> Result<(), String> {
    if model == program {
        return Ok(());
    }
    Err(format!("{what}: model {model:?}, program {program:?}"))
}

fn compare_events(input: &Input, outcome: &Outcome, events: &[Event]) -> Result<(), String> {
    let Some(nic) = outcome.nic else {
        return match events {
            // Somebody may tell of a packet that was left to the host.
            [event, ..] if event.verdict != Verdict::Pass as u8 => {
                Err(format!("an event where none belongs: {event:?}"))
            }
            _ => Ok(()),
        };
    };
    let direction = u8::from(outcome.ingress);
    let [event, rest @ ..] = events else {
        return Err("no event".to_owned());
    };
    differ("verdict", &(outcome.verdict as u8), &event.verdict)?;
    let reason = outcome.reason.map_or(0, |reason| reason as u8);
    differ("reason", &reason, &event.reason)?;
    differ("stage", &(outcome.stage as u8), &event.stage)?;
    compare_event(input, (nic, direction, outcome.target), event)?;
    match (outcome.receiver, rest) {
        (None, []) => Ok(()),
        // Who watches the receiver sees it as well.
        (Some(receiver), [event]) => {
            let verdict = match outcome.verdict {
                Verdict::Drop => Verdict::Drop,
                _ => Verdict::Guest,
            };
            differ("receiver's verdict", &(verdict as u8), &event.verdict)?;
            differ("receiver's reason", &reason, &event.reason)?;
            compare_event(input, (receiver, 1, outcome.target), event)
        }
        _ => Err(format!("{} events of one packet", events.len())),
    }
}

/// Compares what doesn't depend on the verdict: NIC, direction and target, and the frame.
fn compare_event(
    input: &Input,
    (nic, direction, target): (usize, u8, u32),
    event: &Event,
) -> Result<(), String> {
    differ("nic", &nic, &event.nic)?;
    differ("direction", &direction, &event.direction)?;
    differ("target", &target, &event.target)?;
    differ("length", &input.frame.len(), &event.length)?;
    let captured = &input.frame[..input.frame.len().min(192)];
    differ("captured frame", &captured, &&event.frame[..])
}

/// Compares bytes. The kernel writes the Ethernet addresses of a packet whose way was decided anew.
fn compare_frame(outcome: &Outcome, frame: &[u8], warm: bool) -> Result<(), String> {
    let by_kernel = match outcome.macs {
        Macs::Path => false,
        Macs::PathOrKernel => !warm,
        Macs::Kernel => true,
    };
    let (expected, frame) = if by_kernel {
        (&outcome.frame[12..], &frame[12..])
    } else {
        (&outcome.frame[..], frame)
    };
    if expected == frame {
        return Ok(());
    }
    let at = expected
        .iter()
        .zip(frame)
        .position(|(one, other)| one != other);
    Err(format!(
        "bytes differ from {:?}{}:\n  model   {}\n  program {}",
        at.unwrap_or(expected.len().min(frame.len())),
        if by_kernel {
            " (without Ethernet addresses)"
        } else {
            ""
        },
        hex(expected),
        hex(frame)
    ))
}

fn compare_meters(world: &World, meters: &[(Meter, Meter)]) -> Result<(), String> {
    for (number, (nic, (egress, ingress))) in world.nics.iter().zip(meters).enumerate() {
        for (what, model, program) in [
            ("egress bytes", nic.egress.bytes, egress.bytes),
            ("egress packets", nic.egress.packets, egress.packets),
            ("ingress bytes", nic.ingress.bytes, ingress.bytes),
            ("ingress packets", nic.ingress.packets, ingress.packets),
        ] {
            if model.abs_diff(program) > TOLERANCE {
                return Err(format!(
                    "meter {what} of {number}: model {model}, program {program}"
                ));
            }
        }
        differ("paid ahead", &nic.egress.credit, &egress.credit)?;
        differ("paid ahead", &nic.ingress.credit, &ingress.credit)?;
    }
    Ok(())
}

fn compare_answers(world: &World, answers: &[(Vec<u8>, Answer)]) -> Result<(), String> {
    for (flow, answer) in &world.answers {
        let key = encode::answer_key(flow);
        let known = answers.iter().find(|(other, _)| *other == key);
        let Some((_, known)) = known else {
            return Err(format!("the program doesn't know {flow:?}"));
        };
        let of = |answer: &Answer| (answer.via, answer.own, answer.fragment, answer.lease);
        differ("the way of an answer", &of(answer), &of(known))?;
        if answer.seen.abs_diff(known.seen) > TOLERANCE {
            return Err(format!("{flow:?}: model {answer:?}, program {known:?}"));
        }
    }
    differ("answers known", &world.answers.len(), &answers.len())
}

/// Bytes as text.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
