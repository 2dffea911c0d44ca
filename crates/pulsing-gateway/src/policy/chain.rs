//! A prompt as a chain of hashes: what Routers and Workers call the same prefix by.
//!
//! The prompt is one sequence of bytes, cut into blocks of [`BLOCK`] bytes; what is left at the end is no block. The hash of
//! block `i` is XXH3-64, seed 0, of the hash before it (8 bytes, little-endian; 0 for the first) followed by the block's
//! bytes: two prompts share hash `i` exactly if they share their first `i + 1` blocks. The sequence is:
//!
//! * for chat: `tools`, if there are any, as the bytes that the client sent, then a zero byte; then for each message its role,
//!   a zero byte, its content, a zero byte. Content is the decoded text; of content in parts the text of each text part and
//!   the raw JSON of any other; of a message with `tool_calls` their raw JSON follows the content.
//! * for completions: the decoded text of the prompt, or its token ids as 4 bytes each, little-endian.
//!
//! Nothing of it depends on a process, a tokenizer or the order of keys.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::{Deserializer as _, Error as _, SeqAccess, Visitor};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes a block: some 60 tokens of English, four of vLLM's own blocks.
pub const BLOCK: usize = 256;
/// Blocks that are looked at: what two prompts of 256 KiB differ in behind that decides nothing.
pub const MAX_BLOCKS: usize = 1024;

/// Hashes bytes as they come.
pub struct Chain {
    hashes: Vec<u64>,
    /// The hash before, then the block so far.
    block: [u8; 8 + BLOCK],
    filled: usize,
}

impl Default for Chain {
    fn default() -> Self {
        Self { hashes: Vec::new(), block: [0; 8 + BLOCK], filled: 8 }
    }
}

impl Chain {
    /// Takes more of the prompt. False once nothing more is looked at.
    pub fn push(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            if self.hashes.len() == MAX_BLOCKS {
                return false;
            }
            let taken = bytes.len().min(self.block.len() - self.filled);
            self.block[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
            self.filled += taken;
            bytes = &bytes[taken..];
            if self.filled == self.block.len() {
                let hash = xxh3_64(&self.block);
                self.hashes.push(hash);
                self.block[..8].copy_from_slice(&hash.to_le_bytes());
                self.filled = 8;
            }
        }
        true
    }
    /// Bytes of the prompt; `None` where only its beginning was looked at.
    pub fn length(&self) -> Option<usize> {
        (self.hashes.len() < MAX_BLOCKS).then(|| self.hashes.len() * BLOCK + self.filled - 8)
    }
    /// The hashes of all whole blocks.
    pub fn finish(self) -> Vec<u64> {
        self.hashes
    }
}

/// The chain of a chat request. `messages` and `tools` are the raw JSON of these fields, as a client sent them; what cannot be
/// read ends the chain.
pub fn of_chat(messages: &[u8], tools: Option<&[u8]>) -> Chain {
    let mut chain = Chain::default();
    if let Some(tools) = tools
        && !(chain.push(tools) && chain.push(&[0]))
    {
        return chain;
    }
    // Ends early once the chain is full: of a huge body only the beginning is read.
    let _ = serde_json::Deserializer::from_slice(messages).deserialize_seq(Messages(&mut chain));
    chain
}

/// The chain of a completions request with one prompt, given as raw JSON. Of several prompts there is none.
pub fn of_prompt(prompt: &[u8]) -> Chain {
    let mut chain = Chain::default();
    if let Ok(Text(text)) = serde_json::from_slice(prompt) {
        chain.push(text.as_bytes());
    } else if let Ok(tokens) = serde_json::from_slice::<Vec<u32>>(prompt) {
        for token in tokens {
            if !chain.push(&token.to_le_bytes()) {
                break;
            }
        }
    }
    chain
}

/// A string, without a copy where it holds no escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Option<&'a RawValue>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow)]
    text: Option<Text<'a>>,
}

struct Messages<'c>(&'c mut Chain);

impl<'de> Visitor<'de> for Messages<'_> {
    type Value = ();
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array of messages")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut messages: A) -> Result<(), A::Error> {
        while let Some(message) = messages.next_element::<Message<'de>>()? {
            if !push_message(self.0, &message) {
                return Err(A::Error::custom("enough"));
            }
        }
        Ok(())
    }
}

fn push_message(chain: &mut Chain, message: &Message<'_>) -> bool {
    let pushed = message.role.is_none_or(|role| push_text(chain, role))
        && chain.push(&[0])
        && message.content.is_none_or(|content| push_content(chain, content));
    let calls = message.tool_calls.filter(|calls| calls.get() != "null");
    pushed && calls.is_none_or(|calls| chain.push(calls.get().as_bytes())) && chain.push(&[0])
}

fn push_content(chain: &mut Chain, content: &RawValue) -> bool {
    if !content.get().starts_with('[') {
        return content.get() == "null" || push_text(chain, content);
    }
    let Ok(parts) = serde_json::from_str::<Vec<&RawValue>>(content.get()) else { return true };
    parts.into_iter().all(|part| match serde_json::from_str::<Part<'_>>(part.get()) {
        Ok(Part { text: Some(Text(text)) }) => chain.push(text.as_bytes()),
        _ => chain.push(part.get().as_bytes()),
    })
}

