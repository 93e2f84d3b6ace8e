//! Traffic control: where BPF programs sit on the way into and out of an interface.
//!
//! A filter of ours is a `cls_bpf` filter in direct-action mode: the program's verdict is final for
//! what it doesn't pass on. Filters of one hook run by rising priority. Replacing a filter exchanges
//! the program in place, so that every packet meets the old one or the new one.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{
    Error,
    interface::InterfaceIndex,
    netlink::{
        CHANGE, CREATE, Request, Socket,
        attribute::{self, Attributes, Writer},
    },
    number::narrow,
};

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_CLASSID: u16 = 3;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_TAG: u16 = 10;
const TCA_BPF_ID: u16 = 11;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;

/// The handle of ingress and clsact qdiscs, `ffff:`.
const QDISC_HANDLE: u32 = 0xffff_0000;
/// Where ingress and clsact qdiscs are attached.
const QDISC_PARENT: u32 = 0xffff_fff1;
/// Where the qdisc is attached that an interface sends by.
const ROOT: u32 = 0xffff_ffff;
const HEADER: usize = 20;
/// All protocols, in network order.
const PROTOCOL_ALL: u16 = narrow(libc::ETH_P_ALL).to_be();

/// Which way packets go when a filter sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hook {
    /// They were received by the interface. Needs an ingress or a clsact qdisc.
    Ingress,
    /// The interface is about to send them. Needs a clsact qdisc.
    Egress,
}

impl Hook {
    fn parent(self) -> u32 {
        match self {
            Self::Ingress => 0xffff_fff2,
            Self::Egress => 0xffff_fff3,
        }
    }
}

/// Adds an ingress qdisc, for filters on the way in only.
pub fn add_ingress(request: &mut Request, interface: InterfaceIndex) {
    add_qdisc(request, interface, (QDISC_HANDLE, QDISC_PARENT), "ingress");
}

/// Adds a clsact qdisc: filters on the way in and on the way out.
pub fn add_clsact(request: &mut Request, interface: InterfaceIndex) {
    add_qdisc(request, interface, (QDISC_HANDLE, QDISC_PARENT), "clsact");
}

/// Has an interface that is down send without a queue, instead of the one that the kernel adds when it is first raised
/// (`net.core.default_qdisc`, one for each of its queues).
pub fn add_noqueue(request: &mut Request, interface: InterfaceIndex) {
    add_qdisc(request, interface, (0, ROOT), "noqueue");
}

fn add_qdisc(
    request: &mut Request,
    interface: InterfaceIndex,
    (handle, parent): (u32, u32),
    kind: &str,
) {
    let object = format!("{kind} qdisc on interface {interface}");
    request.message((libc::RTM_NEWQDISC, CREATE), "create", object, |message| {
        message.raw(&header(interface, handle, parent, 0));
        message.put_text(TCA_KIND, kind);
    });
}

/// Deletes an ingress or clsact qdisc with all filters on it, whoever added them.
pub fn delete_qdisc(request: &mut Request, interface: InterfaceIndex) {
    let object = format!("ingress or clsact qdisc on interface {interface}");
    request.message((libc::RTM_DELQDISC, CHANGE), "delete", object, |message| {
        message.raw(&header(interface, QDISC_HANDLE, QDISC_PARENT, 0));
    });
}

/// The kind of the qdisc that has the filters on the way in: `ingress` or `clsact`, if there is one.
///
/// # Errors
/// The kernel refuses. Of an interface that isn't there, there is none.
pub fn filter_qdisc(
    socket: &mut Socket,
    interface: InterfaceIndex,
) -> Result<Option<String>, Error> {
    let object = format!("qdisc for filters on interface {interface}");
    let found = socket.query(
        libc::RTM_GETQDISC,
        false,
        ("look up", &object),
        |message| message.raw(&header(interface, 0, QDISC_PARENT, 0)),
        |reply| {
            let kind = reply.attributes(HEADER).find(TCA_KIND)?;
            (reply.kind == libc::RTM_NEWQDISC).then(|| attribute::text_of(kind))
        },
    );
    match found {
        // The second, of an interface that has had one before.
        Err(error) if error.is_missing() || error.errno() == Some(libc::EINVAL) => Ok(None),
        other => Ok(other?.into_iter().next()),
    }
}

