//! The key that signs the audit log, and the two files that hold it.

use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aws_lc_rs::rand;
use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::hex::hex;
use crate::rows::records::Hash;
use crate::rules::note::{ED25519, checkpoint_text, key_id, with_signature};

/// The key that signs checkpoints. Its secret is in one file only.
pub struct AuditKey {
    name: String,
    pair: Ed25519KeyPair,
    verifier: String,
}

/// A failure to load or make the signing key.
#[derive(Debug, thiserror::Error)]
pub enum AuditKeyError {
    /// A file cannot be read or made.
    #[error("{}: the audit log's key cannot be read or made", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The mode of the file lets other users read the secret.
    #[error("{}: mode {mode:o} lets others read the audit log's key; use 600", path.display())]
    Readable {
        /// The file.
        path: PathBuf,
        /// The mode, in octal.
        mode: u32,
    },
    /// The file holds no key in the form that [`AuditKey::make`] writes.
    #[error("{}: the file holds no signing key of the audit log", path.display())]
    Torn {
        /// The file.
        path: PathBuf,
    },
    /// A key exists already.
    #[error("{}: a key exists already; move it away first", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
}

impl AuditKey {
    /// Loads the key in `folder`; `None` where there is none.
    ///
    /// # Errors
    /// The file cannot be read, its mode lets others read it, or it holds no key.
    pub fn load(folder: &Path) -> Result<Option<Self>, AuditKeyError> {
        let path = folder.join(SECRET);
        let failed = |source| AuditKeyError::File { path: path.clone(), source };
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            // A missing key is no error: the caller decides if one is made.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        // A secret that others could read may have been copied.
        let mode = fs::metadata(&path).map_err(failed)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(AuditKeyError::Readable { path, mode });
        }
        let (name, seed) =
            parse_secret(text.trim_end()).ok_or(AuditKeyError::Torn { path: path.clone() })?;
        let key = Self::from_seed(name, &seed).ok_or(AuditKeyError::Torn { path })?;
        Ok(Some(key))
    }

    /// Makes a key in `folder` and writes its public half beside it.
    ///
    /// # Errors
    /// A key exists already, or a file cannot be made.
    #[expect(clippy::expect_used, reason = "40 bytes less 8 are 32")]
    pub fn make(folder: &Path) -> Result<Self, AuditKeyError> {
        let path = folder.join(SECRET);
        let failed = |source| AuditKeyError::File { path: path.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        // 8 bytes make a name that no other log has; 32 bytes are the seed.
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
        // The secret comes first: the public half can be derived from it.
        match write_new(folder, &path, &secret, 0o600) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(AuditKeyError::Exists { path });
            }
            written => written.map_err(failed)?,
        }
        let public = folder.join(PUBLIC);
        // An earlier key's public half may stand here. Verifiers keep their own copy.
        let _ = fs::remove_file(&public);
        write_new(folder, &public, &format!("{}\n", key.verifier), 0o644)
            .map_err(|source| AuditKeyError::File { path: public, source })?;
        Ok(key)
    }

    /// Derives the key of `name` from its secret `seed`; `None` for a bad name.
    pub fn from_seed(name: &str, seed: &[u8; 32]) -> Option<Self> {
        // `+` and whitespace separate the parts of keys and of signature lines.
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

    /// Returns the public half in the form that verifiers take: `name+id+base64`.
    pub fn verifier(&self) -> &str {
        &self.verifier
    }

    /// Signs the checkpoint of a log of `size` records with `root`.
    pub(crate) fn checkpoint(&self, size: u64, root: &Hash) -> String {
        self.note(&checkpoint_text(&self.name, size, root))
    }

    /// Signs `text`, which ends with a newline.
    fn note(&self, text: &str) -> String {
        let signature = self.pair.sign(text.as_bytes());
        with_signature(text, key_id(&self.name, self.public()), &self.name, signature.as_ref())
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

/// Parses name and seed of `PRIVATE+KEY+name+id+base64`.
fn parse_secret(text: &str) -> Option<(&str, [u8; 32])> {
    // Base64 may hold a `+`, so only the first two are separators.
    let mut parts = text.strip_prefix("PRIVATE+KEY+")?.splitn(3, '+');
    let (name, id, key) = (parts.next()?, parts.next()?, parts.next()?);
    let bytes = STANDARD.decode(key).ok()?;
    let (&ED25519, seed) = bytes.split_first()? else { return None };
    let seed = <[u8; 32]>::try_from(seed).ok()?;
    let pair = Ed25519KeyPair::from_seed_unchecked(&seed).ok()?;
    // The id is computed again, so that a damaged seed is found before it signs anything.
    (hex(&key_id(name, pair.public_key().as_ref())) == id).then_some((name, seed))
}

/// Writes a file under another name first, so that half a key is never found. An
/// existing file is left as it is.
fn write_new(folder: &Path, path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let unfinished = path.with_extension("new");
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&unfinished)?;
    file.write_all(text.as_bytes())?;
    // Synced before the link: a power cut could otherwise leave an empty file under the final
    // name.
    file.sync_all()?;
    // A link fails where the name exists; a rename would replace it.
    let linked = fs::hard_link(&unfinished, path);
    // Removed even if the link failed, because the file may hold a secret.
    fs::remove_file(&unfinished)?;
    linked?;
    // The new name is an entry of the folder, so the folder is synced too.
    fs::File::open(folder)?.sync_all()
}

const SECRET: &str = "signing.key";
const PUBLIC: &str = "public.key";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audit_key_is_made_once_and_private() {
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
    fn notes_equal_reference_vectors() {
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
