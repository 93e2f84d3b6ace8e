//! Streams between real guests and the world around them, and what shows that they were carried as they should.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    guest::web::GuestWeb,
    namespace,
    sandwire::Lease,
    traffic::{self, Receiver, Stream},
};

const SECOND: Duration = Duration::from_secs(1);
pub(crate) const STREAM_PORT: u16 = 9000;

/// Has a guest send a stream to a receiver in a namespace; returns what both ends say.
pub(crate) fn send_from_guest(
    lease: &Lease,
    receiver: Receiver,
    to: IpAddr,
    blocks: u64,
) -> (String, Stream) {
    let receiving = thread::spawn(move || receiver.receive().unwrap());
    let target = SocketAddr::new(to, STREAM_PORT);
    let sent = GuestWeb::at(lease.ipv4)
        .run(&format!("/usr/bin/lab-traffic send {target} {blocks}"))
        .unwrap();
    assert!(sent.contains("bytes"), "{}: {sent}", lease.name);
    (sent.trim().to_owned(), receiving.join().unwrap())
}

/// Sends a stream to a guest from a namespace; returns what both ends say.
pub(crate) fn send_to_guest(
    lease: &Lease,
    from: &Path,
    at: IpAddr,
    blocks: u64,
) -> (String, Stream) {
    let web = GuestWeb::at(lease.ipv4);
    let receiving = thread::spawn(move || {
        web.run(&format!("/usr/bin/lab-traffic receive {STREAM_PORT}"))
            .unwrap()
    });
    let target = SocketAddr::new(at, STREAM_PORT);
    let deadline = Instant::now() + 60 * SECOND;
    let sent = loop {
        match namespace::inside(from, || traffic::send(target, blocks)) {
            Ok(sent) => break sent,
            Err(error) => assert!(Instant::now() < deadline, "{}: {error:#}", lease.name),
        }
        thread::sleep(SECOND / 20);
    };
    (receiving.join().unwrap().trim().to_owned(), sent)
}

/// Packets with a wrong checksum that a namespace has received.
pub(crate) fn checksum_errors(netns: &Path) -> u64 {
    let all = namespace::run_in(netns, "nstat -a -s -z -j").unwrap();
    let counters: serde_json::Value = serde_json::from_str(&all).unwrap();
    let counters = counters["kernel"].as_object().unwrap();
    let found: Vec<u64> = counters
        .iter()
        .filter(|(name, _)| name.contains("CsumErrors"))
        .map(|(_, value)| value.as_u64().unwrap())
        .collect();
    assert!(found.len() >= 4, "{counters:?}");
    found.iter().sum()
}

/// Counts super-packets on an interface of a namespace while something goes on: so many, or all that come within a
/// minute.
pub(crate) fn super_packets(
    netns: &Path,
    interface: &str,
    wanted: usize,
    work: impl FnOnce(),
) -> usize {
    let line = format!("timeout 60 tcpdump -n -p -i {interface} -c {wanted} tcp and greater 60000");
    let netns = netns.to_owned();
    let capture = thread::spawn(move || {
        let mut command = namespace::command_in(&netns, "sh");
        let output = command
            .args(["-c", &format!("{line} 2>/dev/null")])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).lines().count()
    });
    thread::sleep(SECOND / 2);
    work();
    capture.join().unwrap()
}
