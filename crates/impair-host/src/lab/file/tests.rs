use std::path::Path;

use super::*;

fn read(text: &str) -> Result<Lab, LabError> {
    Lab::parse(text, Path::new("shop.toml"))
}

/// What a file is refused with, without its own name.
fn refusal(text: &str) -> String {
    let error = read(text).unwrap_err();
    assert!(error.is_refusal());
    let text = error.to_string();
    text.strip_prefix("shop.toml:").unwrap().to_owned()
}

const THREE: &str = r#"
[host.client]
[host.router]
forward = true
[host.server]

[[link]]
ends = ["client", "router"]
addresses = ["10.0.1.1/24", ["10.0.1.2/24", "fd00::2/64"]]

[[link]]
ends = ["router", "server"]
interfaces = ["wan", "uplink"]
mtu = 1400

[[route]]
host = "client"
to = "default"
via = "10.0.1.2"
"#;

#[test]
fn a_file_says_what_is_made() {
    let lab = read(THREE).unwrap();
    assert_eq!(lab.name.as_str(), "shop");
    let hosts: Vec<(&str, bool)> = lab
        .hosts
        .iter()
        .map(|host| (host.name.as_str(), host.forward))
        .collect();
    assert_eq!(
        hosts,
        [("client", false), ("router", true), ("server", false)]
    );
    assert_eq!(lab.namespace(&lab.hosts[0]), "sandwire-lab.shop.client");
    let ends: Vec<(usize, &str, Vec<String>)> = lab
        .links
        .iter()
        .flat_map(|link| &link.ends)
        .map(|end| {
            let addresses = end.addresses.iter().map(ToString::to_string).collect();
            (end.host, end.interface.as_str(), addresses)
        })
        .collect();
    let expected = [
        (0, "eth0", vec!["10.0.1.1/24"]),
        (1, "eth0", vec!["10.0.1.2/24", "fd00::2/64"]),
        (1, "wan", vec!["10.77.0.5/30", "fd77:7377:77:1::1/64"]),
        (2, "uplink", vec!["10.77.0.6/30", "fd77:7377:77:1::2/64"]),
    ];
    let expected = expected.map(|(host, interface, addresses)| {
        let addresses: Vec<String> = addresses.into_iter().map(str::to_owned).collect();
        (host, interface, addresses)
    });
    assert_eq!(ends, expected);
    assert_eq!((lab.links[0].mtu, lab.links[1].mtu), (1500, 1400));
    let route = lab.hosts[0].routes[0];
    assert_eq!(
        (route.to.to_string().as_str(), route.link, route.end),
        ("0.0.0.0/0", 0, 0)
    );
}

#[test]
fn hosts_on_a_switch_share_a_network() {
    let text = "name = \"lan\"\n[host.a]\n[host.b]\n[switch.s]\n[[link]]\nends = [\"a\", \"s\"]\n[[link]]\nends = [\"s\", \"b\"]\n";
    let lab = read(text).unwrap();
    assert_eq!(lab.name.as_str(), "lan");
    let addresses = |link: usize, end: usize| {
        let addresses = lab.links[link].ends[end].addresses.iter();
        addresses.map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(addresses(0, 0), ["10.78.2.1/24", "fd77:7377:78:2::1/64"]);
    assert!(addresses(0, 1).is_empty());
    assert_eq!(addresses(1, 1), ["10.78.2.2/24", "fd77:7377:78:2::2/64"]);
}

/// Wherever in the file they are joined, and in whichever order.
#[test]
fn hosts_on_joined_switches_share_a_network() {
    let hosts = "[host.a]\n[host.b]\n[switch.s]\n[switch.t]\n";
    let link = |ends: [&str; 2]| format!("[[link]]\nends = {ends:?}\n");
    let (a, b) = (link(["a", "s"]), link(["t", "b"]));
    for trunk in [["s", "t"], ["t", "s"]].map(link) {
        for links in [[&trunk, &a, &b], [&a, &trunk, &b], [&a, &b, &trunk]] {
            let text = format!("{hosts}{}{}{}", links[0], links[1], links[2]);
            let lab = read(&text).unwrap();
            let ends = lab.links.iter().flat_map(|link| &link.ends);
            let networks: std::collections::BTreeSet<IpNet> = ends
                .flat_map(|end| &end.addresses)
                .map(IpNet::trunc)
                .collect();
            assert_eq!(networks.len(), 2, "one of each version in\n{text}");
        }
    }
}

#[test]
fn a_trace_that_a_text_names_is_read_from_beside_the_file() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("up.trace"), "1\n5\n9\n").unwrap();
    let text = |trace: &str| {
        format!(
            "[host.a]\n[host.b]\n[[link]]\nends = [\"a\", \"b\"]\nba = \"delay 5ms\"\nab = \"trace {trace}\"\n"
        )
    };
    let path = folder.path().join("lab.toml");
    let lab = Lab::parse(&text("up.trace"), &path).unwrap();
    let rules = &lab.links[0].impairment.rules;
    let traces: Vec<&str> = rules
        .iter()
        .filter_map(|rule| rule.trace.as_ref()?.content.as_deref())
        .collect();
    assert_eq!(traces, ["1\n5\n9\n"]);
    let refused = Lab::parse(&text("down.trace"), &path)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("lab.toml:6:6: "), "{refused}");
    assert!(refused.contains("down.trace"), "{refused}");
}

