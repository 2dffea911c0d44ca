//! Membership (M1-M4) and registry (M5) under a virtual clock, from one seed each. A failure prints the seed and the command
//! that repeats it; `PULSING_SIM_TIMES=20` runs twenty times as many seeds, from `PULSING_SIM_FROM` (1) on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, missing_docs)]

mod membership;
mod registry;
mod scale;
mod sim;
mod trouble;
