//! Why a verb didn't do what it was asked, and the exit status that follows from it.

use sandwire_api::error::{ApiError, ErrorCode};
use serde::Serialize;

/// A verb's bad end: one sentence for people, one word for programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Failure {
    /// Stable word for programs; the daemon's own where it gave one.
    pub(crate) code: ErrorCode,
    /// Operation, object, cause, and what to do.
    pub(crate) message: String,
    /// The request's field whose value the daemon refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) field: Option<String>,
    /// Exit status of the process: 1 refused, 2 failed.
    pub(crate) exit_status: u8,
    /// Number of the request in the daemon's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) request_id: Option<String>,
}

/// How a verb ends.
pub(crate) type Outcome = Result<std::process::ExitCode, Failure>;

impl Failure {
    /// Bad input: nothing changed.
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, message)
    }

    /// Something that should have worked did not.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, message)
    }

    /// With a certain word for programs; the exit status follows from it.
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            field: None,
            exit_status: if code.is_refusal() { 1 } else { 2 },
            request_id: None,
        }
    }

    /// What the daemon answered, with the operation in front unless it names it itself.
    pub(crate) fn of_answer(operation: &str, answer: ApiError) -> Self {
        let message = if answer.message.starts_with("cannot ") {
            answer.message
        } else {
            format!("cannot {operation}: {}", answer.message)
        };
        Self {
            field: answer.field,
            request_id: Some(answer.request_id).filter(|id| !id.is_empty()),
            ..Self::new(answer.code, message)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: ErrorCode, message: &str) -> ApiError {
        ApiError {
            code,
            message: message.to_owned(),
            field: None,
            request_id: "r1".to_owned(),
        }
    }

    #[test]
    fn a_refusal_ends_with_1_and_a_failure_with_2() {
        let refusal = Failure::of_answer("create pool web", answer(ErrorCode::Conflict, "taken"));
        assert_eq!(
            (refusal.exit_status, refusal.message.as_str()),
            (1, "cannot create pool web: taken")
        );
        let failure =
            Failure::of_answer("create pool web", answer(ErrorCode::Internal, "disk full"));
        assert_eq!(failure.exit_status, 2);
    }

    #[test]
    fn an_answer_that_names_its_operation_is_passed_on_as_it_is() {
        let text = "cannot acquire a7 from pool web: it has no ready slot; try again";
        let failure = Failure::of_answer("acquire", answer(ErrorCode::PoolEmpty, text));
        assert_eq!(failure.message, text);
    }
}
