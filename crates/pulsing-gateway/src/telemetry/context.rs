//! W3C trace context.

use std::fmt;

/// Where one span stands. Prints as `traceparent` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    pub(crate) trace: u128,
    pub(crate) span: u64,
    /// Whether its spans are kept: decided once, where the trace began.
    pub(crate) sampled: bool,
}

impl Context {
    /// A trace of its own, kept in `share` of cases.
    pub(crate) fn new(share: f64) -> Self {
        Self { trace: rand::random::<u128>().max(1), span: id(), sampled: rand::random::<f64>() < share }
    }
    /// A span below this one.
    pub(crate) fn child(self) -> Self {
        Self { span: id(), ..self }
    }
    /// Reads `traceparent`. What is none counts as not sent, as the recommendation has it; later versions may be longer.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split('-');
        let hex = |part: &str, length: usize| {
            part.len() == length && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        if !hex(version, 2) || version == "ff" || !hex(trace, 32) || !hex(span, 16) || !hex(flags, 2) {
            return None;
        }
        if version == "00" && parts.next().is_some() {
            return None;
        }
        let trace = u128::from_str_radix(trace, 16).ok().filter(|trace| *trace != 0)?;
        let span = u64::from_str_radix(span, 16).ok().filter(|span| *span != 0)?;
        Some(Self { trace, span, sampled: u8::from_str_radix(flags, 16).ok()? & 1 == 1 })
    }
}

fn id() -> u64 {
    rand::random::<u64>().max(1)
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s7_a_traceparent_is_read_as_the_recommendation_says() {
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let context = Context::parse(text).unwrap();
        assert_eq!((context.to_string().as_str(), context.sampled), (text, true));
        assert_eq!(context.child().trace, context.trace);
        assert_ne!(context.child().span, context.span);
        assert!(!Context::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00").unwrap().sampled);
        assert!(Context::parse("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-later").is_some());
        for bad in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-extra",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
        ] {
            assert!(Context::parse(bad).is_none(), "{bad}");
        }
    }
}
