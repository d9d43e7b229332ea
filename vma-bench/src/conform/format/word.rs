//! Numbers and addresses as the vectors write them: small ones as JSON integers, from 2^53 on as hex strings.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, Unexpected, Visitor},
};

/// A length, an offset, a protection, an advice or a word of flags. A negative number is what its register holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::conform) struct Word(pub u64);

/// An address: a JSON integer is relative to the arena and may be negative, a hex string is absolute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::conform) enum At {
    /// Bytes from the start of the arena.
    Relative(i64),
    /// As it is.
    Absolute(u64),
}

impl At {
    /// The absolute address; wraps around, as the sum that the recording made did.
    pub(in crate::conform) fn resolve(self, arena_start: u64) -> u64 {
        match self {
            At::Relative(bytes) => arena_start.wrapping_add_signed(bytes),
            At::Absolute(addr) => addr,
        }
    }
}

/// The value of `0x...`; nothing else is a hex string.
pub(in crate::conform) fn hex(text: &str) -> Option<u64> {
    let digits = text.strip_prefix("0x")?;
    let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
    plain
        .then(|| u64::from_str_radix(digits, 16).ok())
        .flatten()
}

struct WordVisitor;

impl Visitor<'_> for WordVisitor {
    type Value = Word;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number, or a hex string 0x...")
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Word, E> {
        Ok(Word(value.cast_unsigned()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Word, E> {
        Ok(Word(value))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Word, E> {
        hex(text)
            .map(Word)
            .ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

impl<'de> Deserialize<'de> for Word {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Word, D::Error> {
        deserializer.deserialize_any(WordVisitor)
    }
}

struct AtVisitor;

impl Visitor<'_> for AtVisitor {
    type Value = At;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes from the start of the arena, or an address 0x...")
    }

    fn visit_i64<E: Error>(self, bytes: i64) -> Result<At, E> {
        Ok(At::Relative(bytes))
    }

    fn visit_u64<E: Error>(self, bytes: u64) -> Result<At, E> {
        i64::try_from(bytes)
            .map(At::Relative)
            .map_err(|_| E::invalid_value(Unexpected::Unsigned(bytes), &self))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<At, E> {
        hex(text)
            .map(At::Absolute)
            .ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

impl<'de> Deserialize<'de> for At {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<At, D::Error> {
        deserializer.deserialize_any(AtVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_numbers_or_hex_strings_and_nothing_else() {
        let word = |json: &str| serde_json::from_str::<Word>(json).map(|w| w.0).ok();
        assert_eq!(word("0"), Some(0));
        assert_eq!(word("-1"), Some(u64::MAX));
        assert_eq!(word("18446744073709551615"), Some(u64::MAX));
        assert_eq!(word("\"0xfffffffffffff000\""), Some(!0xfff));
        for bad in [
            "-9223372036854775809",
            "1.5",
            "1e3",
            "\"12\"",
            "\"0x\"",
            "\"0x+1\"",
            "\"0x10000000000000000\"",
            "null",
            "true",
            "[]",
        ] {
            assert_eq!(word(bad), None, "{bad}");
        }
    }

    #[test]
    fn integers_are_relative_and_strings_absolute() {
        let at = |json: &str| {
            serde_json::from_str::<At>(json)
                .map(|a| a.resolve(0x1000))
                .ok()
        };
        assert_eq!(at("16"), Some(0x1010));
        assert_eq!(at("-4096"), Some(0));
        assert_eq!(at("-4097"), Some(u64::MAX));
        assert_eq!(at("\"0x0\""), Some(0));
        assert_eq!(at("9223372036854775808"), None);
        assert_eq!(at("1.0"), None);
    }
}
