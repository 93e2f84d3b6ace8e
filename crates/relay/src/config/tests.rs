use super::*;

const HOST: &str = r#"
[tls]
certificate = "/etc/a.pem"
key = "/etc/a.key"
authorities = "/etc/ca.pem"

[egress]
daemon = "/run/sandwire/daemon.sock"

[[peer]]
name = "paris"
address = "203.0.113.9:4433"
server_name = "paris.example"

[[sender]]
name = "batch"
cgroup = "/sys/fs/cgroup/batch"

[[redirect]]
from = ["10.64.0.0/16"]
senders = ["batch"]
to = ["198.51.100.0/24", "2001:db8::1"]
protocols = ["tcp"]
ports = [443, "8000-8100"]
via = "paris"
"#;

const PEER: &str = r#"
[tls]
certificate = "a"
key = "b"
authorities = "c"

[deliver]
listen = ["[::]:4433"]
clients = ["host-a.example"]
allow = ["0.0.0.0/0", "::/0"]
"#;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(Path::new("relay.toml"), text)
}

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[test]
fn a_host_reads_as_written() {
    let config = parse(HOST).unwrap();
    let egress = config.egress.unwrap();
    assert_eq!(egress.listen_port, 15_001);
    let redirect = &egress.redirects[0];
    assert_eq!(
        (redirect.via, redirect.senders.as_slice()),
        (0, [0].as_slice())
    );
    let covers =
        |protocol, destination: &str| redirect.covers(protocol, destination.parse().unwrap());
    assert!(covers(Protocol::Tcp, "198.51.100.7:443"));
    assert!(covers(Protocol::Tcp, "[2001:db8::1]:8050"));
    assert!(!covers(Protocol::Udp, "198.51.100.7:443"));
    assert!(!covers(Protocol::Tcp, "198.51.101.7:443"));
    assert!(!covers(Protocol::Tcp, "198.51.100.7:444"));
    assert!(!redirect.takes_all());
    assert!(config.deliver.is_none());
}

/// What a host has displaced is with the peer a moment longer, beside what it made room for.
#[test]
fn a_peer_has_room_for_more_of_a_host_than_that_has_itself() {
    let limits = parse(PEER).unwrap().limits;
    assert!(limits.connections_per_host > limits.connections);
    assert!(limits.flows_per_host > limits.flows);
}

