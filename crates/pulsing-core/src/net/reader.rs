//! Reading frames off a connection; bodies of bulk messages go straight into the buffer they will live in.

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::landing::Landing;
use super::wire::{FRAME_PREFIX, Kind, Prefix, decode_prefix};
use crate::error::{Error, Result};

/// What one read of a lane of small frames may bring, in bytes; longer bodies get memory of their own.
pub const READ_CHUNK: usize = 64 << 10;
/// The same of the bulk lane: enough for a frame's head. What is read ahead of a large body is copied to its place.
const READ_HEAD: usize = 512;
/// A block that has this much room left is read into, in bytes.
const READ_REST: usize = 4 << 10;

/// A frame's kind and header; its body follows on the reader.
pub struct Head {
    /// What it is.
    pub kind: Kind,
    /// The protobuf header.
    pub header: Bytes,
    /// Bytes of body still to be read.
    pub body: usize,
}

/// Buffered reader of frames.
pub struct FrameReader<R> {
    io: R,
    buffer: BytesMut,
    ahead: usize,
    /// Bytes read off the connection so far.
    pub read: u64,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads many small frames at a time from `io`.
    pub fn new(io: R) -> Self {
        Self { io, buffer: BytesMut::with_capacity(READ_CHUNK), ahead: READ_CHUNK, read: 0 }
    }
    /// Goes on with `io`, of which `buffer` was read already.
    pub fn with(io: R, buffer: BytesMut) -> Self {
        Self { io, buffer, ahead: READ_CHUNK, read: 0 }
    }
    /// The connection, and what was read of it and not taken.
    pub fn into_parts(self) -> (R, BytesMut) {
        (self.io, self.buffer)
    }
    /// What was read and not taken.
    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }
    /// Reads something more; false at a clean end.
    ///
    /// # Errors
    /// `Protocol` at an end inside a frame.
    pub async fn more(&mut self) -> Result<bool> {
        if self.fill(FRAME_PREFIX).await? {
            return Ok(true);
        }
        if self.buffer.is_empty() { Ok(false) } else { Err(cut()) }
    }
    /// Reads large bodies from `io`, straight to their places.
    pub fn bulk(io: R) -> Self {
        Self { io, buffer: BytesMut::new(), ahead: READ_HEAD, read: 0 }
    }

    /// The next frame's head; `None` at a clean end. Frames of unknown kinds are skipped (a later version's).
    ///
    /// # Errors
    /// `Protocol` for malformed frames or an end inside one; `ConnectionLost` text is left to the caller.
    pub async fn next(&mut self) -> Result<Option<Head>> {
        loop {
            if self.buffer.is_empty() && !self.fill(FRAME_PREFIX).await? {
                return Ok(None);
            }
            self.need(FRAME_PREFIX).await?;
            let mut raw = [0; FRAME_PREFIX];
            self.buffer.copy_to_slice(&mut raw);
            let Prefix { kind, header, body } = decode_prefix(raw)?;
            self.need(header).await?;
            let header = self.buffer.split_to(header).freeze();
            match kind {
                Some(kind) => return Ok(Some(Head { kind, header, body })),
                None => self.skip(body).await?,
            }
        }
    }

    /// Reads `len` bytes of body as one buffer.
    ///
    /// # Errors
    /// `Protocol` at an end before `len` bytes.
    pub async fn take(&mut self, len: usize) -> Result<Bytes> {
        if len == 0 {
            return Ok(Bytes::new());
        }
        if len <= READ_CHUNK {
            self.need(len).await?;
            return Ok(self.buffer.split_to(len).freeze());
        }
        let mut landing = Landing::new(len)?;
        self.land(&mut landing, len).await?;
        Ok(landing.freeze())
    }

    /// Appends `len` bytes of body to `landing`, which misses at least as many.
    ///
    /// # Errors
    /// `Protocol` at an end before `len` bytes, or without memory for them.
    pub async fn land(&mut self, landing: &mut Landing, mut len: usize) -> Result<()> {
        while len > 0 {
            let (out, room) = landing.room(len)?;
            let n = if self.buffer.is_empty() {
                let n = (&mut self.io).take(room as u64).read_buf(out).await.map_err(lost)?;
                self.read += n as u64;
                n
            } else {
                let n = room.min(self.buffer.len());
                out.extend_from_slice(&self.buffer[..n]);
                self.buffer.advance(n);
                n
            };
            if n == 0 {
                return Err(cut());
            }
            len -= n;
        }
        Ok(())
    }

    /// Passes over `len` bytes of body.
    ///
    /// # Errors
    /// `Protocol` at an end before `len` bytes.
    pub async fn skip(&mut self, mut len: usize) -> Result<()> {
        while len > 0 {
            if self.buffer.is_empty() && !self.fill(len).await? {
                return Err(cut());
            }
            let n = len.min(self.buffer.len());
            self.buffer.advance(n);
            len -= n;
        }
        Ok(())
    }

    async fn need(&mut self, len: usize) -> Result<()> {
        while self.buffer.len() < len {
            if !self.fill(len - self.buffer.len()).await? {
                return Err(cut());
            }
        }
        Ok(())
    }

    /// Reads something: `want` bytes or what may be read ahead, at most.
    async fn fill(&mut self, want: usize) -> Result<bool> {
        let most = self.ahead.max(want.min(READ_CHUNK));
        let want = want.min(most);
        // What is left of the last block serves for a frame that comes alone; a block for each would cost more than it.
        if self.buffer.capacity() - self.buffer.len() < want.max(most.min(READ_REST)) {
            self.buffer.reserve(most);
        }
        let most = most.min(self.buffer.capacity() - self.buffer.len());
        let n = (&mut self.io).take(most as u64).read_buf(&mut self.buffer).await.map_err(lost)?;
        self.read += n as u64;
        Ok(n > 0)
    }
}

fn lost(e: std::io::Error) -> Error {
    Error::Protocol(e.to_string())
}

fn cut() -> Error {
    Error::Protocol("the connection ended inside a frame".into())
}