/// Where a filter is: by these four there is at most one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The interface.
    pub interface: InterfaceIndex,
    /// Which way packets go.
    pub hook: Hook,
    /// Lower runs first. Not 0.
    pub priority: u16,
    /// Number among the filters of a priority. Not 0.
    pub handle: u32,
}

impl Place {
    /// Deletes the filter.
    pub fn delete(&self, request: &mut Request) {
        let object = self.to_string();
        request.message(
            (libc::RTM_DELTFILTER, CHANGE),
            "delete",
            object,
            |message| {
                message.raw(&self.header());
                message.put_text(TCA_KIND, "bpf");
            },
        );
    }

    fn header(&self) -> [u8; HEADER] {
        let info = u32::from(self.priority) << 16 | u32::from(PROTOCOL_ALL);
        header(self.interface, self.handle, self.hook.parent(), info)
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hook = match self.hook {
            Hook::Ingress => "ingress",
            Hook::Egress => "egress",
        };
        let (interface, priority) = (self.interface, self.priority);
        write!(
            formatter,
            "BPF filter {priority} on {hook} of interface {interface}"
        )
    }
}

/// A BPF program on a hook, for all protocols, in direct-action mode.
#[derive(Clone, Copy, Debug)]
pub struct Filter<'a> {
    /// Where it is.
    pub place: Place,
    /// A number that the program reads as `skb->tc_classid`, of which the kernel keeps 16 bits there.
    pub class_id: Option<u32>,
    /// The program; of type `sched_cls`.
    pub program: BorrowedFd<'a>,
    /// Name in listings.
    pub name: &'a str,
}

impl Filter<'_> {
    /// Adds the filter where none is.
    pub fn add(&self, request: &mut Request) {
        self.write(request, CREATE, "create");
    }

    /// Adds the filter, or puts it in the place of the one that is there.
    pub fn replace(&self, request: &mut Request) {
        self.write(request, narrow(libc::NLM_F_CREATE), "replace");
    }

    fn write(&self, request: &mut Request, flags: u16, operation: &'static str) {
        let object = self.place.to_string();
        request.message(
            (libc::RTM_NEWTFILTER, flags),
            operation,
            object,
            |message| {
                message.raw(&self.place.header());
                message.put_text(TCA_KIND, "bpf");
                message.nest(TCA_OPTIONS, |options| self.write_options(options));
            },
        );
    }

    fn write_options(&self, options: &mut Writer<'_>) {
        if let Some(class_id) = self.class_id {
            options.put_u32(TCA_BPF_CLASSID, class_id);
        }
        options.put_u32(TCA_BPF_FD, self.program.as_raw_fd().cast_unsigned());
        options.put_text(TCA_BPF_NAME, self.name);
        options.put_u32(TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT);
    }
}

/// A BPF filter as the kernel describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Where it is.
    pub place: Place,
    /// What the program reads as its class.
    pub class_id: Option<u32>,
    /// Number of the program, unless it is one of the old instruction set.
    pub program_id: Option<u32>,
    /// Hash of the program's instructions: equal in every copy of a version.
    pub program_tag: Option<[u8; 8]>,
    /// Name.
    pub name: String,
    /// Whether the program's verdict is final.
    pub is_direct_action: bool,
}

