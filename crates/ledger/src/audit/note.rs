//! The key that signs the audit log, and the checkpoints that it signs, in the
//! formats of the transparency-log world: C2SP `signed-note` and
//! `tlog-checkpoint`. The two key strings are those of Go's `sumdb/note`.

use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand;
use aws_lc_rs::signature::{
    ED25519 as ED25519_VERIFIED, Ed25519KeyPair, KeyPair, UnparsedPublicKey,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::tree::Hash;

/// The key that signs checkpoints. Its secret stands in one file alone.
pub struct AuditKey {
    name: String,
    pair: Ed25519KeyPair,
    verifier: String,
}

/// Why there is no key to sign with.
#[derive(Debug, thiserror::Error)]
pub enum AuditKeyError {
    /// A file cannot be read or made.
    #[error("{}: the audit log's key cannot be read or made", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others may read the secret.
    #[error("{}: mode {mode:o} lets others read the audit log's key; use 600", path.display())]
    Readable {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// It is no key in the form that we write.
    #[error("{}: this is no signing key", path.display())]
    Torn {
        /// The file.
        path: PathBuf,
    },
    /// There is a key already.
    #[error("{}: there is a key already; move it away first", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
}

impl AuditKey {
    /// The key in `folder`; `None` where there is none.
    ///
    /// # Errors
    /// It cannot be read, others may read it, or it is torn.
    pub fn load(folder: &Path) -> Result<Option<Self>, AuditKeyError> {
        let path = folder.join(SECRET);
        let failed = |source| AuditKeyError::File { path: path.clone(), source };
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let mode = fs::metadata(&path).map_err(failed)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(AuditKeyError::Readable { path, mode });
        }
        let (name, seed) =
            parse_secret(text.trim_end()).ok_or(AuditKeyError::Torn { path: path.clone() })?;
        let key = Self::from_seed(name, &seed).ok_or(AuditKeyError::Torn { path })?;
        Ok(Some(key))
    }

    /// Makes a key in `folder`, with its public half beside it.
    ///
    /// # Errors
    /// There is one already, or a file cannot be made.
    pub fn make(folder: &Path) -> Result<Self, AuditKeyError> {
        let path = folder.join(SECRET);
        let failed = |source| AuditKeyError::File { path: path.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let mut random = [0; 40];
        rand::fill(&mut random).map_err(|_| failed(io::Error::other("no random bytes")))?;
        let (tag, seed) = random.split_at(8);
        let name = format!("tollgate/{}", hex(tag));
        let seed = <[u8; 32]>::try_from(seed).expect("40 bytes less 8");
        let key =
            Self::from_seed(&name, &seed).ok_or(AuditKeyError::Torn { path: path.clone() })?;
        let secret = format!(
            "PRIVATE+KEY+{name}+{}+{}\n",
            hex(&key_id(&name, key.public())),
            STANDARD.encode([&[ED25519], &seed[..]].concat())
        );
        match write_new(folder, &path, &secret, 0o600) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(AuditKeyError::Exists { path });
            }
            written => written.map_err(failed)?,
        }
        let public = folder.join(PUBLIC);
        // An earlier key's is in the checkpoints and in whoever verifies them.
        let _ = fs::remove_file(&public);
        write_new(folder, &public, &format!("{}\n", key.verifier), 0o644)
            .map_err(|source| AuditKeyError::File { path: public, source })?;
        Ok(key)
    }

    /// The key of `name` whose secret is `seed`; `None` for a bad name.
    pub fn from_seed(name: &str, seed: &[u8; 32]) -> Option<Self> {
        let good = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c == '+');
        let pair = Ed25519KeyPair::from_seed_unchecked(seed).ok().filter(|_| good)?;
        let public = pair.public_key().as_ref();
        let verifier = format!(
            "{name}+{}+{}",
            hex(&key_id(name, public)),
            STANDARD.encode([&[ED25519], public].concat())
        );
        Some(Self { name: name.to_owned(), pair, verifier })
    }

    /// The public half, as those who verify give it: `name+id+base64`.
    pub fn verifier(&self) -> &str {
        &self.verifier
    }

    /// The checkpoint of a log of `size` records with `root`, signed.
    pub(crate) fn checkpoint(&self, size: u64, root: &Hash) -> String {
        // The origin is the key's name, as tlog-checkpoint would have it.
        self.note(&format!("{}\n{size}\n{}\n", self.name, STANDARD.encode(root)))
    }

    /// `text`, which ends with a newline, and its signature.
    fn note(&self, text: &str) -> String {
        let signature = self.pair.sign(text.as_bytes());
        let id = key_id(&self.name, self.public());
        let signature = STANDARD.encode([&id[..], signature.as_ref()].concat());
        format!("{text}\n\u{2014} {} {signature}\n", self.name)
    }

    fn public(&self) -> &[u8] {
        self.pair.public_key().as_ref()
    }
}

impl fmt::Debug for AuditKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AuditKey({})", self.verifier)
    }
}

