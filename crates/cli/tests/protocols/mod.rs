//! Conversations in protocols that programs speak every day, between two places. Both ends are sockets of the kernel, used by
//! `peer.py`, which compares every byte.

#![allow(dead_code, reason = "each test executable uses the part that it needs")]

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use sandwire_testlab::namespace::command_in;

const PEER: &str = include_str!("peer.py");

/// What programs of every identity may speak.
pub(crate) const COMMON: [&str; 8] = [
    "tcp",
    "tcp-tiny-segments",
    "tcp-fast-open",
    "tcp-urgent",
    "udp-large",
    "udp-without-checksums",
    "udp-segments",
    "udp-segments-as-one",
];

/// Much data of TCP, one way.
pub(crate) const BULK: &str = "tcp-bulk";

/// With checksums over a part of each datagram.
pub(crate) const UDP_LITE: &str = "udp-lite";

/// What sandboxes may speak: that, and what identities can't make sockets of.
pub(crate) fn all() -> Vec<&'static str> {
    [&COMMON[..], &["mptcp", UDP_LITE]].concat()
}

/// Where an end is.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) netns: PathBuf,
    /// Folder of a cgroup that it is in.
    pub(crate) cgroup: Option<String>,
}

impl Place {
    /// A network namespace, in which TCP's first packet may bring data from now on.
    pub(crate) fn namespace(netns: &Path) -> Self {
        let allow = command_in(netns, "sysctl")
            .args(["-q", "net.ipv4.tcp_fastopen=3"])
            .status();
        assert!(allow.unwrap().success());
        Self {
            netns: netns.to_owned(),
            cgroup: None,
        }
    }

    fn python(&self) -> Command {
        let Some(cgroup) = &self.cgroup else {
            return command_in(&self.netns, "python3");
        };
        let mut command = command_in(&self.netns, "sh");
        let enter = format!("echo 0 > {cgroup}/cgroup.procs; exec python3 \"$@\"");
        command.args(["-c", &enter, "sh"]);
        command
    }

    fn start(&self, role: &str, protocol: &str, address: &str, port: u16) -> Child {
        self.python()
            .args(["-c", PEER, role, protocol, address, &port.to_string()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }
}

/// A caller, a server, and the server's address.
pub(crate) struct Between<'a>(
    pub(crate) &'a Place,
    pub(crate) &'a Place,
    pub(crate) &'a str,
);

impl Between<'_> {
    /// Has both ends talk, and collects what went wrong.
    fn talk(&self, protocol: &str, port: u16) -> Vec<String> {
        let Self(caller, server, address) = self;
        let mut serving = server.start("serve", protocol, address, port);
        let mut said = String::new();
        let output = serving.stdout.as_mut().unwrap();
        BufReader::new(output).read_line(&mut said).unwrap();
        let calling = (said == "ready\n").then(|| caller.start("call", protocol, address, port));
        let ends = [("caller", calling), ("server", Some(serving))];
        let complaints = ends.into_iter().filter_map(|(end, process)| {
            let complaint = complaint(process?)?;
            Some(format!("{protocol} at {address}, {end}: {complaint}"))
        });
        complaints.collect()
    }
}

/// What an end complained of.
fn complaint(end: Child) -> Option<String> {
    let ended = end.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    (!ended.status.success()).then_some(said)
}

/// Wants all that is said in these protocols to arrive.
#[track_caller]
pub(crate) fn assert_pass(protocols: &[&str], between: &[Between<'_>]) {
    // Each conversation has a port of its own: what is left of one is nothing to the next.
    let mut ports = 7000..;
    for between in between {
        for protocol in protocols {
            let wrong = between.talk(protocol, ports.next().unwrap());
            assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        }
    }
}
