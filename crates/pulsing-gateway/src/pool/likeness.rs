//! Who can go on with what another Worker has begun.

/// What Workers have in common that give the same answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Likeness {
    pub(super) model: Option<String>,
    pub(super) fingerprint: String,
    pub(super) sampled: bool,
    /// How an engine is asked to go on; `None` for an actor.
    pub(crate) continues: Option<Continues>,
}

/// Engines that go on with an unfinished message of the assistant, by whose rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Continues {
    /// The chat template writes the message down; what may begin a stop string is held back.
    Vllm,
    /// The message's tokens are put behind the prompt's.
    Sglang,
}
