use std::{fs, time::Duration};

use sandwire_engine::{Engine, Graph, apps::Sink};
use sandwire_impair::app::{Line, LineApp};

use super::{replay::Feed, *};
use crate::{forward::LINK, ways::Ways};

/// Records a run of a thousand frames of different lengths, in virtual time, and ends it in the middle of things.
fn record(folder: &Path) -> Recording {
    let ways = Ways {
        ab: Some(
            "seed 7; loss 5% delay 20ms 15ms normal order any rate 5mbit limit 20 packets duplicate 2%",
        ),
        ba: Some("delay 3ms corrupt 10%"),
        both: None,
    };
    let impairment = ways.combine().unwrap();
    let mut recording = Recording::create(folder, &impairment, &Clock::new()).unwrap();
    let (ab, ba) = Line::pair(&impairment, LINK).unwrap();
    let feeds = [Feed::default(), Feed::default()];
    let mut graph = Graph::new();
    for (((name, way), line), feed) in [("ab", Way::Ab), ("ba", Way::Ba)]
        .into_iter()
        .zip([ab, ba])
        .zip(&feeds)
    {
        graph.app(&format!("from-{name}"), feed.clone()).unwrap();
        graph
            .app(&format!("tap-{name}"), recording.tap(way))
            .unwrap();
        graph.app(name, line).unwrap();
        graph.app(&format!("to-{name}"), Sink).unwrap();
        graph
            .link(&format!("from-{name}.output -> tap-{name}.input"))
            .unwrap();
        graph
            .link(&format!("tap-{name}.output -> {name}.input"))
            .unwrap();
        graph
            .link(&format!("{name}.output -> to-{name}.input"))
            .unwrap();
    }
    let mut engine = Engine::new();
    engine.configure(&graph).unwrap();
    for name in ["ab", "ba"] {
        let line = engine.app_mut::<LineApp>(name).unwrap();
        line.observe(Some(recording.observer()));
    }
    let mut now = Time::from_nanos(123_456_789);
    engine.breathe(now);
    recording.begin(now).unwrap();
    for number in 0..1000_u32 {
        for (feed, bytes) in feeds.iter().zip([64, 1500]) {
            if number % 3 != 1 {
                let frame = vec![u8::try_from(number % 251).unwrap(); bytes];
                feed.0.borrow_mut().push_back(frame);
            }
        }
        // Uneven, and seldom when something is due: a real engine is late too.
        now = now + Duration::from_nanos(700_001 + u64::from(number % 7) * 90_000);
        engine.breathe(now);
    }
    recording.end(now).unwrap();
    recording
}

#[test]
fn a_run_that_is_replayed_decides_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let recording = record(&folder.path().join("run"));
    let replayed = replay(&recording.folder).unwrap();
    assert_eq!(replayed.frames, 2 * 667);
    assert!(replayed.decisions > 1200, "{replayed:?}");
    assert!(
        replayed.is_same && replayed.differences.is_empty(),
        "{replayed:?}"
    );
}

/// Who reads `run.json`, or comes to it after a power cut, finds one that is whole.
#[test]
fn what_a_run_was_is_never_cut_short() {
    let folder = tempfile::tempdir().unwrap();
    let clock = Clock::new();
    let mut recording = Recording::create(folder.path(), &Impairment::default(), &clock).unwrap();
    recording.begin(Time::from_nanos(1)).unwrap();
    let path = folder.path().join(RUN);
    let at_first = fs::read_to_string(&path).unwrap();
    let opened = File::open(&path).unwrap();
    recording.end(Time::from_nanos(2)).unwrap();
    assert_ne!(fs::read_to_string(&path).unwrap(), at_first);
    assert_eq!(io::read_to_string(opened).unwrap(), at_first);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
}

#[test]
fn another_fate_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let recording = record(folder.path());
    let path = recording.folder.join(DECISIONS);
    let text = fs::read_to_string(&path).unwrap();
    let lost = text.replacen("\"cause\":\"loss\"", "\"cause\":\"queue_full\"", 1);
    assert_ne!(lost, text);
    fs::write(&path, lost).unwrap();
    let replayed = replay(&recording.folder).unwrap();
    assert_eq!(
        (replayed.is_same, replayed.different),
        (false, 1),
        "{replayed:?}"
    );
    let without: Vec<&str> = text.lines().skip(1).collect();
    fs::write(&path, without.join("\n")).unwrap();
    assert_eq!(replay(&recording.folder).unwrap().different, 1);
    fs::write(&path, format!("{text}{{}}\n")).unwrap();
    let error = replay(&recording.folder).unwrap_err().to_string();
    assert!(error.contains("decisions.jsonl: line "), "{error}");
}

