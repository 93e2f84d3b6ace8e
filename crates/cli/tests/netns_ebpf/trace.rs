//! What is written of packets while they pass.

use std::{
    fs,
    io::Read,
    net::SocketAddr,
    process::{Child, Stdio},
    thread,
};

use sandwire_testlab::{
    command,
    fake_guest::{FakeGuest, frame},
    guest::kernel::Series,
    host::{BEYOND_IPV4, HOST_IPV4},
    lab::{self, Lab},
    pinger::Pinger,
};
use serde_json::Value;

use crate::{
    GATEWAY_MAC,
    ebpf::{POOLS, SECOND, World, wait_until},
    restarts::MAPS,
    tenants::assert_packets_both_ways,
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_written_trace_is_read_by_tcpdump() {
    lab::run(|lab| {
        assert_a_written_trace_is_read_by_tcpdump(lab);
    });
}

#[test]
#[ignore = "needs root and guests: cargo xtask test guest"]
fn traces_and_figures_are_had_on_linux_6_1() {
    lab::run_on(Series::Linux6_1, 900 * SECOND, |lab| {
        let world = assert_a_written_trace_is_read_by_tcpdump(lab);
        let (lease, _guest) = world.guest("host", "seen");
        let pinger = Pinger::start(&world.beyond.path(), lease.ipv4, SECOND / 50).unwrap();
        let sample = world.daemon.json("top --once").unwrap();
        pinger.stop().unwrap();
        assert_packets_both_ways(&sample, "seen");
    });
}

fn assert_a_written_trace_is_read_by_tcpdump(lab: &Lab) -> World {
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
        wait_until("the trace has begun", 60 * SECOND, || {
            guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
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
    world
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Whatever part of a flood the trace has, it says how much it hasn't.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_trace_tells_of_all_packets_or_how_many_it_missed() {
    lab::run(|lab| {
        let world = World::start(lab, "route", 1);
        let (_lease, guest) = world.guest(POOLS[0], "flooded");
        guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
        let trace = trace_unread(&world);
        let before = count_of(&world);
        let datagram = one_of_many(&guest);
        let sent = guest.flood(vec![datagram], SECOND).unwrap();
        // The client reads them in the time that it takes.
        wait_until("it has read all", 60 * SECOND, || {
            let before = processor_ticks(trace.id());
            thread::sleep(2 * SECOND);
            processor_ticks(trace.id()) == before
        });
        let passed = count_of(&world) - before;
        command::run(&format!("kill -INT {}", trace.id())).unwrap();
        let said = trace.wait_with_output().unwrap().stderr;
        let said = String::from_utf8(said).unwrap();
        let summary = said.lines().last().unwrap();
        let numbers = summary
            .split([' ', ':'])
            .filter_map(|word| word.parse::<u64>().ok());
        let told: u64 = numbers.sum();
        // A neighbour's question or two may fall between the two beginnings.
        assert!(
            passed >= sent && told.abs_diff(passed) < 20,
            "{sent} sent, {passed} packets, {said}"
        );
    });
}

/// Each packet would go on to be told of, though nobody reads any more.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_trace_ends_with_its_daemon_amid_packets_and_sums_begin_anew_with_the_next() {
    lab::run(|lab| {
        let mut world = World::start(lab, "route", 1);
        let (lease, guest) = world.guest(POOLS[0], "flooded");
        guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
        let datagram = one_of_many(&guest);
        let trace = trace_unread(&world);
        thread::scope(|scope| {
            let flooding = scope.spawn(|| guest.flood(vec![datagram.clone()], 3 * SECOND));
            thread::sleep(SECOND);
            assert!(world.daemon.terminate().unwrap().success());
            flooding.join().unwrap().unwrap();
        });
        let ended = trace.wait_with_output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(ended.status.success(), "{said}");
        assert!(said.contains("the daemon is stopping"), "{said}");
        let before = events_lost(lab);
        let sent = guest.flood(vec![datagram], SECOND).unwrap();
        assert!(sent > 10_000, "more than the stream has room for: {sent}");
        assert_eq!(events_lost(lab), before);

        world.daemon.restart().unwrap();
        guest.ping(BEYOND_IPV4.into(), 5 * SECOND).unwrap();
        let metrics = world.daemon.http("GET", "/metrics", None).unwrap().body;
        let start = "sandwire_pool_packets_total{pool=\"netns\",direction=\"egress\"} ";
        let found = metrics.lines().find_map(|line| line.strip_prefix(start));
        let told: u64 = found.unwrap().parse().unwrap();
        let counted = &world.detail(&lease)["traffic"]["egress"]["packets"];
        assert!(counted.as_u64().unwrap() > 10_000, "{counted}");
        assert!((1..100).contains(&told), "{told}");
    });
}

/// What a guest floods with.
fn one_of_many(guest: &FakeGuest) -> Vec<u8> {
    let own = guest.network();
    let from = SocketAddr::new(own.ipv4.0.into(), 4000);
    let to = SocketAddr::new(BEYOND_IPV4.into(), 4000);
    frame::udp(own.mac, GATEWAY_MAC, from, to, b"one of many")
}

/// A trace that has begun, of which only the summary is kept.
fn trace_unread(world: &World) -> Child {
    let mut trace = world.daemon.command("trace flooded");
    let trace = trace.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut trace = trace.spawn().unwrap();
    // Byte by byte: what follows is for who waits for its end.
    let (mut said, mut byte) = (Vec::new(), [0]);
    while !said.ends_with(b"interrupt to end\n") {
        let stderr = trace.stderr.as_mut().unwrap();
        stderr.read_exact(&mut byte).unwrap();
        said.push(byte[0]);
    }
    trace
}

/// Processor time that a process has taken, in the kernel's ticks.
fn processor_ticks(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    // utime and stime, fields 14 and 15 of proc(5); the third is the first here.
    let ticks = fields.split(' ').skip(11).take(2);
    ticks.map(|field| field.parse::<u64>().unwrap()).sum()
}

/// Events of packets that found no room, of all interfaces, as the kernel has them.
fn events_lost(lab: &Lab) -> u64 {
    let shown = lab.shell(&format!("bpftool -j map dump pinned {MAPS}/v1/trace_lost"));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let entries = shown.as_array().unwrap().iter();
    entries
        .map(|entry| entry["formatted"]["value"].as_u64().unwrap())
        .sum()
}

/// Packets of the lease `flooded`, with those that were dropped.
fn count_of(world: &World) -> u64 {
    let shown = world.daemon.json("show flooded").unwrap();
    let traffic = &shown["traffic"];
    let drops = traffic["drops"].as_object().unwrap().values();
    let passed = ["egress", "ingress"].map(|way| traffic[way]["packets"].as_u64().unwrap());
    let dropped: u64 = drops.filter_map(Value::as_u64).sum();
    passed.into_iter().sum::<u64>() + dropped
}
