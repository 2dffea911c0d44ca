//! API keys and the file they stand in.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::account::{Account, Client, Limits};

/// Longest name of a key: it stands in logs.
const MAX_NAME: usize = 64;

pub(super) type Hash = [u8; 32];

pub(super) fn hash(key: &[u8]) -> Hash {
    Sha256::digest(key).into()
}

/// Every bit is looked at, whatever differs: how long it takes tells nothing.
fn same(one: &Hash, other: &Hash) -> bool {
    one.iter().zip(other).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// The keys at one moment.
pub(super) struct Ring {
    /// By the first bytes of the hash. That they lead to few keys tells an attacker nothing of use: hashes cannot be steered.
    keys: HashMap<[u8; 8], Vec<(Hash, Client)>>,
    count: usize,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("keys", &self.count).finish_non_exhaustive()
    }
}

fn prefix(hash: &Hash) -> [u8; 8] {
    let mut prefix = [0; 8];
    prefix.copy_from_slice(&hash[..8]);
    prefix
}

impl Ring {
    /// Whose key this is.
    pub(super) fn find(&self, key: &[u8]) -> Option<Client> {
        let hash = hash(key);
        let mut found = None;
        for (other, client) in self.keys.get(&prefix(&hash))? {
            if same(&hash, other) {
                found = Some(client.clone());
            }
        }
        found
    }
    pub(super) fn len(&self) -> usize {
        self.count
    }
    fn add(&mut self, hash: Hash, client: Client) {
        self.keys.entry(prefix(&hash)).or_default().push((hash, client));
        self.count += 1;
    }
    /// One key, without limits.
    pub(super) fn of_one(name: &str, key: &str) -> Self {
        let mut ring = Self { keys: HashMap::new(), count: 0 };
        ring.add(hash(key.as_bytes()), Client { account: Arc::new(Account::new(name)), limits: Limits::default() });
        ring
    }

    /// Reads `name:key` or `name:sha256:hex`, one a line, each with its limits: `rps=`, `concurrency=`, `weight=`. Names that
    /// `before` has keep what is counted for them.
    ///
    /// # Errors
    /// A sentence that names the line; never what stands in it.
    pub(super) fn read(text: &str, before: Option<&Ring>) -> Result<Self, String> {
        let mut accounts: HashMap<String, Client> = HashMap::new();
        let mut known: HashMap<&str, &Arc<Account>> = HashMap::new();
        for (_, client) in before.iter().flat_map(|ring| ring.keys.values().flatten()) {
            known.insert(client.account.name(), &client.account);
        }
        let mut ring = Self { keys: HashMap::new(), count: 0 };
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let bad = |what: &str| format!("line {}: {what}", number + 1);
            let mut words = line.split_ascii_whitespace();
            let (name, secret) = words
                .next()
                .and_then(|word| word.split_once(':'))
                .ok_or_else(|| bad("expected name:key or name:sha256:hex"))?;
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
            if !(1..=MAX_NAME).contains(&name.len()) || !name.bytes().all(fits) {
                return Err(bad("a name has 1 to 64 letters, digits, '_', '.' or '-'"));
            }
            let hash = match secret.strip_prefix("sha256:") {
                Some(hex) => from_hex(hex).ok_or_else(|| bad("after sha256: come 64 hexadecimal digits"))?,
                None if secret.is_empty() => return Err(bad("the key is empty")),
                None if !secret.bytes().all(|byte| byte.is_ascii_graphic()) => {
                    return Err(bad("a key has visible ASCII characters only: others do not fit in a header"));
                }
                None => hash(secret.as_bytes()),
            };
            let limits = limits(words).map_err(|what| bad(&what))?;
            let client = match accounts.get(name) {
                Some(other) if other.limits != limits => {
                    return Err(bad(
                        "another key of this name has other limits; they count together, so give both the same",
                    ));
                }
                Some(other) => other.clone(),
                None => {
                    let account = known.get(name).copied().cloned().unwrap_or_else(|| Arc::new(Account::new(name)));
                    let client = Client { account, limits };
                    accounts.insert(name.to_owned(), client.clone());
                    client
                }
            };
            if ring.keys.get(&prefix(&hash)).is_some_and(|keys| keys.iter().any(|(other, _)| same(other, &hash))) {
                return Err(bad("this key stands in the file already"));
            }
            ring.add(hash, client);
        }
        if ring.count == 0 {
            return Err("it holds no key; nobody could ask anything".to_owned());
        }
        Ok(ring)
    }
}