/// Whether `note` is signed by one of the `verifiers`, written as
/// [`AuditKey::verifier`] writes them. `None` where it names a key that is none
/// of them, twice: as its origin and as its signer.
pub(crate) fn is_signed(note: &str, verifiers: &[String]) -> Option<bool> {
    let mut signer = None;
    let signed = (|| {
        let (text, signature) = note.split_once("\n\n\u{2014} ")?;
        let (name, signature) = signature.strip_suffix('\n')?.split_once(' ')?;
        let origin = text.split('\n').next()?;
        signer = (name == origin).then_some(name);
        let key = verifiers.iter().find_map(|key| key.strip_prefix(name)?.strip_prefix('+'))?;
        let (id, key) = key.split_once('+')?;
        let (signature, key) = (STANDARD.decode(signature).ok()?, STANDARD.decode(key).ok()?);
        let (stated, signature) = signature.split_at_checked(4)?;
        let public = UnparsedPublicKey::new(&ED25519_VERIFIED, key.strip_prefix(&[ED25519])?);
        let verified = public.verify(format!("{text}\n").as_bytes(), signature).is_ok();
        Some(origin == name && hex(stated) == id && verified)
    })();
    let is_unknown = signer.is_some_and(|name| {
        !verifiers.iter().any(|key| key.split_once('+').is_some_and(|(known, _)| known == name))
    });
    if is_unknown { None } else { Some(signed.unwrap_or(false)) }
}

/// `SHA-256(name || 0x0A || 0x01 || public key)[..4]`
fn key_id(name: &str, public: &[u8]) -> [u8; 4] {
    let hash = digest(&SHA256, &[name.as_bytes(), b"\n", &[ED25519], public].concat());
    let mut id = [0; 4];
    id.copy_from_slice(&hash.as_ref()[..4]);
    id
}

/// Name and seed of `PRIVATE+KEY+name+id+base64`.
fn parse_secret(text: &str) -> Option<(&str, [u8; 32])> {
    let mut parts = text.strip_prefix("PRIVATE+KEY+")?.splitn(3, '+');
    let (name, id, key) = (parts.next()?, parts.next()?, parts.next()?);
    let bytes = STANDARD.decode(key).ok()?;
    let (&ED25519, seed) = bytes.split_first()? else { return None };
    let seed = <[u8; 32]>::try_from(seed).ok()?;
    let pair = Ed25519KeyPair::from_seed_unchecked(&seed).ok()?;
    (hex(&key_id(name, pair.public_key().as_ref())) == id).then_some((name, seed))
}

/// Under another name first: half a key must not be found. An existing file
/// is left as it is.
fn write_new(folder: &Path, path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let unfinished = path.with_extension("new");
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&unfinished)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    let linked = fs::hard_link(&unfinished, path);
    fs::remove_file(&unfinished)?;
    linked?;
    fs::File::open(folder)?.sync_all()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.push(DIGITS[usize::from(byte >> 4)].into());
        text.push(DIGITS[usize::from(byte & 15)].into());
    }
    text
}

/// The signature type of Ed25519 in `signed-note`.
const ED25519: u8 = 0x01;
const SECRET: &str = "signing.key";
const PUBLIC: &str = "public.key";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_made_once_and_for_its_owner_alone() {
        let parent = tempfile::tempdir().expect("a folder");
        let folder = parent.path().join("audit");
        assert!(AuditKey::load(&folder).expect("nothing is no error").is_none());
        let made = AuditKey::make(&folder).expect("makes");
        assert!(matches!(AuditKey::make(&folder), Err(AuditKeyError::Exists { .. })));
        let loaded = AuditKey::load(&folder).expect("loads").expect("it is there");
        assert_eq!(loaded.verifier(), made.verifier());
        let public = fs::read_to_string(folder.join(PUBLIC)).expect("reads");
        assert_eq!(public.trim_end(), made.verifier());
        let secret = folder.join(SECRET);
        let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode();
        assert_eq!(mode(&secret) & 0o777, 0o600);
        assert_eq!(mode(&folder) & 0o777, 0o700);
        assert!(!format!("{made:?}").contains("PRIVATE"));

        fs::set_permissions(&secret, fs::Permissions::from_mode(0o640)).expect("sets");
        assert!(matches!(AuditKey::load(&folder), Err(AuditKeyError::Readable { .. })));
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).expect("sets");
        let whole = fs::read_to_string(&secret).expect("reads");
        for torn in ["", &whole[..whole.len() / 2], &whole.replace("tollgate/", "other/")] {
            fs::write(&secret, torn).expect("writes");
            assert!(matches!(AuditKey::load(&folder), Err(AuditKeyError::Torn { .. })), "{torn}");
        }
    }

    /// The signer of the documentation of Go's `golang.org/x/mod/sumdb/note`;
    /// Ed25519 is deterministic, so its note must come out byte by byte.
    #[test]
    fn notes_are_those_of_the_reference() {
        let secret =
            "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz";
        let (name, seed) = parse_secret(secret).expect("a key");
        let key = AuditKey::from_seed(name, &seed).expect("a good name");
        assert_eq!(
            key.verifier(),
            "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
        );
        let text = "If you think cryptography is the answer to your problem,\n\
                    then you don't know what your problem is.\n";
        let expected = format!(
            "{text}\n\u{2014} PeterNeumann \
             x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
        );
        assert_eq!(key.note(text), expected);
    }
}
