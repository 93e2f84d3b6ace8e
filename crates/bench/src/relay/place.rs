//! The namespaces, and what runs in them.

use std::{
    env,
    fmt::Write,
    fs::{self, File},
    net::{IpAddr, Ipv4Addr},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use sandwire_relay::{keys, steering};
use tempfile::TempDir;

use crate::{
    private_host::{run, wait_until},
    tcp,
};

/// Where streams and datagrams go.
pub(super) const DESTINATION: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 7));
const PATIENCE: Duration = Duration::from_secs(60);
const DAYS: u32 = 2;

/// How bytes get to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    PlainTcp,
    Stunnel,
    RelayedTcp,
    RelayedTcpByQuic,
    PlainUdp,
    RelayedUdp,
}

impl Way {
    pub(super) const ALL: [Self; 6] = [
        Self::PlainTcp,
        Self::Stunnel,
        Self::RelayedTcp,
        Self::RelayedTcpByQuic,
        Self::PlainUdp,
        Self::RelayedUdp,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::PlainTcp => "plain_tcp",
            Self::Stunnel => "stunnel",
            Self::RelayedTcp => "relayed_tcp",
            Self::RelayedTcpByQuic => "relayed_tcp_by_quic",
            Self::PlainUdp => "plain_udp",
            Self::RelayedUdp => "relayed_udp",
        }
    }

    pub(super) fn is_tcp(self) -> bool {
        !matches!(self, Self::PlainUdp | Self::RelayedUdp)
    }
}

/// Processes that are ended when dropped, with what they have told the kernel.
pub(super) struct Running {
    processes: Vec<Child>,
    /// Takes that away, where they tell it anything.
    unsteer: Option<fn() -> Result<()>>,
}

impl Running {
    fn of(processes: Vec<Child>) -> Self {
        Self {
            processes,
            unsteer: None,
        }
    }

    /// Ends them, and tells what of it fails.
    pub(super) fn end(mut self) -> Result<()> {
        self.stop()
    }

    fn stop(&mut self) -> Result<()> {
        for process in &mut self.processes {
            // It may have ended by itself.
            let _ = process.kill();
            let _ = process.wait();
        }
        // Without its relay, what is steered lets nothing pass: not what the next way sends either.
        self.unsteer.take().map_or(Ok(()), |unsteer| unsteer())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Who drops it without `end` has an error already, which says more.
        let _ = self.stop();
    }
}

fn unsteer() -> Result<()> {
    steering::clear().map_err(|errors| anyhow!("cannot clear the steering: {errors:?}"))
}

/// The namespaces, with certificates and the destination's server.
pub(super) struct Place {
    folder: TempDir,
    _server: Running,
}

impl Place {
    pub(super) fn build() -> Result<Self> {
        let folder = tempfile::tempdir_in("/run").context("cannot make a folder")?;
        let wires = WIRES.replace("CONTROL", tcp::CUBIC);
        for line in wires.lines().filter(|line| !line.is_empty()) {
            let words: Vec<&str> = line.split(' ').collect();
            run(words[0], &words[1..])?;
        }
        let names = ["host.example", "peer.example"].map(str::to_owned);
        let life = DAYS * Duration::from_secs(86_400);
        keys::write(folder.path(), &names, life).context("cannot make certificates")?;
        let mut iperf3 = inside("dest", "iperf3");
        let server = spawn(iperf3.arg("--server"), &folder.path().join("iperf3.log"))?;
        let place = Self {
            folder,
            _server: Running::of(vec![server]),
        };
        place.wait_for_listener("dest", "sport = :5201")?;
        Ok(place)
    }

    fn wait_for_listener(&self, namespace: &str, filter: &str) -> Result<()> {
        wait_until("a server listens", PATIENCE, || {
            let output = inside(namespace, "ss").args(["-Hltn", filter]).output();
            Ok(!output.context("cannot start ss")?.stdout.is_empty())
        })
    }

