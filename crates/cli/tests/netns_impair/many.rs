//! Many targets on one thread.

use std::{
    sync::mpsc::channel,
    thread,
    time::{Duration, Instant},
};

use sandwire_impair_host::control::{Client, Owner, Side, State, Target};
use sandwire_testlab::lab::{self, Lab};

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
            // ping leaves before its last answer where the machine is slow.
            let mut said = String::new();
            wait_until("every ping is answered", || {
                said = lab.shell(&format!(
                    "ping -n -q -c 10 -i 0.02 10.20.{number}.2 || true"
                ));
                said.contains("10 received")
            });
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

/// As many as may be waited for at once of one user, who isn't root.
const WAITING_PER_USER: usize = 12;

/// A far namespace with so many interfaces, impaired for these users, whose packets will be under way for an hour.
fn hold_packets(lab: &Lab, users: &[u32]) -> (Service, Client) {
    let mut script = "ip netns add far\n".to_owned();
    for number in 0..users.len() {
        script += &format!(
            "ip -n far link add d{number} type veth peer name p{number}; ip -n far link set p{number} up\n"
        );
    }
    lab.shell(&script);
    let service = Service::start(lab);
    let mut client = Client::connect(&service.folder.join("control.sock")).unwrap();
    let impairment = "delay 1h".parse().unwrap();
    for (number, uid) in users.iter().enumerate() {
        let owner = Owner::User { uid: *uid };
        client.set(&target(number), &owner, &impairment).unwrap();
        // What the kernel says by a new interface is under way from then on.
        lab.run(&format!("ip -n far link set d{number} up"));
    }
    wait_until("every target holds packets", || {
        let all = client.list().unwrap();
        all.iter().all(|target| target.egress.line.inside > 0)
    });
    (service, client)
}

fn target(number: usize) -> Target {
    Target {
        netns: Some("/run/netns/far".into()),
        interface: format!("d{number}"),
        side: Side::Sandbox,
    }
}

fn waited_for(client: &mut Client) -> usize {
    let all = client.list().unwrap().into_iter();
    all.filter(|target| target.state == State::Draining).count()
}

/// Packets may be under way for an hour, and as long is waited for them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_waits_for_packets_under_way_holds_up_nobody_else() {
    lab::run(|lab| {
        let (service, mut client) = hold_packets(lab, &[0; WAITING + 1]);
        let socket = service.folder.join("control.sock");
        thread::scope(|scope| {
            for number in 0..WAITING {
                let mut waiting = Client::connect(&socket).unwrap();
                scope.spawn(move || waiting.clear(&target(number), false).unwrap());
            }
            wait_until("all are waited for", || waited_for(&mut client) == WAITING);
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

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_user_who_waits_for_packets_leaves_others_and_root_their_part() {
    lab::run(|lab| {
        // One more of each than may be waited for, and then one of a fourth user, and one of root.
        let of_users = [1000, 1001, 1002].map(|uid| [uid; WAITING_PER_USER + 1]);
        let users = [of_users.as_flattened(), &[1003, 0]].concat();
        let (service, mut client) = hold_packets(lab, &users);
        let socket = service.folder.join("control.sock");
        let (refused, refusals) = channel();
        thread::scope(|scope| {
            let mut clear = |number: usize| {
                let mut waiting = Client::connect(&socket).unwrap();
                let refused = refused.clone();
                scope.spawn(move || {
                    if let Err(error) = waiting.clear(&target(number), false) {
                        refused.send((number, error.to_string())).unwrap();
                    }
                });
            };
            let of_one = WAITING_PER_USER + 1;
            (0..of_one).for_each(&mut clear);
            let (_, reason) = refusals.recv_timeout(Duration::from_secs(20)).unwrap();
            wait_until("the others are waited for", || {
                waited_for(&mut client) == WAITING_PER_USER
            });
            (of_one..users.len() - 2).for_each(&mut clear);
            let more: Vec<_> = refusals.iter().take(2).collect();
            wait_until("those of others are waited for", || {
                waited_for(&mut client) == 3 * WAITING_PER_USER
            });
            // Users together leave the rest to root.
            (users.len() - 2..users.len()).for_each(&mut clear);
            let (last, _) = refusals.recv_timeout(Duration::from_secs(20)).unwrap();
            wait_until("that of root is waited for", || {
                waited_for(&mut client) == 3 * WAITING_PER_USER + 1
            });
            for number in 0..users.len() {
                client.clear(&target(number), true).unwrap();
            }
            assert!(reason.contains("user 1000"), "{reason}");
            assert_eq!(more.len(), 2);
            assert_eq!(users[last], 1003);
        });
    });
}

/// Control connections at once.
const CONNECTIONS: usize = 512;

/// As of hundreds of scenarios, each of which has one as long as it runs.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_connects_beyond_the_most_waits_for_another_to_go() {
    lab::run(|lab| {
        let service = Service::start(lab);
        let socket = service.folder.join("control.sock");
        let mut served: Vec<Client> = Vec::new();
        for _ in 0..CONNECTIONS {
            let mut client = Client::connect(&socket).unwrap();
            client.hello().unwrap();
            served.push(client);
        }
        let mut late = Client::connect(&socket).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(move || late.hello());
            thread::sleep(Duration::from_millis(200));
            assert!(!waiting.is_finished());
            drop(served.pop());
            waiting.join().unwrap().unwrap();
        });
    });
}
