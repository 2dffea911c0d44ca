//! A body in chunks (RFC 9112, section 7.1), read as it arrives.

use bytes::{Buf, Bytes, BytesMut};

/// Longest line with a chunk's size and extensions, or of a trailer.
const MAX_LINE: usize = 4096;
/// Lines of trailers.
const MAX_TRAILERS: usize = 64;

/// Where in such a body the reader is.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    state: State,
    trailers: usize,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    /// A line with the next chunk's size follows.
    #[default]
    Size,
    /// So many bytes of data follow.
    Data(u64),
    /// The line end behind the data follows.
    Behind,
    /// Lines of trailers follow, or the empty one that ends the body.
    Trailers,
    End,
}

impl Chunks {
    /// The body is complete.
    pub(super) fn is_complete(&self) -> bool {
        self.state == State::End
    }

    /// Takes from `read` all that is there and returns the data in it, of however many chunks: an engine that is ahead of
    /// its client costs no more for having written token by token.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn take(&mut self, read: &mut BytesMut) -> Result<Option<Bytes>, &'static str> {
        let mut first = Bytes::new();
        let mut joined = BytesMut::new();
        loop {
            match self.state {
                State::Size => match line(read)? {
                    Some(line) => {
                        let size = size(&line).ok_or("a chunk's size is no hexadecimal number")?;
                        self.state = if size == 0 { State::Trailers } else { State::Data(size) };
                    }
                    None => break,
                },
                State::Data(_) if read.is_empty() => break,
                State::Data(left) => {
                    let count = usize::try_from(left).map_or(read.len(), |left| left.min(read.len()));
                    if first.is_empty() {
                        first = read.split_to(count).freeze();
                    } else {
                        if joined.is_empty() {
                            joined.reserve(first.len() + read.len());
                            joined.extend_from_slice(&first);
                        }
                        joined.extend_from_slice(&read[..count]);
                        read.advance(count);
                    }
                    let left = left - count as u64;
                    self.state = if left == 0 { State::Behind } else { State::Data(left) };
                }
                State::Behind if read.len() < 2 => break,
                State::Behind if !read.starts_with(b"\r\n") => return Err("a chunk is longer than it said"),
                State::Behind => {
                    read.advance(2);
                    self.state = State::Size;
                }
                State::Trailers => match line(read)? {
                    Some(line) if line.is_empty() => self.state = State::End,
                    Some(_) if self.trailers == MAX_TRAILERS => return Err("its trailers have no end"),
                    Some(_) => self.trailers += 1,
                    None => break,
                },
                State::End => break,
            }
        }
        let data = if joined.is_empty() { first } else { joined.freeze() };
        Ok((!data.is_empty()).then_some(data))
    }
}

/// The next line without its end, once it is whole.
fn line(read: &mut BytesMut) -> Result<Option<BytesMut>, &'static str> {
    let Some(end) = read.iter().take(MAX_LINE).position(|byte| *byte == b'\n') else {
        return if read.len() < MAX_LINE { Ok(None) } else { Err("a line between chunks has no end") };
    };
    let mut line = read.split_to(end + 1);
    if !line.ends_with(b"\r\n") {
        return Err("a line between chunks does not end in CRLF");
    }
    line.truncate(end - 1);
    Ok(Some(line))
}

/// The size that such a line tells; extensions are for others.
fn size(line: &[u8]) -> Option<u64> {
    let digits = line.split(|byte| *byte == b';').next()?.trim_ascii_end();
    if digits.is_empty() || digits.len() > 16 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &[u8] = b"5\r\nhello\r\n1;x=y\r\n \r\n00A \r\n0123456789\r\n0\r\nx-trailer: 1\r\n\r\nrest";

    /// The data, in how many pieces it came, whether it is complete, and what follows it.
    type Taken = (Vec<u8>, usize, bool, Vec<u8>);

    fn run(parts: &[&[u8]]) -> Result<Taken, &'static str> {
        let (mut chunks, mut read, mut data, mut pieces) = (Chunks::default(), BytesMut::new(), Vec::new(), 0);
        for part in parts {
            read.extend_from_slice(part);
            if let Some(piece) = chunks.take(&mut read)? {
                data.extend_from_slice(&piece);
                pieces += 1;
            }
        }
        Ok((data, pieces, chunks.is_complete(), read.to_vec()))
    }

    #[test]
    fn data_comes_out_whole_wherever_the_bytes_are_split() {
        let whole = (b"hello 0123456789".to_vec(), true, b"rest".to_vec());
        for first in 0..=BODY.len() {
            for second in (first..=BODY.len()).step_by(3) {
                let (data, _, complete, rest) =
                    run(&[&BODY[..first], &BODY[first..second], &BODY[second..]]).expect("read");
                assert_eq!((data, complete, rest), whole, "split at {first} and {second}");
            }
        }
        assert_eq!(run(&[BODY]).expect("read").1, 1, "what is there comes in one piece");
    }

    #[test]
    fn what_is_no_such_body_is_refused() {
        for bad in [
            &b"x\r\n"[..],
            b"\r\n",
            b"-1\r\n",
            b"5\n",
            b"11111111111111111\r\n",
            b"1\r\nxy\r\n",
            &[b'0'; MAX_LINE],
            &b"0\r\n".iter().chain(b"a: b\r\n".repeat(MAX_TRAILERS + 1).iter()).copied().collect::<Vec<u8>>(),
        ] {
            assert!(run(&[bad]).is_err(), "{:?}", String::from_utf8_lossy(bad));
        }
    }

    #[test]
    fn a_body_that_stops_is_not_complete() {
        for end in 0..BODY.len() - 4 {
            assert!(!run(&[&BODY[..end]]).expect("read").2, "{end}");
        }
    }
}
