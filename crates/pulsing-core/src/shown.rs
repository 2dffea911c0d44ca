//! What was given, in a message about it: quoted, escaped, and never more than a line of it.

use std::fmt;

/// Characters of a value that a message shows. Enough to recognise it; a terminal shows the reason beside it.
const LIMIT: usize = 120;

/// `text` in quotes with its control characters escaped, cut after 120 characters. A message goes to terminals and logs, and
/// what it names may be a file that somebody took for a name.
pub fn shown(text: &str) -> Shown<'_> {
    Shown(text)
}

/// What [`shown`] gives.
#[derive(Clone, Copy)]
pub struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(LIMIT) {
            None => write!(f, "{:?}", self.0),
            Some((end, _)) => write!(f, "{:?}... ({} characters)", &self.0[..end], self.0.chars().count()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_in_a_message_is_one_line_of_bounded_length() {
        assert_eq!(shown("a name").to_string(), "\"a name\"");
        assert_eq!(shown("a\u{1b}[31m\n\u{202e}").to_string(), r#""a\u{1b}[31m\n\u{202e}""#);
        let long = "é".repeat(100_000);
        let text = shown(&long).to_string();
        assert!(text.chars().count() < 160, "{text}");
        assert!(text.ends_with("\"... (100000 characters)"), "{text}");
    }
}
