//! Where the parts of a JSON text lie, found in one pass that reads strings 64 bytes at a time.
//!
//! A prompt of some hundred kilobytes is one string, and looking for its end is most of what reading a request costs.
//! Whatever is not plainly in order is `None` here: serde_json then decides, and has the words for what is wrong.

/// Words of 8 bytes that are looked at before chunks are.
const NEAR: usize = 2;
/// Deeper than anything a request has; serde_json takes over below.
const MAX_DEPTH: u32 = 64;

/// Calls `each` with every key and the text of its value, in order. Keys with escapes are left to serde_json.
pub(super) fn object<'a>(text: &'a str, mut each: impl FnMut(&'a str, &'a str)) -> Option<()> {
    let mut scan = Scan { text, bytes: text.as_bytes(), at: 0 };
    scan.space();
    scan.members(0, &mut each)?;
    scan.space();
    (scan.at == scan.bytes.len()).then_some(())
}

/// The texts of an array's elements.
pub(super) fn elements(text: &str) -> Option<Vec<&str>> {
    let mut scan = Scan { text, bytes: text.as_bytes(), at: 0 };
    let mut found = Vec::new();
    scan.space();
    scan.elements(0, &mut |element| found.push(element))?;
    scan.space();
    (scan.at == scan.bytes.len()).then_some(found)
}

/// What a JSON text is made into. `None` of any part is `None` of the whole.
pub trait Build {
    /// Any value.
    type Value;
    /// An object, its members in order.
    fn object(&mut self, members: Vec<(&str, Self::Value)>) -> Option<Self::Value>;
    /// An array.
    fn array(&mut self, elements: Vec<Self::Value>) -> Option<Self::Value>;
    /// A string, its escapes undone.
    fn string(&mut self, text: &str) -> Option<Self::Value>;
    /// Anything else, as it is written: a number, `true`, `false`, `null`.
    fn other(&mut self, text: &str) -> Option<Self::Value>;
}

/// Reads an object in one pass. `None`: it is none, or it is not plainly in order (keys with escapes, 64 levels).
pub fn build<B: Build>(text: &str, builder: &mut B) -> Option<B::Value> {
    let mut scan = Scan { text, bytes: text.as_bytes(), at: 0 };
    scan.space();
    let value = (scan.peek()? == b'{').then(|| scan.built(0, builder)).flatten()?;
    scan.space();
    (scan.at == scan.bytes.len()).then_some(value)
}

