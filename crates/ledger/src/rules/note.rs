//! Signed notes in the formats of the transparency-log world: C2SP `signed-note`
//! and `tlog-checkpoint`. The key strings are those of Go's `sumdb/note`.

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::signature::{ED25519 as ED25519_VERIFIED, UnparsedPublicKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::hex::hex;
use crate::rows::records::Hash;

/// The signature type of Ed25519 in `signed-note`.
pub(crate) const ED25519: u8 = 0x01;

/// Returns the text of a checkpoint before it is signed. Its origin is the key's
/// name, as `tlog-checkpoint` recommends.
pub(crate) fn checkpoint_text(origin: &str, size: u64, root: &Hash) -> String {
    format!("{origin}\n{size}\n{}\n", STANDARD.encode(root))
}

/// Returns a note: `text`, which ends with a newline, and its signature.
pub(crate) fn with_signature(text: &str, id: [u8; 4], name: &str, signature: &[u8]) -> String {
    let signature = STANDARD.encode([&id[..], signature].concat());
    format!("{text}\n\u{2014} {name} {signature}\n")
}

/// Returns the root that a checkpoint states; `None` where the note cannot be read
/// or states another size.
pub(crate) fn root_of(note: &str, size: u64) -> Option<Hash> {
    // The first line is the origin; `check_signature` compares it.
    let mut lines = note.lines().skip(1);
    let stated = lines.next().and_then(|size| size.parse::<u64>().ok());
    let root = lines.next().and_then(|root| STANDARD.decode(root).ok());
    let root = root.and_then(|root| Hash::try_from(root).ok());
    // The row's size is not signed, so it must be the size that the note states.
    root.filter(|_| stated == Some(size))
}

/// Result of a look at a note's signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signature {
    /// One of the keys signed the note.
    Good,
    /// The note names one of the keys, and the signature is not that key's; or the
    /// note cannot be read.
    Bad,
    /// The note names another key, as its origin and as its signer.
    UnknownKey,
}

/// Compares a note's signature with the `verifiers`, each in the form
/// `name+id+base64`.
pub(crate) fn check_signature(note: &str, verifiers: &[String]) -> Signature {
    let mut signer = None;
    let is_good = (|| {
        let (text, signature) = note.split_once("\n\n\u{2014} ")?;
        let (name, signature) = signature.strip_suffix('\n')?.split_once(' ')?;
        let origin = text.split('\n').next()?;
        signer = (name == origin).then_some(name);
        // Keys are found by name; the id below guards against another key of the same name.
        let key = verifiers.iter().find_map(|key| key.strip_prefix(name)?.strip_prefix('+'))?;
        let (id, key) = key.split_once('+')?;
        let (signature, key) = (STANDARD.decode(signature).ok()?, STANDARD.decode(key).ok()?);
        let (stated, signature) = signature.split_at_checked(4)?;
        let public = UnparsedPublicKey::new(&ED25519_VERIFIED, key.strip_prefix(&[ED25519])?);
        // The signed text ends with the newline that the split above took.
        let is_verified = public.verify(format!("{text}\n").as_bytes(), signature).is_ok();
        Some(origin == name && hex(stated) == id && is_verified)
    })();
    let is_known =
        |name| verifiers.iter().any(|key| key.split_once('+').is_some_and(|(it, _)| it == name));
    match signer {
        // An unknown key is no forgery: the caller knows if a new key may sign already.
        Some(name) if !is_known(name) => Signature::UnknownKey,
        _ if is_good == Some(true) => Signature::Good,
        _ => Signature::Bad,
    }
}

/// Returns `SHA-256(name || 0x0A || 0x01 || public key)[..4]`.
pub(crate) fn key_id(name: &str, public: &[u8]) -> [u8; 4] {
    let hash = digest(&SHA256, &[name.as_bytes(), b"\n", &[ED25519], public].concat());
    let mut id = [0; 4];
    id.copy_from_slice(&hash.as_ref()[..4]);
    id
}
