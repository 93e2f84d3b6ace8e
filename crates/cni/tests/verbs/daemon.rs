//! A daemon of a few lines: leases in a list, and answers that a test puts in the place of its own.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    thread,
};

use sandwire_cni::Environment;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A request as it came: method and path, and the body.
pub(crate) type Request = (String, Value);

/// The daemon. Its threads end with the test's process.
pub(crate) struct Daemon {
    folder: TempDir,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    leases: BTreeMap<String, Value>,
    ports: BTreeMap<String, Vec<Value>>,
    requests: Vec<Request>,
    /// Answers to requests that begin so, and how often they are given.
    instead: Vec<(String, u32, u16, Value)>,
}

impl Daemon {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        // What stands for a container's namespace.
        std::fs::write(folder.path().join("netns"), "").unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, shared) = (stream.unwrap(), Arc::clone(&shared));
                thread::spawn(move || serve(&stream, &shared));
            }
        });
        Self { folder, state }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    pub(crate) fn netns(&self) -> PathBuf {
        self.folder.path().join("netns")
    }

    /// A path in its folder.
    pub(crate) fn folder_path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Answers requests that begin so by this instead, `times` times.
    pub(crate) fn answer(&self, request: &str, times: u32, status: u16, body: Value) {
        let entry = (request.to_owned(), times, status, body);
        self.state().instead.push(entry);
    }

    /// Refuses such requests with a code of the API.
    pub(crate) fn refuse(&self, request: &str, code: &str) {
        self.answer(request, u32::MAX, 400, refusal(code));
    }

    /// Adds somebody's lease.
    pub(crate) fn add_lease(&self, name: &str, owner_uid: u32) {
        let mut lease = lease(name, &json!({ "pool": "web" }));
        lease["owner_uid"] = owner_uid.into();
        self.state().leases.insert(name.to_owned(), lease);
    }

    /// Names of its leases.
    pub(crate) fn leases(&self) -> Vec<String> {
        self.state().leases.keys().cloned().collect()
    }

    /// What it was asked since it was last asked for that.
    pub(crate) fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state().requests)
    }

    /// Variables of an operation on the container `c1`.
    pub(crate) fn environment(&self, command: &str) -> Environment {
        Environment {
            command: Some(command.into()),
            container_id: Some("c1".into()),
            netns: Some(self.netns().into()),
            interface: Some("eth0".into()),
            arguments: None,
        }
    }

    /// A configuration of the network `pods` with these keys more, or others.
    pub(crate) fn config(&self, more: &Value) -> Value {
        let mut config = json!({
            "cniVersion": "1.1.0",
            "name": "pods",
            "type": "sandwire-cni",
            "pool": "web",
            "socket": self.socket(),
        });
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    }

    /// Carries out an operation on `c1`; the answer, or the error's document.
    pub(crate) fn run(&self, command: &str, more: &Value) -> Result<String, Value> {
        self.run_as(&self.environment(command), more)
    }

    /// The same with other variables.
    pub(crate) fn run_as(&self, environment: &Environment, more: &Value) -> Result<String, Value> {
        run(environment, self.config(more).to_string().as_bytes())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

/// Carries out an operation; what it printed, or the error's document.
pub(crate) fn run(environment: &Environment, input: &[u8]) -> Result<String, Value> {
    let mut output = Vec::new();
    let is_success = sandwire_cni::run(environment, input, &mut output);
    let text = String::from_utf8(output).unwrap();
    if is_success {
        return Ok(text);
    }
    let error: Value = serde_json::from_str(&text).unwrap();
    assert!(error["code"].as_u64().is_some_and(|code| code > 0));
    assert!(error["msg"].is_string() && error["details"].is_string());
    assert!(error["cniVersion"].is_string());
    Err(error)
}

fn serve(stream: &UnixStream, state: &Mutex<State>) {
    let mut reader = BufReader::new(stream);
    while let Some((head, body)) = read(&mut reader) {
        let (status, answer) = {
            let mut state = state.lock().unwrap();
            state.requests.push((head.clone(), body.clone()));
            state.answer(&head, &body)
        };
        let text = answer.to_string();
        let length = text.len();
        // A client that gives up is a case of its own.
        let _ = write!(
            &*stream,
            "HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\r\n{text}"
        );
    }
}

fn read(reader: &mut BufReader<&UnixStream>) -> Option<Request> {
    let mut head = String::new();
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
        if head.is_empty() {
            head = line.trim_end_matches(" HTTP/1.1").to_owned();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((head, serde_json::from_slice(&body).unwrap_or(Value::Null)))
}

impl State {
    fn answer(&mut self, head: &str, body: &Value) -> (u16, Value) {
        let instead = &mut self.instead;
        let found = instead
            .iter_mut()
            .find(|(start, times, ..)| *times > 0 && head.starts_with(start));
        if let Some((_, times, status, answer)) = found {
            *times -= 1;
            return (*status, answer.clone());
        }
        let (method, path) = head.split_once(' ').unwrap();
        match (method, path.trim_start_matches("/v1/")) {
            ("GET", "/healthz") => (200, health_with(&[])),
            ("GET", "pools/web") => (200, pool()),
            ("GET", "leases") => (200, self.leases.values().cloned().collect()),
            ("POST", "leases") => self.acquire(body),
            (_, of_lease) => self.of_lease(method, of_lease, body),
        }
    }

    fn acquire(&mut self, body: &Value) -> (u16, Value) {
        let name = body["name"].as_str().unwrap();
        if let Some(lease) = self.leases.get(name) {
            return (200, lease.clone());
        }
        let lease = lease(name, body);
        self.leases.insert(name.to_owned(), lease.clone());
        (201, lease)
    }

    fn of_lease(&mut self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let path = path.strip_prefix("leases/").unwrap_or("");
        let (name, below) = path.split_once('/').unwrap_or((path, ""));
        let Some(lease) = self.leases.get(name).cloned() else {
            return (404, refusal("not_found"));
        };
        let ports = self.ports.entry(name.to_owned()).or_default();
        match (method, below) {
            ("DELETE", "") => {
                self.leases.remove(name);
                let released = json!({ "name": name, "pool": "web", "slot": 7, "outcome": "released", "held_by": [] });
                (200, released)
            }
            ("GET", "attached") => (200, json!({ "attached": lease["attached"], "defects": [] })),
            ("GET", "ports") => (200, json!(ports)),
            ("POST", "ports?hide_host_service=true") => {
                let mut port = body.clone();
                port["lease"] = name.into();
                port["owner_uid"] = 0.into();
                ports.push(port.clone());
                (201, port)
            }
            ("GET", "policy") => {
                let policy = &lease["asked_policy"];
                (
                    200,
                    json!({ "own": !policy.is_null(), "policy": policy.as_object().cloned().unwrap_or_default() }),
                )
            }
            _ => (404, refusal("not_found")),
        }
    }
}

pub(crate) fn refusal(code: &str) -> Value {
    json!({ "code": code, "message": format!("cannot do it: {code}"), "request_id": "r1" })
}

/// What the daemon says of itself when something is wrong with each of these.
pub(crate) fn health_with(subjects: &[&str]) -> Value {
    let problem = |subject: &&str| json!({ "subject": subject, "message": "its uplink is gone", "blocking": true });
    let problems: Vec<Value> = subjects.iter().map(problem).collect();
    json!({ "ready": problems.is_empty(), "version": "1", "instance": "default", "problems": problems })
}

pub(crate) fn pool() -> Value {
    json!({
        "spec": {
            "name": "web",
            "kind": "container",
            "addresses": { "plan": "prefix", "ipv4": "10.64.0.0/24", "ipv6": "fd00:c10e::/64" },
            "policy": { "group": "blue" },
        },
        "slots_max": 200,
        "slots": { "ready": 8, "building": 0, "leased": 3, "held": 0, "tearing_down": 0, "quarantined": 0 },
        "last_error": null,
    })
}

fn lease(name: &str, request: &Value) -> Value {
    let attach = &request["attach"];
    json!({
        "name": name,
        "pool": request["pool"],
        "slot": 7,
        "owner_uid": rustix::process::geteuid().as_raw(),
        "state": "active",
        "acquired_at": 1,
        "expires_at": null,
        "netns": null,
        "netns_name": null,
        "nics": [],
        "asked_policy": request["policy"],
        "attached": {
            "netns": attach["netns"].as_str().unwrap_or("/run/netns/x"),
            "interface": attach["interface"].as_str().unwrap_or("eth0"),
            "mac": attach["mac"].as_str().unwrap_or("06:00:0a:40:00:09"),
            "mtu": attach["mtu"].as_u64().unwrap_or(1500),
            "host_interface": "swabc-7",
            "device": "veth",
            "addresses": [
                { "address": "10.64.0.9/32", "gateway": "169.254.1.1" },
                { "address": "fd00:c10e::9/128", "gateway": "fe80::1" },
            ],
            "routes": [
                { "destination": "0.0.0.0/0", "gateway": "169.254.1.1" },
                { "destination": "::/0", "gateway": "fe80::1" },
            ],
            "gateway_mac": "02:73:77:00:00:01",
            "tap": attach["tap"],
        },
    })
}