struct Scan<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }
    /// Passes a byte if it is the next one.
    fn take(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }
    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\t' | b'\r')) {
            self.at += 1;
        }
    }

    fn members(&mut self, depth: u32, each: &mut impl FnMut(&'a str, &'a str)) -> Option<()> {
        self.take(b'{')?;
        self.space();
        if self.take(b'}').is_some() {
            return Some(());
        }
        loop {
            self.space();
            let key = self.at + 1;
            let escaped = self.string()?;
            if escaped && depth == 0 {
                return None;
            }
            let key = &self.text[key..self.at - 1];
            self.space();
            self.take(b':')?;
            self.space();
            let value = self.at;
            self.value(depth)?;
            each(key, &self.text[value..self.at]);
            self.space();
            if self.take(b',').is_none() {
                return self.take(b'}');
            }
        }
    }

    fn elements(&mut self, depth: u32, each: &mut impl FnMut(&'a str)) -> Option<()> {
        self.take(b'[')?;
        self.space();
        if self.take(b']').is_some() {
            return Some(());
        }
        loop {
            self.space();
            let element = self.at;
            self.value(depth)?;
            each(&self.text[element..self.at]);
            self.space();
            if self.take(b',').is_none() {
                return self.take(b']');
            }
        }
    }

    fn value(&mut self, depth: u32) -> Option<()> {
        if depth >= MAX_DEPTH {
            return None;
        }
        match self.peek()? {
            b'"' => self.string().map(drop),
            b'{' => self.nested_members(depth + 1),
            b'[' => self.nested_elements(depth + 1),
            b't' => self.literal("true"),
            b'f' => self.literal("false"),
            b'n' => self.literal("null"),
            _ => self.number(),
        }
    }
    fn built<B: Build>(&mut self, depth: u32, builder: &mut B) -> Option<B::Value> {
        if depth >= MAX_DEPTH {
            return None;
        }
        let begin = self.at;
        match self.peek()? {
            b'{' => {
                let members = self.built_members(depth + 1, builder)?;
                builder.object(members)
            }
            b'[' => {
                let elements = self.built_elements(depth + 1, builder)?;
                builder.array(elements)
            }
            b'"' => match self.string()? {
                false => builder.string(&self.text[begin + 1..self.at - 1]),
                true => builder.string(&serde_json::from_str::<String>(&self.text[begin..self.at]).ok()?),
            },
            _ => {
                self.value(depth)?;
                builder.other(&self.text[begin..self.at])
            }
        }
    }
    fn built_members<B: Build>(&mut self, depth: u32, builder: &mut B) -> Option<Vec<(&'a str, B::Value)>> {
        self.take(b'{')?;
        self.space();
        let mut members = Vec::new();
        if self.take(b'}').is_some() {
            return Some(members);
        }
        loop {
            self.space();
            let key = self.at + 1;
            if self.string()? {
                return None;
            }
            let key = &self.text[key..self.at - 1];
            self.space();
            self.take(b':')?;
            self.space();
            members.push((key, self.built(depth, builder)?));
            self.space();
            if self.take(b',').is_none() {
                return self.take(b'}').map(|()| members);
            }
        }
    }
    fn built_elements<B: Build>(&mut self, depth: u32, builder: &mut B) -> Option<Vec<B::Value>> {
        self.take(b'[')?;
        self.space();
        let mut elements = Vec::new();
        if self.take(b']').is_some() {
            return Some(elements);
        }
        loop {
            self.space();
            elements.push(self.built(depth, builder)?);
            self.space();
            if self.take(b',').is_none() {
                return self.take(b']').map(|()| elements);
            }
        }
    }

    // Of their own type, or the compiler would make a function for every depth.
    fn nested_members(&mut self, depth: u32) -> Option<()> {
        self.members(depth, &mut |_, _| ())
    }
    fn nested_elements(&mut self, depth: u32) -> Option<()> {
        self.elements(depth, &mut |_| ())
    }

    fn literal(&mut self, word: &str) -> Option<()> {
        self.bytes[self.at..].starts_with(word.as_bytes()).then(|| self.at += word.len())
    }

    fn number(&mut self) -> Option<()> {
        let _ = self.take(b'-');
        if self.take(b'0').is_none() {
            self.digits()?;
        }
        if self.take(b'.').is_some() {
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Some(())
    }
    /// One or more.
    fn digits(&mut self) -> Option<()> {
        let begin = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        (self.at > begin).then_some(())
    }

    /// Passes a string; whether it holds escapes.
    fn string(&mut self) -> Option<bool> {
        self.take(b'"')?;
        let mut escaped = false;
        loop {
            self.at += plain(&self.bytes[self.at..]);
            match self.peek()? {
                b'"' => {
                    self.at += 1;
                    return Some(escaped);
                }
                b'\\' => {
                    escaped = true;
                    while self.peek() == Some(b'\\') {
                        self.escape()?;
                    }
                }
                // A control character.
                _ => return None,
            }
        }
    }
    fn escape(&mut self) -> Option<()> {
        match self.bytes.get(self.at + 1)? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 2,
            b'u' => {
                let hex = self.bytes.get(self.at + 2..self.at + 6)?;
                if !hex.iter().all(u8::is_ascii_hexdigit) {
                    return None;
                }
                self.at += 6;
            }
            _ => return None,
        }
        Some(())
    }
}

/// How many bytes stand before the next quote, backslash or control character.
fn plain(bytes: &[u8]) -> usize {
    let special = |byte: u8| (byte == b'"') | (byte == b'\\') | (byte < 0x20);
    // Where escapes stand close together, looking at a chunk for each of them would be most of the work.
    let (words, _) = bytes.as_chunks::<8>();
    for (at, word) in words.iter().take(NEAR).enumerate() {
        if let Some(found) = first_special(*word) {
            return at * 8 + found;
        }
    }
    let begin = words.len().min(NEAR) * 8;
    let (chunks, _) = bytes[begin..].as_chunks::<64>();
    // Without an early end within a chunk the compiler makes vector instructions of it.
    let whole = chunks.iter().take_while(|chunk| !chunk.iter().fold(false, |any, byte| any | special(*byte))).count();
    let begin = begin + whole * 64;
    let (words, rest) = bytes[begin..].as_chunks::<8>();
    for (at, word) in words.iter().enumerate() {
        if let Some(found) = first_special(*word) {
            return begin + at * 8 + found;
        }
    }
    let left = rest.iter().position(|byte| special(*byte)).unwrap_or(rest.len());
    bytes.len() - rest.len() + left
}

