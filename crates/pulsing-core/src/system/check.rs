//! What a name and its metadata may be (R10).

use std::collections::BTreeMap;

use crate::cluster::METADATA_LIMIT;
use crate::error::{Error, Result};

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
    Err(Error::InvalidName { name: name.chars().take(NAME_LIMIT).collect(), reason: problem })
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