#[test]
fn a_frame_from_the_end_of_time_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let recording = record(folder.path());
    let path = recording.folder.join(BEFORE);
    let mut frames = fs::read(&path).unwrap();
    let word = |frames: &[u8], at| u32::from_ne_bytes(frames[at..at + 4].try_into().unwrap());
    // The first enhanced packet block: type, length, interface, time.
    let mut at = 0;
    while word(&frames, at) != 6 {
        at += usize::try_from(word(&frames, at + 4)).unwrap();
    }
    frames[at + 12..at + 20].fill(0xff);
    fs::write(&path, &frames).unwrap();
    let error = replay(&recording.folder).unwrap_err().to_string();
    assert!(error.contains("a century"), "{error}");
}

/// What this process has mapped at most so far, in bytes.
fn mapped_max() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:"));
    let number = line.unwrap().trim().trim_end_matches(" kB");
    number.parse::<usize>().unwrap() * 1024
}

/// Buffers of the longest frame that there could be would take 6.5 GB.
#[test]
fn a_replay_takes_no_more_memory_than_its_frames_need() {
    let folder = tempfile::tempdir().unwrap();
    let impairment = "delay 60s limit 200000 packets".parse().unwrap();
    let mut recording =
        Recording::create(&folder.path().join("run"), &impairment, &Clock::new()).unwrap();
    recording.begin(Time::from_nanos(1)).unwrap();
    for number in 0..100_000 {
        let mut files = recording.files.borrow_mut();
        files.came(Way::Ab, 1000 + number * 1000, &[0; 64]);
    }
    recording.end(Time::from_nanos(200_000_000)).unwrap();
    let before = mapped_max();
    assert_eq!(replay(&recording.folder).unwrap().frames, 100_000);
    let more = mapped_max() - before;
    assert!(more < 2_000_000_000, "{more}");
}

/// Takes so many bytes off the end of a file.
fn cut(path: &Path, bytes: usize) {
    let content = fs::read(path).unwrap();
    fs::write(path, &content[..content.len() - bytes]).unwrap();
}

/// Takes the end off a recording, as if its process had been killed.
fn cut_off(folder: &Path) {
    let path = folder.join(RUN);
    let mut run: Run = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    run.ended = None;
    fs::write(&path, serde_json::to_vec(&run).unwrap()).unwrap();
}

#[test]
fn a_run_that_was_cut_off_is_replayed_as_far_as_it_goes() {
    let folder = tempfile::tempdir().unwrap();
    let whole = record(&folder.path().join("run"));
    let before = replay(&whole.folder).unwrap();
    let path = whole.folder.join(BEFORE);
    let frames = fs::read(&path).unwrap();
    let decisions = fs::read(whole.folder.join(DECISIONS)).unwrap();

    // Torn is only the end of what was cut off.
    cut(&path, 30);
    assert!(replay(&whole.folder).is_err());
    cut_off(&whole.folder);
    // More of the frames is missing, or more of the decisions.
    for (less, fewer) in [
        (30, 10),
        (400_001, 5),
        (7, 60_003),
        (frames.len() - 2_000, 1),
    ] {
        fs::write(&path, &frames).unwrap();
        cut(&path, less);
        fs::write(whole.folder.join(DECISIONS), &decisions).unwrap();
        cut(&whole.folder.join(DECISIONS), fewer);
        let replayed = replay(&whole.folder).unwrap();
        assert!(replayed.is_same && replayed.is_cut_off, "{replayed:?}");
        assert!(replayed.frames < before.frames, "{replayed:?}");
        assert!(replayed.decisions < before.decisions, "{replayed:?}");
    }
    // A line amid others is as wrong as ever, and so is another fate.
    fs::write(&path, &frames).unwrap();
    let text = String::from_utf8(decisions).unwrap();
    let lost = text.replacen("\"cause\":\"loss\"", "\"cause\":\"queue_full\"", 1);
    fs::write(whole.folder.join(DECISIONS), lost).unwrap();
    assert_eq!(replay(&whole.folder).unwrap().different, 1);
    fs::write(whole.folder.join(DECISIONS), format!("{{}}\n{text}")).unwrap();
    let error = replay(&whole.folder).unwrap_err().to_string();
    assert!(error.contains("decisions.jsonl: line 1"), "{error}");
}

#[test]
fn nothing_that_is_there_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("notes"), "mine").unwrap();
    let error = Recording::create(folder.path(), &Impairment::default(), &Clock::new());
    assert!(error.unwrap_err().to_string().contains("it isn't empty"));
    assert!(
        replay(folder.path())
            .unwrap_err()
            .to_string()
            .contains("run.json")
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
