//! What this kernel's eBPF can do, tried out with a few instructions each.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use sandwire_kernel_net::{
    bpf::{self, BPF_TCX_INGRESS, ProgramType, instruction},
    interface::InterfaceIndex,
    netlink::{Request, Socket},
    netns::Home,
    tc,
};

use crate::{
    Error,
    abi::{NetnsPlaces, SkbPlaces},
    btf::Btf,
    routes, skb, sys,
};

/// What the programs may use beyond Linux 6.1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Flags of `bpf_fib_lookup` beyond the first ones: table (Linux 6.5) and mark (Linux 6.10).
    pub fib_flags: u32,
    /// Programs of several owners on one interface in a stated order (Linux 6.6); without it, `cls_bpf`
    /// filters are used on uplinks too.
    pub tcx: bool,
    /// Where a packet says which of its checksums is to be finished; zeros where the kernel doesn't tell its types
    /// (`CONFIG_DEBUG_INFO_BTF`), or forbids programs to read its memory (before Linux 6.2, lockdown for confidentiality).
    pub skb_places: SkbPlaces,
    /// The kernel's number of `bpf_cast_to_kern_ctx`, by which programs read that without a copy (Linux 6.2).
    pub skb_cast: Option<u32>,
    /// Where the kernel says whether its routes depend on ports; zeros where it doesn't tell its types, or forbids
    /// programs to read its memory (lockdown for confidentiality).
    pub netns_places: NetnsPlaces,
}

/// `bpf_fib_lookup` looks at the table that it is told.
pub const FIB_LOOKUP_TABLE: u32 = 1 << 3;
/// `bpf_fib_lookup` looks at the mark that it is told.
pub const FIB_LOOKUP_MARK: u32 = 1 << 5;

const FIB_LOOKUP: i32 = 69;
const PROBE_READ_KERNEL: i32 = 113;
/// `struct bpf_fib_lookup`.
const FIB_PARAMETERS: i16 = 64;

type Instruction = [u8; 8];

/// Tries what this kernel can do.
///
/// # Errors
/// There is no eBPF, or this process may not use it.
pub fn probe() -> Result<Features, Error> {
    let pass = [move_number(0, 0), EXIT];
    let program = load(&pass).map_err(|source| unsupported(&source))?;
    let tcx = bpf::create_link(program.as_fd(), NOBODY, BPF_TCX_INGRESS, 0);
    let fib_flags = [FIB_LOOKUP_TABLE, FIB_LOOKUP_MARK]
        .into_iter()
        .filter(|flag| returned(&fib_lookup(*flag)).is_some_and(|answer| answer != -libc::EINVAL))
        .fold(0, |flags, flag| flags | flag);
    let types = Btf::of_kernel();
    let can_read = returned(&read_kernel()) == Some(0);
    let (skb_places, skb_cast) = skb_fields(types.as_ref(), can_read);
    let netns_places = types.as_ref().filter(|_| can_read);
    Ok(Features {
        fib_flags,
        // A kernel that knows the hook looks for the interface.
        tcx: tcx.is_err_and(|error| error.raw_os_error() == Some(libc::ENODEV)),
        skb_places,
        skb_cast,
        netns_places: netns_places.and_then(routes::places_by).unwrap_or_default(),
    })
}

/// Where the fields of packets are that programs can read, and by which cast. The kernel's memory can be read in other
/// ways, or not.
fn skb_fields(types: Option<&Btf>, can_read: bool) -> (SkbPlaces, Option<u32>) {
    let Some(told) = types.and_then(skb::told_by) else {
        return (SkbPlaces::default(), None);
    };
    let can_cast = |cast: &u32| returned(&read_fields(&told.places, *cast)) == Some(0);
    let cast = told.cast.filter(can_cast);
    let places = if cast.is_some() || can_read {
        told.places
    } else {
        SkbPlaces::default()
    };
    (places, cast)
}

/// Tries whether interfaces can have a filter: on the loopback of a namespace that nobody else knows and that goes at
/// once. The kernel has what that takes in modules, which may be missing.
///
/// # Errors
/// Names what is missing.
pub(crate) fn check_filters() -> Result<(), Error> {
    let program = load(&[move_number(0, 0), EXIT]).map_err(|source| unsupported(&source))?;
    let _inside = Home::here()?.unshare()?;
    let mut socket = Socket::route()?;
    let mut request = Request::new();
    tc::add_clsact(&mut request, LOOPBACK);
    let qdisc = "load the module sch_ingress (CONFIG_NET_SCH_INGRESS), or use the data path nft";
    let failed = |reason, remedy| move |source| lacks_filters(reason, &source, remedy);
    socket
        .execute(request)
        .map_err(failed("no filters on interfaces", qdisc))?;
    let mut request = Request::new();
    add_filter(&mut request, program.as_fd());
    let classifier = "load the module cls_bpf (CONFIG_NET_CLS_BPF), or use the data path nft";
    socket
        .execute(request)
        .map_err(failed("no filters that are eBPF programs", classifier))
}

/// Has a program judge what comes in by the loopback.
fn add_filter(request: &mut Request, program: BorrowedFd<'_>) {
    let place = tc::Place {
        interface: LOOPBACK,
        hook: tc::Hook::Ingress,
        priority: 1,
        handle: 1,
    };
    let filter = tc::Filter {
        place,
        class_id: None,
        program,
        name: "sandwire_probe",
    };
    filter.add(request);
}