fn limits<'a>(words: impl Iterator<Item = &'a str>) -> Result<Limits, String> {
    let mut limits = Limits::default();
    for word in words {
        let (name, value) = word.split_once('=').ok_or("after the key come rps=, concurrency= or weight=")?;
        let number = || value.parse::<f64>().ok().filter(|value| *value > 0.0 && value.is_finite());
        match name {
            "rps" => limits.rps = Some(number().ok_or("rps= takes a number above 0")?),
            "weight" => limits.weight = number().ok_or("weight= takes a number above 0")?,
            "concurrency" => {
                let value = value.parse().ok().filter(|value| *value > 0);
                limits.concurrency = Some(value.ok_or("concurrency= takes a whole number above 0")?);
            }
            _ => return Err("a limit is rps=, concurrency= or weight=".to_owned()),
        }
    }
    Ok(limits)
}

fn from_hex(text: &str) -> Option<Hash> {
    let bytes = text.as_bytes();
    if bytes.len() != 64 || !bytes.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut hash = [0; 32];
    for (at, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stand_plain_or_hashed_with_their_limits() {
        let hashed = "4b5c2783d3e9b76d2c1b7e0ba7ed2dbbf7b0ab4dbb0b2b0b5d8e0e2ca6b0e0aa";
        let text = format!(
            "# ours\n\n  a:sk-a:b  rps=2.5 concurrency=3 weight=2\nb:sha256:{hashed}\na:other rps=2.5 concurrency=3 weight=2"
        );
        let ring = Ring::read(&text, None).unwrap();
        assert_eq!(ring.len(), 3);
        let client = ring.find(b"sk-a:b").unwrap();
        assert_eq!(client.account.name(), "a");
        assert_eq!(client.limits, Limits { rps: Some(2.5), concurrency: Some(3), weight: 2.0 });
        assert!(Arc::ptr_eq(&client.account, &ring.find(b"other").unwrap().account), "one name, one account");
        for wrong in ["", "sk-a", "sk-a:B", hashed] {
            assert!(ring.find(wrong.as_bytes()).is_none(), "{wrong}");
        }
        let hex: String = hash(b"secret").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(Ring::read(&format!("x:sha256:{hex}"), None).unwrap().find(b"secret").unwrap().account.name(), "x");
        let again = Ring::read("a:fresh", Some(&ring)).unwrap();
        assert!(Arc::ptr_eq(&client.account, &again.find(b"fresh").unwrap().account), "counts outlive a reload");
        assert!(again.find(b"sk-a:b").is_none());
    }

    #[test]
    fn what_cannot_be_read_is_named_by_its_line_and_never_shown() {
        for (text, words) in [
            ("", "holds no key"),
            ("# only a comment", "holds no key"),
            ("sk-secret", "line 1: expected name:key"),
            ("\na b:sk-secret", "line 2: expected name:key"),
            (":sk-secret", "line 1: a name has"),
            ("a:", "line 1: the key is empty"),
            ("a:sk-secré", "line 1: a key has visible ASCII"),
            ("a:sha256:12", "line 1: after sha256:"),
            ("a:sk-secret rps=0", "line 1: rps= takes"),
            ("a:sk-secret rps=nan", "line 1: rps= takes"),
            ("a:sk-secret concurrency=1.5", "line 1: concurrency= takes"),
            ("a:sk-secret weight=-1", "line 1: weight= takes"),
            ("a:sk-secret burst=3", "line 1: a limit is"),
            ("a:sk-secret fast", "line 1: after the key"),
            ("a:sk-secret\nb:sk-secret", "line 2: this key stands"),
            ("a:sk-secret rps=1\na:sk-other", "line 2: another key of this name"),
        ] {
            let error = Ring::read(text, None).expect_err(text);
            assert!(error.contains(words) && !error.contains("secr"), "{text}: {error}");
        }
    }
}
