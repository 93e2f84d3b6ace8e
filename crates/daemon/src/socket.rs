//! The Unix socket of the API: made with its permissions from the start, never stolen.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::{
        fs::{DirBuilderExt, FileTypeExt, PermissionsExt, chown},
        net::UnixListener,
    },
    path::{Path, PathBuf},
};

use sandwire_vsock_host::listener::refuse_descriptors;

use crate::config::SocketConfig;

/// Why the daemon can't listen.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process answers on the socket.
    #[error("another daemon listens on {}: stop it, or give this one an `instance`, a `state_dir` and a `socket` (by default in \
             `state_dir`) of its own", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// Something else has that name.
    #[error("{} is there and is not a socket: remove it, or set another `socket`", path.display())]
    NotASocket {
        /// What is there.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl SocketError {
    /// Whether the daemon was refused, as opposed to having failed.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::Io { .. })
    }
}

/// Makes the socket's folder, and refuses a socket that can't be had, before anything else is done: after the start of the
/// daemon it would be too late for a refusal.
pub(crate) fn prepare(config: &SocketConfig) -> Result<(), SocketError> {
    prepare_folder(config)?;
    check_free(&config.path)
}

/// Listens on the configured socket. A socket that a dead daemon left is replaced.
pub(crate) fn bind(config: &SocketConfig) -> Result<UnixListener, SocketError> {
    let path = &config.path;
    prepare(config)?;

    // It gets its permissions, and refuses descriptors, under a name that nobody connects to, then its own name.
    let mut temporary = OsString::from(path);
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(cannot("remove", &temporary)(error));
        }
        _ => {}
    }
    let listener = UnixListener::bind(&temporary).map_err(cannot("listen on", &temporary))?;
    if !refuse_descriptors(&listener) {
        tracing::debug!(
            "callers can send descriptors along, which this kernel closes as they are read"
        );
    }
    fs::set_permissions(&temporary, fs::Permissions::from_mode(config.mode))
        .map_err(cannot("change the mode of", &temporary))?;
    if config.uid.is_some() || config.gid.is_some() {
        chown(&temporary, config.uid, config.gid)
            .map_err(cannot("change the owner of", &temporary))?;
    }
    fs::rename(&temporary, path).map_err(cannot("put in place", path))?;
    Ok(listener)
}

/// Makes the socket's folder, which tenants may enter. Mostly this is the state folder too, so it is
/// done before the journal makes that for itself alone.
fn prepare_folder(config: &SocketConfig) -> Result<(), SocketError> {
    let Some(folder) = config.path.parent() else {
        return Ok(());
    };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(folder)
        .map_err(cannot("create folder", folder))
}

/// Removes the socket at the daemon's end, so that a client is told at once that nobody is there.
pub(crate) fn remove(config: &SocketConfig) {
    if let Err(error) = fs::remove_file(&config.path) {
        tracing::debug!(%error, "cannot remove the socket");
    }
}

fn check_free(path: &Path) -> Result<(), SocketError> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(cannot("look at", path)(error)),
    };
    if !metadata.file_type().is_socket() {
        return Err(SocketError::NotASocket {
            path: path.to_owned(),
        });
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // A listener whose queue is full is alive too.
        Ok(_) => Err(SocketError::InUse {
            path: path.to_owned(),
        }),
        Err(error) => Err(cannot("connect to", path)(error)),
    }
}

fn cannot<'a>(
    operation: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> SocketError + use<'a> {
    move |source| SocketError::Io {
        operation,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn config(path: PathBuf) -> SocketConfig {
        SocketConfig {
            path,
            mode: 0o640,
            uid: None,
            gid: None,
        }
    }

    #[test]
    fn a_socket_gets_its_mode_and_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/s.sock");
        let _listener = bind(&config(path.clone())).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let parent = fs::metadata(path.parent().unwrap()).unwrap();
        assert_eq!(parent.permissions().mode() & 0o777, 0o755);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_socket_that_a_dead_daemon_left_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.sock");
        drop(bind(&config(path.clone())).unwrap());
        assert!(path.exists());
        let _listener = bind(&config(path.clone())).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_socket_that_somebody_answers_on_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.sock");
        let first = bind(&config(path.clone())).unwrap();
        let error = bind(&config(path.clone())).unwrap_err();
        assert!(matches!(error, SocketError::InUse { .. }), "{error}");
        UnixStream::connect(&path).unwrap();
        drop(first);
    }

    #[test]
    fn a_file_of_that_name_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.sock");
        fs::write(&path, "mine").unwrap();
        let error = bind(&config(path.clone())).unwrap_err();
        assert!(matches!(error, SocketError::NotASocket { .. }), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    }
}
