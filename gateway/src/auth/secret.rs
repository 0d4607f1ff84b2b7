//! The text of an API key: `tg-`, id, `.`, secret, checksum.
//!
//! The public id has 10 characters (50 bits), the secret 32 characters (160
//! random bits), the checksum 7 characters. The checksum is the CRC-32 of the
//! text before it, so a mistyped key is refused without a lookup. The alphabet
//! has 32 characters that are hard to confuse with each other.

use std::fmt;

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use tollgate_domain::KeyId;

/// A whole key with a correct checksum, owned or borrowed from a request. `Debug`
/// prints the id alone, so that no key reaches a log.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeySecret<T = String> {
    text: T,
}

/// A failure of the system's random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the system has no random numbers")]
pub struct NoRandomness;

impl KeySecret {
    /// Makes a key from the system's random numbers.
    pub(super) fn draw() -> Result<Self, NoRandomness> {
        let mut random = [0; ID + SECRET];
        SystemRandom::new().fill(&mut random).map_err(|_| NoRandomness)?;
        let (id, secret) = random.split_at(ID);
        let mut text = PREFIX.to_owned();
        // A byte has 256 values, a multiple of 32, so every letter is equally likely.
        text.extend(id.iter().map(|&byte| letter(u32::from(byte))));
        text.push('.');
        text.extend(secret.iter().map(|&byte| letter(u32::from(byte))));
        push_checksum(&mut text);
        Ok(Self { text })
    }

    /// Returns this secret with another id and a correct checksum: the text of an
    /// attacker that guesses.
    #[cfg(test)]
    pub(super) fn with_id(&self, id: &str) -> Self {
        let secret = &self.text[PREFIX.len() + ID..LENGTH - CHECKSUM];
        let mut text = format!("{PREFIX}{id}{secret}");
        push_checksum(&mut text);
        Self { text }
    }
}

impl<'a> KeySecret<&'a str> {
    /// Returns the key that `text` spells, or `None` if its shape or its checksum
    /// is wrong.
    pub fn parse(text: &'a str) -> Option<Self> {
        let bytes = text.as_bytes();
        let shaped = bytes.len() == LENGTH
            && text.starts_with(PREFIX)
            && bytes[PREFIX.len() + ID] == b'.'
            && bytes[PREFIX.len()..]
                .iter()
                .enumerate()
                .all(|(at, &byte)| at == ID || value_of(byte).is_some());
        if !shaped {
            return None;
        }
        // Every byte is ASCII by now, so the split cannot fall inside a character.
        let (checked, checksum) = text.split_at(LENGTH - CHECKSUM);
        // The checksum is no secret, so the comparison need not take constant time.
        let is_right = checksum_of(checked).eq(checksum.bytes());
        is_right.then_some(Self { text })
    }
}

#[expect(
    clippy::expect_used,
    reason = "the constructor checked that the id is letters and digits which spell a number"
)]
impl<T: AsRef<str>> KeySecret<T> {
    /// Returns the public id, which records and lists show.
    pub fn id(&self) -> KeyId {
        KeyId::new(self.id_text()).expect("letters and digits are a name")
    }

    pub(super) fn id_text(&self) -> &str {
        &self.expose()[PREFIX.len()..PREFIX.len() + ID]
    }

    /// Returns the number that the id spells.
    pub(super) fn number(&self) -> u64 {
        number_of(self.id_text()).expect("an id spells a number")
    }

    /// Returns the whole key in plain text, to show it once or to compute its MAC.
    pub fn expose(&self) -> &str {
        self.text.as_ref()
    }
}

impl<T: AsRef<str>> fmt::Debug for KeySecret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeySecret({PREFIX}{}.redacted)", self.id_text())
    }
}

/// Returns the number that the id of a key spells, with five bits for each
/// character; `None` if the text is not such an id.
pub(super) fn number_of(id: &str) -> Option<u64> {
    if id.len() != ID {
        return None;
    }
    // Ten characters of five bits are 50 bits, which 64 bits hold.
    id.bytes().try_fold(0, |number, byte| Some(number << 5 | u64::from(value_of(byte)?)))
}

