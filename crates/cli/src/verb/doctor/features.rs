//! Probes of kernel features, in a network namespace that goes with this process.
//!
//! Each makes the thing itself; version numbers say nothing about what a kernel was built with.

use std::{io, net::Ipv4Addr};

use nix::sched::CloneFlags;
use rustix::net::{AddressFamily, SocketType};
use sandwire_kernel_net::{
    Error,
    interface::{self, Change, InterfaceIndex, InterfacePair, PairDevice},
    netlink::{CREATE, Request, Socket, attribute::Writer},
    netns::Home,
    nft::{self, Batch, Chain, ChainKind, Hook, Policy},
    probe::{
        bpf::{self, Program},
        netkit,
    },
    procfs::PrivateProcfs,
    tap,
};

use super::{
    host::setting,
    probe::{Probed, Results},
};

const TAP: &str = "probetap0";
const VETH: &str = "probeveth0";
const PEER: &str = "probeveth1";
const VETH_INDEX: InterfaceIndex = InterfaceIndex(100);
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;
const TC_H_ROOT: u32 = 0xffff_ffff;
const TC_H_CLSACT: u32 = 0xffff_fff1;
const TC_H_CLSACT_INGRESS: u32 = 0xffff_fff2;
const ETH_P_ALL_BE: u32 = 0x0300;

/// Probes everything. Without privileges a user namespace lends them, as far as it can.
pub(super) fn probe_all() -> Results {
    let mut results = Results::from([("IPv6".to_owned(), ipv6_support())]);
    let mut note = |name: &str, probed: Probed| results.insert(name.to_owned(), probed);
    if !rustix::process::geteuid().is_root() {
        // A refusal shows in the next step.
        let _ = nix::sched::unshare(CloneFlags::CLONE_NEWUSER);
    }
    let entered = Home::here().and_then(|home| home.unshare());
    note("network namespaces", probed(entered.as_ref().map(|_| ())));
    // Everything below would change the host's own namespace.
    let Ok(inside) = entered else {
        return results;
    };
    // From within a user namespace there is no way back; this process ends here anyway.
    std::mem::forget(inside);
    note("private procfs", probed(PrivateProcfs::new().map(drop)));
    let mut socket = match Socket::route() {
        Ok(socket) => socket,
        Err(error) => {
            note("rtnetlink", probed(Err(error)));
            return results;
        }
    };
    let plain = tap::Options {
        vnet_header: true,
        multi_queue: false,
        owner: None,
        group: None,
    };
    let multi_queue = tap::Options {
        multi_queue: true,
        ..plain
    };
    note("TUN/TAP", probed(tap::create(TAP, None, plain)));
    note(
        "multi-queue TAP",
        probed(tap::create("probetap1", None, multi_queue)),
    );
    note("veth", probed(create_veth(&mut socket)));
    note(
        "bridge",
        probed(send(&mut socket, |request| {
            interface::create_bridge(request, "probebr0", None)
        })),
    );
    for kind in ["macvlan", "ipvlan"] {
        note(kind, probed(create_above_veth(&mut socket, kind)));
    }
    let netkit = Home::here().and_then(|here| netkit::make_pair(&mut socket, &here));
    note("netkit", probed(netkit));
    let fq = add_queue_discipline(&mut socket, "fq", (0x10_0000, TC_H_ROOT));
    note("fq", probed(fq));
    for (name, trial) in probe_nft() {
        note(name, probed(trial));
    }
    for (name, trial) in probe_bpf(&mut socket) {
        note(name, probed(trial));
    }
    note("identities", identities());
    let xdp_socket = rustix::net::socket(AddressFamily::XDP, SocketType::RAW, None);
    note(
        "AF_XDP",
        probed_io(xdp_socket.map(drop).map_err(Into::into)),
    );
    results
}

/// New interfaces, which pools need, have what `default` says: in this namespace, not in one of ours.
fn ipv6_support() -> Probed {
    const OFF: &str = "net/ipv6/conf/default/disable_ipv6";
    let (found, detail) = match setting(OFF).as_deref() {
        None => (false, "unknown to the kernel".to_owned()),
        Some("0") => (true, "known to the kernel".to_owned()),
        Some(_) => (false, format!("switched off ({})", OFF.replace('/', "."))),
    };
    Probed {
        found: Some(found),
        detail,
    }
}

