//! Signed notes and the checkpoints in them: C2SP `signed-note` and
//! `tlog-checkpoint`. A [`Checkpoint`] is made only from a note with a good
//! signature.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::signature::{ED25519, UnparsedPublicKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::Hash;

/// The public key of a log, as `name+id+base64`, the form of Go's `sumdb/note`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifierKey {
    name: String,
    id: [u8; 4],
    public: [u8; 32],
}

/// A text that is no verifier key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a public key of the form name+id+base64, with the id of an Ed25519 key")]
pub struct VerifierKeyError;

/// A signed checkpoint: the number of a log's records and the root over them.
#[derive(Clone, PartialEq, Eq)]
pub struct Checkpoint {
    origin: String,
    size: u64,
    root: Hash,
}

/// The reason why a note is no valid checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoteError {
    /// The text is no signed note.
    #[error("it is no signed note")]
    Form,
    /// None of the given keys signed it.
    #[error("none of the given keys signed it")]
    UnknownKey,
    /// The note names a given key, and the signature does not fit the text.
    #[error("the signature of {name} is forged")]
    Forged {
        /// The name of the key.
        name: String,
    },
    /// The note is signed, but its text is no checkpoint.
    #[error("it is signed and no checkpoint of that key's log")]
    Text,
}

impl FromStr for VerifierKey {
    type Err = VerifierKeyError;

    fn from_str(text: &str) -> Result<Self, VerifierKeyError> {
        // Base64 may hold a `+`, so only the first two are separators.
        let mut parts = text.splitn(3, '+');
        let (Some(name), Some(id), Some(key)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(VerifierKeyError);
        };
        let bytes = STANDARD.decode(key).map_err(|_| VerifierKeyError)?;
        let Some((&TYPE_ED25519, public)) = bytes.split_first() else {
            return Err(VerifierKeyError);
        };
        let public = <[u8; 32]>::try_from(public).map_err(|_| VerifierKeyError)?;
        let key = Self { id: key_id(name, &public), name: name.to_owned(), public };
        // The id is computed again: it shows that name and key belong together.
        let stated = key.id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        if is_name(name) && stated == id { Ok(key) } else { Err(VerifierKeyError) }
    }
}

impl VerifierKey {
    /// Returns true if `signature` is this key's signature of `text`.
    fn signed(&self, text: &str, signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ED25519, &self.public).verify(text.as_bytes(), signature).is_ok()
    }
}

impl Checkpoint {
    /// Opens a signed note with one of `keys`. Signatures by other keys are ignored,
    /// as the format demands. A bad signature by one of `keys` is an error.
    ///
    /// # Errors
    /// The text is no note, none of `keys` signed it, or a signature is forged.
    pub fn open(note: &str, keys: &[VerifierKey]) -> Result<Self, NoteError> {
        let (text, signatures) = split(note).ok_or(NoteError::Form)?;
        let mut signer = None;
        for (name, signature) in signatures {
            let (id, signature) = signature.split_at_checked(4).ok_or(NoteError::Form)?;
            let Some(key) = keys.iter().find(|key| key.name == name && key.id == id) else {
                // Other parties, such as witnesses, may sign the same note.
                continue;
            };
            if !key.signed(text, signature) {
                // A forgery is reported even if another signature of the note is good.
                return Err(NoteError::Forged { name: name.to_owned() });
            }
            signer = Some(key);
        }
        let signer = signer.ok_or(NoteError::UnknownKey)?;
        Self::read(text)
            // The origin of a log is the name of its key: a note of another log must not pass.
            .filter(|checkpoint| checkpoint.origin == signer.name)
            .ok_or(NoteError::Text)
    }

    /// Parses a checkpoint: origin, size and root, a line each, and nothing else.
    fn read(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix('\n')?.split('\n');
        let (origin, size, root) = (lines.next()?, lines.next()?, lines.next()?);
        // Only one spelling of a number is accepted: no sign, no leading zero.
        let number = size.parse().ok().filter(|number: &u64| number.to_string() == size)?;
        let root = <[u8; 32]>::try_from(STANDARD.decode(root).ok()?).ok()?;
        let whole = lines.next().is_none() && !origin.is_empty();
        whole.then(|| Self { origin: origin.to_owned(), size: number, root: Hash(root) })
    }

    /// Returns the name of the log.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Returns the number of records.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the root over the records.
    pub fn root(&self) -> Hash {
        self.root
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({} at {}: {})", self.origin, self.size, self.root)
    }
}

/// A signature: the name of its key, and its bytes.
type Signature<'a> = (&'a str, Vec<u8>);

