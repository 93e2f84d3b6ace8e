//! Cgroups as rules name them: by number, which one that was deleted and made again has anew.

use std::{
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::SteeringError;
use crate::config::{Egress, Origin, Protocol};

/// A cgroup as rules name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CgroupNumber {
    pub(super) id: u64,
    pub(super) depth: u32,
}

/// Those of a configuration, in the order of their entrances.
pub(super) fn paths(egress: &Egress) -> impl Iterator<Item = &PathBuf> {
    egress.cgroups().map(|(path, _)| path)
}

/// Their numbers, as far as they are there.
pub(super) fn present(egress: &Egress) -> Vec<Option<CgroupNumber>> {
    paths(egress).map(|path| number(path).ok()).collect()
}

/// Those that aren't there.
#[must_use]
pub fn missing(egress: &Egress) -> Vec<&Path> {
    paths(egress)
        .filter(|path| !path.exists())
        .map(PathBuf::as_path)
        .collect()
}

/// Wants all that are there to be cgroups (v2).
///
/// # Errors
/// One that is there isn't.
pub fn check(egress: &Egress) -> Result<(), SteeringError> {
    for path in paths(egress) {
        match number(path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                let path = path.clone();
                return Err(SteeringError::Cgroup { path, source });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Wants the relay itself to be in none whose redirect leads to a peer: it would carry its own connections to that peer,
/// and those again, and none would arrive.
pub(super) fn check_own(egress: &Egress) -> Result<(), SteeringError> {
    let Ok(own) = std::fs::read_to_string("/proc/self/cgroup") else {
        return Ok(());
    };
    let Some(own) = own.lines().find_map(|line| line.strip_prefix("0::")) else {
        return Ok(());
    };
    for (redirect, place) in egress.redirects.iter().zip(1..) {
        let covers = |protocol| {
            let mut peers = egress.peers.iter();
            peers.find(|peer| redirect.covers(protocol, peer.address))
        };
        let Some(peer) = Protocol::ALL.into_iter().find_map(covers) else {
            continue;
        };
        let senders = redirect.senders.iter();
        for sender in senders.map(|sender| &egress.senders[*sender].origin) {
            if let Origin::Cgroup { path, .. } = sender
                && holds(path, Path::new(own))
            {
                return Err(SteeringError::OwnCgroup {
                    path: path.clone(),
                    redirect: place,
                    peer: peer.name.clone(),
                });
            }
        }
    }
    Ok(())
}

/// Whether a cgroup, by its folder, is or holds another one, by its path below the root.
fn holds(folder: &Path, other: &Path) -> bool {
    let (Ok(folder), Ok(number)) = (folder.canonicalize(), number(folder)) else {
        return false;
    };
    let names = folder.components().count();
    let below_root = folder
        .components()
        .skip(names.saturating_sub(number.depth as usize));
    let below_root: PathBuf = below_root.collect();
    let inside = other.strip_prefix("/");
    inside.is_ok_and(|inside| inside.starts_with(below_root))
}

fn number(path: &Path) -> io::Result<CgroupNumber> {
    let path = path.canonicalize()?;
    if !path.join("cgroup.procs").exists() || !path.join("cgroup.type").exists() {
        let reason = "it is no cgroup of version 2 below the root of the hierarchy";
        return Err(io::Error::other(reason));
    }
    let found = path.metadata()?;
    let mut depth = 0;
    for folder in path.ancestors() {
        let parent = folder.parent().map(Path::metadata).transpose()?;
        if parent.is_none_or(|parent| parent.dev() != found.dev()) {
            break;
        }
        depth += 1;
    }
    Ok(CgroupNumber {
        id: found.ino(),
        depth,
    })
}
