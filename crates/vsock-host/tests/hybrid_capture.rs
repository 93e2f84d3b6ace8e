//! Captures, read by tcpdump: an implementation that isn't ours.

mod hybrid;

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    net::Shutdown,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use hybrid::{Lab, echo, serve, to_unix, until};
use rustix::pipe::{PipeFlags, pipe_with};
use sandwire_vsock_host::{
    capture::{Captures, SNAP_LENGTH, Sink},
    readiness::{Interest, Poller, Waker},
    statistics::VmCounters,
};

/// What tcpdump says about a capture file, a line a packet.
fn tcpdump(file: &std::path::Path) -> Vec<String> {
    let output = Command::new("tcpdump")
        .args(["-n", "-t", "-r"])
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .expect("tcpdump, which `cargo xtask setup` installs");
    let (text, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{errors}");
    assert!(errors.contains("link-type VSOCK"), "{errors}");
    text.lines().map(str::to_owned).collect()
}

fn captures() -> (Captures, Arc<Waker>) {
    let ended = Arc::new(Waker::new().expect("an eventfd"));
    (
        Captures::spawn(ended.clone()).expect("the capture thread"),
        ended,
    )
}

/// A packet's header: payload from the guest, or something else by its operation.
fn header(operation: u16, length: u32) -> [u8; 44] {
    let mut header = [0; 44];
    header[0] = 3;
    header[8] = 2;
    header[16..20].copy_from_slice(&1025_u32.to_le_bytes());
    header[20..24].copy_from_slice(&22_u32.to_le_bytes());
    header[24..28].copy_from_slice(&length.to_le_bytes());
    header[28] = 1;
    header[30..32].copy_from_slice(&operation.to_le_bytes());
    header
}

#[test]
fn tcpdump_reads_each_operation() {
    let (captures, _) = captures();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("all.pcap");
    let sink = captures
        .start(
            File::create(&path).expect("a file").into(),
            SNAP_LENGTH,
            Arc::default(),
        )
        .expect("a capture");
    for operation in 1..=7 {
        sink.record(&header(operation, 0), &[]);
    }
    sink.record(&header(5, 5), &[b"he", b"llo"]);
    sink.end();
    drop(captures);
    let lines = tcpdump(&path);
    let kinds = [
        "CONNECT",
        "CONNECT",
        "DISCONNECT",
        "DISCONNECT",
        "PAYLOAD",
        "CONTROL",
        "CONTROL",
    ];
    assert_eq!(lines.len(), 8, "{lines:#?}");
    for (line, kind) in lines.iter().zip(kinds) {
        assert!(line.contains(&format!("3.1025 > 2.22 {kind}")), "{line}");
    }
    assert_eq!(sink.outcome().recorded, 8);
    let bytes = fs::read(&path).expect("the file");
    assert!(bytes.ends_with(b"hello"));
}

#[test]
fn a_relay_s_capture_shows_its_life_and_the_bytes_arrive_as_without() {
    let mut lab = Lab::new();
    let service = lab.path("service");
    serve(&service, echo);
    lab.add("web", &[&to_unix("22", &service)])
        .expect("a guest");
    let (captures, _) = captures();
    let path = lab.path("relay.pcap");
    let sink = captures
        .start(
            File::create(&path).expect("a file").into(),
            16,
            Arc::default(),
        )
        .expect("a capture");
    lab.capture("web", Some(sink.clone()));
    let mut stream = lab.call("web", 22).expect("a connection");
    let sent: Vec<u8> = (0..100_000_u32)
        .map(|number| number.to_le_bytes()[0])
        .collect();
    stream.write_all(&sent).expect("writing");
    stream.shutdown(Shutdown::Write).expect("an end");
    let mut received = Vec::new();
    stream.read_to_end(&mut received).expect("the echo");
    assert!(received == sent);
    until("the relay is gone", || lab.list().is_empty());
    lab.capture("web", None);
    sink.end();
    drop(captures);
    let lines = tcpdump(&path);
    let (out, back) = ("3.1073741824 > 2.22 ", "2.22 > 3.1073741824 ");
    assert!(lines[0].contains(&format!("{out}CONNECT")), "{}", lines[0]);
    assert!(lines[1].contains(&format!("{back}CONNECT")), "{}", lines[1]);
    let of = |kind: String| lines.iter().filter(|line| line.contains(&kind)).count();
    assert!(
        of(format!("{out}PAYLOAD")) >= 2 && of(format!("{back}PAYLOAD")) >= 2,
        "{lines:#?}"
    );
    assert_eq!(
        (
            of(format!("{out}DISCONNECT")),
            of(format!("{back}DISCONNECT"))
        ),
        (1, 1)
    );
    let length = fs::metadata(&path).expect("the file").len();
    assert!(
        length < 10_000,
        "the payload is cut at 16 bytes, and yet there are {length} bytes"
    );
}

#[test]
fn a_full_disk_ends_that_capture_alone_and_the_other_goes_on() {
    let (captures, ended) = captures();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("good.pcap");
    let full = OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("a full disk");
    let bad = captures
        .start(full.into(), SNAP_LENGTH, Arc::default())
        .expect("a capture");
    let good = captures
        .start(
            File::create(&path).expect("a file").into(),
            SNAP_LENGTH,
            Arc::default(),
        )
        .expect("another");
    wait_for(&ended);
    let reason = bad.outcome().reason.expect("a reason");
    assert!(reason.contains("no space is left"), "{reason}");
    for sink in [&bad, &good] {
        sink.record(&header(5, 1), &[b"x"]);
    }
    good.end();
    drop(captures);
    assert_eq!(good.outcome().reason, None);
    assert_eq!(tcpdump(&path).len(), 1);
}

#[test]
fn a_reader_that_does_not_read_costs_packets_and_nothing_else() {
    let (captures, _) = captures();
    let (out, into) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
    let counters = Arc::new(VmCounters::default());
    let sink = captures.start(into, SNAP_LENGTH, counters.clone());
    let sink = sink.expect("a capture");
    let begun = Instant::now();
    for _ in 0..1000 {
        sink.record(&header(5, 60_000), &[&[1; 60_000]]);
    }
    assert!(
        begun.elapsed() < Duration::from_secs(60),
        "recording waited"
    );
    let outcome = sink.outcome();
    assert!(
        outcome.dropped > 800 && outcome.recorded > 10,
        "{outcome:?}"
    );
    assert_eq!(outcome.recorded + outcome.dropped, 1000);
    let counted = counters.snapshot().capture_dropped_packets;
    assert_eq!(counted, outcome.dropped);
    assert_eq!(outcome.reason, None);
    drop(out);
    until("its end is known", || sink.outcome().reason.is_some());
}

fn wait_for(ended: &Waker) {
    let mut poller = Poller::new().expect("an epoll instance");
    poller.add(ended, 1, Interest::READ).expect("watching");
    let ready = poller
        .wait(Some(Instant::now() + hybrid::PATIENCE))
        .expect("waiting");
    assert_eq!(ready.len(), 1, "nobody was told of the end");
}

/// Sinks are shared between threads.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Sink>();
};
