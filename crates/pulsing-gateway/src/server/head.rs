//! What the head of a request must be beyond what the HTTP library asks of it.
//!
//! Behind a proxy one request must be the same one to both: where two readings of a head are possible, none is taken.

use hyper::header::{self, HeaderMap, HeaderName};
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

/// What frames a request was read already, whoever calls it a matter of the connection.
const FRAMES: [HeaderName; 3] = [header::HOST, header::CONTENT_LENGTH, header::TRANSFER_ENCODING];

/// Takes out what `Connection` names: it is between the client and this Router only (RFC 9110, section 7.6.1).
pub(super) fn drop_hop_by_hop(headers: &mut HeaderMap) {
    for name in named_by_connection(headers) {
        if !FRAMES.contains(&name) {
            headers.remove(name);
        }
    }
}

fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let names = values.flat_map(|value| value.split(',')).map(str::trim);
    // These two are in most requests, and name no header that anybody sends.
    let names = names.filter(|name| !name.eq_ignore_ascii_case("close") && !name.eq_ignore_ascii_case("keep-alive"));
    names.filter_map(|name| name.parse().ok()).collect()
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
