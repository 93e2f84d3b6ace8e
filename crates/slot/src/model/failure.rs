//! What a step fails with that a test lets fail.

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
