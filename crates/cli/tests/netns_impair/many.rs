//! Many targets on one thread.

use std::time::{Duration, Instant};

use sandwire_testlab::lab;

use crate::lab::Service;

const COUNT: u32 = 100;

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