/// Where in `word` the first such byte is. Each test marks the high bit of bytes that pass it; a borrow may mark others too,
/// but only above one that does.
fn first_special(word: [u8; 8]) -> Option<usize> {
    const ONES: u64 = u64::from_le_bytes([1; 8]);
    let word = u64::from_le_bytes(word);
    let below = |word: u64, limit: u64| word.wrapping_sub(ONES * limit) & !word;
    let equal = |byte: u8| below(word ^ (ONES * u64::from(byte)), 1);
    let marks = (below(word, 0x20) | equal(b'"') | equal(b'\\')) & (ONES << 7);
    (marks != 0).then(|| marks.trailing_zeros() as usize / 8)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::{RngExt, SeedableRng};
    use serde_json::value::RawValue;

    use super::*;

    const SAMPLE: &str = r#" { "model" : "m" ,"messages":[ {"role":"user","content":"a \"quoted\" \u00e9 日本 text that is longer than sixty-four bytes, so that chunks matter \\ "} , [ ] ,{}],
        "n":-0.5e+10,"t":true,"f":false ,"z":null,"big":123456789012345678901234567890,"deep":[[[{"x":[1,2,{"y":"z"}]}]]],"" : 0 } "#;

    fn pairs(text: &str) -> Option<Vec<(String, String)>> {
        let mut found = Vec::new();
        object(text, |key, value| found.push((key.to_owned(), value.to_owned())))?;
        Some(found)
    }
    fn by_serde(text: &str) -> Option<BTreeMap<String, String>> {
        let map = serde_json::from_str::<BTreeMap<String, &RawValue>>(text).ok()?;
        Some(map.into_iter().map(|(key, value)| (key, value.get().to_owned())).collect())
    }

    #[test]
    fn what_is_in_order_is_found_where_serde_json_finds_it() {
        let found = pairs(SAMPLE).expect("taken");
        assert_eq!(found.len(), 9);
        assert_eq!(Some(found.into_iter().collect()), by_serde(SAMPLE));
        assert_eq!(elements(r#"[1, "a,b" ,[2,3],{"x":[]}]"#), Some(vec!["1", "\"a,b\"", "[2,3]", r#"{"x":[]}"#]));
        assert_eq!(elements(" [ ] "), Some(vec![]));
    }

    const NOISE: &[u8] = b"\"\\{}[],:0e-+.tfn \n\x01u/";

    #[test]
    fn whatever_is_taken_serde_json_takes_too_and_reads_alike() {
        let mut dice = rand::rngs::StdRng::seed_from_u64(7);
        let mut taken = 0;
        for _ in 0..60_000 {
            let mut bytes = SAMPLE.as_bytes().to_vec();
            for _ in 0..dice.random_range(1..3) {
                let at = dice.random_range(0..bytes.len());
                match dice.random_range(0..3) {
                    0 => bytes[at] = NOISE[dice.random_range(0..NOISE.len())],
                    1 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, NOISE[dice.random_range(0..NOISE.len())]),
                }
            }
            let Ok(text) = String::from_utf8(bytes) else { continue };
            if let Some(found) = pairs(&text) {
                taken += 1;
                assert_eq!(Some(found.into_iter().collect()), by_serde(&text), "{text}");
            }
        }
        assert!(taken > 1000, "{taken}");
    }

    /// Makes what serde_json makes.
    struct Values;

    impl Build for Values {
        type Value = serde_json::Value;
        fn object(&mut self, members: Vec<(&str, serde_json::Value)>) -> Option<serde_json::Value> {
            Some(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
        }
        fn array(&mut self, elements: Vec<serde_json::Value>) -> Option<serde_json::Value> {
            Some(elements.into())
        }
        fn string(&mut self, text: &str) -> Option<serde_json::Value> {
            Some(text.into())
        }
        fn other(&mut self, text: &str) -> Option<serde_json::Value> {
            serde_json::from_str(text).ok()
        }
    }

    #[test]
    fn whatever_is_built_is_what_serde_json_makes_of_it() {
        assert_eq!(build(SAMPLE, &mut Values), serde_json::from_str(SAMPLE).ok());
        let mut dice = rand::rngs::StdRng::seed_from_u64(8);
        let mut taken = 0;
        for _ in 0..30_000 {
            let mut bytes = SAMPLE.as_bytes().to_vec();
            let at = dice.random_range(0..bytes.len());
            bytes[at] = NOISE[dice.random_range(0..NOISE.len())];
            let Ok(text) = String::from_utf8(bytes) else { continue };
            if let Some(value) = build(&text, &mut Values) {
                taken += 1;
                assert_eq!(Some(value), serde_json::from_str(&text).ok(), "{text}");
            }
        }
        assert!(taken > 1000, "{taken}");
        for other in ["", "[]", "1", "{", "{}x", r#"{"\u0061":1}"#] {
            assert_eq!(build(other, &mut Values), None, "{other}");
        }
    }

    #[test]
    fn the_end_of_plain_text_is_found_wherever_it_lies() {
        for length in 0..200 {
            for special in [b'"', b'\\', 0, 0x1f, b'\n'] {
                let mut bytes = vec![b'x'; length];
                bytes.push(special);
                bytes.extend([b'y'; 70]);
                assert_eq!(plain(&bytes), length);
            }
            assert_eq!(plain(&vec![0x7f; length]), length);
        }
    }

    #[test]
    fn the_first_special_byte_of_a_word_is_found_whatever_stands_beside_it() {
        let mut dice = rand::rngs::StdRng::seed_from_u64(11);
        let edges = [b'"', b'\\', 0, 0x1f, 0x20, 0x21, 0x23, 0x5b, 0x5d, 0x7f, 0x80, 0x9f, 0xa2, 0xdc, 0xff];
        for _ in 0..100_000 {
            let word = [(); 8].map(|()| edges[dice.random_range(0..edges.len())]);
            let found = word.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..0x20));
            assert_eq!(first_special(word), found, "{word:?}");
        }
    }

    #[test]
    fn what_is_deeper_than_any_request_is_left_to_serde_json() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(pairs(&deep), None);
        assert_eq!(build(&deep, &mut Values), None);
    }
}
