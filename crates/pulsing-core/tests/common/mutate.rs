//! A fuzzer that needs no nightly compiler: valid messages, changed at random, given to a parser until time is up.
//!
//! | variable | meaning |
//! |---|---|
//! | `PULSING_TEST_FUZZ_SECONDS` | how long each target runs (`make fuzz`); without it, a few thousand inputs from a fixed seed |
//! | `PULSING_TEST_FUZZ_SEED` | the seed of a run that failed |
#![allow(dead_code, clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Beyond this an input teaches nothing that a shorter one does not.
const LONGEST: usize = 1 << 16;
/// What lengths, counts and tags are most wrong with.
const VALUES: [u8; 12] = [0, 1, 2, 4, 7, 8, 0x0a, 0x7f, 0x80, 0xfe, 0xff, b'\n'];

/// Gives mutations of `corpus` to `target`, which must neither panic nor hang; `count` of them unless told how long.
///
/// # Panics
/// As the target does, after naming the seed and the input.
pub fn fuzz(name: &str, corpus: &[Vec<u8>], count: usize, mut target: impl FnMut(&[u8])) {
    assert!(!corpus.is_empty() && corpus.iter().all(|one| !one.is_empty()), "{name} has nothing to start from");
    let variable = |name: &str| std::env::var(name).ok();
    let seconds = variable("PULSING_TEST_FUZZ_SECONDS").map(|text| Duration::from_secs_f64(text.parse().unwrap()));
    let seed = match (variable("PULSING_TEST_FUZZ_SEED"), seconds) {
        (Some(text), _) => text.parse().unwrap(),
        (None, Some(_)) => rand::random(),
        (None, None) => 1u64,
    };
    let mut rng = StdRng::seed_from_u64(seed);
    let begun = Instant::now();
    let mut done = 0;
    for input in corpus {
        target(input);
    }
    while seconds.map_or(done < count, |limit| begun.elapsed() < limit) {
        done += 1;
        let input = mutated(&mut rng, corpus);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(&input))) {
            let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
            // The test's own output: what is needed to see it again.
            eprint(&format!("{name}: PULSING_TEST_FUZZ_SEED={seed}, input {done}: {hex}"));
            resume_unwind(panic);
        }
    }
}

#[allow(clippy::print_stderr)]
fn eprint(text: &str) {
    eprintln!("{text}");
}

fn mutated(rng: &mut StdRng, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut input = corpus[rng.random_range(0..corpus.len())].clone();
    for _ in 0..=rng.random_range(0..6) {
        let at = if input.is_empty() { 0 } else { rng.random_range(0..input.len()) };
        match rng.random_range(0..9) {
            0 if !input.is_empty() => input[at] ^= 1 << rng.random_range(0..8),
            1 if !input.is_empty() => input[at] = VALUES[rng.random_range(0..VALUES.len())],
            2 if !input.is_empty() => input[at] = rng.random(),
            3 => input.truncate(at),
            4 => {
                let more: Vec<u8> = (0..rng.random_range(1..9)).map(|_| rng.random()).collect();
                input.splice(at..at, more);
            }
            5 if !input.is_empty() => {
                let end = (at + rng.random_range(1..17)).min(input.len());
                input.drain(at..end);
            }
            // A part of it again: fields and frames may come twice.
            6 if !input.is_empty() => {
                let end = (at + rng.random_range(1..65)).min(input.len());
                let again = input[at..end].to_vec();
                input.splice(at..at, again);
            }
            // The rest of another.
            7 => {
                let other = &corpus[rng.random_range(0..corpus.len())];
                input.truncate(at);
                input.extend_from_slice(&other[rng.random_range(0..other.len())..]);
            }
            // A number that is wrong by little, or by much.
            8 if input.len() >= at + 4 => {
                let number = u32::from_le_bytes(input[at..at + 4].try_into().unwrap());
                let wrong = match rng.random_range(0..4) {
                    0 => number.wrapping_add(1),
                    1 => number.wrapping_sub(1),
                    2 => u32::MAX,
                    _ => number << rng.random_range(0..16),
                };
                input[at..at + 4].copy_from_slice(&wrong.to_le_bytes());
            }
            _ => {}
        }
    }
    input.truncate(LONGEST);
    input
}

/// The golden messages of a folder whose name `wanted` accepts, by name.
pub fn golden(folder: &str, wanted: impl Fn(&str) -> bool) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(folder);
    let mut names: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.retain(|path| path.is_file());
    names.sort();
    names.retain(|path| wanted(path.file_stem().unwrap().to_str().unwrap()));
    names.iter().map(|path| bytes(&std::fs::read_to_string(path).unwrap())).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.chars().filter_map(|c| Some(c.to_digit(16)? as u8)).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}
