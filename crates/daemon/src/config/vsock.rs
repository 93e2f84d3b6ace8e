//! The section `[vsock]` of the configuration.

mod limits;

use std::path::{Path, PathBuf};

use sandwire_api::{name::Name, vsock::VsockDestination};
use sandwire_slot::channel::checks::is_host_service;
use sandwire_vsock_host::limits::Limits;
use serde::Deserialize;
use toml::Spanned;

use super::{ConfigError, Source};

/// Most worker threads of a service process.
const THREADS_MAX: usize = 64;
/// Worker threads unless told otherwise: as many as there are processors, up to this.
const THREADS_DEFAULT_MAX: usize = 4;
/// Longest time that a worker looks for work before it sleeps: beyond, a processor is spent for nothing.
const BUSY_POLL_US_MAX: u32 = 10_000;

/// Settings of the services for vsock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockConfig {
    /// Folder of all channels.
    pub folder: PathBuf,
    /// The service of everybody who is in no group.
    pub service: VsockService,
    /// Services of their own for the leases of certain users.
    pub groups: Vec<VsockGroup>,
    /// Services of the host to which others than root may lead guests.
    pub host_services: Vec<VsockDestination>,
}

/// A service for the leases of some users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockGroup {
    /// Its name, which is that of its folder under `groups/`.
    pub name: Name,
    /// Whose leases it carries.
    pub uids: Vec<u32>,
    /// Its settings.
    pub service: VsockService,
}

/// Settings of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockService {
    /// Worker threads.
    pub threads: usize,
    /// User and group that it runs as. Absent: those of the daemon.
    pub user: Option<(u32, u32)>,
    /// Microseconds that a worker looks for work before it sleeps.
    pub busy_poll_us: u32,
    /// Bounds of each guest, and of all together. Those of the section, in each group.
    pub limits: Limits,
}

/// What the file may hold.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    #[serde(default)]
    enabled: bool,
    folder: Option<Spanned<PathBuf>>,
    threads: Option<Spanned<usize>>,
    user: Option<Spanned<String>>,
    busy_poll_us: Option<Spanned<u32>>,
    limits: Option<Spanned<limits::Section>>,
    #[serde(default)]
    host_services: Vec<Spanned<VsockDestination>>,
    #[serde(default)]
    group: Vec<Spanned<Group>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    name: Name,
    uids: Vec<u32>,
    threads: Option<Spanned<usize>>,
    user: Option<Spanned<String>>,
    busy_poll_us: Option<Spanned<u32>>,
}

impl Source<'_> {
    /// None where it is not enabled; what it says is checked all the same.
    pub(super) fn vsock(
        &self,
        section: Option<Section>,
        state_dir: &Path,
    ) -> Result<Option<VsockConfig>, ConfigError> {
        let Some(section) = section else {
            return Ok(None);
        };
        let folder = match &section.folder {
            Some(folder) => self.absolute("vsock.folder", folder)?,
            None => state_dir.join("vsock"),
        };
        let base = VsockService {
            threads: std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(THREADS_DEFAULT_MAX),
            user: None,
            busy_poll_us: 0,
            limits: self.vsock_limits(section.limits)?,
        };
        let service = self.vsock_service(
            &base,
            section.threads.as_ref(),
            section.user.as_ref(),
            section.busy_poll_us.as_ref(),
        )?;
        let mut groups: Vec<VsockGroup> = Vec::with_capacity(section.group.len());
        for group in section.group {
            groups.push(self.vsock_group(group, &service, &groups)?);
        }
        let host_services = self.host_services(section.host_services)?;
        Ok(section.enabled.then_some(VsockConfig {
            folder,
            service,
            groups,
            host_services,
        }))
    }

    fn host_services(
        &self,
        listed: Vec<Spanned<VsockDestination>>,
    ) -> Result<Vec<VsockDestination>, ConfigError> {
        if let Some(other) = listed.iter().find(|to| !is_host_service(to.get_ref())) {
            let reason = "vsock.host_services: it is no service of the host: kind is \"unix\", \"tcp\" or \"vsock\"";
            return Err(self.invalid(other.span(), reason));
        }
        Ok(listed.into_iter().map(Spanned::into_inner).collect())
    }

    /// A group has the settings of the section where it has none of its own.
    fn vsock_group(
        &self,
        group: Spanned<Group>,
        base: &VsockService,
        earlier: &[VsockGroup],
    ) -> Result<VsockGroup, ConfigError> {
        let span = group.span();
        let group = group.into_inner();
        let name = &group.name;
        let refuse = |reason: String| {
            Err(self.invalid(span.clone(), &format!("vsock.group {name}: {reason}")))
        };
        if group.uids.is_empty() {
            return refuse("uids is empty: name the users whose leases it is for".to_owned());
        }
        if earlier.iter().any(|other| other.name == *name) {
            return refuse("an earlier group has that name".to_owned());
        }
        for uid in &group.uids {
            if let Some(other) = earlier.iter().find(|other| other.uids.contains(uid)) {
                return refuse(format!("user {uid} is in group {} already", other.name));
            }
        }
        let service = self.vsock_service(
            base,
            group.threads.as_ref(),
            group.user.as_ref(),
            group.busy_poll_us.as_ref(),
        )?;
        Ok(VsockGroup {
            name: group.name,
            uids: group.uids,
            service,
        })
    }

    fn vsock_service(
        &self,
        base: &VsockService,
        threads: Option<&Spanned<usize>>,
        user: Option<&Spanned<String>>,
        busy_poll_us: Option<&Spanned<u32>>,
    ) -> Result<VsockService, ConfigError> {
        let threads = match threads {
            None => base.threads,
            Some(threads) if (1..=THREADS_MAX).contains(threads.get_ref()) => *threads.get_ref(),
            Some(threads) => {
                let reason = format!("vsock threads must be between 1 and {THREADS_MAX}");
                return Err(self.invalid(threads.span(), &reason));
            }
        };
        let user = match user {
            None => base.user,
            Some(text) => Some(user_and_group(text.get_ref()).ok_or_else(|| {
                let reason = "vsock user must be numeric user and group, as \"990:990\"";
                self.invalid(text.span(), reason)
            })?),
        };
        let busy_poll_us = match busy_poll_us {
            None => base.busy_poll_us,
            Some(time) if *time.get_ref() <= BUSY_POLL_US_MAX => *time.get_ref(),
            Some(time) => {
                let reason = format!(
                    "vsock busy_poll_us must be at most {BUSY_POLL_US_MAX} (0: sleep at once)"
                );
                return Err(self.invalid(time.span(), &reason));
            }
        };
        Ok(VsockService {
            threads,
            user,
            busy_poll_us,
            limits: base.limits.clone(),
        })
    }
}

