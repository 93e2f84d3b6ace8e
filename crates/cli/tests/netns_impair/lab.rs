//! A far host behind a veth, a service, and the verb.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{command, iperf3, lab::Lab, namespace, sandwire};
use serde_json::Value;

/// Here `near0` with 10.9.0.1 and fd09::1, in the namespace `far` `far0` with 10.9.0.2 and fd09::2.
pub(crate) fn interfaces(lab: &Lab) {
    lab.shell(
        "ip netns add far
         ip link add near0 type veth peer name far0 netns far
         ip addr add 10.9.0.1/24 dev near0; ip addr add fd09::1/64 dev near0 nodad
         ip link set near0 up
         ip -n far addr add 10.9.0.2/24 dev far0; ip -n far addr add fd09::2/64 dev far0 nodad
         ip -n far link set far0 up; ip -n far link set lo up",
    );
    // So that no test waits for ARP.
    lab.run("ping -n -q -c 1 10.9.0.2");
}

/// The same, each of which is the other's way to all others.
pub(crate) fn interfaces_with_default_routes(lab: &Lab) {
    interfaces(lab);
    lab.shell(
        "ip route add default via 10.9.0.2 dev near0
         ip -n far route add default via 10.9.0.1",
    );
}

/// A service of its own.
pub(crate) struct Service {
    pub(crate) folder: PathBuf,
    child: Option<Child>,
}

impl Service {
    /// Starts one, and waits until it listens.
    pub(crate) fn start(lab: &Lab) -> Self {
        let mut service = Self::at(lab);
        service.restart();
        service
    }

    /// One that runs from [`Service::restart`] on, or that somebody else starts in its folder.
    pub(crate) fn at(lab: &Lab) -> Self {
        Self {
            folder: lab.folder().join("impair"),
            child: None,
        }
    }

    pub(crate) fn restart(&mut self) {
        self.run_by(command(&self.folder, "serve"));
    }

    /// Starts it from within that namespace, and waits until it listens.
    pub(crate) fn start_in(&mut self, netns: &str) {
        self.run_by(command_in(netns, &self.folder, "serve"));
    }

    fn run_by(&mut self, mut command: Command) {
        self.child = Some(command.spawn().unwrap());
        let socket = self.folder.join("control.sock");
        let listens = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
        wait_until("the service listens", listens);
    }

    /// Ends it by SIGKILL.
    pub(crate) fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Ends it by SIGTERM, and waits.
    pub(crate) fn terminate(&mut self) {
        let mut child = self.child.take().unwrap();
        command::run(&format!("kill {}", child.id())).unwrap();
        assert!(child.wait().unwrap().success());
    }

    /// Runs the verb; words that hold spaces stand in `'…'`.
    pub(crate) fn output(&self, line: &str) -> Output {
        verb(&self.folder, line)
    }

    /// The same; it has to succeed. What it says.
    #[track_caller]
    pub(crate) fn run(&self, line: &str) -> String {
        let output = self.output(line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "impair {line}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The only target, as `show --json` has it.
    #[track_caller]
    pub(crate) fn shown(&self) -> Value {
        let shown: Value = serde_json::from_str(&self.run("show --json")).unwrap();
        let all = shown.as_array().unwrap();
        assert_eq!(all.len(), 1, "{shown:#}");
        all[0].clone()
    }
}

/// Runs the verb with this folder of the service.
pub(crate) fn verb(folder: &Path, line: &str) -> Output {
    command(folder, line).output().unwrap()
}

/// The verb with this folder of the service.
pub(crate) fn command(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(sandwire::executable().unwrap());
    command.arg("impair");
    for (number, piece) in line.split('\'').enumerate() {
        if number % 2 == 1 {
            command.arg(piece);
        } else {
            command.args(piece.split_whitespace());
        }
    }
    command.env("SANDWIRE_IMPAIR_FOLDER", folder);
    command.stdin(Stdio::null());
    command
}

/// The same, as `ip netns exec` has it: with a mount namespace of its own, in which there is no bpffs.
pub(crate) fn command_in(netns: &str, folder: &Path, line: &str) -> Command {
    let verb = command(folder, line);
    let mut command = Command::new("ip");
    command.args(["netns", "exec", netns]);
    command.arg(verb.get_program()).args(verb.get_args());
    command.env("SANDWIRE_IMPAIR_FOLDER", folder);
    command
}

pub(crate) fn wait_until(what: &str, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !happens() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Least and mean round trip in milliseconds of some pings from the far host to here.
pub(crate) fn round_trip(lab: &Lab) -> (f64, f64) {
    // ping waits for its last answers no longer than two round trips: on a machine that is short of
    // processors it leaves too early at times.
    let mut said = String::new();
    wait_until("every ping is answered", || {
        said = lab.run("ip netns exec far ping -n -q -c 20 -i 0.02 10.9.0.1");
        said.contains("20 received")
    });
    let times = said.rsplit("= ").next().unwrap();
    let mut times = times.split('/').map(|time| time.parse().unwrap_or(0.0));
    (times.next().unwrap(), times.next().unwrap())
}

/// Runs iperf3 in the far host; its report.
#[track_caller]
pub(crate) fn iperf3_from_far(options: &str) -> Value {
    let far = namespace::path_of("far");
    iperf3::report(Some(&far), &format!("--client {options}")).unwrap()
}

/// Segments and datagrams with wrong checksums that the kernels saw, here and there.
pub(crate) fn wrong_checksums(lab: &Lab) -> Vec<String> {
    let counters = "nstat -asz TcpInCsumErrors UdpInCsumErrors Udp6InCsumErrors IcmpInCsumErrors";
    let mut wrong = Vec::new();
    for place in ["", "ip netns exec far "] {
        let said = lab.run(&format!("{place}{counters}"));
        let lines = said.lines().filter(|line| line.contains("Csum"));
        wrong.extend(
            lines
                .filter(|line| line.split_whitespace().nth(1) != Some("0"))
                .map(str::to_owned),
        );
    }
    wrong
}

/// Datagrams that were dropped since nobody read them from their sockets in time, here and there.
pub(crate) fn full_sockets(lab: &Lab) -> u64 {
    let mut dropped = 0;
    for place in ["", "ip netns exec far "] {
        let said = lab.run(&format!(
            "{place}nstat -asz UdpRcvbufErrors Udp6RcvbufErrors"
        ));
        let lines = said.lines().filter(|line| line.contains("RcvbufErrors"));
        dropped += lines
            .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
            .sum::<u64>();
    }
    dropped
}
