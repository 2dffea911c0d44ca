//! Random ids.

/// `prefix` and 128 random bits in hexadecimal. Every request and every answer has one: digit by digit costs a tenth of what
/// the formatter takes.
pub(crate) fn fresh(prefix: &str) -> String {
    let mut id = String::with_capacity(prefix.len() + 32);
    id.push_str(prefix);
    for byte in rand::random::<u128>().to_be_bytes() {
        for digit in [byte >> 4, byte & 15] {
            id.push(char::from(if digit < 10 { b'0' + digit } else { b'a' + digit - 10 }));
        }
    }
    id
}

#[cfg(test)]
mod tests {
    use super::fresh;

    #[test]
    fn an_id_is_a_prefix_and_32_digits_and_never_the_same() {
        let ids: std::collections::HashSet<String> = (0..100).map(|_| fresh("req-")).collect();
        assert_eq!(ids.len(), 100);
        for id in ids {
            let digits = id.strip_prefix("req-").unwrap();
            assert_eq!(digits.len(), 32, "{id}");
            assert!(digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')), "{id}");
        }
    }
}
