//! What part of a request a Worker does: all of it, or one half of a pair of prefill and decode.

use std::collections::BTreeMap;

/// The port on which SGLang's prefill servers tell where they keep what they have, unless they are told another one.
const BOOTSTRAP_PORT: u16 = 8998;

/// A Worker's part, from its metadata: `role`, `pd`, `bootstrap_host`, `bootstrap_port`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// All of it.
    #[default]
    Aggregated,
    /// Reads prompts, for those that decode.
    Prefill(Pairing),
    /// Generates from prompts that others have read.
    Decode(Pairing),
}

/// How the two of a pair meet. Those of one kind fit together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// One after the other: what prefill answers goes to decode (vLLM).
    Sequential,
    /// Both at once: decode gets it from prefill, where it listens (SGLang).
    Concurrent {
        /// Where prefill listens; empty: the host that requests go to.
        host: String,
        /// And on which port.
        port: u16,
    },
}

impl Pairing {
    /// These two understand each other.
    pub fn fits(&self, other: &Self) -> bool {
        matches!(
            (self, other),
            (Self::Sequential, Self::Sequential) | (Self::Concurrent { .. }, Self::Concurrent { .. })
        )
    }
}

impl Role {
    /// Reads a Worker's metadata.
    ///
    /// # Errors
    /// A sentence that names the key at fault.
    pub(super) fn read(metadata: &BTreeMap<String, String>) -> Result<Self, String> {
        let text = |key: &str| metadata.get(key).map(String::as_str).unwrap_or_default();
        let pairing = || match text("pd") {
            "sequential" => Ok(Pairing::Sequential),
            "concurrent" => {
                let port = match text("bootstrap_port") {
                    "" => BOOTSTRAP_PORT,
                    port => port.parse().map_err(|_| format!("its bootstrap_port {port:?} is no port"))?,
                };
                Ok(Pairing::Concurrent { host: text("bootstrap_host").to_owned(), port })
            }
            other => {
                Err(format!("its pd {other:?} is unknown; a {} worker needs sequential or concurrent", text("role")))
            }
        };
        match text("role") {
            "" | "aggregated" => Ok(Self::Aggregated),
            "prefill" => pairing().map(Self::Prefill),
            "decode" => pairing().map(Self::Decode),
            other => Err(format!("its role {other:?} is unknown; this Router knows aggregated, prefill and decode")),
        }
    }
    /// As metadata spell it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Prefill(_) => "prefill",
            Self::Decode(_) => "decode",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Role, String> {
        Role::read(&pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn roles_are_read_from_metadata_and_what_is_unknown_is_refused() {
        assert_eq!(read(&[]), Ok(Role::Aggregated));
        assert_eq!(read(&[("role", "prefill"), ("pd", "sequential")]), Ok(Role::Prefill(Pairing::Sequential)));
        let there = |host: &str, port| Pairing::Concurrent { host: host.to_owned(), port };
        assert_eq!(read(&[("role", "decode"), ("pd", "concurrent")]), Ok(Role::Decode(there("", 8998))));
        let told = [("role", "prefill"), ("pd", "concurrent"), ("bootstrap_host", "h"), ("bootstrap_port", "9")];
        assert_eq!(read(&told), Ok(Role::Prefill(there("h", 9))));
        for (odd, named) in [
            (&[("role", "chef")][..], "role \"chef\""),
            (&[("role", "decode")], "pd \"\""),
            (&[("role", "decode"), ("pd", "x")], "pd \"x\""),
            (&[("role", "decode"), ("pd", "concurrent"), ("bootstrap_port", "99999")], "bootstrap_port \"99999\""),
        ] {
            let error = read(odd).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
        assert!(there("a", 1).fits(&there("b", 2)) && !there("a", 1).fits(&Pairing::Sequential));
    }
}
