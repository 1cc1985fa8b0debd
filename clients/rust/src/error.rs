//! What calls end with.

use std::fmt;
use std::time::Duration;

use http::HeaderMap;
use percent_encoding::percent_decode;
use prost::Message;

use crate::standard;

/// A status code of gRPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Ok,
    Cancelled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

/// By number.
const CODES: [(Code, &str); 17] = [
    (Code::Ok, "OK"),
    (Code::Cancelled, "CANCELLED"),
    (Code::Unknown, "UNKNOWN"),
    (Code::InvalidArgument, "INVALID_ARGUMENT"),
    (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
    (Code::NotFound, "NOT_FOUND"),
    (Code::AlreadyExists, "ALREADY_EXISTS"),
    (Code::PermissionDenied, "PERMISSION_DENIED"),
    (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"),
    (Code::FailedPrecondition, "FAILED_PRECONDITION"),
    (Code::Aborted, "ABORTED"),
    (Code::OutOfRange, "OUT_OF_RANGE"),
    (Code::Unimplemented, "UNIMPLEMENTED"),
    (Code::Internal, "INTERNAL"),
    (Code::Unavailable, "UNAVAILABLE"),
    (Code::DataLoss, "DATA_LOSS"),
    (Code::Unauthenticated, "UNAUTHENTICATED"),
];

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(CODES[*self as usize].1)
    }
}

/// A call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub code: Code,
    /// The server's sentence.
    pub message: String,
    /// Of `InvalidArgument`: the first refused field, if the server named one.
    pub field: Option<String>,
    /// Of `ResourceExhausted`, the queue is full: when to try again, if the server said it.
    pub retry_after: Option<Duration>,
}

impl Error {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), field: None, retry_after: None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Error {}

/// An error, as far as it says how to go on.
#[derive(Debug)]
pub(crate) struct Failure {
    pub error: Error,
    /// Of google.rpc.ErrorInfo: "EXPIRED_REQUEST" and so on.
    pub reason: String,
    /// It broke off on the way, without a word of the server.
    pub is_loss: bool,
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { error: Error::new(code, message), reason: String::new(), is_loss: false }
    }

    /// The connection broke, or was never there.
    pub fn loss(message: impl Into<String>) -> Self {
        Self { is_loss: true, ..Self::new(Code::Unavailable, message) }
    }
}

/// What the trailers of a call say; None: they have no status.
pub(crate) fn status_of(trailers: &HeaderMap) -> Option<Result<(), Failure>> {
    let number: usize = trailers.get("grpc-status")?.to_str().ok()?.parse().ok()?;
    let code = CODES.get(number).map_or(Code::Unknown, |known| known.0);
    if code == Code::Ok {
        return Some(Ok(()));
    }
    let message = trailers.get("grpc-message").map_or(&b""[..], |value| value.as_bytes());
    let mut failure = Failure::new(code, percent_decode(message).decode_utf8_lossy());
    match details_of(trailers) {
        Some(details) => read_details(&mut failure, &details),
        None => failure.is_loss = speaks_of_loss(&failure.error),
    }
    Some(Err(failure))
}

/// What a proxy says of a connection that broke behind it, by codes that a server has too.
fn speaks_of_loss(error: &Error) -> bool {
    let words = ["RST_STREAM", "Stream removed", "Socket closed", "GOAWAY", "http2", "EOF"];
    match error.code {
        Code::Unavailable | Code::Cancelled => true,
        Code::Internal | Code::Unknown => words.iter().any(|word| error.message.contains(word)),
        _ => false,
    }
}

fn details_of(trailers: &HeaderMap) -> Option<standard::Status> {
    let text = trailers.get("grpc-status-details-bin")?.as_bytes();
    let end = text.iter().rposition(|&byte| byte != b'=').map_or(0, |last| last + 1);
    let bytes = base64::decode_config(&text[..end], base64::STANDARD_NO_PAD).ok()?;
    standard::Status::decode(&bytes[..]).ok()
}

fn read_details(failure: &mut Failure, details: &standard::Status) {
    for detail in &details.details {
        let value = &detail.value[..];
        match detail.type_url.rsplit('/').next() {
            Some("google.rpc.BadRequest") => {
                let refused = standard::BadRequest::decode(value).unwrap_or_default();
                let first = refused.field_violations.into_iter().next();
                failure.error.field = first.map(|violation| violation.field);
            }
            Some("google.rpc.RetryInfo") => {
                let retry = standard::RetryInfo::decode(value).unwrap_or_default();
                failure.error.retry_after = retry.retry_delay.map(|delay| {
                    Duration::new(
                        delay.seconds.max(0) as u64,
                        delay.nanos.clamp(0, 999_999_999) as u32,
                    )
                });
            }
            Some("google.rpc.ErrorInfo") => {
                failure.reason = standard::ErrorInfo::decode(value).unwrap_or_default().reason;
            }
            _ => {}
        }
    }
}
