//! What a user without rights sees of leases: all of its own, nothing of others'.

use std::{
    fs::{self, File},
    net::TcpListener,
    process::{Command, Output, Stdio},
};

use sandwire_testlab::{
    fake_guest::FakeGuest,
    host::{BEYOND_IPV4, HOST_IPV4},
    lab::{self, Lab},
    openmetrics,
    sandwire::{self, Lease},
};
use serde_json::{Value, json};

use crate::{
    assert_in_touch,
    ebpf::{POOLS, SECOND, World, ping, pool, wait_until},
};

/// Two users that may acquire leases, and nothing else.
const TENANTS: [u32; 2] = [1001, 1002];

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_tenant_sees_and_traces_its_own_leases_and_no_others() {
    lab::run(|lab| {
        let world = World::with_config(lab, "socket_mode = \"0666\"\nmetrics_per_lease = true");
        let users = TENANTS.map(|uid| Tenant::new(lab, &world, uid));
        for (number, kind) in POOLS.into_iter().enumerate() {
            let mut spec = pool(kind, kind, number, 2, &json!({"uplink": "route"}));
            spec["access"] = json!([{"verbs": ["acquire", "publish"], "uids": TENANTS}]);
            world.daemon.create_pool(&spec).unwrap();
            world.route_back(number);
            let [mine, theirs] = [("mine", &users[0]), ("theirs", &users[1])]
                .map(|(name, tenant)| tenant.acquire(kind, &format!("{name}-{kind}")));
            assert_trace_has_own_packets(lab, &users[0], &mine, &theirs);
            assert_top_has_own_lease(&world, &users[0], &mine.0);
            users[0].assert_refused(&theirs.0.name, users[1].uid);
            assert_figures_agree(&world, &users[0], &mine);
            assert_low_ports_are_roots(lab, &users[0], &mine.0);
            assert_services_of_the_host_stay(&world, &users[0], &mine.0);
        }
        assert_the_log_has_a_share_of(&world, &users[0]);
    });
}

/// A user who runs verbs of the command line.
struct Tenant<'a> {
    lab: &'a Lab,
    world: &'a World,
    uid: u32,
}

impl<'a> Tenant<'a> {
    fn new(lab: &'a Lab, world: &'a World, uid: u32) -> Self {
        // Where the executable was built may be closed to other users.
        let path = lab.folder().join("sandwire");
        if !path.exists() {
            File::create(&path).unwrap();
            let built = sandwire::executable().unwrap();
            lab.run(&format!(
                "mount --bind {} {}",
                built.display(),
                path.display()
            ));
        }
        Self { lab, world, uid }
    }

    fn command(&self, verb: &str) -> Command {
        let id = self.uid.to_string();
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid", &id, "--regid", &id, "--clear-groups"])
            .args(["--bounding-set=-all", "--no-new-privs", "--"])
            .arg(self.lab.folder().join("sandwire"))
            .args(self.world.daemon.command(verb).get_args())
            .current_dir("/")
            .stdin(Stdio::null());
        command
    }

    fn output(&self, verb: &str) -> Output {
        self.command(verb).output().unwrap()
    }