/// Whether the programs of identities load.
fn identities() -> Probed {
    let mut probed = Probed::of_trial(sandwire_identity::probe(), |error| {
        may_be_others_right() && matches!(error, sandwire_identity::Error::Forbidden { .. })
    });
    if probed.found == Some(true)
        && let Err(error) = sandwire_identity::probe_receivers()
    {
        probed.detail = format!("tried; UDP on the wildcard has one address: {error}");
    }
    // The verifier's words are many; the first line says which program it is.
    if let Some((first, _)) = probed.detail.split_once('\n') {
        probed.detail = first.to_owned();
    }
    probed
}

/// Whether what is refused to us may be granted to the daemon. Root is refused what a container, for example, may not do,
/// and the daemon neither.
fn may_be_others_right() -> bool {
    !rustix::process::geteuid().is_root()
}

fn probed<E: std::borrow::Borrow<Error> + std::fmt::Display>(trial: Result<(), E>) -> Probed {
    let is_refused_to_us = |error: &E| {
        let errno = error.borrow().errno();
        may_be_others_right() && (errno == Some(libc::EPERM) || errno == Some(libc::EACCES))
    };
    Probed::of_trial(trial, is_refused_to_us)
}

fn probed_io(trial: Result<(), io::Error>) -> Probed {
    Probed::of_trial(trial, |error| {
        may_be_others_right() && error.kind() == io::ErrorKind::PermissionDenied
    })
}

fn send(socket: &mut Socket, fill: impl FnOnce(&mut Request)) -> Result<(), Error> {
    let mut request = Request::new();
    fill(&mut request);
    socket.execute(request)
}

fn create_veth(socket: &mut Socket) -> Result<(), Error> {
    let here = Home::here()?;
    let pair = InterfacePair {
        device: PairDevice::Veth,
        name: VETH,
        index: VETH_INDEX,
        peer_name: PEER,
        peer_namespace: std::os::fd::AsFd::as_fd(&here),
        mac: [2, 0, 0, 0, 0, 1],
        peer_mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        dormant: None,
    };
    send(socket, |request| {
        pair.create(request);
        let up = Change {
            name: VETH,
            up: Some(true),
            ..Change::default()
        };
        up.apply(request);
    })
}

