//! actor
