//! Identities of the configuration whose cgroup isn't there: of a service that doesn't run, or a slip of the pen.

use std::{io::ErrorKind, path::Path};

use sandwire_daemon::config::Config;
use sandwire_identity::{Cgroup, Error};

use super::report::Warning;

/// What is to be said of those of a configuration.
pub(super) fn warnings(config: &Config) -> Vec<Warning> {
    let identities = config.identities.iter();
    identities
        .filter_map(|identity| {
            let (problem, advice) = look_at(&identity.new.cgroup)?;
            Some(Warning {
                subject: format!("identity {}", identity.name),
                problem,
                advice,
            })
        })
        .collect()
}

/// What is wrong with a declared cgroup, and what to do.
fn look_at(cgroup: &Path) -> Option<(String, String)> {
    match Cgroup::open(cgroup) {
        Err(Error::NoCgroup { source, .. }) if source.kind() == ErrorKind::NotFound => Some((
            format!(
                "it waits for its cgroup: {} isn't there",
                cgroup.display()
            ),
            "nothing, if that is of a service that doesn't run now; else correct `cgroup` in the configuration: below \
             /sys/fs/cgroup it is what systemctl show -p ControlGroup UNIT says"
                .to_owned(),
        )),
        // It can't be told by this user.
        Ok(_) | Err(Error::NoCgroup { .. }) => None,
        Err(error) => Some((
            error.to_string(),
            "correct `cgroup` in the configuration, and reload the daemon".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

    use std::fs;

    use super::*;

    #[test]
    fn a_declared_cgroup_that_is_not_there_or_none_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let cgroup = folder.path().join("web");
        let text = format!(
            "[[identity]]\nname = \"web\"\ncgroup = {cgroup:?}\naddresses = [\"10.0.0.5\"]\n"
        );
        let config = Config::parse(&text, Path::new("s.toml")).unwrap();
        let told = |words: &str| {
            let warnings = warnings(&config);
            assert_eq!(warnings.len(), 1, "{warnings:?}");
            assert_eq!(warnings[0].subject, "identity web");
            assert!(warnings[0].problem.contains(words), "{warnings:?}");
        };
        told("isn't there");
        fs::create_dir(&cgroup).unwrap();
        told("not in a cgroup v2");
    }
}