#[test]
fn every_end_of_the_largest_lab_gets_its_own_addresses() {
    let mut text = "[host.a]\n[host.b]\n".to_owned();
    text.push_str(&"[[link]]\nends = [\"a\", \"b\"]\n".repeat(LINKS_MAX));
    let lab = read(&text).unwrap();
    let ends = || lab.links.iter().flat_map(|link| &link.ends);
    let macs: std::collections::BTreeSet<[u8; 6]> = ends().map(|end| end.mac).collect();
    assert_eq!(macs.len(), 2 * LINKS_MAX);
    assert_eq!(
        ends().map(|end| end.addresses.len()).sum::<usize>(),
        4 * LINKS_MAX
    );
    text.push_str("[[link]]\nends = [\"a\", \"b\"]\n");
    assert!(refusal(&text).contains("at most 256 links"));
}

#[test]
fn a_refusal_names_the_line_and_what_to_do() {
    let two = "[host.a]\n[host.b]\n[switch.s]\n[[link]]\n";
    let cases = [
        ("", "1:1: the lab has no hosts"),
        (
            "[host.a]\nforwards = true\n",
            "2:1: unknown field `forwards`",
        ),
        ("[host.a\n", "1:8: "),
        ("[host.A]\n", "1:7: 'A' is not a valid name"),
        ("[host.a]\n[switch.a]\n", "2:9: 'a' is a host already"),
        (
            "name = \"x y\"\n[host.a]\n",
            "1:8: 'x y' is not a valid name",
        ),
        (
            "ends = [\"a\"]",
            "5:8: ends must be two hosts or switches, not 1",
        ),
        (
            "ends = [\"a\", \"c\"]",
            "5:14: there is no host 'c'; there are a, b, s",
        ),
        (
            "ends = [\"a\", \"a\"]",
            "5:8: both ends of the link are the same",
        ),
        (
            "ends = [\"a\", \"b\"]\nmtu = 67",
            "6:7: mtu must be between 68 and 65535",
        ),
        (
            "ends = [\"a\", \"b\"]\ninterfaces = [\"lo\", \"x\"]",
            "6:15: 'lo': the name of an interface is none of",
        ),
        (
            "ends = [\"a\", \"b\"]\ninterfaces = [\"sixteen-letters-\", \"x\"]",
            "6:15: ",
        ),
        (
            "ends = [\"a\", \"b\"]\naddresses = [\"10.0.0.1\", []]",
            "6:14: \"10.0.0.1\" is no address",
        ),
        (
            "ends = [\"a\", \"b\"]\naddresses = [\"10.0.0.0/24\", []]",
            "6:14: ",
        ),
        (
            "ends = [\"a\", \"b\"]\naddresses = [\"10.0.0.1/24\", \"10.0.0.1/24\"]",
            "6:29: address 10.0.0.1 is given twice; see line 6",
        ),
        (
            "ends = [\"a\", \"s\"]\naddresses = [\"10.0.0.1/24\", \"10.0.0.2/24\"]",
            "6:29: s is a switch",
        ),
        (
            "ends = [\"a\", \"b\"]\nmtu = 1279\naddresses = [\"fd00::1/64\", []]",
            "7:14: IPv6 needs an mtu",
        ),
        (
            "ends = [\"a\", \"b\"]\naddresses = [\"10.0.0.1/24\", []]\n[[link]]\nends = [\"a\", \"b\"]\naddresses = [\"10.0.0.2/16\", []]",
            "9:14: 10.0.0.2/16 overlaps with 10.0.0.1/24 of a's interface eth0",
        ),
        (
            "ends = [\"a\", \"b\"]\nba = \"pass\"\nab = \"los 1%\"",
            "7:6: ab: 'los' is no impairment",
        ),
        (
            "ends = [\"a\", \"b\"]\nab = \"seed 1; pass\"\nba = \"seed 2; pass\"",
            "7:6: there are two seeds, 1 and 2",
        ),
        (
            "ends = [\"a\", \"b\"]\n[[link.impairment.rule]]\nloss = \"1,5%\"",
            "7:8: ",
        ),
        (
            "ends = [\"a\", \"b\"]\n[[link.impairment.rule]]\nloss = \"1%\"\n[[link.impairment.rule]]\nloss = \"101%\"",
            "8:1: rule 'rule-2', loss: 101%",
        ),
        (
            "ends = [\"a\", \"b\"]\n[[route]]\nhost = \"a\"\nto = \"default\"\nvia = \"10.0.0.1\"",
            "9:7: 10.0.0.1 is in none of the networks of a",
        ),
        (
            "ends = [\"a\", \"b\"]\n[[route]]\nhost = \"a\"\nto = \"fd00::/8\"\nvia = \"10.77.0.2\"",
            "9:7: fd00::/8 and 10.77.0.2 are of different families",
        ),
        (
            "ends = [\"a\", \"b\"]\n[[route]]\nhost = \"a\"\nto = \"everywhere\"\nvia = \"10.77.0.2\"",
            "8:6: 'everywhere' is no network",
        ),
    ];
    for (text, expected) in cases {
        let is_link = text.starts_with("ends");
        let whole = if is_link {
            format!("{two}{text}")
        } else {
            text.to_owned()
        };
        let refusal = refusal(&whole);
        assert!(
            refusal.starts_with(expected),
            "{whole}\n→ {refusal}\nnot {expected}"
        );
    }
}

