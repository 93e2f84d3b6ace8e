//! ```text
//!  box                   host (the lab)                     peer                        dest
//!  10.64.0.2 ── veth ── 10.64.0.1   203.0.113.1 ── wire ── 203.0.113.9  198.51.100.1 ── 198.51.100.7
//!  fd64::2              fd64::1     2001:db8:1::1          2001:db8:1::9  2001:db8:5::1   2001:db8:5::7
//! ```
//! The host's default route leads to the peer's host, which forwards: what isn't relayed arrives too, in the clear.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use rustix::process::{Pid, Signal, kill_process};
use sandwire_relay::keys::Authority;
use sandwire_testlab::{
    command::{self, Process},
    host::{ECHO_PORT, serve_tcp, serve_udp},
    namespace::{Namespace, command_in},
    openmetrics, sandwire,
    suspend::Suspended,
};

pub(crate) const MARKER: &str = "this-is-not-to-be-seen-on-the-wire";
pub(crate) const DESTINATIONS: [&str; 2] = ["198.51.100.7", "2001:db8:5::7"];
pub(crate) const OTHER_ECHO_PORT: u16 = 4007;

const PATIENCE: Duration = Duration::from_secs(60);

/// Ends it as a service manager does.
fn stop(mut process: Process) {
    kill_process(Pid::from_child(&process.0), Signal::TERM).unwrap();
    assert!(process.0.wait().unwrap().success());
}

pub(crate) fn executable() -> PathBuf {
    sandwire::executable().unwrap()
}

pub(crate) fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + 2 * PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

pub(crate) struct Stage {
    folder: PathBuf,
    authority: Authority,
    sandbox: Namespace,
    peer: Namespace,
    dest: Namespace,
    cgroup: PathBuf,
    other_cgroup: PathBuf,
    host_relay: Option<Process>,
    peer_relay: Option<Process>,
    _servers: Vec<Process>,
}

