//! Queueing disciplines: what holds packets that an interface is to send.

use crate::{
    Error,
    interface::{Interface, InterfaceIndex},
    netlink::{
        Socket,
        attribute::{self, Attributes},
    },
};

const TCA_KIND: u16 = 1;
const HEADER: usize = 20;
/// Parent of the one that all others are below, and of those for filters alone.
const ROOT: u32 = 0xffff_ffff;
const FILTERS: u32 = 0xffff_fff1;

/// A queueing discipline of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qdisc {
    /// What it is a class of, by number.
    pub parent: u32,
    /// `fq`, `mq`, `pfifo_fast`.
    pub kind: String,
}

/// Whether packets wait for their departure times by whichever of its queues an interface sends: `fq` does that, and `mq`,
/// which interfaces with several queues have, if there is `fq` in each of them.
///
/// # Errors
/// The kernel refuses.
pub fn honours_departures(socket: &mut Socket, interface: &Interface) -> Result<bool, Error> {
    match interface.queue.as_deref() {
        Some("fq") => Ok(true),
        Some("mq") => Ok(is_fq_in_each(&list(socket, interface.index)?)),
        _ => Ok(false),
    }
}

/// Whether all that is below the root is `fq`. The kernel lists a queue's own only if it is in use.
fn is_fq_in_each(qdiscs: &[Qdisc]) -> bool {
    let mut below = qdiscs
        .iter()
        .filter(|qdisc| ![ROOT, FILTERS].contains(&qdisc.parent))
        .peekable();
    below.peek().is_some() && below.all(|qdisc| qdisc.kind == "fq")
}

/// All of an interface, but those that the kernel has built in for itself.
///
/// # Errors
/// The kernel refuses.
pub fn list(socket: &mut Socket, interface: InterfaceIndex) -> Result<Vec<Qdisc>, Error> {
    let object = format!("queueing disciplines of interface {interface}");
    socket.query(
        libc::RTM_GETQDISC,
        true,
        ("list", &object),
        |message| message.raw(&[0; HEADER]),
        |reply| {
            (reply.kind == libc::RTM_NEWQDISC)
                .then(|| parse(reply.payload, interface))
                .flatten()
        },
    )
}

/// The kernel lists those of all interfaces.
fn parse(payload: &[u8], interface: InterfaceIndex) -> Option<Qdisc> {
    let number = |at: usize| payload.get(at..).and_then(attribute::u32_of);
    if number(4)? != interface.0 {
        return None;
    }
    let kind = Attributes::new(payload.get(HEADER..)?).find(TCA_KIND)?;
    Some(Qdisc {
        parent: number(12)?,
        kind: attribute::text_of(kind),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attribute::Writer;

    const INTERFACE: InterfaceIndex = InterfaceIndex(7);

    fn qdisc(parent: u32, kind: &str) -> Qdisc {
        Qdisc {
            parent,
            kind: kind.to_owned(),
        }
    }

    #[test]
    fn each_queue_must_be_fq() {
        let mq = qdisc(ROOT, "mq");
        let cases = [
            (vec![], false),
            (vec![mq.clone()], false),
            (vec![mq.clone(), qdisc(1, "fq"), qdisc(2, "fq")], true),
            (
                vec![qdisc(2, "fq"), mq.clone(), qdisc(0x1_0001, "fq")],
                true,
            ),
            (
                vec![mq.clone(), qdisc(1, "fq"), qdisc(2, "pfifo_fast")],
                false,
            ),
            (vec![mq.clone(), qdisc(1, "htb"), qdisc(2, "fq")], false),
            (
                vec![mq.clone(), qdisc(1, "fq"), qdisc(FILTERS, "clsact")],
                true,
            ),
            (vec![mq, qdisc(FILTERS, "ingress")], false),
        ];
        for (qdiscs, expected) in cases {
            assert_eq!(is_fq_in_each(&qdiscs), expected, "{qdiscs:?}");
        }
    }

    #[test]
    fn a_listed_one_is_read_if_it_is_of_the_interface_and_whole() {
        let mut answer = vec![0; HEADER];
        answer[4..8].copy_from_slice(&INTERFACE.0.to_ne_bytes());
        answer[12..16].copy_from_slice(&0x1_0002_u32.to_ne_bytes());
        Writer::new(&mut answer).put_text(TCA_KIND, "fq");
        assert_eq!(parse(&answer, INTERFACE), Some(qdisc(0x1_0002, "fq")));
        assert_eq!(parse(&answer, InterfaceIndex(8)), None);
        // Behind the name there is nothing but padding.
        for length in 0..HEADER + 7 {
            assert_eq!(parse(&answer[..length], INTERFACE), None, "{length} bytes");
        }
    }
}
