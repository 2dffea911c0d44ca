//! Identifiers: 128 random bits, printed as 32 hexadecimal digits everywhere (peer fault 32).

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u128);

        impl $name {
            /// A fresh random id.
            pub fn generate() -> Self {
                Self(rand::random())
            }
            /// Big-endian bytes, as they travel in frames.
            pub fn to_bytes(self) -> [u8; 16] {
                self.0.to_be_bytes()
            }
            /// Reads what [`to_bytes`](Self::to_bytes) wrote.
            ///
            /// # Errors
            /// [`Error::Protocol`] unless there are exactly 16 bytes.
            pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
                let raw: [u8; 16] = bytes.try_into().map_err(|_| {
                    Error::Protocol(format!("{} needs 16 bytes, got {}", stringify!($name), bytes.len()))
                })?;
                Ok(Self(u128::from_be_bytes(raw)))
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:032x})", stringify!($name), self.0)
            }
        }
        impl FromStr for $name {
            type Err = Error;
            /// Accepts 32 hexadecimal digits, with or without dashes.
            fn from_str(text: &str) -> Result<Self, Error> {
                let hex: String = text.chars().filter(|c| *c != '-').collect();
                if hex.len() != 32 {
                    return Err(Error::InvalidId { value: text.to_owned() });
                }
                u128::from_str_radix(&hex, 16)
                    .map(Self)
                    .map_err(|_| Error::InvalidId { value: text.to_owned() })
            }
        }
    };
}

id_type! {
    /// One run of one process: a restarted node has a new id.
    NodeId
}
id_type! {
    /// One incarnation of one actor: a restarted or respawned actor has a new id.
    ActorId
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_bytes_round_trip() {
        let id = ActorId::generate();
        assert_eq!(id.to_string().parse::<ActorId>().unwrap(), id);
        assert_eq!(ActorId::from_bytes(&id.to_bytes()).unwrap(), id);
        assert!("zz".parse::<NodeId>().is_err());
    }
}
