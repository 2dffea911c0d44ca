//! Tables by call number.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// What is known under the numbers of calls.
pub type ByNumber<T> = HashMap<u64, T, BuildHasherDefault<Spread>>;

/// Spreads numbers that follow each other. Peers choose theirs: a member of the cluster could make its own link slow, which it
/// can in simpler ways.
#[derive(Default)]
pub struct Spread(u64);

impl Hasher for Spread {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u64(&mut self, number: u64) {
        // 2^64 divided by the golden ratio: Knuth's multiplicative hashing. The table looks at the highest and lowest bits.
        let product = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}
