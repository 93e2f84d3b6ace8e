//! What a step fails with that a test lets fail, and what is found of a slot that a test damages.

use sandwire_api::slot::Defect;

use crate::error::NetworkError;

#[derive(Debug, thiserror::Error)]
#[error("the test says so")]
struct TestSaysSo;

pub(super) fn failed(operation: &'static str) -> NetworkError {
    NetworkError::Kernel {
        operation,
        object: "model".to_owned(),
        source: Box::new(TestSaysSo),
    }
}

pub(super) fn defect(action: &str) -> Defect {
    Defect {
        object: "tap vmtap0".to_owned(),
        problem: "is not as it was made".to_owned(),
        action: action.to_owned(),
    }
}