#[test]
fn all_is_taken_where_both_protocols_are_named_however_often() {
    for (protocols, takes_all) in [
        (r#""tcp", "udp""#, true),
        (r#""tcp", "udp", "tcp""#, true),
        (r#""udp", "tcp", "udp", "tcp""#, true),
        (r#""udp", "udp""#, false),
    ] {
        let text = HOST.replace(
            "protocols = [\"tcp\"]",
            &format!("protocols = [{protocols}]"),
        );
        let text = text.replace("ports = [443, \"8000-8100\"]", "");
        let egress = parse(&text).unwrap().egress.unwrap();
        assert_eq!(egress.redirects[0].takes_all(), takes_all, "{protocols}");
    }
}

#[test]
fn errors_name_the_key() {
    for (text, wanted) in [
        (
            HOST.replace("[egress]", "[egress]\nlisten_prot = 1"),
            "listen_prot",
        ),
        (
            HOST.replace("via = \"paris\"", "via = \"rome\""),
            "redirect 1.via: there is no peer 'rome'",
        ),
        (
            HOST.replace("senders = [\"batch\"]", "senders = [\"bach\"]"),
            "redirect 1.senders",
        ),
        (
            HOST.replace("10.64.0.0/16", "10.64.0.1/16"),
            "10.64.0.0/16 has none",
        ),
        (
            HOST.replace("8000-8100", "8100-8000"),
            "a port is written as 443",
        ),
        (
            HOST.replace("paris.example", "not a name"),
            "peer 1.server_name",
        ),
        (
            HOST.replace("cgroup = \"/sys", "cgroup = \"sys"),
            "sender 1.cgroup",
        ),
        (
            HOST.replace("[egress]", "[limits]\nbuffer_bytes = 1\n[egress]"),
            "limits.buffer_bytes",
        ),
        (
            HOST.replace("[egress]", "[limits]\nunread_bytes = 8388607\n[egress]"),
            "limits.unread_bytes: with that `buffer_bytes` it is 8388608 at least",
        ),
        (
            HOST.replace("[egress]\ndaemon = \"/run/sandwire/daemon.sock\"\n", ""),
            "add a section [egress]",
        ),
        (PEER.replace("\"host-a.example\"", ""), "deliver.clients"),
        (
            PEER.split("[deliver]").next().unwrap().to_owned(),
            "nothing to do",
        ),
        (
            HOST.replace(
                "[tls]",
                "[[peer]]\nname = \"paris\"\naddress = \"192.0.2.1:1\"\nserver_name = \"b\"\n[tls]",
            ),
            "two of the name 'paris'",
        ),
    ] {
        let message = error(&text);
        assert!(
            message.contains(wanted) && message.contains("relay.toml"),
            "{wanted}: {message}"
        );
    }
}

#[test]
fn loopback_and_metadata_are_delivered_to_only_where_that_is_said() {
    let deliver = parse(PEER).unwrap().deliver.unwrap();
    let allows = |deliver: &Deliver, text: &str| deliver.allows(text.parse().unwrap());
    assert!(allows(&deliver, "198.51.100.1") && allows(&deliver, "2001:db8::1"));
    for denied in [
        "127.0.0.1",
        "::1",
        "::ffff:127.0.0.1",
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "169.254.0.23",
        "100.100.100.200",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
        "fd00:c1::a9fe:a9fe",
        "fe80::1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        "::",
    ] {
        assert!(!allows(&deliver, denied), "{denied}");
    }
    let own = PEER.replace("\"::/0\"", "\"127.0.0.1/32\"");
    let deliver = parse(&own).unwrap().deliver.unwrap();
    assert!(allows(&deliver, "127.0.0.1") && !allows(&deliver, "127.0.0.2"));
    let said = PEER.replace("\"::/0\"", "\"100.100.100.200/32\", \"fd20:ce::254\"");
    let deliver = parse(&said).unwrap().deliver.unwrap();
    assert!(allows(&deliver, "100.100.100.200") && allows(&deliver, "fd20:ce::254"));
    // Cloud metadata is among these, and isn't meant by them.
    let link_local = PEER.replace("\"::/0\"", "\"169.254.0.0/16\"");
    let deliver = parse(&link_local).unwrap().deliver.unwrap();
    assert!(allows(&deliver, "169.254.1.1") && !allows(&deliver, "169.254.169.254"));
}

#[test]
fn everything_leaves_the_loopback_where_it_is_and_what_names_it_does_not() {
    let redirect = |to: &str| {
        let text = HOST.replace("\"198.51.100.0/24\", \"2001:db8::1\"", to);
        let text = text.replace("ports = [443, \"8000-8100\"]", "");
        let egress = parse(&text).unwrap().egress.unwrap();
        egress.redirects[0].clone()
    };
    let all = redirect("\"0.0.0.0/0\", \"::/0\"");
    let named = redirect("\"127.0.0.1\", \"::1\"");
    let local = ["127.0.0.1", "127.255.0.1", "::1"];
    let beyond = [
        "126.255.255.255",
        "128.0.0.0",
        "0.0.0.1",
        "255.255.255.255",
        "::2",
        "ff::",
    ];
    let covers = |redirect: &Redirect, ip: &str| {
        let ip: IpAddr = ip.parse().unwrap();
        let steered = redirect.to_from_here();
        let holders = steered.iter().filter(|prefix| prefix.contains(&ip)).count();
        assert!(holders < 2, "{ip} is in {holders}");
        let is_covered = redirect.covers(Protocol::Tcp, (ip, 80).into());
        assert_eq!(is_covered, holders == 1, "{ip}");
        is_covered
    };
    assert!(local.iter().all(|ip| !covers(&all, ip)));
    assert!(beyond.iter().all(|ip| covers(&all, ip)));
    assert!(covers(&named, "127.0.0.1") && covers(&named, "::1"));
    assert!(!covers(&named, "127.0.0.2"));
}

#[test]
fn ipv4_that_is_written_as_ipv6_is_refused() {
    for to in ["::ffff:198.51.100.0/120", "::ffff:198.51.100.7"] {
        let error = error(&HOST.replace("198.51.100.0/24", to));
        assert!(error.contains("write it as 192.0.2.0/24"), "{error}");
    }
}
