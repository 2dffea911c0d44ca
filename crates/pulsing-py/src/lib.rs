//! pulsing._core