    /// Starts what a way needs.
    pub(super) fn start(&self, way: Way) -> Result<Running> {
        let transport = match way {
            Way::PlainTcp | Way::PlainUdp => {
                return Ok(Running::of(Vec::new()));
            }
            Way::Stunnel => return self.start_stunnel(),
            Way::RelayedTcpByQuic => "quic",
            Way::RelayedTcp | Way::RelayedUdp => "auto",
        };
        self.configure(transport)?;
        let program = env::current_exe().context("cannot find this executable")?;
        let program = program.to_string_lossy();
        let mut running = Running {
            processes: Vec::new(),
            unsteer: Some(unsteer),
        };
        for name in ["peer", "host"] {
            let config = self.path(&format!("{name}.toml"));
            let log = self.folder.path().join(format!("{name}.log"));
            let mut command = inside(name, &program);
            let process = spawn(command.args(["relay", "serve", "--config", &config]), &log)?;
            running.processes.push(process);
            let said = if name == "peer" {
                "the relay is ready"
            } else {
                "the peer is there"
            };
            wait_until("the relay is ready", PATIENCE, || {
                let text = fs::read_to_string(&log).unwrap_or_default();
                Ok(text.contains(said) && text.contains("the relay is ready"))
            })
            .with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
        }
        Ok(running)
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_string_lossy().into_owned()
    }

    fn configure(&self, transport: &str) -> Result<()> {
        for name in ["host", "peer"] {
            let mut text = String::new();
            let [folder, certificate, key, authority] = [
                name.to_owned(),
                format!("{name}.example.pem"),
                format!("{name}.example.key"),
                "authority.pem".to_owned(),
            ]
            .map(|file| self.path(&file));
            // Writing to a text doesn't fail.
            let _ = write!(
                text,
                "folder = \"{folder}\"\nreport = \"{folder}.report\"\n[tls]\ncertificate = \"{certificate}\"\n\
                 key = \"{key}\"\nauthorities = \"{authority}\"\n"
            );
            text.push_str(&if name == "host" {
                HOST.replace("TRANSPORT", transport)
            } else {
                PEER.to_owned()
            });
            fs::write(self.path(&format!("{name}.toml")), text)
                .context("cannot configure the relay")?;
        }
        Ok(())
    }

    fn start_stunnel(&self) -> Result<Running> {
        let mut running = Running::of(Vec::new());
        for name in ["peer", "host"] {
            let other = if name == "peer" { "host" } else { "peer" };
            let ends = if name == "peer" {
                "accept = 203.0.113.9:4434\nconnect = 198.51.100.7:5201"
            } else {
                "client = yes\naccept = 10.64.0.1:5201\nconnect = 203.0.113.9:4434"
            };
            let text = format!(
                "foreground = yes\npid =\nsslVersion = TLSv1.3\n[stream]\n{ends}\ncert = {}\nkey = {}\nCAfile = {}\n\
                 verifyChain = yes\ncheckHost = {other}.example\n",
                self.path(&format!("{name}.example.pem")),
                self.path(&format!("{name}.example.key")),
                self.path("authority.pem"),
            );
            let file = self.path(&format!("stunnel-{name}.conf"));
            fs::write(&file, text).context("cannot configure stunnel")?;
            let log = self.folder.path().join(format!("stunnel-{name}.log"));
            let process = spawn(inside(name, "stunnel").arg(&file), &log)?;
            running.processes.push(process);
        }
        for (namespace, filter) in [("peer", "sport = :4434"), ("host", "sport = :5201")] {
            self.wait_for_listener(namespace, filter)?;
        }
        Ok(running)
    }

    /// Gigabits per second that arrive of one stream.
    pub(super) fn stream(&self, way: Way, time: Duration) -> Result<f64> {
        let server = if way == Way::Stunnel {
            "10.64.0.1".to_owned()
        } else {
            DESTINATION.to_string()
        };
        // iperf3 counts in whole seconds, after one that is left out.
        let seconds = time.as_secs().max(1).to_string();
        let arguments = [
            "--json", "--omit", "1", "--time", &seconds, "--client", &server,
        ];
        let output = inside("box", "iperf3").args(arguments).output();
        let output = output.context("cannot start iperf3; `apt-get install iperf3` installs it")?;
        let report: serde_json::Value =
            serde_json::from_slice(&output.stdout).context("iperf3 gives no report")?;
        let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
        let bits = bits.with_context(|| format!("iperf3: {}", report["error"]))?;
        ensure!(bits > 0.0, "nothing arrived");
        Ok(bits / 1e9)
    }
}