/// Returns the id that a number spells.
pub(super) fn id_of(number: u64) -> String {
    (0..ID).rev().map(|place| letter((number >> (5 * place)) as u32)).collect()
}

fn letter(bits: u32) -> char {
    char::from(ALPHABET[bits as usize % ALPHABET.len()])
}

/// Returns the five bits that a character of the alphabet spells.
fn value_of(character: u8) -> Option<u8> {
    match VALUES[usize::from(character)] {
        NO_VALUE => None,
        value => Some(value),
    }
}

fn push_checksum(text: &mut String) {
    let checksum = checksum_of(text);
    text.extend(checksum.map(char::from));
}

fn checksum_of(text: &str) -> impl Iterator<Item = u8> + use<> {
    let checksum = crc32fast::hash(text.as_bytes());
    (0..CHECKSUM as u32)
        .map(move |place| ALPHABET[checksum.unbounded_shr(5 * place) as usize % ALPHABET.len()])
}

/// The value of each byte as a character of the alphabet.
static VALUES: [u8; 256] = {
    let mut values = [NO_VALUE; 256];
    let mut value = 0;
    while value < ALPHABET.len() {
        values[ALPHABET[value] as usize] = value as u8;
        value += 1;
    }
    values
};
const NO_VALUE: u8 = u8::MAX;

/// The first characters of every key.
pub(super) const PREFIX: &str = "tg-";
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const ID: usize = 10;
const SECRET: usize = 32;
const CHECKSUM: usize = 7;
const LENGTH: usize = PREFIX.len() + ID + 1 + SECRET + CHECKSUM;

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys that clients hold carry this checksum, so the polynomial must not change.
    #[test]
    fn checksum_is_crc32() {
        let spelt = 0xCBF4_3926_u32;
        let expected: Vec<u8> =
            (0..7).map(|place| ALPHABET[(u64::from(spelt) >> (5 * place)) as usize % 32]).collect();
        assert_eq!(checksum_of("123456789").collect::<Vec<_>>(), expected);
    }

    #[test]
    fn id_of_number_is_the_keys_id() {
        for _ in 0..100 {
            let key = KeySecret::draw().expect("random numbers");
            assert_eq!(id_of(key.number()), key.id_text());
        }
    }

    #[test]
    fn mistyped_key_is_refused() {
        let key = KeySecret::draw().expect("random numbers");
        let read = KeySecret::parse(key.expose());
        assert_eq!(read.map(|read| read.expose().to_owned()), Some(key.expose().to_owned()));
        for at in 0..LENGTH {
            let mut bytes = key.expose().as_bytes().to_vec();
            bytes[at] = if bytes[at] == b'7' { b'8' } else { b'7' };
            let mistaken = String::from_utf8(bytes).expect("ASCII");
            assert_eq!(KeySecret::parse(&mistaken), None, "{at}");
        }
        let text = key.expose();
        for wrong in [
            "",
            "tg-",
            &text[1..],
            &text[..LENGTH - 1],
            &format!("{text}0"),
            &format!(" {text}"),
            &text.to_uppercase(),
            &"é".repeat(LENGTH / 2),
        ] {
            assert_eq!(KeySecret::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn key_id_spells_number() {
        for (id, number) in [
            ("0000000000", Some(0)),
            ("000000000z", Some(31)),
            ("0000000010", Some(32)),
            ("zzzzzzzzzz", Some((1 << 50) - 1)),
            ("", None),
            ("00000", None),
            ("00000000000", None),
            ("000000000o", None),
            ("000000000A", None),
        ] {
            assert_eq!(number_of(id), number, "{id}");
        }
    }

    #[test]
    fn key_debug_hides_secret() {
        let key = KeySecret::draw().expect("random numbers");
        let shown = format!("{key:?}");
        assert!(shown.contains(key.id_text()));
        let secret = &key.expose()[PREFIX.len() + ID + 1..];
        assert!(!shown.contains(&secret[..6]), "{shown}");
    }
}