impl Stage {
    pub(crate) fn build(transport: &str) -> Self {
        command::require_on_path(&["curl", "dig", "dnsmasq", "python3", "tcpdump"]).unwrap();
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap();
        let folder = PathBuf::from(format!("/run/lab/relay-{}", now.as_nanos()));
        fs::create_dir(&folder).unwrap();
        let [sandbox, peer, dest] =
            ["box", "peer", "dest"].map(|name| Namespace::create(name).unwrap());
        for line in WIRES.lines().filter(|line| !line.trim().is_empty()) {
            command::run(line).unwrap();
        }
        for sysctl in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            let write = format!("echo 1 > /proc/sys/net/{sysctl}");
            command::shell(&write).unwrap();
            let status = command_in(&peer.path(), "sh").args(["-c", &write]).status();
            assert!(status.unwrap().success());
        }
        let [cgroup, other_cgroup] = ["", "-other"].map(|ending| {
            let name = format!("sandwire-test-{}{ending}", now.as_nanos());
            let cgroup = hierarchy().join(name);
            fs::create_dir(&cgroup).unwrap();
            cgroup
        });
        dest.inside(|| {
            serve_tcp(ECHO_PORT, echo)?;
            serve_udp(ECHO_PORT, |packet, _| packet.to_vec())?;
            serve_udp(OTHER_ECHO_PORT, |packet, _| packet.to_vec())
        })
        .unwrap();
        fs::write(folder.join("page"), MARKER).unwrap();
        let servers = vec![
            serve(
                &dest,
                &format!(
                    "python3 -m http.server 8080 --bind :: --directory {}",
                    folder.display()
                ),
            ),
            serve(
                &peer,
                &format!(
                    "python3 -m http.server 8081 --bind :: --directory {}",
                    folder.display()
                ),
            ),
            serve(
                &dest,
                "dnsmasq --keep-in-foreground --no-resolv --no-hosts --bind-interfaces --listen-address=198.51.100.7 \
                 --port=53 --user=root --pid-file --address=/marker.example/192.0.2.77",
            ),
        ];
        let stage = Self {
            authority: Authority::new("tests").unwrap(),
            folder,
            sandbox,
            peer,
            dest,
            cgroup,
            other_cgroup,
            host_relay: None,
            peer_relay: None,
            _servers: servers,
        };
        stage.configure(transport);
        stage.wait_for_servers();
        stage
    }

    fn wait_for_servers(&self) {
        for (namespace, address) in [
            (&self.dest, "198.51.100.7:8080"),
            (&self.dest, "198.51.100.7:53"),
            (&self.peer, "203.0.113.9:8081"),
        ] {
            let address = address.parse().unwrap();
            namespace
                .inside(move || sandwire_testlab::host::wait_for_server(address, PATIENCE))
                .unwrap();
        }
    }

    fn configure(&self, transport: &str) {
        let folder = self.folder.display();
        let tls = |name: &str| {
            format!(
                "folder = \"{folder}/{name}\"\nreport = \"{folder}/{name}.report\"\n[tls]\ncertificate = \"{folder}/{name}.pem\"\n\
                 key = \"{folder}/{name}.key\"\nauthorities = \"{folder}/authority.pem\"\n[limits]\nudp_idle_seconds = 2\n"
            )
        };
        let host = format!(
            "{}[egress]\nseed = 7\n[[peer]]\nname = \"beyond\"\naddress = \"203.0.113.9:4433\"\n\
             server_name = \"peer.example\"\ntransport = \"{transport}\"\n\
             [[sender]]\nname = \"lab\"\naddresses = [\"10.64.0.0/24\", \"fd64::/64\"]\n\
             [[sender]]\nname = \"batch\"\ncgroup = \"{}\"\n\
             [[sender]]\nname = \"other\"\ncgroup = \"{}\"\n\
             [[redirect]]\nsenders = [\"lab\", \"batch\", \"other\"]\nto = [\"198.51.100.0/24\", \"2001:db8:5::/64\"]\nvia = \"beyond\"\n",
            tls("host"),
            self.cgroup.display(),
            self.other_cgroup.display()
        );
        let peer = format!(
            "{}[deliver]\nlisten = [\"203.0.113.9:4433\"]\nclients = [\"host.example\"]\n\
             allow = [\"198.51.100.0/24\", \"2001:db8:5::/64\"]\n",
            tls("peer")
        );
        fs::write(self.folder.join("host.toml"), host).unwrap();
        fs::write(self.folder.join("peer.toml"), peer).unwrap();
        fs::write(
            self.folder.join("authority.pem"),
            self.authority.certificate(),
        )
        .unwrap();
        self.certify("peer", "peer.example", Duration::from_secs(3600));
        self.certify("host", "host.example", Duration::from_secs(3600));
    }

    /// Has all destinations redirected that there are.
    pub(crate) fn redirect_everywhere(&self) {
        let path = self.folder.join("host.toml");
        let text = fs::read_to_string(&path).unwrap();
        let (start, _) = text.split_once("to = [").unwrap();
        let everywhere = "to = [\"0.0.0.0/0\", \"::/0\"]\nvia = \"beyond\"\n";
        fs::write(&path, format!("{start}{everywhere}")).unwrap();
    }

    /// Adds lines to the section `limits` of a relay.
    pub(crate) fn limit(&self, name: &str, lines: &str) {
        self.exchange(name, "[limits]\n", &format!("[limits]\n{lines}\n"));
    }

    /// Has an identity in place of the second cgroup, and gives it to that cgroup.
    pub(crate) fn add_identity(&self, addresses: [&str; 2]) {
        let origin = format!("cgroup = \"{}\"", self.other_cgroup.display());
        self.exchange("host", &origin, &format!("identity = {addresses:?}"));
        let [ipv4, ipv6] = addresses;
        let line = format!(
            "{} identity add {} --name web --address {ipv4} --address {ipv6}",
            executable().display(),
            self.other_cgroup.display()
        );
        command::run(&line).unwrap();
    }

    /// Has UDP alone redirected.
    pub(crate) fn redirect_udp(&self) {
        let via = "via = \"beyond\"\n";
        self.exchange("host", via, &format!("protocols = [\"udp\"]\n{via}"));
    }

    /// Exchanges a part of a relay's configuration.
    pub(crate) fn exchange(&self, name: &str, before: &str, after: &str) {
        let path = self.folder.join(format!("{name}.toml"));
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(before), "{text}");
        fs::write(&path, text.replacen(before, after, 1)).unwrap();
    }

    /// Adds lines to the end of a relay's configuration.
    pub(crate) fn append(&self, name: &str, lines: &str) {
        let path = self.folder.join(format!("{name}.toml"));
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text + lines).unwrap();
    }

    /// Writes a file beside those of the relays.
    pub(crate) fn write(&self, file: &str, text: &str) -> PathBuf {
        let path = self.folder.join(file);
        fs::write(&path, text).unwrap();
        path
    }

    /// A file of the relays, such as a certificate.
    pub(crate) fn read(&self, file: &str) -> Vec<u8> {
        fs::read(self.folder.join(file)).unwrap()
    }

    /// Who signs the certificates of both relays.
    pub(crate) fn authority(&self) -> &Authority {
        &self.authority
    }

    fn certify(&self, file: &str, name: &str, life: Duration) {
        let certified = self.authority.certify(name, life).unwrap();
        for (ending, text) in [("key", certified.key), ("pem", certified.certificate)] {
            let new = self.folder.join("new");
            fs::write(&new, text).unwrap();
            fs::rename(&new, self.folder.join(format!("{file}.{ending}"))).unwrap();
        }
    }

    pub(crate) fn certify_host(&self, name: &str, life: Duration) {
        self.certify("host", name, life);
    }

    pub(crate) fn remove_host_key(&self) {
        fs::remove_file(self.folder.join("host.key")).unwrap();
    }

    fn relay(&self, name: &str, namespace: Option<&Path>) -> Process {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.join(format!("{name}.log")))
            .unwrap();
        let program = executable();
        let mut command = match namespace {
            None => Command::new(&program),
            Some(path) => command_in(path, program.to_str().unwrap()),
        };
        let config = self.folder.join(format!("{name}.toml"));
        command.args(["relay", "serve", "--config"]).arg(config);
        let marks = |stage: &Self| stage.log(name).matches("the relay is ready").count();
        let before = marks(self);
        let mut process = Process(command.stdout(Stdio::null()).stderr(log).spawn().unwrap());
        wait_for("the relay is ready", || {
            assert!(
                process.0.try_wait().unwrap().is_none(),
                "{}",
                self.log(name)
            );
            marks(self) > before
        });
        process
    }

    pub(crate) fn start_host(&mut self) {
        self.host_relay = Some(self.relay("host", None));
    }

    pub(crate) fn start_peer(&mut self) {
        self.peer_relay = Some(self.relay("peer", Some(&self.peer.path())));
    }

    fn process(&self, name: &str) -> &Child {
        let relay = if name == "host" {
            &self.host_relay
        } else {
            &self.peer_relay
        };
        &relay.as_ref().unwrap().0
    }

    /// What the kernel says of each thread of a relay.
    pub(crate) fn threads(&self, name: &str) -> Vec<String> {
        let tasks = format!("/proc/{}/task", self.process(name).id());
        let tasks = fs::read_dir(tasks).unwrap();
        tasks
            .map(|task| fs::read_to_string(task.unwrap().path().join("status")).unwrap())
            .collect()
    }

    /// Has a relay read its configuration again; what it says of that.
    pub(crate) fn reload(&self, name: &str) -> String {
        let outcomes = |log: &str| -> Vec<String> {
            let is_one = |line: &&str| line.contains("the configuration ");
            log.lines().filter(is_one).map(str::to_owned).collect()
        };
        let before = outcomes(&self.log(name)).len();
        kill_process(Pid::from_child(self.process(name)), Signal::HUP).unwrap();
        wait_for("the configuration is read", || {
            outcomes(&self.log(name)).len() > before
        });
        outcomes(&self.log(name)).pop().unwrap()
    }

    pub(crate) fn kill_host(&mut self) {
        self.host_relay = None;
    }

    /// As `systemctl stop` does.
    pub(crate) fn stop_host(&mut self) {
        stop(self.host_relay.take().unwrap());
    }

    pub(crate) fn stop_peer(&mut self) {
        stop(self.peer_relay.take().unwrap());
    }

    pub(crate) fn kill_peer(&mut self) {
        self.peer_relay = None;
    }

    pub(crate) fn host_refuses(&self) -> String {
        let config = self.folder.join("host.toml");
        let output: Output = Command::new(executable())
            .args(["relay", "serve", "--config"])
            .arg(config)
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    }

    /// The same in the cgroup that is redirected.
    pub(crate) fn host_refuses_in_cgroup(&self) -> String {
        let (program, config) = (executable(), self.folder.join("host.toml"));
        let line = format!(
            "timeout 10 {} relay serve --config {}",
            program.display(),
            config.display()
        );
        in_cgroup(&self.cgroup, &line).unwrap_err()
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.folder.join(format!("{name}.log"))).unwrap_or_default()
    }

    pub(crate) fn host_log(&self) -> String {
        self.log("host")
    }

    pub(crate) fn peer_log(&self) -> String {
        self.log("peer")
    }

    /// The peer's report, once the last flows of datagrams have ended.
    pub(crate) fn report(&self) -> String {
        let read = || fs::read_to_string(self.folder.join("peer.report")).unwrap_or_default();
        wait_for("flows end", || read().contains("\"outcome\":\"idle\""));
        read()
    }

    /// What is reported of a relay's connections until now.
    pub(crate) fn report_of(&self, name: &str) -> String {
        fs::read_to_string(self.folder.join(format!("{name}.report"))).unwrap_or_default()
    }

    pub(crate) fn metrics(&self, name: &str) -> String {
        let socket = self.folder.join(name).join("metrics.sock");
        let line = format!(
            "curl -sS --unix-socket {} http://relay/metrics",
            socket.display()
        );
        let metrics = command::run(&line).unwrap();
        openmetrics::families(&metrics).unwrap();
        metrics
    }

    /// Has the peer's machine call from these ports alone.
    pub(crate) fn narrow_ports_of_peer(&self, range: &str) {
        let write = format!("echo {range} > /proc/sys/net/ipv4/ip_local_port_range");
        let mut narrow = command_in(&self.peer.path(), "sh");
        command::output_of(narrow.args(["-c", &write])).unwrap();
    }

    pub(crate) fn box_path(&self) -> PathBuf {
        self.sandbox.path()
    }

    /// Waits until the sandbox is served, upon `what`.
    pub(crate) fn wait_for_a_page(&self, what: &str) {
        wait_for(what, || {
            self.in_box("curl -sS --max-time 5 http://198.51.100.7:8080/page")
                .is_ok()
        });
    }

    pub(crate) fn in_box(&self, line: &str) -> Result<String, String> {
        self.sandbox
            .run(line)
            .map_err(|error| format!("{error:#}\n{}", self.host_log()))
    }

    pub(crate) fn in_peer(&self, line: &str) -> String {
        self.peer.run(line).unwrap()
    }

    pub(crate) fn peer_path(&self) -> PathBuf {
        self.peer.path()
    }

    pub(crate) fn inside_peer<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.peer.inside(|| Ok(work())).unwrap()
    }

    pub(crate) fn inside_box<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.sandbox.inside(|| Ok(work())).unwrap()
    }

    pub(crate) fn inside_dest<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.dest.inside(|| Ok(work())).unwrap()
    }

    pub(crate) fn in_cgroup(&self, line: &str) -> String {
        in_cgroup(&self.cgroup, line).unwrap_or_else(|error| panic!("{error}\n{}", self.host_log()))
    }

    /// By a process of the identity.
    pub(crate) fn in_identity(&self, line: &str) -> Result<String, String> {
        in_cgroup(&self.other_cgroup, line).map_err(|error| format!("{error}\n{}", self.host_log()))
    }

    /// As a unit's `ExecStartPre=` does: in the cgroup, before anything else runs in it.
    pub(crate) fn steer_in_cgroup(&self) -> Result<String, String> {
        in_cgroup(&self.cgroup, &self.steering())
    }

    /// The same, and a line right behind it, which has nothing to wait for.
    pub(crate) fn steer_and_run_in_cgroup(&self, line: &str) -> String {
        let line = format!("sh -c '{} >&2 && exec {line}'", self.steering());
        self.in_cgroup(&line)
    }

    fn steering(&self) -> String {
        let config = self.folder.join("host.toml");
        let program = executable();
        let (program, config) = (program.display(), config.display());
        format!("{program} relay steer --config {config}")
    }

    /// Neither by TCP nor by UDP does a process of the cgroup get an answer.
    pub(crate) fn cgroup_is_cut_off(&self) {
        for line in [
            "curl -sS --max-time 3 http://198.51.100.7:8080/page",
            "curl -sS --max-time 3 http://[2001:db8:5::7]:8080/page",
            "dig +short +tries=1 +time=2 @198.51.100.7 marker.example",
        ] {
            assert!(in_cgroup(&self.cgroup, line).is_err(), "{line}");
        }
    }

    pub(crate) fn make_other_cgroup(&self) {
        fs::create_dir(&self.other_cgroup).unwrap();
    }

    /// By a process of the second cgroup.
    pub(crate) fn in_other_cgroup(&self, line: &str) -> String {
        in_cgroup(&self.other_cgroup, line).unwrap()
    }

    /// Lines of a configuration that name the second cgroup's sender.
    pub(crate) fn other_sender(&self) -> String {
        let cgroup = self.other_cgroup.display();
        format!("[[sender]]\nname = \"other\"\ncgroup = \"{cgroup}\"\n")
    }

    /// As when one service was started anew and another one has ended.
    pub(crate) fn make_cgroup_anew_without_the_other(&self) {
        for cgroup in [&self.cgroup, &self.other_cgroup] {
            wait_for("the cgroup can be deleted", || {
                fs::remove_dir(cgroup).is_ok()
            });
        }
        fs::create_dir(&self.cgroup).unwrap();
    }

    /// As when a service was started anew.
    pub(crate) fn make_cgroup_anew(&self) {
        wait_for("the cgroup can be deleted", || {
            fs::remove_dir(&self.cgroup).is_ok()
        });
        fs::create_dir(&self.cgroup).unwrap();
    }

    /// The same, while the host's relay is stopped as by Ctrl-Z.
    pub(crate) fn make_cgroup_anew_while_the_relay_stands(&self, then: impl FnOnce(&Self)) {
        let relay = Pid::from_child(&self.host_relay.as_ref().unwrap().0);
        let suspended = Suspended::new(relay).unwrap();
        self.make_cgroup_anew();
        then(self);
        drop(suspended);
    }

    /// Ends the steering.
    pub(crate) fn clear(&self) {
        command::run(&format!("{} relay clear", executable().display())).unwrap();
    }

    pub(crate) fn name_is_resolved(&self) {
        let answer = self
            .in_box("dig +short +tries=5 +time=10 @198.51.100.7 marker.example")
            .unwrap();
        assert_eq!(answer.trim(), "192.0.2.77");
    }

    /// Neither TCP nor UDP nor anything else gets an answer.
    pub(crate) fn nothing_is_answered(&self) {
        for line in [
            "curl -sS --max-time 3 http://198.51.100.7:8080/page",
            "curl -sS --max-time 3 http://[2001:db8:5::7]:8080/page",
            "dig +short +tries=1 +time=2 @198.51.100.7 marker.example",
            "ping -c 1 -W 2 198.51.100.7",
        ] {
            assert!(self.sandbox.run(line).is_err(), "{line}");
        }
    }

    pub(crate) fn capture(&self) -> Capture {
        let file = self.folder.join("wire.pcap");
        let mut command = Command::new("tcpdump");
        command.args([
            "-i",
            "wire0",
            "--immediate-mode",
            "-U",
            "-Z",
            "root",
            "-s",
            "0",
            "-w",
        ]);
        let log = fs::File::create(self.folder.join("tcpdump.log")).unwrap();
        let process = Process(command.arg(&file).stderr(log).spawn().unwrap());
        let log = self.folder.join("tcpdump.log");
        wait_for("tcpdump listens", || {
            fs::read_to_string(&log).is_ok_and(|text| text.contains("listening on"))
        });
        Capture { file, process }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.host_relay = None;
        self.peer_relay = None;
        let _ = Command::new(executable()).args(["relay", "clear"]).status();
        for _ in 0..200 {
            let _ = fs::remove_dir(&self.other_cgroup);
            if fs::remove_dir(&self.cgroup).is_ok() {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// What went over the wire.
pub(crate) struct Capture {
    file: PathBuf,
    process: Process,
}

impl Capture {
    pub(crate) fn has_nothing_in_the_clear(mut self, has_relayed: bool) {
        // As Ctrl-C does: killed, it would leave the last packet half written.
        let tcpdump = &mut self.process.0;
        kill_process(Pid::from_child(tcpdump), Signal::INT).unwrap();
        tcpdump.wait().unwrap();
        let bytes = fs::read(&self.file).unwrap();
        let marker = MARKER.as_bytes();
        assert!(
            !bytes.windows(marker.len()).any(|window| window == marker),
            "the marker is on the wire"
        );
        let name = b"marker\x07example";
        assert!(
            !bytes.windows(name.len()).any(|window| window == name),
            "the name is on the wire"
        );
        let read = |filter: &[&str]| {
            let mut command = Command::new("tcpdump");
            command.args(["-n", "-r"]).arg(&self.file).args(filter);
            command::output_of(&mut command).unwrap()
        };
        // The two hosts may tell each other that a relay is away, by parts of its packets.
        let others = read(&[
            "not arp and not port 4433 and not (ip6 and (icmp6 or ip6[6] = 0)) \
             and not (icmp[0] = 3 and host 203.0.113.1 and host 203.0.113.9)",
        ]);
        assert!(others.is_empty(), "{others}");
        assert_eq!(!read(&["port 4433"]).is_empty(), has_relayed);
    }
}

fn in_cgroup(cgroup: &Path, line: &str) -> Result<String, String> {
    let script = format!("echo 0 > {}/cgroup.procs; exec {line}", cgroup.display());
    command::shell(&script).map_err(|error| format!("{error:#}"))
}

fn echo(mut stream: std::net::TcpStream) -> std::io::Result<()> {
    let mut back = stream.try_clone()?;
    std::io::copy(&mut stream, &mut back).map(drop)
}

fn serve(namespace: &Namespace, line: &str) -> Process {
    let mut words = line.split_whitespace();
    let mut command = command_in(&namespace.path(), words.next().unwrap());
    let command = command
        .args(words)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Process(command.spawn().unwrap())
}

/// Where cgroup v2 is, with or without cgroup v1 beside it.
fn hierarchy() -> &'static Path {
    let beside = Path::new("/sys/fs/cgroup/unified");
    if beside.is_dir() {
        beside
    } else {
        Path::new("/sys/fs/cgroup")
    }
}

const WIRES: &str = "
ip link add box0 index 1000 type veth peer name eth0 netns box
ip link add wire0 index 1001 type veth peer name wire1 netns peer
ip -n peer link add far0 index 1002 type veth peer name eth0 netns dest
ip address add 10.64.0.1/24 dev box0
ip address add fd64::1/64 dev box0 nodad
ip address add 203.0.113.1/24 dev wire0
ip address add 2001:db8:1::1/64 dev wire0 nodad
ip -n box address add 10.64.0.2/24 dev eth0
ip -n box address add fd64::2/64 dev eth0 nodad
ip -n peer address add 203.0.113.9/24 dev wire1
ip -n peer address add 2001:db8:1::9/64 dev wire1 nodad
ip -n peer address add 198.51.100.1/24 dev far0
ip -n peer address add 2001:db8:5::1/64 dev far0 nodad
ip -n dest address add 198.51.100.7/24 dev eth0
ip -n dest address add 2001:db8:5::7/64 dev eth0 nodad
ip link set box0 up
ip link set wire0 up
ip -n box link set eth0 up
ip -n peer link set wire1 up
ip -n peer link set far0 up
ip -n dest link set eth0 up
ip route add default via 203.0.113.9
ip -6 route add default via 2001:db8:1::9
ip -n box route add default via 10.64.0.1
ip -n box -6 route add default via fd64::1
ip -n peer route add 10.64.0.0/24 via 203.0.113.1
ip -n peer -6 route add fd64::/64 via 2001:db8:1::1
ip -n dest route add default via 198.51.100.1
ip -n dest -6 route add default via 2001:db8:5::1
";