fn lacks_filters(what: &str, source: &sandwire_kernel_net::Error, remedy: &'static str) -> Error {
    Error::Unsupported {
        reason: format!("this kernel has {what}: {source}"),
        remedy,
    }
}

/// Whether the loaded program of this number is ours for TAPs, which leaves the packets of impaired leases to tc.
#[must_use]
pub fn is_own_xdp(program: u32) -> bool {
    let mut loaded = aya::programs::loaded_programs().flatten();
    loaded.any(|found| found.id() == program && found.name_as_str() == Some("from_guest_xdp"))
}

/// The first interface of each namespace.
const LOOPBACK: InterfaceIndex = InterfaceIndex(1);

/// No interface has this number.
const NOBODY: InterfaceIndex = InterfaceIndex(i32::MAX.cast_unsigned());

fn load(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    bpf::load(ProgramType::Classifier, "sandwire_probe", instructions)
}

fn unsupported(source: &io::Error) -> Error {
    let (reason, remedy) = match source.raw_os_error() {
        Some(libc::ENOSYS) => (
            "this kernel has no bpf system call".to_owned(),
            "use a kernel with CONFIG_BPF_SYSCALL, or the data path nft",
        ),
        Some(libc::EPERM | libc::EACCES) => (
            format!("loading a program is forbidden to this process ({source})"),
            "run as root or with CAP_BPF and CAP_NET_ADMIN, and outside of containers whose seccomp \
             profile or lockdown forbids bpf; or use the data path nft",
        ),
        _ => (
            format!("a program of two instructions does not load ({source})"),
            "use a kernel with CONFIG_BPF_SYSCALL and CONFIG_NET_CLS_BPF, or the data path nft",
        ),
    };
    Error::Unsupported { reason, remedy }
}

/// What a program returns for a packet of zeros; `None` if it can't be loaded or run.
fn returned(instructions: &[Instruction]) -> Option<i32> {
    let program = load(instructions).ok()?;
    sys::run_classifier(program.as_fd()).ok()
}

/// Reads the start of the kernel's own struct of the packet.
fn read_kernel() -> Vec<Instruction> {
    vec![
        move_register(3, 1),
        move_register(1, 10),
        add_number(1, -8),
        move_number(2, 8),
        call(PROBE_READ_KERNEL),
        EXIT,
    ]
}

/// Reads the fields by the kernel's own struct of the packet.
fn read_fields(places: &SkbPlaces, cast: u32) -> Vec<Instruction> {
    let place = |field: u16| i16::try_from(places.first + field).unwrap_or(i16::MAX);
    let mut program = vec![skb::call_kernel(cast), load_byte(1, 0, place(places.state))];
    let numbers = [
        places.checksum_start,
        places.checksum_offset,
        places.mac_header,
    ];
    program.extend(numbers.map(|field| load_half(1, 0, place(field))));
    program.extend([move_number(0, 0), EXIT]);
    program
}

/// Looks a route up for no address family: flags are judged before that.
fn fib_lookup(flags: u32) -> Vec<Instruction> {
    let mut program: Vec<Instruction> = (1..=FIB_PARAMETERS / 8)
        .map(|place| store_zero(-8 * place))
        .collect();
    program.extend([
        move_register(2, 10),
        add_number(2, -i32::from(FIB_PARAMETERS)),
        move_number(3, FIB_PARAMETERS.cast_unsigned().into()),
        move_number(4, flags),
        call(FIB_LOOKUP),
        EXIT,
    ]);
    program
}

const EXIT: Instruction = [0x95, 0, 0, 0, 0, 0, 0, 0];

fn move_number(to: u8, number: u32) -> Instruction {
    instruction(0xb7, to, 0, 0, number.cast_signed())
}

fn move_register(to: u8, from: u8) -> Instruction {
    instruction(0xbf, to, from, 0, 0)
}

fn add_number(to: u8, number: i32) -> Instruction {
    instruction(0x07, to, 0, 0, number)
}

fn load_byte(to: u8, from: u8, offset: i16) -> Instruction {
    instruction(0x71, to, from, offset, 0)
}

/// Two bytes.
fn load_half(to: u8, from: u8, offset: i16) -> Instruction {
    instruction(0x69, to, from, offset, 0)
}

/// Eight bytes on the stack.
fn store_zero(offset: i16) -> Instruction {
    instruction(0x7a, 10, 0, offset, 0)
}

fn call(function: i32) -> Instruction {
    instruction(0x85, 0, 0, 0, function)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn netns_a_helper_that_is_tried_runs() {
        // This flag is as old as the helper: whatever else fails, this must not.
        assert_eq!(returned(&fib_lookup(1)), Some(-libc::EAFNOSUPPORT));
        // And this one doesn't exist.
        assert_eq!(returned(&fib_lookup(1 << 20)), Some(-libc::EINVAL));
        probe().expect("root may load programs");
        check_filters().expect("this kernel has filters");
        let types = Btf::of_kernel().expect("this kernel tells its types");
        let (places, cast) = skb_fields(Some(&types), true);
        assert_ne!(places, SkbPlaces::default());
        assert_ne!(probe().unwrap().netns_places, NetnsPlaces::default());
        // What is behind the struct can't be read so.
        let elsewhere = SkbPlaces {
            first: 0,
            checksum_start: i16::MAX.cast_unsigned(),
            ..places
        };
        // Since Linux 6.2 there is one.
        assert_eq!(cast, skb::told_by(&types).unwrap().cast);
        if let Some(cast) = cast {
            assert_eq!(returned(&read_fields(&elsewhere, cast)), None);
        }
    }
}