/// The BPF filters on a hook, in the order in which they run. Where there is no qdisc to have any, or not
/// even the interface, there are none.
///
/// # Errors
/// The kernel refuses.
pub fn list(
    socket: &mut Socket,
    interface: InterfaceIndex,
    hook: Hook,
) -> Result<Vec<Listed>, Error> {
    let object = format!("filters on interface {interface}");
    socket.query(
        libc::RTM_GETTFILTER,
        true,
        ("list", &object),
        |message| message.raw(&header(interface, 0, hook.parent(), 0)),
        |reply| {
            (reply.kind == libc::RTM_NEWTFILTER)
                .then(|| parse(reply.payload, hook))
                .flatten()
        },
    )
}

fn parse(payload: &[u8], hook: Hook) -> Option<Listed> {
    let number = |at: usize| payload.get(at..).and_then(attribute::u32_of);
    let (interface, handle, info) = (number(4)?, number(8)?, number(16)?);
    let attributes = Attributes::new(payload.get(HEADER..)?);
    let is_bpf = attributes.find(TCA_KIND).map(attribute::text_of).as_deref() == Some("bpf");
    // Each priority is also listed by itself, with handle 0.
    if !is_bpf || handle == 0 {
        return None;
    }
    let options = attributes.nested(TCA_OPTIONS);
    let option = |kind| options.find(kind).and_then(attribute::u32_of);
    Some(Listed {
        place: Place {
            interface: InterfaceIndex(interface),
            hook,
            priority: u16::try_from(info >> 16).expect("sixteen bits are left"),
            handle,
        },
        class_id: option(TCA_BPF_CLASSID),
        program_id: option(TCA_BPF_ID),
        program_tag: options
            .find(TCA_BPF_TAG)
            .and_then(|tag| tag.try_into().ok()),
        name: options
            .find(TCA_BPF_NAME)
            .map(attribute::text_of)
            .unwrap_or_default(),
        is_direct_action: option(TCA_BPF_FLAGS)
            .is_some_and(|flags| flags & TCA_BPF_FLAG_ACT_DIRECT != 0),
    })
}

fn header(interface: InterfaceIndex, handle: u32, parent: u32, info: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[4..8].copy_from_slice(&interface.0.to_ne_bytes());
    header[8..12].copy_from_slice(&handle.to_ne_bytes());
    header[12..16].copy_from_slice(&parent.to_ne_bytes());
    header[16..20].copy_from_slice(&info.to_ne_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place {
        interface: InterfaceIndex(7),
        hook: Hook::Ingress,
        priority: 49152,
        handle: 1,
    };

    /// A filter as the kernel lists it.
    fn answer() -> Vec<u8> {
        let mut bytes = PLACE.header().to_vec();
        let mut message = Writer::new(&mut bytes);
        message.put_text(TCA_KIND, "bpf");
        message.nest(TCA_OPTIONS, |options| {
            options.put_u32(TCA_BPF_CLASSID, 12);
            options.put_text(TCA_BPF_NAME, "from_guest");
            options.put_u32(TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT);
            options.put(TCA_BPF_TAG, b"12345678");
            options.put_u32(TCA_BPF_ID, 99);
        });
        bytes
    }

    #[test]
    fn a_listed_filter_is_read() {
        let expected = Listed {
            place: PLACE,
            class_id: Some(12),
            program_id: Some(99),
            program_tag: Some(*b"12345678"),
            name: "from_guest".into(),
            is_direct_action: true,
        };
        assert_eq!(parse(&answer(), Hook::Ingress), Some(expected));
    }

    #[test]
    fn truncated_answers_are_no_filters_or_lack_what_was_cut_off() {
        let answer = answer();
        let whole = parse(&answer, Hook::Ingress);
        for length in 0..answer.len() {
            let read = parse(&answer[..length], Hook::Ingress);
            assert_ne!(read, whole, "{length} bytes");
            if length < HEADER + 8 {
                assert_eq!(read, None, "{length} bytes");
            }
        }
        let mut other = answer;
        other[HEADER + 4..HEADER + 7].copy_from_slice(b"u32");
        assert_eq!(parse(&other, Hook::Ingress), None);
    }
}