fn user_and_group(text: &str) -> Option<(u32, u32)> {
    let (user, group) = text.split_once(':')?;
    Some((user.parse().ok()?, group.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn parse(text: &str) -> Result<Option<VsockConfig>, String> {
        Config::parse(text, Path::new("s.toml"))
            .map(|config| config.vsock)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn vsock_is_off_unless_it_is_enabled() {
        assert_eq!(parse(""), Ok(None));
        assert_eq!(parse("[vsock]\nthreads = 2"), Ok(None));
        let config = parse("[vsock]\nenabled = true").unwrap().unwrap();
        assert_eq!(config.folder, Path::new("/run/sandwire/vsock"));
        assert!((1..=4).contains(&config.service.threads));
        assert_eq!(
            (config.service.user, config.service.busy_poll_us),
            (None, 0)
        );
    }

    #[test]
    fn a_group_has_the_settings_of_the_section_unless_it_says_otherwise() {
        let text = r#"
state_dir = "/run/b"
[vsock]
enabled = true
threads = 3
user = "990:991"
host_services = [{ kind = "tcp", address = "127.0.0.1:80" }]
[[vsock.group]]
name = "batch"
uids = [2000, 2001]
busy_poll_us = 50
"#;
        let config = parse(text).unwrap().unwrap();
        assert_eq!(config.folder, Path::new("/run/b/vsock"));
        let address = "127.0.0.1:80".parse().unwrap();
        assert_eq!(config.host_services, [VsockDestination::Tcp { address }]);
        let group = &config.groups[0];
        assert_eq!(group.uids, [2000, 2001]);
        assert_eq!(group.service.threads, 3);
        assert_eq!(group.service.user, Some((990, 991)));
        assert_eq!(group.service.busy_poll_us, 50);
        assert_eq!(config.service.busy_poll_us, 0);
        assert_eq!(group.service.limits, Limits::default());
    }

    #[test]
    fn what_is_wrong_is_refused_with_its_place() {
        for (text, reason) in [
            (
                "[vsock]\nthreads = 0",
                "s.toml:2:11: vsock threads must be between 1 and 64",
            ),
            (
                "[vsock]\nuser = \"nobody\"",
                "s.toml:2:8: vsock user must be numeric",
            ),
            (
                "[vsock]\nbusy_poll_us = 10001",
                "vsock busy_poll_us must be at most 10000",
            ),
            (
                "[vsock]\nfolder = \"v\"",
                "vsock.folder must be an absolute path",
            ),
            ("[vsock]\nport = 1", "unknown field `port`"),
            (
                "[vsock]\nhost_services = [{ kind = \"host\" }]",
                "s.toml:2:18: vsock.host_services: it is no service of the host",
            ),
            (
                "[[vsock.group]]\nname = \"a\"\nuids = []",
                "vsock.group a: uids is empty",
            ),
            (
                "[[vsock.group]]\nname = \"a\"\nuids = [1]\n[[vsock.group]]\nname = \"b\"\nuids = [1]",
                "vsock.group b: user 1 is in group a already",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