/// Splits a note into its text, with the last newline, and its signatures. `None`
/// for a text that is no signed note.
fn split(note: &str) -> Option<(&str, Vec<Signature<'_>>)> {
    // The signed-note format forbids control characters. They could also hide text in a terminal.
    if note.len() > LONGEST_NOTE || note.contains(|c: char| c < ' ' && c != '\n') {
        return None;
    }
    // The last blank line separates: the text itself may hold blank lines.
    let end = note.rfind("\n\n")?;
    let (text, signatures) = (&note[..=end], note[end + 2..].strip_suffix('\n')?);
    let mut read = Vec::new();
    for line in signatures.split('\n') {
        let (name, signature) = line.strip_prefix("\u{2014} ")?.split_once(' ')?;
        let signature = STANDARD.decode(signature).ok()?;
        // The bound limits the work that a hostile note can cause.
        if !is_name(name) || read.len() >= MOST_SIGNATURES {
            return None;
        }
        read.push((name, signature));
    }
    Some((text, read))
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c == '+')
}

/// `SHA-256(name || 0x0A || 0x01 || public key)[..4]`
fn key_id(name: &str, public: &[u8; 32]) -> [u8; 4] {
    let preimage = [name.as_bytes(), b"\n", &[TYPE_ED25519], public].concat();
    let mut id = [0; 4];
    id.copy_from_slice(&digest(&SHA256, &preimage).as_ref()[..4]);
    id
}

/// The signature type of Ed25519.
const TYPE_ED25519: u8 = 0x01;
/// Bytes of the longest accepted note. Cosigners may add lines, so notes need a bound.
const LONGEST_NOTE: usize = 1 << 16;
const MOST_SIGNATURES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// From the documentation of Go's `golang.org/x/mod/sumdb/note`.
    const GO_KEY: &str = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW";
    const GO_NOTE: &str = "If you think cryptography is the answer to your problem,\n\
        then you don't know what your problem is.\n\n\u{2014} PeterNeumann \
        x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n";

    #[test]
    fn notes_equal_reference_vectors() {
        let key: VerifierKey = GO_KEY.parse().expect("a key");
        let (text, signatures) = split(GO_NOTE).expect("a note");
        assert_eq!(signatures.len(), 1);
        assert_eq!(signatures[0].1[..4], key.id);
        assert!(key.signed(text, &signatures[0].1[4..]));
        assert!(!key.signed(&text[1..], &signatures[0].1[4..]));
        // Well signed, and no checkpoint.
        assert_eq!(Checkpoint::open(GO_NOTE, &[key]), Err(NoteError::Text));
    }

    /// The example of C2SP `tlog-checkpoint`; its key is not published.
    #[test]
    fn checkpoint_of_the_specification_is_read() {
        let note = "example.com/behind-the-sofa\n20852163\n\
            CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n\
            \u{2014} example.com/behind-the-sofa \
            Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n";
        let (text, signatures) = split(note).expect("a note");
        assert_eq!(signatures[0].0, "example.com/behind-the-sofa");
        assert_eq!(signatures[0].1.len(), 68);
        let checkpoint = Checkpoint::read(text).expect("a checkpoint");
        assert_eq!(
            (checkpoint.origin(), checkpoint.size()),
            ("example.com/behind-the-sofa", 20_852_163)
        );
        assert_eq!(
            STANDARD.encode(checkpoint.root.0),
            "CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I="
        );
        let stranger: VerifierKey = GO_KEY.parse().expect("a key");
        assert_eq!(Checkpoint::open(note, &[stranger]), Err(NoteError::UnknownKey));
    }

    #[test]
    fn malformed_keys_and_notes_are_refused() {
        for key in [
            "",
            "PeterNeumann",
            "PeterNeumann+c74f20a4+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
            "PeterNeuman+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
            "PeterNeumann+c74f20a3+AhpcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
            "PeterNeumann+C74F20A3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        ] {
            assert_eq!(key.parse::<VerifierKey>(), Err(VerifierKeyError), "{key}");
        }
        let key: VerifierKey = GO_KEY.parse().expect("a key");
        for (note, error) in [
            ("", NoteError::Form),
            ("text\n", NoteError::Form),
            (&GO_NOTE[..GO_NOTE.len() - 1], NoteError::Form),
            (&GO_NOTE.replace("\n\n", "\n"), NoteError::Form),
            (&GO_NOTE.replace('\u{2014}', "-"), NoteError::Form),
            (&GO_NOTE.replace("answer", "end\tof"), NoteError::Form),
            (
                &GO_NOTE.replace("answer", "cause"),
                NoteError::Forged { name: "PeterNeumann".into() },
            ),
            (&GO_NOTE.replace("\u{2014} Peter", "\u{2014} Paul"), NoteError::UnknownKey),
        ] {
            assert_eq!(Checkpoint::open(note, std::slice::from_ref(&key)), Err(error), "{note}");
        }
        for text in
            ["a\n1\n", "a\n01\nAAAA\n", "\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n"]
        {
            assert_eq!(Checkpoint::read(text), None, "{text}");
        }
    }
}
