//! Many targets on one thread.

use std::{
    thread,
    time::{Duration, Instant},
};

use sandwire_impair_host::control::{Client, Owner, Side, State, Target};
use sandwire_testlab::lab;

use crate::lab::{Service, wait_until};

const COUNT: u32 = 100;
/// As many as may be waited for at once.
const WAITING: usize = 48;

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_hundred_targets_share_a_thread() {
    lab::run_within(Duration::from_secs(240), |lab| {
        let mut script = String::new();
        for number in 1..=COUNT {
            script += &format!(
                "ip netns add n{number}; ip link add v{number} type veth peer name eth0 netns n{number}
                 ip addr add 10.20.{number}.1/24 dev v{number}; ip link set v{number} up
                 ip -n n{number} addr add 10.20.{number}.2/24 dev eth0; ip -n n{number} link set eth0 up\n"
            );
        }
        lab.shell(&script);
        let mut service = Service::start(lab);
        let start = Instant::now();
        for number in 1..=COUNT {
            service.run(&format!(
                "--netns n{number} --both 'delay {}ms'",
                5 + number % 5
            ));
        }
        println!("{COUNT} targets began in {:?}", start.elapsed());
        let shown: serde_json::Value = serde_json::from_str(&service.run("show --json")).unwrap();
        let shown = shown.as_array().unwrap();
        assert_eq!(shown.len(), COUNT as usize);
        assert!(shown.iter().all(|target| target["thread"] == 0));
        for number in [1, 37, COUNT] {
            let said = lab.run(&format!("ping -n -q -c 10 -i 0.02 10.20.{number}.2"));
            assert!(said.contains("10 received"), "{said}");
            let least: f64 = said
                .rsplit("= ")
                .next()
                .unwrap()
                .split('/')
                .next()
                .unwrap()
                .parse()
                .unwrap();
            let wanted = f64::from(2 * (5 + number % 5));
            assert!(least >= wanted && least < wanted + 20.0, "{number}: {said}");
        }
        service.terminate();
        assert_eq!(lab.run("ip -n n50 -o link").matches("swd").count(), 0);
    });
}

/// Packets may be under way for an hour, and as long is waited for them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_waits_for_packets_under_way_holds_up_nobody_else() {
    lab::run(|lab| {
        let mut script = "ip netns add far\n".to_owned();
        for number in 0..=WAITING {
            script += &format!(
                "ip -n far link add d{number} type veth peer name p{number}; ip -n far link set p{number} up\n"
            );
        }
        lab.shell(&script);
        let service = Service::start(lab);
        let socket = service.folder.join("control.sock");
        let mut client = Client::connect(&socket).unwrap();
        let target = |number: usize| Target {
            netns: Some("/run/netns/far".into()),
            interface: format!("d{number}"),
            side: Side::Sandbox,
        };
        let impairment = "delay 1h".parse().unwrap();
        for number in 0..=WAITING {
            let owner = Owner::User { uid: 0 };
            client.set(&target(number), &owner, &impairment).unwrap();
            // What the kernel says by a new interface is under way from then on.
            lab.run(&format!("ip -n far link set d{number} up"));
        }
        wait_until("every target holds packets", || {
            let all = client.list().unwrap();
            all.iter().all(|target| target.egress.line.inside > 0)
        });
        thread::scope(|scope| {
            for number in 0..WAITING {
                let mut waiting = Client::connect(&socket).unwrap();
                scope.spawn(move || waiting.clear(&target(number), false).unwrap());
            }
            wait_until("all are waited for", || {
                let all = client.list().unwrap().into_iter();
                all.filter(|target| target.state == State::Draining).count() == WAITING
            });
            let refused = Client::connect(&socket)
                .unwrap()
                .clear(&target(WAITING), false);
            let another = Client::connect(&socket).unwrap().list();
            for number in 0..=WAITING {
                client.clear(&target(number), true).unwrap();
            }
            assert_eq!(another.unwrap().len(), WAITING + 1);
            assert!(refused.unwrap_err().to_string().contains("--flush"));
        });
    });
}
