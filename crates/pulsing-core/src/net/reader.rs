//! Reading frames off a connection; bodies of bulk messages go straight into the buffer they will live in.

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::wire::{FRAME_PREFIX, Kind, Prefix, decode_prefix};
use crate::error::{Error, Result};

const READ_CHUNK: usize = 64 << 10;

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
    /// Bytes read off the connection so far.
    pub read: u64,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads from `io`.
    pub fn new(io: R) -> Self {
        Self { io, buffer: BytesMut::with_capacity(READ_CHUNK), read: 0 }
    }

    /// The next frame's head; `None` at a clean end. Frames of unknown kinds are skipped (a later version's).
    ///
    /// # Errors
    /// `Protocol` for malformed frames or an end inside one; `ConnectionLost` text is left to the caller.
    pub async fn next(&mut self) -> Result<Option<Head>> {
        loop {
            if self.buffer.is_empty() && !self.fill().await? {
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
        let mut out = BytesMut::with_capacity(len);
        self.append(&mut out, len).await?;
        Ok(out.freeze())
    }

    /// Appends `len` bytes of body to `out`.
    ///
    /// # Errors
    /// `Protocol` at an end before `len` bytes.
    pub async fn append(&mut self, out: &mut BytesMut, len: usize) -> Result<()> {
        let have = len.min(self.buffer.len());
        out.extend_from_slice(&self.buffer[..have]);
        self.buffer.advance(have);
        let mut left = len - have;
        while left > 0 {
            let n = (&mut self.io).take(left as u64).read_buf(out).await.map_err(lost)?;
            if n == 0 {
                return Err(cut());
            }
            self.read += n as u64;
            left -= n;
        }
        Ok(())
    }

    async fn skip(&mut self, mut len: usize) -> Result<()> {
        while len > 0 {
            if self.buffer.is_empty() && !self.fill().await? {
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
            if !self.fill().await? {
                return Err(cut());
            }
        }
        Ok(())
    }

    async fn fill(&mut self) -> Result<bool> {
        self.buffer.reserve(READ_CHUNK);
        let n = self.io.read_buf(&mut self.buffer).await.map_err(lost)?;
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
