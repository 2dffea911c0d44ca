//! Headers that a collector of traces wants, as a rule a key.
//!
//! They are secrets: no error repeats what stands in them.

use std::path::Path;

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};

use crate::files;

/// These are this client's own to say.
const OWN: [HeaderName; 5] =
    [header::HOST, header::CONTENT_TYPE, header::CONTENT_LENGTH, header::CONNECTION, header::TRANSFER_ENCODING];

/// Reads what is given: a `file` with one `Name: value` a line, or else a `list` as `OTEL_EXPORTER_OTLP_HEADERS` has it,
/// `name=value,name=value` with `%xx` for what could be misread.
///
/// # Errors
/// A sentence that says what is wrong with the file or the list, and where.
pub(super) fn read(file: Option<&Path>, list: Option<&str>) -> Result<HeaderMap, String> {
    match (file, list) {
        (Some(path), _) => {
            const WHAT: &str = "otlp_headers_file";
            let text = files::read_secret(WHAT, path)?;
            let lines = text.lines().enumerate().map(|(at, line)| (at, line.trim()));
            let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
            let bad = |at: usize, why: &str| format!("{WHAT} {}: line {} {why}", path.display(), at + 1);
            collect(lines.map(|(at, line)| (at, line.split_once(':'), false)), "is no `Name: value`", bad)
        }
        (None, Some(list)) => {
            let entries = list.split(',').enumerate().filter(|(_, entry)| !entry.trim().is_empty());
            let bad = |at: usize, why: &str| format!("OTEL_EXPORTER_OTLP_HEADERS: entry {} {why}", at + 1);
            collect(entries.map(|(at, entry)| (at, entry.split_once('='), true)), "is no `name=value`", bad)
        }
        (None, None) => Ok(HeaderMap::new()),
    }
}

/// A place, the two parts that stand there, and whether `%xx` is an escape in them.
type Entry<'a> = (usize, Option<(&'a str, &'a str)>, bool);

fn collect<'a>(
    entries: impl Iterator<Item = Entry<'a>>,
    form: &str,
    bad: impl Fn(usize, &str) -> String,
) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (at, parts, escaped) in entries {
        let (name, value) = parts.ok_or_else(|| bad(at, form))?;
        let plain = |text: &str| if escaped { decode(text.trim()) } else { Some(text.trim().as_bytes().to_vec()) };
        let name = plain(name).and_then(|name| HeaderName::from_bytes(&name).ok()).ok_or_else(|| bad(at, form))?;
        if OWN.contains(&name) {
            return Err(bad(at, &format!("sets {name}, which is no header to choose")));
        }
        let value = plain(value).and_then(|value| HeaderValue::from_bytes(&value).ok());
        let mut value = value.ok_or_else(|| bad(at, "has a value that no header can have"))?;
        value.set_sensitive(true);
        headers.append(name, value);
    }
    Ok(headers)
}

/// Undoes `%xx`; `None` for a `%` that is none.
fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
                digit(bytes.next()?)? * 16 + digit(bytes.next()?)?
            }
            other => other,
        });
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn told(headers: &HeaderMap) -> Vec<(String, String)> {
        headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
    }
    fn pair(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    #[test]
    fn a_list_is_read_as_the_sdks_read_it() {
        let headers = read(None, Some("Authorization=Bearer%20a%2Cb==, x-scope = one ,")).unwrap();
        assert_eq!(told(&headers), [pair("authorization", "Bearer a,b=="), pair("x-scope", "one")]);
        assert!(!format!("{headers:?}").contains("Bearer"), "secrets do not show");
        assert!(read(None, None).unwrap().is_empty());
        for (list, why) in [
            ("s3cret", "entry 1 is no `name=value`"),
            ("a=b,s3cret", "entry 2 is no `name=value`"),
            ("a b=s3cret", "entry 1 is no `name=value`"),
            ("a=s3cret%0a", "has a value that no header can have"),
            ("a=s3cret%zz", "has a value that no header can have"),
            ("host=s3cret", "sets host"),
        ] {
            let error = read(None, Some(list)).unwrap_err();
            assert!(error.contains(why) && !error.contains("s3cret"), "{list}: {error}");
        }
    }

    #[test]
    fn a_file_has_one_a_line_comes_before_a_list_and_is_for_its_owner() {
        let path = std::env::temp_dir().join(format!("pulsing-otlp-{:032x}", rand::random::<u128>()));
        let write = |text: &str, mode| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        };
        write("# the collector's\n\nAuthorization: Bearer a=b, 50%: c\n", 0o600);
        let headers = read(Some(&path), Some("other=1")).unwrap();
        assert_eq!(told(&headers), [pair("authorization", "Bearer a=b, 50%: c")]);
        write("fine: 1\ns3cret\n", 0o600);
        let error = read(Some(&path), None).unwrap_err();
        assert!(error.contains("line 2 is no `Name: value`") && !error.contains("s3cret"), "{error}");
        write("a: 1\n", 0o644);
        assert!(read(Some(&path), None).unwrap_err().contains("chmod 600"));
        fs::remove_file(&path).unwrap();
        assert!(read(Some(&path), None).unwrap_err().contains("otlp_headers_file"));
    }
}
