//! Any file is a scenario or refused: what comes of it is in order, and can be carried out.

use sandwire_impair::scenario::Scenario;

/// One case: a file.
pub(crate) fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let lines = text.split('\n').count();
    let scenario = match Scenario::parse(text, &["a", "b"]) {
        Ok(scenario) => scenario,
        Err(error) => {
            assert!(
                (1..=lines).contains(&error.line),
                "{error} in {lines} lines"
            );
            return;
        }
    };
    let mut before = 0;
    for change in scenario.changes().take(300) {
        assert!(change.at >= before, "{} comes after {before}", change.at);
        before = change.at;
        assert_eq!(change.impairment.check(), Ok(()));
    }
}
