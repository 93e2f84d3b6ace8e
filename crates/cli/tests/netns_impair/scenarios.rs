//! `sandwire impair run`.

use sandwire_testlab::lab;

use crate::lab::{Service, interfaces, round_trip, wait_until};

const SCENARIO: &str = r#"
duration = "9s"
[[rule]]
name = "all"
delay = "10ms"

[[step]]
at = "1s"
set = "name all delay 40ms"
"#;

/// The impairment changes at its moment, and ends with the scenario.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_scenario_changes_the_impairment_by_the_clock_and_ends_it() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let file = lab.folder().join("scenario.toml");
        std::fs::write(&file, SCENARIO).unwrap();
        let line = format!("run {} --netns far --json", file.display());
        std::thread::scope(|scope| {
            let running = scope.spawn(|| service.run(&line));
            wait_until("the delay is another", || {
                (80.0..100.0).contains(&round_trip(lab).0)
            });
            let said: serde_json::Value = serde_json::from_str(&running.join().unwrap()).unwrap();
            assert_eq!(said["changes"], 2, "{said:#}");
            assert_eq!(said["completed"], true, "{said:#}");
        });
        let (least, _) = round_trip(lab);
        assert!(least < 5.0, "{least}");

        std::fs::write(&file, SCENARIO.replace("40ms", "-40ms")).unwrap();
        let output = service.output(&line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("line 9"), "{said}");
    });
}

/// What a scenario isn't allowed to begin it doesn't end either.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_scenario_that_is_refused_leaves_the_impairment_that_there_is() {
    lab::run(|lab| {
        interfaces(lab);
        let service = Service::start(lab);
        let file = lab.folder().join("scenario.toml");
        std::fs::write(&file, SCENARIO).unwrap();
        service.run("--netns far --both 'delay 10ms'");
        let output = service.output(&format!("run {} --netns far --side host", file.display()));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("the other way round"), "{said}");
        assert_eq!(service.shown()["state"]["state"], "impaired");
        let (least, _) = round_trip(lab);
        assert!(least >= 20.0, "{least}");
    });
}
