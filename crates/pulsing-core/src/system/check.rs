//! What a name and its metadata may be (R10).

use std::collections::BTreeMap;

use crate::cluster::METADATA_LIMIT;
use crate::error::{Error, Result};
use crate::shown::shown;

/// Longest actor name, in characters.
const NAME_LIMIT: usize = 256;

pub(super) fn check_name(name: &str) -> Result<()> {
    let problem = if name.is_empty() {
        "it is empty".to_owned()
    } else if name.chars().count() > NAME_LIMIT {
        format!("it is longer than {NAME_LIMIT} characters")
    } else if let Some(c) = name.chars().find(|c| c.is_whitespace() || c.is_control()) {
        format!("it contains {c:?}; spaces and control characters are not allowed")
    } else {
        return Ok(());
    };
    Err(Error::InvalidName { name: name.to_owned(), reason: problem })
}

/// The name of a cluster travels in every handshake and stands in what nodes refuse each other with.
pub(super) fn check_cluster(name: &str) -> Result<()> {
    let problem = if name.trim().is_empty() {
        return Err(Error::Config("the cluster's name is empty".to_owned()));
    } else if name.chars().count() > NAME_LIMIT {
        format!("it is longer than {NAME_LIMIT} characters")
    } else if let Some(c) = name.chars().find(|c| c.is_control()) {
        format!("it contains {c:?}; control characters are not allowed")
    } else {
        return Ok(());
    };
    Err(Error::Config(format!("{} is no name of a cluster: {problem}", shown(name))))
}

pub(super) fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<()> {
    let size: usize = metadata.iter().map(|(k, v)| k.len() + v.len()).sum();
    if size > METADATA_LIMIT {
        return Err(Error::Config(format!(
            "metadata of {size} bytes; at most {METADATA_LIMIT} are published with a name"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_message_could_carry_are_refused_in_one_line() {
        for cluster in ["default", "a b", "\u{e9}", &"x".repeat(NAME_LIMIT)] {
            assert!(check_cluster(cluster).is_ok(), "{cluster}");
        }
        let long = "x".repeat(100_000);
        for (cluster, words) in [
            (" ", "empty"),
            ("a\u{1b}[31m", "contains '\\u{1b}'"),
            ("a\nb", "contains '\\n'"),
            (&long, "longer than 256"),
        ] {
            let error = check_cluster(cluster).unwrap_err().to_string();
            assert!(error.contains(words) && error.len() < 300 && !error.contains(char::is_control), "{error}");
        }
        let error = check_name(&long).unwrap_err().to_string();
        assert!(error.contains("longer than 256") && error.len() < 300, "{error}");
    }
}
