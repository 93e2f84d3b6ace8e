//! Firecracker, whose vsock device is its own: what a lease says to it, the sockets that it makes, and the router's.

use std::{
    env,
    io::{Read, Write},
    path::Path,
};

use sandwire_testlab::{capabilities::FIRECRACKER_KERNEL, guest::firecracker::Recipe, lab};
use serde_json::Value;

use super::{
    ECHO, HASH, STREAM_BLOCKS, assert_echoes, leased, said_through,
    vsock::{Channel, GUEST_COMMANDS, GUEST_ECHO, SECOND, answer_hash, serve_stream, until},
};

/// A KVM that emulates takes minutes for a gibibyte.
const BLOCKS: u64 = STREAM_BLOCKS / 16;

#[test]
#[ignore = "needs root, Firecracker and a kernel for it: cargo xtask test firecracker"]
fn firecracker_speaks_both_ways_with_what_a_lease_says_to_it() {
    lab::run_within(400 * SECOND, |lab| {
        let (daemon, lease) = leased(lab, "hybrid");
        let hash = lab.folder().join("hash.sock");
        serve_stream(&hash, answer_hash);
        let allow = format!("vsock policy allow one {HASH} unix:{}", hash.display());
        assert!(daemon.output(&allow).unwrap().status.success());

        let kernel = env::var(FIRECRACKER_KERNEL).unwrap();
        let recipe = Recipe::prepare_for_vsock(Path::new(&kernel), lab.folder()).unwrap();
        let body = lease["vsock"]["firecracker_vsock"].as_str().unwrap();
        let body: Value = serde_json::from_str(body).unwrap();
        let guest = recipe.boot_with_vsock("one", body).unwrap();
        let socket = Path::new(lease["vsock"]["socket"].as_str().unwrap());
        let channel = Channel::in_folder(socket.parent().unwrap());
        until("the guest serves its ports", || {
            channel.try_connect(GUEST_ECHO).is_some()
        });

        // The host calls: Firecracker's own socket, by hand and by the command line.
        assert_echoes(&channel, "by its own socket");
        channel.assert_carries_in(BLOCKS);
        let connect = format!("vsock connect one {GUEST_ECHO}");
        assert_eq!(said_through(lab, &daemon, &connect), "by the command line");

        // The guest calls: a port of its policy, all of it and half of the connection after the other; and
        // others.
        let said = command(&channel, &format!("send 2 {HASH} {BLOCKS}")).unwrap();
        let [sent, answer, _took] = said.split(" | ").collect::<Vec<_>>()[..] else {
            panic!("{said}; the console: {}", guest.console());
        };
        assert_eq!(answer, sent);
        command(&channel, &format!("try stream 2 {ECHO}")).unwrap_err();
        let shown = daemon.json("vsock list one --channels").unwrap();
        let traffic = &shown[0]["traffic"];
        assert_eq!(traffic["attached"], true, "{shown}");
        assert_eq!(traffic["opened_by_guest"], 1, "{shown}");
        assert!(
            traffic["egress_bytes"].as_u64() >= Some(BLOCKS * 65_536),
            "{shown}"
        );
    });
}

/// Has the guest do something, over its own vsock; what it says, or the error.
fn command(channel: &Channel, command: &str) -> Result<String, String> {
    let mut stream = channel.connect(GUEST_COMMANDS);
    writeln!(stream, "{command}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let answer = answer.trim_end();
    match answer.strip_prefix("ok ") {
        Some(said) => Ok(said.to_owned()),
        None => Err(answer.to_owned()),
    }
}
