//! What a host has of others: addresses, routes, rules.

use super::*;

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_prefix_that_the_host_has_is_refused_and_nothing_changes() {
    lab::run(|lab| {
        let network = open();
        lab.run("ip link add eth7 type bridge");
        lab.run("ip address add 10.64.0.9/32 dev eth7");
        lab.run("ip link set eth7 up");
        lab.run("ip route add 10.65.0.0/16 dev eth7");
        lab.run("ip -6 route add fd00:66::/32 dev eth7");
        lab.run("ip route add default dev eth7");
        let before = lab.snapshot();
        for (ipv4, ipv6, with) in [
            ("10.64.0.0/24", "fd00:c10e::/64", "10.64.0.9/32"),
            (
                "10.65.3.0/24",
                "fd00:c10e::/64",
                "route 10.65.0.0/16 dev eth7",
            ),
            (
                "10.66.0.0/24",
                "fd00:66:1::/64",
                "route fd00:66::/32 dev eth7",
            ),
        ] {
            let error = network
                .add_pool(&pool_of("web", "{}", "{}", ipv4, ipv6))
                .unwrap_err();
            assert!(matches!(error, NetworkError::Conflict { .. }), "{error}");
            assert!(error.to_string().contains(with), "{error}");
            lab.assert_unchanged(&before);
        }
        // Twice the same is fine, also with slots in it.
        let plan = pool_of("web", "{}", "{}", "10.67.0.0/24", "fd00:67::/64");
        filled(&network, &plan, 1);
        network.add_pool(&plan).unwrap();
        open().add_pool(&plan).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn the_host_keeps_the_default_route_that_its_router_told_it() {
    lab::run(|lab| {
        let network = open();
        lab.run("ip link add eth7 type bridge");
        lab.run("ip link set eth7 up");
        lab.run("ip -6 route add default via fe80::99 dev eth7 proto ra");
        let before = lab.snapshot();
        let error = network.add_pool(&pool("web", "{}")).unwrap_err();
        assert!(matches!(error, NetworkError::Conflict { .. }), "{error}");
        assert!(
            error.to_string().contains("net.ipv6.conf.eth7.accept_ra=2"),
            "{error}"
        );
        lab.assert_unchanged(&before);
        // 0 is where systemd-networkd or NetworkManager hears the router, and keeps the route.
        for accept_ra in ["2", "0"] {
            lab.run("sysctl -w net.ipv6.conf.all.forwarding=0");
            lab.run(&format!(
                "sysctl -w net.ipv6.conf.eth7.accept_ra={accept_ra}"
            ));
            network.add_pool(&pool("web", "{}")).unwrap();
            assert!(lab.run("ip -6 route show default").contains("fe80::99"));
            network.remove_pool(&pool("web", "{}")).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn other_people_s_rules_stay_byte_for_byte() {
    lab::run(|lab| {
        command::run_with_input("nft -f -", FOREIGN_RULES).unwrap();
        lab.run("iptables -t nat -A POSTROUTING -s 172.17.0.0/16 -j MASQUERADE");
        lab.run("iptables -P FORWARD DROP");
        lab.run("ip6tables -A INPUT -p tcp --dport 22 -j ACCEPT");
        let rules = || {
            let tables = ["inet user", "ip docker"];
            let nft = tables
                .map(|table| lab.run(&format!("nft -a list table {table}")))
                .concat();
            // iptables' own listings carry the time.
            let saved = lab.run("iptables -S") + &lab.run("iptables -t nat -S");
            nft + &saved + &lab.run("ip6tables -S")
        };
        let before = (rules(), lab.snapshot());
        let network = open();
        let plan = pool("web", "{}");
        let slots = filled(&network, &plan, 3);
        network.set_published_ports(&[]).unwrap();
        assert_eq!(rules(), before.0);
        tear_down(&network, &slots);
        network.remove_pool(&plan).unwrap();
        assert_eq!(rules(), before.0);
        lab.assert_unchanged(&before.1);
    });
}

const FOREIGN_RULES: &str = r#"
table inet user {
    set allowed { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 } }
    chain input { type filter hook input priority filter; policy accept; ip saddr @allowed accept; }
}
table ip docker {
    chain forward { type filter hook forward priority filter; policy drop; iifname "docker0" accept; }
}
"#;