#[test]
fn a_link_has_a_text_for_each_way_or_a_table() {
    let two = "[host.a]\n[host.b]\n[[link]]\nends = [\"a\", \"b\"]\n";
    let texts = read(&format!(
        "{two}ab = \"name x delay 50ms\"\nba = \"name y loss 1%\"\n"
    ))
    .unwrap();
    let table = read(&format!(
        "{two}[[link.impairment.rule]]\nname = \"x\"\ndirection = \"egress\"\ndelay = \"50ms\"\n\
         [[link.impairment.rule]]\nname = \"y\"\ndirection = \"ingress\"\nloss = \"1%\"\n"
    ));
    assert_eq!(texts, table.unwrap());
    assert!(read(two).unwrap().links[0].impairment.is_nothing());
    let both = format!("{two}ab = \"loss 1%\"\nimpairment = {{ seed = 1 }}\n");
    assert!(refusal(&both).starts_with("5:6: the link has a table"));
}

#[test]
fn a_circle_of_switches_is_refused() {
    let text = "[host.a]\n[switch.s]\n[switch.t]\n[switch.u]\n[[link]]\nends = [\"s\", \"t\"]\n\
                [[link]]\nends = [\"t\", \"u\"]\n[[link]]\nends = [\"u\", \"s\"]\n";
    assert!(refusal(text).starts_with("10:8: this link closes a circle of switches"));
}
