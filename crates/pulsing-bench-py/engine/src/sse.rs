//! Server-sent events, parsed from whatever pieces the socket yields.

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The `event:` field; empty when absent.
    pub name: String,
    /// The `data:` lines, joined by newlines.
    pub data: Vec<u8>,
}

/// An event larger than this ends the stream: nothing a model says in one event comes near it.
const LARGEST: usize = 16 << 20;

/// The parser. Every way of splitting the same bytes yields the same events.
#[derive(Debug, Default)]
pub struct Parser {
    line: Vec<u8>,
    name: String,
    data: Vec<u8>,
    has_data: bool,
    after_cr: bool,
    started: bool,
}

/// An event grew past the limit.
#[derive(Debug, thiserror::Error)]
#[error("an event is larger than {LARGEST} bytes")]
pub struct TooLarge;

impl Parser {
    /// Takes the next bytes and calls `each` for every event they complete.
    ///
    /// # Errors
    /// [`TooLarge`]; the parser is of no use afterwards.
    pub fn push(&mut self, mut bytes: &[u8], mut each: impl FnMut(Event)) -> Result<(), TooLarge> {
        while !bytes.is_empty() {
            // CRLF may be split between its two bytes: the LF after a CR ends no second line.
            if std::mem::take(&mut self.after_cr) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.line.extend_from_slice(bytes);
                return if self.line.len() + self.data.len() > LARGEST { Err(TooLarge) } else { Ok(()) };
            };
            self.after_cr = bytes[end] == b'\r';
            let event = if self.line.is_empty() {
                self.end_line(&bytes[..end])
            } else {
                self.line.extend_from_slice(&bytes[..end]);
                let line = std::mem::take(&mut self.line);
                let event = self.end_line(&line);
                self.line = line;
                self.line.clear();
                event
            };
            bytes = &bytes[end + 1..];
            if self.data.len() > LARGEST {
                return Err(TooLarge);
            }
            if let Some(event) = event {
                each(event);
            }
        }
        Ok(())
    }

    /// The end of the stream: servers exist that leave out the last blank line.
    pub fn finish(&mut self) -> Option<Event> {
        let line = std::mem::take(&mut self.line);
        let blank = if line.is_empty() { None } else { self.end_line(&line) };
        blank.or_else(|| self.dispatch())
    }

    fn end_line(&mut self, line: &[u8]) -> Option<Event> {
        let line = if self.started { line } else { line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line) };
        self.started = true;
        if line.is_empty() {
            return self.dispatch();
        }
        let (field, value) = match line.iter().position(|byte| *byte == b':') {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &line[line.len()..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => {
                if self.has_data {
                    self.data.push(b'\n');
                }
                self.has_data = true;
                self.data.extend_from_slice(value);
            }
            b"event" => self.name = String::from_utf8_lossy(value).into_owned(),
            // Comments (an empty field name), id, retry and fields nobody knows.
            _ => {}
        }
        None
    }

    fn dispatch(&mut self) -> Option<Event> {
        let name = std::mem::take(&mut self.name);
        if !std::mem::take(&mut self.has_data) {
            return None;
        }
        Some(Event { name, data: std::mem::take(&mut self.data) })
    }
}