    fn json(&self, verb: &str) -> Value {
        let output = self.output(&format!("--json {verb}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{verb}: {said}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn acquire(&self, pool: &str, name: &str) -> (Lease, FakeGuest) {
        let document = self.json(&format!("acquire {pool} {name}"));
        assert_eq!(document["owner_uid"], self.uid);
        let lease = Lease::read(&document).unwrap();
        let guest = FakeGuest::attach(&lease.path, &lease.tap).unwrap();
        assert_in_touch(&lease, &guest);
        (lease, guest)
    }

    /// Nothing of somebody else's lease is shown or traced, whether the owner is guessed or named.
    fn assert_refused(&self, name: &str, owner: u32) {
        for verb in ["show", "trace --count 1", "release"] {
            for whose in [String::new(), format!(" --owner-uid {owner}")] {
                let line = format!("{verb} {name}{whose}");
                let output = self.output(&line);
                let said = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(1), "{line}: {said}");
                assert!(output.stdout.is_empty(), "{line}: {output:?}");
            }
        }
    }
}

/// Twenty lines at once, and then one in four seconds: also on a machine on which each request takes a second.
fn assert_the_log_has_a_share_of(world: &World, tenant: &Tenant<'_>) {
    const REQUESTS: usize = 100;
    let told = || {
        let whose = format!(" uid={}", tenant.uid);
        let log = world.daemon.log();
        let refused = log.lines().filter(|line| line.contains("not_found"));
        refused.filter(|line| line.ends_with(&whose)).count()
    };
    let before = told();
    for _ in 0..REQUESTS {
        assert_eq!(tenant.output("show nobodys").status.code(), Some(1));
    }
    let lines = told() - before;
    assert!(lines < REQUESTS / 2, "{lines}");
    assert!(told() > 0, "{}", world.daemon.log());
}

/// Both guests talk while the tenant traces its own.
fn assert_trace_has_own_packets(
    lab: &Lab,
    tenant: &Tenant<'_>,
    (own, guest): &(Lease, FakeGuest),
    (other, beside): &(Lease, FakeGuest),
) {
    let file = lab.folder().join(&own.name);
    let mut trace = tenant
        .command(&format!("trace {} --count 12", own.name))
        .stdout(File::create(&file).unwrap())
        .spawn()
        .unwrap();
    wait_until("the trace has its packets", 60 * SECOND, || {
        for guest in [guest, beside] {
            guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
            guest.ping(HOST_IPV4.into(), SECOND / 20).unwrap_err();
        }
        trace.try_wait().unwrap().is_some()
    });
    assert!(trace.wait().unwrap().success());
    let text = fs::read_to_string(&file).unwrap();
    assert_eq!(text.lines().count(), 12, "{text}");
    for needed in [
        format!("out {} > {BEYOND_IPV4}", guest.network().ipv4.0),
        format!("in  {BEYOND_IPV4} > {}", own.ipv4),
        "-> uplink by up0".to_owned(),
        "-> guest by ".to_owned(),
        "-> drop at policy: host_service".to_owned(),
    ] {
        assert!(text.contains(&needed), "no '{needed}' in:\n{text}");
    }
    let of_other = format!("> {} ", other.ipv4);
    assert!(!text.contains(&of_other), "{text}");
}

/// The host's own services are there, unless the kernel has been told otherwise.
fn assert_low_ports_are_roots(lab: &Lab, tenant: &Tenant<'_>, lease: &Lease) {
    let publish = |port: u16| tenant.output(&format!("publish {} {port}:7", lease.name));
    let withdraw = |port: u16| {
        let verb = format!("publish {} {port} --withdraw", lease.name);
        assert!(tenant.output(&verb).status.success(), "{verb}");
    };
    let refused = publish(22);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("ip_unprivileged_port_start"),
        "{said}"
    );
    assert!(publish(1024).status.success());
    withdraw(1024);
    let set = |first: u16| {
        lab.run(&format!(
            "sysctl -q net.ipv4.ip_unprivileged_port_start={first}"
        ))
    };
    set(22);
    assert!(publish(22).status.success());
    withdraw(22);
    set(1024);
}

