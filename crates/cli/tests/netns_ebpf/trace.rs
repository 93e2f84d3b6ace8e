//! What is written of packets while they pass.

use std::{fs, process::Stdio};

use sandwire_testlab::{
    command,
    host::{BEYOND_IPV4, HOST_IPV4},
    lab,
};

use crate::ebpf::{POOLS, SECOND, World, wait_until};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_written_trace_is_read_by_tcpdump() {
    lab::run(|lab| {
        let world = World::start(lab, "route", 1);
        for pool in POOLS {
            let (lease, guest) = world.guest(pool, pool);
            let file = lab.folder().join(format!("{pool}.pcapng"));
            let mut trace = world
                .daemon
                .command(&format!("trace {pool} -w {}", file.display()))
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            wait_until("the trace has begun", 10 * SECOND, || {
                guest.ping(BEYOND_IPV4.into(), SECOND).unwrap();
                guest.ping(HOST_IPV4.into(), SECOND / 10).unwrap_err();
                fs::metadata(&file).is_ok_and(|file| file.len() > 1000)
            });
            // By the signal that Ctrl-C sends, after which the file is whole.
            command::run(&format!("kill -INT {}", trace.id())).unwrap();
            trace.wait().unwrap();
            let text = command::run(&format!("tcpdump -n -r {}", file.display())).unwrap();
            let clone = lease.ipv4.to_string();
            let own = guest.network().ipv4.0.to_string();
            assert!(
                text.contains(&format!("{own} > {BEYOND_IPV4}: ICMP echo request")),
                "{text}"
            );
            assert!(
                text.contains(&format!("{BEYOND_IPV4} > {clone}: ICMP echo reply")),
                "{text}"
            );
            let bytes = fs::read(&file).unwrap();
            assert!(
                contains(&bytes, b"host_service"),
                "no verdict in the comments"
            );
        }
    });
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
