//! The data path in a lab: maps, pins, attachments and packets, judged by `tc`, `bpftool` and sockets.

mod attach;
mod compilers;
mod divert;
mod ledgers;
mod maps;
mod migrate;
mod packets;

use std::{net::Ipv4Addr, path::Path, process::Command};

use sandwire_kernel_net::interface::InterfaceIndex;

use crate::{
    Datapath, Opened, Settings, TraceReader,
    abi::{self, Nic, NicState},
    folder_for,
};

/// Any number of threads may use a data path, and any one of them read events.
const _: fn() = || {
    fn is_shared<T: Send + Sync>() {}
    fn is_sent<T: Send>() {}
    is_shared::<Datapath>();
    is_sent::<TraceReader>();
};

/// Settings of a small data path that mounts its own bpffs.
fn settings() -> Settings {
    Settings {
        mount: true,
        nics_max: 256,
        answers_max: 1024,
        ..Settings::new(folder_for("test"))
    }
}

fn open(settings: &Settings) -> Datapath {
    let Opened {
        datapath,
        migrated_from,
    } = Datapath::open(settings).unwrap();
    assert_eq!(migrated_from, None);
    datapath
}

const GUEST_MAC: [u8; 6] = [0x06, 0, 0xc0, 0xa8, 0xf1, 2];
const GATEWAY_MAC: [u8; 6] = [2, 0x73, 0x77, 0, 0, 1];
const SHARED_MAC: [u8; 6] = [2, 0x73, 0x77, 0x68, 0, 1];
const GUEST: Ipv4Addr = Ipv4Addr::new(192, 168, 241, 2);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 168, 241, 1);

/// A host slot's entry, ready.
fn nic(host_end: InterfaceIndex, shared: InterfaceIndex, clone: Ipv4Addr) -> Nic {
    Nic {
        state: NicState::Ready.number(),
        ifindex: host_end.0,
        shared_ifindex: shared.0,
        mtu: 1500,
        guest_mac: GUEST_MAC,
        gateway_mac: GATEWAY_MAC,
        shared_mac: SHARED_MAC,
        guest4: abi::network_order(GUEST),
        clone4: abi::network_order(clone),
        gateway4: abi::network_order(GATEWAY),
        count: 1,
        ..Nic::default()
    }
}

/// No interface has it.
const NOWHERE: InterfaceIndex = InterfaceIndex(4711);

fn clone_of(index: u32) -> Ipv4Addr {
    Ipv4Addr::from(0x0a40_0000 + index)
}

fn index_of(name: &str) -> InterfaceIndex {
    let text = std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")).unwrap();
    InterfaceIndex(text.trim().parse().unwrap())
}

/// Output of a command as JSON.
fn json(program: &str, arguments: &[&str]) -> serde_json::Value {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
    serde_json::from_slice(&output.stdout).unwrap()
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
