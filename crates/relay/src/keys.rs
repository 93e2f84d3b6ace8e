//! Certificates to try things with: an authority, and a certificate for each name.
//!
//! For production, use the authority that you have: what a certificate needs is in `docs/relay.md`.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};

/// Why there are no certificates.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// A file can't be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// There are some already.
    #[error(
        "{path} is there already, and the authority that signed it can sign nothing more: name another folder, or remove \
         authority.pem, and the .pem and .key of each name, to have all made anew"
    )]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A name isn't one.
    #[error("cannot make a certificate for '{name}': {source}")]
    Certificate {
        /// The name.
        name: String,
        /// Why.
        source: rcgen::Error,
    },
}

/// An authority that signs certificates.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its private key, in PEM form.
#[derive(Clone, Debug)]
pub struct Certified {
    /// The certificate.
    pub certificate: String,
    /// The key.
    pub key: String,
}

impl Authority {
    /// Makes one that is valid for ten years.
    ///
    /// # Errors
    /// Its key can't be made.
    pub fn new(name: &str) -> Result<Self, KeysError> {
        let make = || {
            let mut parameters = CertificateParams::new(Vec::new())?;
            parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            parameters.distinguished_name.push(DnType::CommonName, name);
            let day = Duration::from_secs(86_400);
            set_times(&mut parameters, 3650 * day);
            CertifiedIssuer::self_signed(parameters, KeyPair::generate()?)
        };
        let issuer = make().map_err(certificate_error(name))?;
        Ok(Self { issuer })
    }

    /// Its own certificate, in PEM form.
    #[must_use]
    pub fn certificate(&self) -> String {
        self.issuer.pem()
    }

    /// Makes a certificate for a name, valid for so long from now.
    ///
    /// # Errors
    /// The name isn't one, or there is no key.
    pub fn certify(&self, name: &str, life: Duration) -> Result<Certified, KeysError> {
        let make = || {
            let mut parameters = CertificateParams::new(vec![name.to_owned()])?;
            parameters.distinguished_name.push(DnType::CommonName, name);
            parameters.extended_key_usages = vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ];
            parameters.use_authority_key_identifier_extension = true;
            set_times(&mut parameters, life);
            let key = KeyPair::generate()?;
            let certificate = parameters.signed_by(&key, &self.issuer)?;
            Ok(Certified {
                certificate: certificate.pem(),
                key: key.serialize_pem(),
            })
        };
        make().map_err(certificate_error(name))
    }
}

/// From an hour ago, as clocks differ.
fn set_times(parameters: &mut CertificateParams, life: Duration) {
    let now = SystemTime::now();
    parameters.not_before = (now - Duration::from_secs(3600)).into();
    parameters.not_after = (now + life).into();
}

fn certificate_error(name: &str) -> impl FnOnce(rcgen::Error) -> KeysError {
    move |source| KeysError::Certificate {
        name: name.to_owned(),
        source,
    }
}

/// Writes an authority (`authority.pem`) and a certificate and key for each name (`NAME.pem`, `NAME.key`) into a
/// folder, which is made. The authority's key isn't kept: it can sign nothing more.
///
/// # Errors
/// See [`KeysError`]. Files that are there are not overwritten.
pub fn write(folder: &Path, names: &[String], life: Duration) -> Result<Vec<PathBuf>, KeysError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| KeysError::Write { path, source }
    };
    let authority = Authority::new("sandwire relay, for tests")?;
    let mut files = vec![(folder.join("authority.pem"), authority.certificate(), 0o644)];
    for name in names {
        let certified = authority.certify(name, life)?;
        files.push((
            folder.join(format!("{name}.pem")),
            certified.certificate,
            0o644,
        ));
        files.push((folder.join(format!("{name}.key")), certified.key, 0o600));
    }
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let exists = files.iter().find(|(path, ..)| path.exists());
    if let Some((path, ..)) = exists {
        return Err(KeysError::Exists { path: path.clone() });
    }
    for (path, text, mode) in &files {
        let mut options = OpenOptions::new();
        let opened = options.write(true).create_new(true).mode(*mode).open(path);
        opened
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(failed(path))?;
    }
    Ok(files.into_iter().map(|(path, ..)| path).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_some_already_is_told_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["a.example".to_owned()];
        let day = Duration::from_secs(86_400);
        write(folder.path(), &names, day).unwrap();
        let read = || fs::read(folder.path().join("authority.pem")).unwrap();
        let before = read();
        let error = write(folder.path(), &names, day).unwrap_err().to_string();
        assert!(
            error.contains("authority.pem is there already") && error.contains("another folder"),
            "{error}"
        );
        assert_eq!(read(), before);
    }
}
