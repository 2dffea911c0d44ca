//! Memory for bytes that a peer has announced: one block, aligned, and only as much of it as the peer has earned.

use bytes::Bytes;

use crate::error::{Error, Result};

/// Received buffers begin at a multiple of this many bytes, a cache line: what numpy, torch and Arrow like best.
pub const ALIGN: usize = 64;
/// Up to this many bytes are reserved on a peer's word; the system commits them only as they are written. More is reserved
/// as the bytes arrive, each time as much again.
const ON_TRUST: usize = 64 << 20;

/// A buffer that fills up to an announced size.
pub struct Landing {
    data: Vec<u8>,
    /// Bytes before the first aligned one.
    pad: usize,
    size: usize,
}

impl Landing {
    /// Room for `size` bytes.
    ///
    /// # Errors
    /// `Protocol` when there is no memory for them.
    pub fn new(size: usize) -> Result<Self> {
        let mut landing = Self { data: Vec::new(), pad: 0, size };
        if size > 0 {
            reserve(&mut landing.data, size.min(ON_TRUST) + ALIGN, size)?;
            landing.pad = pad_of(&landing.data);
            landing.data.resize(landing.pad, 0);
        }
        Ok(landing)
    }

    /// Bytes that have arrived.
    pub fn len(&self) -> usize {
        self.data.len() - self.pad
    }

    /// True once all have arrived.
    pub fn is_full(&self) -> bool {
        self.len() == self.size
    }

    /// The vector to append up to `want` of the missing bytes to, and how many of them it has room for: at least one.
    ///
    /// # Errors
    /// `Protocol` when there is no memory for them.
    pub fn room(&mut self, want: usize) -> Result<(&mut Vec<u8>, usize)> {
        if self.free() == 0 {
            let more = self.len().max(1).min(self.size - self.len());
            reserve(&mut self.data, more + ALIGN, self.size)?;
            self.align();
        }
        let room = want.min(self.free());
        Ok((&mut self.data, room))
    }

    /// The bytes, complete or not.
    pub fn freeze(self) -> Bytes {
        let Self { data, pad, .. } = self;
        Bytes::from(data).slice(pad..)
    }

    fn free(&self) -> usize {
        // The last ALIGN bytes stay free for another padding should the block move.
        (self.data.capacity() - self.data.len()).saturating_sub(ALIGN - self.pad).min(self.size - self.len())
    }

    /// A block that moved may begin at another offset from a cache line.
    fn align(&mut self) {
        let pad = pad_of(&self.data);
        if pad != self.pad {
            let (old, len) = (self.pad, self.len());
            self.data.resize(old.max(pad) + len, 0);
            self.data.copy_within(old..old + len, pad);
            self.data.truncate(pad + len);
            self.pad = pad;
        }
    }
}

fn pad_of(data: &[u8]) -> usize {
    // Only the interpreter of const code may answer that it cannot tell.
    data.as_ptr().align_offset(ALIGN) % ALIGN
}

fn reserve(data: &mut Vec<u8>, more: usize, size: usize) -> Result<()> {
    data.try_reserve_exact(more).map_err(|_| Error::Protocol(format!("no memory for a message part of {size} bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fills in pieces of `step` bytes at most, each with its own value; tells where each begins.
    fn fill(landing: &mut Landing, step: usize) -> Vec<usize> {
        let mut begins = Vec::new();
        while !landing.is_full() {
            begins.push(landing.len());
            let (data, room) = landing.room(step).unwrap();
            assert!(room > 0 && room <= step);
            data.resize(data.len() + room, (begins.len() % 251) as u8);
        }
        begins
    }

    #[test]
    fn bytes_land_whole_aligned_and_alone() {
        for size in [0, 1, 63, 64, 65, 4096, 1 << 20, ON_TRUST - 1, ON_TRUST, ON_TRUST + 1, ON_TRUST * 3 + 5] {
            let mut landing = Landing::new(size).unwrap();
            let begins = fill(&mut landing, 1 << 20);
            let bytes = landing.freeze();
            assert_eq!(bytes.len(), size);
            assert!(begins.iter().enumerate().all(|(i, at)| bytes[*at] == ((i + 1) % 251) as u8));
            if size > 0 {
                assert_eq!(bytes.as_ptr().align_offset(ALIGN), 0);
                // Exclusive: whoever gets it may write to it.
                assert!(bytes.try_into_mut().is_ok());
            }
        }
    }

    #[test]
    fn a_block_that_moves_stays_aligned() {
        for pad in 0..ALIGN {
            let mut landing = Landing::new(1000).unwrap();
            landing.data = Vec::with_capacity(2000);
            landing.data.resize(pad, 0);
            landing.pad = pad;
            let (data, _) = landing.room(10).unwrap();
            data.extend_from_slice(b"0123456789");
            landing.align();
            let bytes = landing.freeze();
            assert_eq!((&bytes[..], bytes.as_ptr().align_offset(ALIGN)), (&b"0123456789"[..], 0));
        }
    }

    #[test]
    fn an_announcement_alone_reserves_little() {
        let landing = Landing::new(4 << 30).unwrap();
        assert!(landing.data.capacity() <= ON_TRUST + ALIGN);
    }
}
