//! Reads server-sent events as engines write them: any line ends, cut anywhere.

use bytes::BytesMut;

/// A line longer than this is no event of a language model; what an engine sends is not gathered for ever.
pub(super) const MAX_LINE: usize = 16 << 20;

/// Gathers bytes into the payloads of events. Comments and fields other than `data` mean nothing here.
#[derive(Clone, Default)]
pub(super) struct Lines {
    held: BytesMut,
    /// How much of `held` is known to have no line end.
    seen: usize,
    data: Vec<u8>,
    has_data: bool,
}

impl Lines {
    /// Takes bytes and gives each payload that is complete to `event`, as text: what is no UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// What `event` returns, or a sentence when a line never ends.
    pub(super) fn push<E: From<String>>(
        &mut self,
        bytes: &[u8],
        mut event: impl FnMut(&str) -> Result<(), E>,
    ) -> Result<(), E> {
        self.held.extend_from_slice(bytes);
        while let Some(at) = self.held[self.seen..].iter().position(|byte| *byte == b'\n') {
            let mut line = self.held.split_to(self.seen + at + 1);
            self.seen = 0;
            line.truncate(line.len() - 1);
            if line.ends_with(b"\r") {
                line.truncate(line.len() - 1);
            }
            self.line(&line, &mut event)?;
        }
        self.seen = self.held.len();
        if self.seen > MAX_LINE {
            return Err(too_long().into());
        }
        Ok(())
    }

    /// The last byte ended an event.
    pub(super) fn is_between_events(&self) -> bool {
        self.held.is_empty() && !self.has_data
    }

    /// The body is over: what has no line end, or no blank line behind it, is an event all the same.
    pub(super) fn finish<E: From<String>>(&mut self, mut event: impl FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        let rest = std::mem::take(&mut self.held);
        self.seen = 0;
        if !rest.is_empty() {
            self.line(rest.strip_suffix(b"\r").unwrap_or(&rest), &mut event)?;
        }
        self.line(b"", &mut event)
    }

    fn line<E: From<String>>(&mut self, line: &[u8], event: &mut impl FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        if line.is_empty() {
            if std::mem::take(&mut self.has_data) {
                let data = std::mem::take(&mut self.data);
                return event(&String::from_utf8_lossy(&data));
            }
            return Ok(());
        }
        let Some(value) = line.strip_prefix(b"data:") else { return Ok(()) };
        if self.has_data {
            self.data.push(b'\n');
        }
        let value = value.strip_prefix(b" ").unwrap_or(value);
        // As many lines make one event.
        if self.data.len() + value.len() > MAX_LINE {
            return Err(too_long().into());
        }
        self.has_data = true;
        self.data.extend_from_slice(value);
        Ok(())
    }
}

/// What is said of a line that is none.
pub(super) fn too_long() -> String {
    format!("the engine sent an event with more than {MAX_LINE} bytes in a line")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parts: &[&[u8]]) -> Vec<String> {
        let mut lines = Lines::default();
        let mut events = Vec::new();
        let mut take = |text: &str| {
            events.push(text.to_owned());
            Ok::<(), String>(())
        };
        for part in parts {
            lines.push(part, &mut take).unwrap();
        }
        lines.finish(&mut take).unwrap();
        events
    }

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        let bytes = "event: x\r\nid: 1\r\ndata: {\"a\":\"日本\"}\r\n\r\n: ping\n\nretry: 5\n\ndata:one\ndata: two\n\ndata: last".as_bytes();
        let expected = ["{\"a\":\"日本\"}", "one\ntwo", "last"];
        for cut in 0..=bytes.len() {
            assert_eq!(read(&[&bytes[..cut], &bytes[cut..]]), expected, "cut at {cut}");
        }
        assert_eq!(read(&bytes.chunks(1).collect::<Vec<_>>()), expected);
        assert_eq!(read(&[b"data: \xe6\x97\n\n", b"data:\n\n", b"\n\n"]), ["\u{fffd}", ""]);
    }
}
