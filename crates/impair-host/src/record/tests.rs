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