/// A command in one of the namespaces.
fn inside(namespace: &str, program: &str) -> Command {
    if namespace == "host" {
        return Command::new(program);
    }
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace, program]);
    command
}

fn spawn(command: &mut Command, log: &Path) -> Result<Child> {
    let file = File::create(log).context("cannot write a log")?;
    let other = file.try_clone().context("cannot write a log")?;
    command
        .env("SANDWIRE_LOG", "info")
        .stdin(Stdio::null())
        .stdout(other)
        .stderr(file)
        .spawn()
        .with_context(|| {
            format!("cannot start {command:?}; `cargo xtask setup` installs what it needs")
        })
}

const HOST: &str = "[egress]\n[[peer]]\nname = \"beyond\"\naddress = \"203.0.113.9:4433\"\n\
    server_name = \"peer.example\"\ntransport = \"TRANSPORT\"\n[[sender]]\nname = \"box\"\n\
    addresses = [\"10.64.0.0/24\"]\n[[redirect]]\nsenders = [\"box\"]\nto = [\"198.51.100.0/24\"]\nvia = \"beyond\"\n";
const PEER: &str = "[deliver]\nlisten = [\"203.0.113.9:4433\"]\nclients = [\"host.example\"]\n\
    allow = [\"198.51.100.0/24\"]\n";

/// How connections control congestion is said by routes: `stunnel` can't be told, and a namespace other than the first may not
/// choose what isn't for everybody.
const WIRES: &str = "
ip netns add box
ip netns add peer
ip netns add dest
ip link add box0 index 1000 type veth peer name eth0 netns box
ip link add wire0 index 1001 type veth peer name wire1 netns peer
ip -n peer link add far0 index 1002 type veth peer name eth0 netns dest
ip address add 10.64.0.1/24 dev box0
ip address add 203.0.113.1/24 dev wire0
ip -n box address add 10.64.0.2/24 dev eth0
ip -n peer address add 203.0.113.9/24 dev wire1
ip -n peer address add 198.51.100.1/24 dev far0
ip -n dest address add 198.51.100.7/24 dev eth0
ip link set box0 up
ip link set wire0 up
ip -n box link set eth0 up
ip -n peer link set wire1 up
ip -n peer link set far0 up
ip -n dest link set eth0 up
ip route replace 203.0.113.0/24 dev wire0 src 203.0.113.1 congctl CONTROL
ip route add default via 203.0.113.9 congctl CONTROL
ip -n box route replace 10.64.0.0/24 dev eth0 src 10.64.0.2 congctl CONTROL
ip -n box route add default via 10.64.0.1 congctl CONTROL
ip -n peer route replace 198.51.100.0/24 dev far0 src 198.51.100.1 congctl CONTROL
ip -n peer route add 10.64.0.0/24 via 203.0.113.1
ip -n dest route add default via 198.51.100.1
sysctl -qw net.ipv4.ip_forward=1
ip netns exec peer sysctl -qw net.ipv4.ip_forward=1
";

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local!(static CLEARED: Cell<u32> = const { Cell::new(0) });

    fn steered(unsteer: fn() -> Result<()>) -> Running {
        Running {
            processes: Vec::new(),
            unsteer: Some(unsteer),
        }
    }

    #[test]
    fn a_way_that_fails_leaves_no_steering_behind() {
        drop(steered(|| {
            CLEARED.set(CLEARED.get() + 1);
            Ok(())
        }));
        assert_eq!(CLEARED.get(), 1);
    }

    #[test]
    fn steering_is_cleared_once_and_what_fails_is_told() {
        let running = steered(|| {
            CLEARED.set(CLEARED.get() + 1);
            Err(anyhow!("refused"))
        });
        assert_eq!(running.end().unwrap_err().to_string(), "refused");
        assert_eq!(CLEARED.get(), 1);
    }
}