/// Unless root says otherwise.
fn assert_services_of_the_host_stay(world: &World, tenant: &Tenant<'_>, lease: &Lease) {
    let (name, owner) = (&lease.name, tenant.uid);
    let root = |more: &str| {
        let verb = format!("publish {name} --owner-uid {owner} 8100{more}");
        world.daemon.command(&verb).output().unwrap()
    };
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let tcp = TcpListener::bind("[::]:8100").unwrap();
    for refused in [
        tenant.output(&format!("publish {name} 8100:7")),
        tenant.output(&format!("publish {name} 8100:7 --hide-host-service")),
        root(":7"),
    ] {
        let said = said(&refused);
        assert!(!refused.status.success(), "{said}");
        let wanted = "tcp port 8100: the host itself listens there, at [::]:8100";
        assert!(said.contains(wanted), "{said}");
    }
    let udp = root(":7/udp");
    assert!(udp.status.success(), "{}", said(&udp));
    assert!(root("/udp --withdraw").status.success());
    let hidden = root(":7 --hide-host-service");
    assert!(hidden.status.success(), "{}", said(&hidden));
    assert!(root(" --withdraw").status.success());
    drop(tcp);
    let free = tenant.output(&format!("publish {name} 8100:7"));
    assert!(free.status.success(), "{}", said(&free));
    assert!(root(" --withdraw").status.success());
}

/// While a kernel pings it.
fn assert_top_has_own_lease(world: &World, tenant: &Tenant<'_>, lease: &Lease) {
    let pinger = ping(&world.beyond.path(), lease.ipv4);
    let sample = tenant.json("top --once");
    assert!(pinger.stop().unwrap().sent > 0);
    let leases = sample["leases"].as_array().unwrap();
    let is_own = |row: &Value| row["owner_uid"] == tenant.uid;
    assert!(leases.iter().all(is_own), "{sample}");
    assert_packets_both_ways(&sample, &lease.name);
}

/// In a sample of `top`.
pub(crate) fn assert_packets_both_ways(sample: &Value, lease: &str) {
    let leases = sample["leases"].as_array().unwrap();
    let row = leases.iter().find(|row| row["name"] == lease);
    let rates = &row.expect("the lease is in the sample")["rates"];
    for direction in ["egress", "ingress"] {
        let rate = rates[direction]["packets_per_second"].as_u64();
        assert!(rate.is_some_and(|rate| rate > 0), "{direction}: {rates}");
    }
}

/// What the tenant is shown is what the metrics say, and is what has passed.
fn assert_figures_agree(world: &World, tenant: &Tenant<'_>, (lease, guest): &(Lease, FakeGuest)) {
    let traffic = |before: Option<&Value>| {
        let now = tenant.json(&format!("show {}", lease.name))["traffic"].take();
        let count = |traffic: &Value, pointer: &str| {
            traffic
                .pointer(pointer)
                .and_then(Value::as_u64)
                .unwrap_or(0)
        };
        let figures = ["/egress/packets", "/ingress/packets", "/drops/host_service"];
        let since = figures
            .map(|figure| count(&now, figure) - before.map_or(0, |before| count(before, figure)));
        (now, since)
    };
    let (before, _) = traffic(None);
    for _ in 0..10 {
        guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
    }
    for _ in 0..3 {
        guest.ping(HOST_IPV4.into(), SECOND / 20).unwrap_err();
    }
    let (after, since) = traffic(Some(&before));
    // The guest may ask for its gateway meanwhile.
    assert!(
        since[0] >= 10 && since[1] >= 10 && since[2] == 3,
        "{since:?}"
    );
    let (_, total) = traffic(None);
    let metrics = world.daemon.http("GET", "/metrics", None).unwrap().body;
    let families = openmetrics::families(&metrics).unwrap();
    assert!(families.contains("sandwire_lease_drops"), "{families:?}");
    let labels = |last: &str| vec![format!("lease=\"{}\"", lease.name), last.to_owned()];
    for (name, label, wanted) in [
        ("packets", "direction=\"egress\"", total[0]),
        ("packets", "direction=\"ingress\"", total[1]),
        ("drops", "reason=\"host_service\"", total[2]),
    ] {
        let found = metrics.lines().find(|line| {
            line.starts_with(&format!("sandwire_lease_{name}_total{{"))
                && labels(label).iter().all(|label| line.contains(label))
        });
        let line = found.unwrap_or_else(|| panic!("no {name} with {label} in:\n{metrics}"));
        let value = line.rsplit(' ').next().unwrap();
        assert_eq!(value, wanted.to_string(), "{line}, but shown: {after}");
    }
}
