//! Captures: tcpdump reads what is written and writes what is read, and frames are replayed in a time of our own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Result, ensure};
use sandwire_engine::apps::{Sink, Source};
use sandwire_engine::io::pcap::{Format, Writer};
use sandwire_engine::io::{PcapReader, PcapWriter};
use sandwire_engine::{Engine, Graph, Runner, Time, Wake};

/// A datagram from 10.0.0.1:4321 to 10.0.0.2:53.
fn datagram() -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([
        8, 0, 0x45, 0, 0, 28, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
    ]);
    frame.extend([0x10, 0xe1, 0, 53, 0, 8, 0, 0]);
    frame
}

/// What tcpdump says about a file, a line a frame.
fn tcpdump(path: &Path, more: &[&str]) -> Result<Vec<String>> {
    let output = Command::new("tcpdump")
        .args(["-n", "-e", "-tt", "--nano", "-r"])
        .arg(path)
        .args(more)
        .output()
        .expect("tcpdump, which `cargo xtask setup` installs");
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{complaint}");
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().map(str::to_owned).collect())
}

fn replay(path: &Path) -> Result<Engine> {
    let mut graph = Graph::new();
    graph.app("file", PcapReader::file(path))?;
    graph.app("sink", Sink)?;
    graph.link("file.output -> sink.input")?;
    let mut engine = Engine::new();
    engine.configure(&graph)?;
    Ok(engine)
}

/// A file with one frame at each of these times.
fn capture_at(folder: &Path, times: &[u64]) -> Result<PathBuf> {
    let path = folder.join("times.pcapng");
    let mut writer = Writer::new(fs::File::create(&path)?, Format::Pcapng, &["a"])?;
    for time in times {
        writer.write(0, *time, &datagram(), None)?;
    }
    Ok(path)
}

#[test]
fn tcpdump_reads_what_passes_and_we_read_what_tcpdump_writes() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for (format, name) in [(Format::Pcap, "a.pcap"), (Format::Pcapng, "a.pcapng")] {
        let path = folder.path().join(name);
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let mut graph = Graph::new();
        graph.app("source", Source::of(vec![datagram()]).limit(300))?;
        graph.app("file", PcapWriter::file(&path, format, start))?;
        graph.app("sink", Sink)?;
        graph.links("source.output -> file.input \n file.output -> sink.input")?;
        let mut engine = Engine::new();
        engine.configure(&graph)?;
        for nanos in 0..5 {
            engine.breathe(Time::from_nanos(123_456_789 + nanos * 1_000_000_000));
        }
        assert_eq!(engine.figure("sink", "packets"), Some(300));
        // The engine still runs: an idle breath has handed everything over.
        let lines = tcpdump(&path, &[])?;
        assert_eq!(lines.len(), 300);
        for (number, line) in lines.iter().enumerate() {
            let second = 1_700_000_000 + number / 102;
            assert!(line.starts_with(&format!("{second}.123456789 ")), "{line}");
            assert!(line.contains("10.0.0.1.4321 > 10.0.0.2.53"), "{line}");
        }

        let rewritten = folder.path().join("b.pcap");
        tcpdump(&path, &["-w", &rewritten.to_string_lossy()])?;
        let mut engine = replay(&rewritten)?;
        Runner::new().run_until(&mut engine, |_| false);
        assert_eq!(engine.figure("sink", "packets"), Some(300));
        assert_eq!(engine.figure("sink", "bytes"), Some(300 * 42));
        assert_eq!(engine.figure("file", "ended"), Some(1));
        assert_eq!(engine.figure("file", "broken"), Some(0));
    }
    Ok(())
}

#[test]
fn comments_are_in_the_file_and_tcpdump_reads_past_them() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("a.pcapng");
    let file = fs::File::create(&path)?;
    let mut writer = Writer::new(file, Format::Pcapng, &["before", "after"])?;
    writer.write(0, 1, &datagram(), Some("dropped: loss"))?;
    writer.write(1, 2, &datagram(), None)?;
    drop(writer);
    assert_eq!(tcpdump(&path, &[])?.len(), 2);
    let text = fs::read(&path)?;
    let has = |word: &[u8]| text.windows(word.len()).any(|part| part == word);
    assert!(has(b"dropped: loss") && has(b"before") && has(b"after"));
    Ok(())
}

#[test]
fn frames_come_when_they_were_recorded() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // The fourth was recorded before the third: it comes right after it.
    let path = capture_at(
        folder.path(),
        &[
            9_000_000_000,
            9_000_000_001,
            9_005_000_000,
            9_004_000_000,
            9_006_000_000,
        ],
    )?;
    let mut graph = Graph::new();
    graph.app("file", PcapReader::file(&path).at_recorded_times())?;
    graph.app("sink", Sink)?;
    graph.link("file.output -> sink.input")?;
    let mut engine = Engine::new();
    engine.configure(&graph)?;
    let start = Time::from_nanos(1_000);
    let mut now = start;
    let mut sent = Vec::new();
    let mut before = 0;
    for _ in 0..100 {
        let breath = engine.breathe(now);
        let packets = engine.figure("sink", "packets").unwrap_or_default();
        sent.extend((before..packets).map(|_| now.since(start).as_nanos()));
        before = packets;
        if breath.moved > 0 {
            continue;
        }
        match breath.wake {
            Wake { at: Some(at), .. } => now = at,
            Wake { polls, .. } => {
                assert!(!polls);
                break;
            }
        }
    }
    assert_eq!(sent, [0, 1, 5_000_000, 5_000_000, 6_000_000]);
    assert_eq!(engine.figure("file", "late_max_ns"), Some(0));
    assert_eq!(engine.figure("file", "ended"), Some(1));
    Ok(())
}

#[test]
fn what_can_not_be_sent_whole_is_left_out_and_counted() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let whole = folder.path().join("whole.pcap");
    let mut writer = Writer::new(fs::File::create(&whole)?, Format::Pcap, &[])?;
    writer.write(0, 1, &[0x11; 3000], None)?;
    writer.write(0, 2, &[0x22; 1000], None)?;
    writer.write(0, 3, &[0x33; 60], None)?;
    drop(writer);
    let cut = folder.path().join("cut.pcap");
    // A snapshot length is for captures, not for copies; so the second frame is cut here by hand.
    let mut bytes = fs::read(&whole)?;
    let second = 24 + 16 + 3000;
    bytes[second + 8..second + 12].copy_from_slice(&500_u32.to_le_bytes());
    bytes.drain(second + 16 + 500..second + 16 + 1000);
    // And the file ends in the middle of a fourth.
    bytes.extend([0; 7]);
    fs::write(&cut, bytes)?;
    let mut engine = replay(&cut)?;
    Runner::new().run_until(&mut engine, |_| false);
    for (figure, value) in [
        ("packets", 1),
        ("bytes", 60),
        ("too_long", 1),
        ("cut_short", 1),
        ("ended", 1),
        ("broken", 1),
    ] {
        assert_eq!(engine.figure("file", figure), Some(value), "{figure}");
    }
    Ok(())
}

#[test]
fn a_file_that_is_none_is_refused_before_anything_changes() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("a.pcap");
    fs::write(&path, "not a capture")?;
    for (path, reason) in [
        (path, "neither pcap nor pcapng"),
        (folder.path().join("missing"), "No such file"),
    ] {
        let error = match replay(&path) {
            Ok(_) => anyhow::bail!("{} was taken", path.display()),
            Err(error) => format!("{error:#}"),
        };
        assert!(error.contains(reason), "{error}");
        assert!(error.contains(&path.display().to_string()), "{error}");
    }
    Ok(())
}