fn push_text(chain: &mut Chain, raw: &RawValue) -> bool {
    match serde_json::from_str::<Text<'_>>(raw.get()) {
        Ok(Text(text)) => chain.push(text.as_bytes()),
        Err(_) => chain.push(raw.get().as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_chat(messages: &[u8], tools: Option<&[u8]>) -> Vec<u64> {
        super::of_chat(messages, tools).finish()
    }
    fn of_prompt(prompt: &[u8]) -> Vec<u64> {
        super::of_prompt(prompt).finish()
    }

    fn plain(bytes: &[u8]) -> Vec<u64> {
        let mut chain = Chain::default();
        chain.push(bytes);
        chain.finish()
    }
    fn shared(one: &[u64], other: &[u64]) -> usize {
        one.iter().zip(other).take_while(|(one, other)| one == other).count()
    }

    #[test]
    fn the_hashes_are_the_same_in_every_version_and_language() {
        // Made with Python's `xxhash`: xxh3_64_intdigest(previous.to_bytes(8, "little") + block).
        let bytes: Vec<u8> = (0..600_u32).map(|at| (at % 251) as u8).collect();
        assert_eq!(plain(&bytes), GOLDEN);
    }
    const GOLDEN: [u64; 2] = [0x14ca_958c_2c1d_f618, 0x77ab_4ccd_b645_8678];

    #[test]
    fn however_the_bytes_come_the_chain_is_the_same() {
        let bytes: Vec<u8> = (0..2000_u32).map(|at| (at * 7 % 256) as u8).collect();
        let whole = plain(&bytes);
        assert_eq!(whole.len(), 2000 / BLOCK);
        for size in [1, 255, 256, 257, 999] {
            let mut chain = Chain::default();
            assert!(bytes.chunks(size).all(|chunk| chain.push(chunk)));
            assert_eq!(chain.length(), Some(2000));
            assert_eq!(chain.finish(), whole, "{size}");
        }
        let mut other = bytes;
        other[700] ^= 1;
        assert_eq!(shared(&whole, &plain(&other)), 2, "a block that differs changes all that follow");
        assert!(whole.iter().skip(2).zip(plain(&other).iter().skip(2)).all(|(one, other)| one != other));
    }

    #[test]
    fn a_conversation_that_goes_on_keeps_its_prefix_however_the_client_writes_it() {
        let long = "a long instruction, \u{e9} \\n ".repeat(60);
        let first = format!(r#"[{{"role":"system","content":"{long}"}},{{"role":"user","content":"hi"}}]"#);
        let later = format!(
            r#"[ {{"content" : "{long}", "role":"system"}}, {{"role":"user","content":[{{"type":"text","text":"hi"}}]}},
                {{"role":"assistant","content":null,"tool_calls":[{{"id":"c1"}}]}}, {{"role":"user","content":"{long}"}} ]"#
        );
        let (first, later) = (of_chat(first.as_bytes(), None), of_chat(later.as_bytes(), None));
        assert!(first.len() >= 4 && later.len() > first.len());
        assert_eq!(shared(&first, &later), first.len());
        // An escape or a letter is the same text.
        let escaped = format!(r#"[{{"role":"system","content":"{}"}}]"#, long.replace('\u{e9}', "\\u00e9"));
        assert_eq!(shared(&first, &of_chat(escaped.as_bytes(), None)), first.len());
    }

    #[test]
    fn roles_tools_and_images_are_part_of_the_prompt() {
        let long = "x".repeat(1000);
        let chat = |role: &str, content: &str, tools: Option<&str>| {
            of_chat(format!(r#"[{{"role":"{role}","content":{content}}}]"#).as_bytes(), tools.map(str::as_bytes))
        };
        let text = format!("\"{long}\"");
        let base = chat("user", &text, None);
        assert_eq!(shared(&base, &chat("system", &text, None)), 0);
        assert_eq!(shared(&base, &chat("user", &text, Some("[{}]"))), 0);
        let image = |url: &str| {
            chat("user", &format!(r#"[{{"type":"image_url","image_url":"{url}"}},{{"text":{text}}}]"#), None)
        };
        assert_eq!(shared(&image("data:a"), &image("data:b")), 0);
        assert!(shared(&image("data:a"), &image("data:a")) >= 3);
    }

    #[test]
    fn prompts_are_text_or_tokens_and_nothing_else_breaks_it() {
        let text = "y".repeat(600);
        assert_eq!(of_prompt(format!("\"{text}\"").as_bytes()), plain(text.as_bytes()));
        let ids: Vec<u32> = (0..200).collect();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(of_prompt(serde_json::to_string(&ids).unwrap().as_bytes()), plain(&bytes));
        for odd in ["", "3", "[\"a\",\"b\"]", "[[1],[2]]", "{}", "[1.5]", "\"\\ud800\""] {
            assert!(of_prompt(odd.as_bytes()).is_empty(), "{odd}");
        }
        for odd in ["", "3", "[3]", "{}", r#"[{"role":7,"content":true}]"#, r#"[{"content":[3,{"text":4}]}]"#] {
            assert!(of_chat(odd.as_bytes(), None).is_empty(), "{odd}");
        }
    }

    #[test]
    fn of_a_huge_prompt_only_the_beginning_counts() {
        let huge = format!(r#"[{{"role":"user","content":"{}"}},"#, "z".repeat(400 << 10));
        // What follows is not even read: it is no JSON.
        assert_eq!(of_chat(format!("{huge} no JSON").as_bytes(), None).len(), MAX_BLOCKS);
    }
}
