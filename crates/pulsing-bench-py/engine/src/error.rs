//! Why a run could not be made. A failed request is no error here: it is a [`crate::record::Failure`] in the report.

/// Ends a run before its first measured request.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The configuration cannot be meant as written; nothing was sent.
    #[error("{0}")]
    Config(String),
    /// The server did not answer a first request as a server of this kind does.
    #[error("{0}")]
    Server(String),
    /// Threads or sockets of this machine.
    #[error("cannot start the load generator: {0}")]
    Runtime(#[from] std::io::Error),
    /// Ctrl-C came before anything was measured.
    #[error("interrupted before the first measured request")]
    Interrupted,
}
