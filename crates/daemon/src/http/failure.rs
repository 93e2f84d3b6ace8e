//! What a handler answers when it does not do what it was asked.
//!
//! A [`Failure`] becomes a response without a body that carries it along; the outermost layer
//! ([`super::answer`]) knows the request's number and writes the body. So each error, whoever makes
//! it, has the same form.

use std::collections::BTreeMap;

use axum::{
    http::StatusCode,
    response::{IntoResponse, Response},
};
use sandwire_api::{error::ErrorCode, name::Name};
use sandwire_slot::error::ServiceError;
use utoipa::{
    IntoResponses, ToSchema,
    openapi::{Content, Ref, RefOr, ResponseBuilder},
};

/// A refusal or a failure, before it has a request number.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) status: StatusCode,
    pub(crate) code: ErrorCode,
    pub(crate) message: String,
    /// The request's field whose value is refused.
    pub(crate) field: Option<&'static str>,
    /// The pool, if that has no slot to give right now.
    pub(crate) empty_pool: Option<Name>,
}

impl Failure {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            status: status_of(code),
            code,
            message: message.into(),
            field: None,
            empty_pool: None,
        }
    }

    /// The same failure with a status that says more than its code.
    pub(crate) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    pub(crate) fn no_pool(name: &impl std::fmt::Display) -> Self {
        Self::new(ErrorCode::NotFound, format!("there is no pool {name}"))
    }
}

/// The HTTP status of a code: 4xx for a refusal, 5xx for what may work later or needs an operator.
pub(crate) fn status_of(code: ErrorCode) -> StatusCode {
    match code {
        ErrorCode::InvalidRequest => StatusCode::BAD_REQUEST,
        ErrorCode::Forbidden => StatusCode::FORBIDDEN,
        ErrorCode::NotFound => StatusCode::NOT_FOUND,
        ErrorCode::Conflict | ErrorCode::PoolExhausted => StatusCode::CONFLICT,
        ErrorCode::Unsupported => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorCode::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        ErrorCode::PoolEmpty | ErrorCode::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
    }
}

impl From<ServiceError> for Failure {
    fn from(error: ServiceError) -> Self {
        let failure = Self::new(error.code(), error.to_string());
        match error {
            ServiceError::PoolEmpty { pool, .. } => Self {
                empty_pool: Some(pool),
                ..failure
            },
            ServiceError::Invalid { field, .. } => Self {
                field: Some(field),
                ..failure
            },
            _ => failure,
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// The errors that any operation under `/v1` may answer, for the API's description.
pub(crate) struct Failures;

impl IntoResponses for Failures {
    fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
        let error = sandwire_api::error::ApiError::name();
        [
            ("400", "`invalid_request`: malformed, or impossible values"),
            ("403", "`forbidden`: the caller may not do that"),
            ("404", "`not_found`: nothing of that name for this caller"),
            ("405", "`invalid_request`: the path has no such method"),
            ("408", "`invalid_request`: the body took too long"),
            (
                "409",
                "`conflict`: taken; `pool_exhausted`: the pool's addresses are used up",
            ),
            ("413", "`invalid_request`: the body is too large"),
            (
                "422",
                "`unsupported`: this version or this host can't do that",
            ),
            ("500", "`internal`: the kernel or the state folder failed"),
            (
                "503",
                "`pool_empty`: no slot is ready, try again; `unavailable`: starting or stopping",
            ),
        ]
        .into_iter()
        .map(|(status, description)| {
            let content = Content::new(Some(Ref::from_schema_name(error.clone())));
            let response = ResponseBuilder::new()
                .description(description)
                .content("application/json", content)
                .build();
            (status.to_owned(), RefOr::T(response))
        })
        .collect()
    }
}
