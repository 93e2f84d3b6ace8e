//! Any text is an impairment or refused: what is understood is written and understood the same again, and can be
//! carried out or says why not.

use sandwire_api::impairment::Impairment;
use sandwire_impair::{compile::compile, random::Direction};

/// One case: a text, which may also be JSON.
pub(crate) fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let read = text.parse::<Impairment>().ok();
    if let Some(read) = &read {
        let written = read.to_string();
        assert_eq!(written.parse().as_ref(), Ok(read), "{written}");
    }
    let json = serde_json::from_str::<Impairment>(text).ok();
    for impairment in read.iter().chain(&json) {
        // What the check refuses nobody keeps, and some of it no text can hold.
        if impairment.check().is_ok() {
            let written = serde_json::to_string(impairment).expect("writing it");
            let again: Impairment = serde_json::from_str(&written).expect("reading it again");
            assert_eq!(&again, impairment, "{written}");
        }
        for direction in [Direction::Egress, Direction::Ingress] {
            let compiled = compile(impairment, direction);
            let has_trace = impairment.rules.iter().any(|rule| rule.trace.is_some());
            assert!(compiled.is_ok() || has_trace || impairment.check().is_err());
        }
    }
}
