//! What the head of a request must be beyond what the HTTP library asks of it.
//!
//! Behind a proxy one request must be the same one to both: where two readings of a head are possible, none is taken.

use hyper::header::{self, HeaderMap};
use hyper::{Request, Version};

use crate::api::ApiError;

/// What is wrong with a request's head (RFC 9112, sections 3.2 and 7.1).
pub(super) fn fault<B>(request: &Request<B>) -> Option<ApiError> {
    let headers = request.headers();
    let mut hosts = headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) if request.version() == Version::HTTP_11 => {
            return Some(ApiError::malformed("A request of HTTP/1.1 has a Host header, and this one has none"));
        }
        (Some(_), Some(_)) => return Some(ApiError::malformed("The request has more than one Host header")),
        (Some(host), None) if !is_host(host.as_bytes()) => {
            return Some(ApiError::malformed("The request's Host header is no host"));
        }
        _ => {}
    }
    chunked_twice(headers).then(|| ApiError::malformed("The request's Transfer-Encoding says chunked more than once"))
}

/// A host name or address, perhaps with a port; empty where the target has none.
fn is_host(host: &[u8]) -> bool {
    host.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=:[]".contains(byte))
}

fn chunked_twice(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::TRANSFER_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let codings = values.flat_map(|value| value.split(','));
    codings.filter(|coding| coding.trim().eq_ignore_ascii_case("chunked")).nth(1).is_some()
}