/// Message about an interface: a family header of 16 bytes, then attributes.
fn create_interface(
    socket: &mut Socket,
    kind: &str,
    fill: impl FnOnce(&mut Writer<'_>),
) -> Result<(), Error> {
    send(socket, |request| {
        let object = format!("{kind} interface");
        request.message((libc::RTM_NEWLINK, CREATE), "create", object, |message| {
            message.raw(&[0; 16]);
            fill(message);
            message.nest(libc::IFLA_LINKINFO, |info| {
                info.put_text(libc::IFLA_INFO_KIND, kind)
            });
        });
    })
}

fn create_above_veth(socket: &mut Socket, kind: &str) -> Result<(), Error> {
    let name = format!("probe{kind}");
    create_interface(socket, kind, |message| {
        message.put_text(libc::IFLA_IFNAME, &name);
        message.put_u32(libc::IFLA_LINK, VETH_INDEX.0);
    })?;
    // An interface has children of one kind: beside this one the next would be refused.
    send(socket, |request| interface::delete(request, &name))
}

/// Header of a traffic control message.
fn traffic_header(handle: u32, parent: u32, info: u32) -> [u8; 20] {
    let mut header = [0; 20];
    header[4..8].copy_from_slice(&VETH_INDEX.0.to_ne_bytes());
    header[8..12].copy_from_slice(&handle.to_ne_bytes());
    header[12..16].copy_from_slice(&parent.to_ne_bytes());
    header[16..].copy_from_slice(&info.to_ne_bytes());
    header
}

fn add_queue_discipline(
    socket: &mut Socket,
    kind: &str,
    (handle, parent): (u32, u32),
) -> Result<(), Error> {
    send(socket, |request| {
        let object = format!("queue discipline {kind}");
        request.message((libc::RTM_NEWQDISC, CREATE), "create", object, |message| {
            message.raw(&traffic_header(handle, parent, 0));
            message.put_text(TCA_KIND, kind);
        });
    })
}

fn base_chain(name: &'static str, kind: ChainKind, hook: Hook) -> Chain<'static> {
    Chain::Base {
        name,
        kind,
        hook,
        priority: 0,
        policy: Policy::Accept,
    }
}

/// As the relay's rules: what it takes, and from whom.
fn add_transparent_proxy(batch: &mut Batch<'_>) {
    batch.add_chain(&base_chain("in", ChainKind::Filter, Hook::Prerouting));
    batch.add_rule("in", &nft::Rule::new().for_a_socket().accept());
    let listener = (Ipv4Addr::LOCALHOST, 9).into();
    batch.add_rule("in", &nft::Rule::new().give_to_socket(listener).accept());
    batch.add_chain(&base_chain("out", ChainKind::Filter, Hook::Output));
    batch.add_rule("out", &nft::Rule::new().socket_cgroup(1, 1).accept());
}

fn probe_nft() -> Vec<(&'static str, Result<(), Error>)> {
    let trial = |fill: &dyn Fn(&mut Batch<'_>)| {
        let mut batch = Batch::new("probe");
        batch.recreate_table();
        fill(&mut batch);
        batch.commit(&mut Socket::netfilter()?)
    };
    let with_rule = |rule: nft::Rule| {
        trial(&|batch| {
            batch.add_chain(&base_chain("c", ChainKind::Filter, Hook::Forward));
            batch.add_rule("c", &rule);
        })
    };
    vec![
        (
            "nf_tables",
            trial(&|batch| batch.add_chain(&base_chain("c", ChainKind::Filter, Hook::Forward))),
        ),
        (
            "nf_tables NAT",
            trial(&|batch| {
                batch.add_chain(&base_chain("c", ChainKind::Nat, Hook::Postrouting));
                batch.add_rule("c", &nft::Rule::new().masquerade());
            }),
        ),
        (
            "connection tracking",
            with_rule(nft::Rule::new().state(nft::CtState::ESTABLISHED).accept()),
        ),
        (
            "connection limit",
            with_rule(
                nft::Rule::new()
                    .state(nft::CtState::NEW)
                    .connections_over(9)
                    .drop(),
            ),
        ),
        (
            "packet limit",
            with_rule(nft::Rule::new().at_most(9, 9).drop()),
        ),
        (
            "sets of ranges with several fields",
            trial(&|batch| {
                let fields = [
                    nft::Field::Address(nft::Family::Ipv4),
                    nft::Field::Protocol,
                    nft::Field::Port,
                ];
                batch.add_set(&nft::Set {
                    name: "s",
                    kind: nft::SetKind::Ranges,
                    key: &fields,
                });
            }),
        ),
        ("transparent proxy", trial(&add_transparent_proxy)),
    ]
}

fn probe_bpf(socket: &mut Socket) -> Vec<(&'static str, Result<(), Error>)> {
    let index_of = |socket: &mut Socket, name: &str| {
        interface::find(socket, name)
            .map(|found| found.map_or(InterfaceIndex(0), |found| found.index))
    };
    let attach = |hook, index: Result<InterfaceIndex, Error>| {
        index
            .and_then(|index| Program::load(hook)?.attach(index))
            .map(drop)
    };
    let (tap, veth) = (index_of(socket, TAP), index_of(socket, VETH));
    vec![
        ("BPF", Program::load(bpf::Hook::Tcx).map(drop)),
        ("TCX", attach(bpf::Hook::Tcx, Ok(InterfaceIndex::LOOPBACK))),
        ("native XDP on TAP", attach(bpf::Hook::NativeXdp, tap)),
        ("native XDP on veth", attach(bpf::Hook::NativeXdp, veth)),
        (
            "cls_bpf",
            Program::load(bpf::Hook::Tcx).and_then(|program| attach_filter(socket, &program)),
        ),
    ]
}

/// Attaches a program the older way: a filter of the clsact queue discipline.
fn attach_filter(socket: &mut Socket, program: &Program) -> Result<(), Error> {
    use std::os::fd::AsRawFd;
    add_queue_discipline(socket, "clsact", (0xffff_0000, TC_H_CLSACT))?;
    send(socket, |request| {
        request.message(
            (libc::RTM_NEWTFILTER, CREATE),
            "create",
            "filter bpf",
            |message| {
                // Priority 1 for all protocols.
                message.raw(&traffic_header(
                    0,
                    TC_H_CLSACT_INGRESS,
                    1 << 16 | ETH_P_ALL_BE,
                ));
                message.put_text(TCA_KIND, "bpf");
                message.nest(TCA_OPTIONS, |options| {
                    options.put_u32(TCA_BPF_FD, program.descriptor().as_raw_fd().cast_unsigned());
                    options.put_u32(TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT);
                });
            },
        );
    })
}
