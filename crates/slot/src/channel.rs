//! A lease's vsock channel: what is remembered of it, and what is asked of the service that carries it.
//!
//! The service is a process of its own; [`Channels`] is all that is known of it here. The folder of a
//! channel is a pure function of the slot, so that nothing about it has to be looked up.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use sandwire_api::{
    error::ErrorCode,
    name::Name,
    vsock::{
        DEFAULT_GUEST_CID, VsockChannel, VsockConnection, VsockDestination, VsockKind, VsockPolicy,
        VsockRequest, VsockRule, VsockTraffic,
    },
};
use serde::{Deserialize, Serialize};

use crate::{
    lease::LeaseKey,
    plan::{Plan, SlotNumber},
};

pub mod checks;

/// Socket by which the host reaches a guest, in the channel's folder.
pub const STREAM_SOCKET: &str = "vsock.sock";
/// The same for SEQPACKET.
pub const SEQPACKET_SOCKET: &str = "vsock.sock_seqpacket";
/// vhost-user socket of a channel whose device is ours.
pub const VHOST_USER_SOCKET: &str = "vhost.sock";

/// Longest path of a Unix socket: `sun_path` without its final zero.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// The longest file name in a channel's folder: the socket of the last port.
const LONGEST_FILE: &str = "vsock.sock_4294967294";

/// What is remembered of a lease's channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelRecord {
    /// What owns the guest's device.
    pub kind: VsockKind,
    /// The guest's CID.
    pub cid: u32,
    /// CID by which siblings may call it.
    #[serde(default)]
    pub virtual_cid: Option<u32>,
    /// Its own policy; without one it has the pool's.
    #[serde(default)]
    pub policy: Option<VsockPolicy>,
    /// Rules of its own policy that it may have for as long as its pool has them: they take a right that its holder,
    /// who has added others to them, doesn't have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lent: Vec<VsockRule>,
}

impl ChannelRecord {
    /// What the guest may reach, with this policy of its pool.
    #[must_use]
    pub fn policy_in(&self, of_pool: Option<&VsockPolicy>) -> VsockPolicy {
        let Some(own) = &self.policy else {
            return of_pool.cloned().unwrap_or_default();
        };
        let has = |rule: &VsockRule| of_pool.is_some_and(|pool| pool.rules.contains(rule));
        let is_taken_away = |rule: &VsockRule| self.lent.contains(rule) && !has(rule);
        let mut policy = own.clone();
        policy.rules.retain(|rule| !is_taken_away(rule));
        policy
    }

    /// Whether a change of its pool's policy may change what the guest may reach.
    #[must_use]
    pub fn follows_pool(&self) -> bool {
        self.policy.is_none() || !self.lent.is_empty()
    }

    /// The same with a policy of its own, or with its pool's.
    #[must_use]
    pub fn with_policy(&self, policy: Option<VsockPolicy>) -> Self {
        Self {
            policy,
            lent: Vec::new(),
            ..self.clone()
        }
    }

    /// The same with a rule beside those that hold now. Of its pool's, which become its own by that, those for which
    /// `is_lent` says so stay the pool's to take away.
    #[must_use]
    pub fn with_rule(
        &self,
        rule: VsockRule,
        of_pool: Option<&VsockPolicy>,
        is_lent: impl Fn(&VsockRule) -> bool,
    ) -> Self {
        let mut policy = self.policy_in(of_pool);
        let mut lent = policy.rules.clone();
        lent.retain(|rule| match self.policy {
            Some(_) => self.lent.contains(rule),
            None => is_lent(rule),
        });
        policy.rules.push(rule);
        Self {
            policy: Some(policy),
            lent,
            ..self.clone()
        }
    }
}

impl From<&VsockRequest> for ChannelRecord {
    fn from(request: &VsockRequest) -> Self {
        Self {
            kind: request.kind,
            cid: request.cid.unwrap_or(DEFAULT_GUEST_CID),
            virtual_cid: request.virtual_cid,
            policy: request.policy.clone(),
            lent: Vec::new(),
        }
    }
}

/// A channel as it is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChannelPlan {
    /// Whose it is.
    pub lease: LeaseKey,
    /// What owns the guest's device.
    pub kind: VsockKind,
    /// Folder of its sockets.
    pub folder: PathBuf,
    /// The guest's CID.
    pub cid: u32,
    /// CID by which siblings may call it.
    pub virtual_cid: Option<u32>,
    /// What the guest may reach.
    pub policy: VsockPolicy,
}

impl ChannelPlan {
    /// The channel of a lease in a slot of `pool`. `base` is the folder of all channels.
    #[must_use]
    pub fn new(
        base: &Path,
        pool: &Plan,
        slot: SlotNumber,
        lease: &LeaseKey,
        record: &ChannelRecord,
    ) -> Self {
        Self {
            lease: lease.clone(),
            kind: record.kind,
            folder: folder(base, &pool.spec.name, slot),
            cid: record.cid,
            virtual_cid: record.virtual_cid,
            policy: record.policy_in(pool.spec.vsock.as_ref()),
        }
    }

    /// Whether all but what the guest may reach is the same.
    #[must_use]
    pub fn differs_in_policy_alone(&self, other: &Self) -> bool {
        let with_its_policy = Self {
            policy: other.policy.clone(),
            ..self.clone()
        };
        self.policy != other.policy && with_its_policy == *other
    }

    /// The channel as the API shows it, with the arguments of each VMM.
    #[must_use]
    pub fn to_api(&self) -> VsockChannel {
        let file = |name: &str| self.folder.join(name).to_string_lossy().into_owned();
        let socket = file(STREAM_SOCKET);
        let cid = self.cid;
        let ours = self.kind == VsockKind::VhostUser;
        let vhost_user_socket = ours.then(|| file(VHOST_USER_SOCKET));
        let words = |words: [String; 2]| words.to_vec();
        let (qemu_arguments, cloud_hypervisor_arguments) = match &vhost_user_socket {
            Some(path) => (
                vec![
                    "-chardev".to_owned(),
                    format!("socket,id=sandwire-vsock,path={path}"),
                    "-device".to_owned(),
                    "vhost-user-vsock-pci,id=sandwire-vsock,chardev=sandwire-vsock".to_owned(),
                ],
                words([
                    "--generic-vhost-user".to_owned(),
                    format!("socket={path},device_type=vsock,queue_sizes=[256,256,256]"),
                ]),
            ),
            None => (
                Vec::new(),
                words(["--vsock".to_owned(), format!("cid={cid},socket={socket}")]),
            ),
        };
        let firecracker = || {
            let body = serde_json::json!({ "guest_cid": cid, "uds_path": socket });
            body.to_string()
        };
        VsockChannel {
            kind: self.kind,
            cid,
            virtual_cid: self.virtual_cid,
            seqpacket_socket: ours.then(|| file(SEQPACKET_SOCKET)),
            vhost_user_socket,
            qemu_arguments,
            cloud_hypervisor_arguments,
            firecracker_vsock: (!ours).then(firecracker),
            socket,
        }
    }
}

/// Folder of the channel of a slot: `<base>/<pool>.<slot>`.
#[must_use]
pub fn folder(base: &Path, pool: &Name, slot: SlotNumber) -> PathBuf {
    base.join(format!("{pool}.{slot}"))
}

/// Whether a file name is that of a channel's folder.
#[must_use]
pub fn is_folder_name(name: &str) -> bool {
    name.split_once('.').is_some_and(|(pool, slot)| {
        pool.parse::<Name>().is_ok() && slot.parse::<u32>().is_ok_and(|n| n.to_string() == slot)
    })
}

/// How many bytes too long the longest path of a socket of the pool would be. None if all fit.
#[must_use]
pub fn excess_path_bytes(base: &Path, pool: &Name, slots_max: u32) -> Option<usize> {
    let last = SlotNumber(slots_max.saturating_sub(1));
    let longest = folder(base, pool, last).join(LONGEST_FILE);
    let bytes = longest.as_os_str().len();
    bytes
        .checked_sub(SOCKET_PATH_BYTES_MAX)
        .filter(|excess| *excess > 0)
}

/// A running capture.
pub struct Capture {
    /// Bytes of a pcap file, until the capture ends.
    pub bytes: OwnedFd,
    /// Dropped, it ends the capture. Says, once the bytes have ended, whether that is since the channel has: if not, its
    /// service is gone. Waits some seconds at most.
    pub hold: Box<dyn FnMut() -> bool + Send>,
}

/// Whose channels are asked about.
#[derive(Clone, Copy, Debug)]
pub enum Whose<'a> {
    /// This lease's.
    Lease(&'a LeaseKey),
    /// All leases' of these users: services that carry none of them aren't asked.
    Owners(&'a BTreeSet<u32>),
}

/// The services for vsock, as far as leases need them. No call takes longer than some seconds, and none
/// starts a process.
pub trait Channels: Send + Sync {
    /// Folder of all channels; none where vsock is not enabled.
    fn folder(&self) -> Option<&Path>;

    /// How many services carry channels, each those of some users. What is asked of one waits for no other.
    fn services(&self) -> usize;

    /// Which of them carries the channels of this user.
    fn service_of(&self, owner_uid: u32) -> usize;

    /// Whether a channel of this user could be opened now. Asks nobody: looks at what is known.
    ///
    /// # Errors
    /// The service isn't enabled or doesn't answer, with what to do.
    fn check(&self, owner_uid: u32) -> Result<(), ChannelError>;

    /// Whether others than root may lead guests to this service of the host, by the configuration.
    fn may_lead_to(&self, to: &VsockDestination) -> bool;

    /// Makes a channel: its folder, and its sockets in it. One that is there as it should is left so;
    /// one of the same lease that differs is replaced.
    ///
    /// # Errors
    /// Nothing of it is there that wasn't before.
    fn open(&self, channel: &ChannelPlan) -> Result<(), ChannelError>;

    /// Resets a channel's connections and has that service carry it no more. Its folder stays: another lease may have it by now.
    /// One that isn't there is no error.
    ///
    /// # Errors
    /// It may still be there.
    fn close(&self, service: usize, lease: &LeaseKey) -> Result<(), ChannelError>;

    /// Removes a channel's folder. One that isn't there is no error.
    ///
    /// # Errors
    /// A part may still be there.
    fn remove_folder(&self, folder: &Path) -> Result<(), ChannelError>;

    /// Replaces a channel's policy. Connections that the guest may no longer have are reset.
    ///
    /// # Errors
    /// Nothing changed.
    fn set_policy(&self, lease: &LeaseKey, policy: &VsockPolicy) -> Result<(), ChannelError>;

    /// All channels that a service has. It says what it likes: their owners may be another's, and their folders anywhere.
    ///
    /// # Errors
    /// It doesn't answer.
    fn list(&self, service: usize) -> Result<Vec<ChannelPlan>, ChannelError>;

    /// Whether a channel's folder is there. If so, it is given to its service's group where that has become another.
    fn has_folder(&self, channel: &ChannelPlan) -> bool;

    /// Removes folders of channels that are not among these. What can't be removed stays for the next time.
    fn sweep(&self, wanted: &HashSet<PathBuf>);

    /// Counters of one channel, or of all that services which answer have of these owners' and others.
    ///
    /// # Errors
    /// None of the services answers.
    fn traffic(&self, of: Whose<'_>) -> Result<BTreeMap<LeaseKey, VsockTraffic>, ChannelError>;

    /// Connections of one channel, or all that services which answer have of these owners' and others.
    ///
    /// # Errors
    /// None of the services answers.
    fn connections(&self, of: Whose<'_>) -> Result<Vec<VsockConnection>, ChannelError>;

    /// Begins to capture a channel's packets, each cut to `snap_bytes` of payload.
    ///
    /// # Errors
    /// The service doesn't answer, or refuses.
    fn capture(&self, lease: &LeaseKey, snap_bytes: u32) -> Result<Capture, ChannelError>;

    /// Grows each time that service may have lost something: it was started or came back.
    fn generation(&self, service: usize) -> u64;

    /// What an operator should know: subject and message.
    fn problems(&self) -> Vec<(String, String)>;
}

/// Why a channel could not be made, changed or asked for.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The configuration doesn't have it.
    #[error(
        "vsock is not enabled here: set `enabled = true` in the section [vsock] of the daemon's \
         configuration and restart the daemon"
    )]
    Disabled,
    /// The service doesn't answer.
    #[error(
        "the service for vsock doesn't answer at {}: {reason}; the daemon starts it again by itself, or \
         under systemd: systemctl status sandwire-vsock", .socket.display()
    )]
    Down {
        /// Its control socket.
        socket: PathBuf,
        /// The last error.
        reason: String,
    },
    /// The service refuses. Nothing changed.
    #[error("the service for vsock refuses: {0}")]
    Refused(String),
    /// The channel's folder can't be made or removed.
    #[error("cannot {operation} {}: {source}", .path.display())]
    Folder {
        /// What was tried.
        operation: &'static str,
        /// The folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl ChannelError {
    /// The word that the API answers.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Disabled => ErrorCode::Unsupported,
            Self::Down { .. } => ErrorCode::Unavailable,
            Self::Refused(_) => ErrorCode::Conflict,
            Self::Folder { .. } => ErrorCode::Internal,
        }
    }
}

/// Where vsock is not enabled.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoChannels;

impl Channels for NoChannels {
    fn folder(&self) -> Option<&Path> {
        None
    }

    fn services(&self) -> usize {
        0
    }

    fn service_of(&self, _: u32) -> usize {
        0
    }

    fn check(&self, _: u32) -> Result<(), ChannelError> {
        Err(ChannelError::Disabled)
    }

    fn may_lead_to(&self, _: &VsockDestination) -> bool {
        false
    }

    fn open(&self, _: &ChannelPlan) -> Result<(), ChannelError> {
        Err(ChannelError::Disabled)
    }

    fn close(&self, _: usize, _: &LeaseKey) -> Result<(), ChannelError> {
        Ok(())
    }

    fn remove_folder(&self, _: &Path) -> Result<(), ChannelError> {
        Ok(())
    }

    fn set_policy(&self, _: &LeaseKey, _: &VsockPolicy) -> Result<(), ChannelError> {
        Err(ChannelError::Disabled)
    }

    fn list(&self, _: usize) -> Result<Vec<ChannelPlan>, ChannelError> {
        Err(ChannelError::Disabled)
    }

    fn has_folder(&self, _: &ChannelPlan) -> bool {
        false
    }

    fn sweep(&self, _: &HashSet<PathBuf>) {}

    fn traffic(&self, _: Whose<'_>) -> Result<BTreeMap<LeaseKey, VsockTraffic>, ChannelError> {
        Err(ChannelError::Disabled)
    }

    fn connections(&self, _: Whose<'_>) -> Result<Vec<VsockConnection>, ChannelError> {
        Err(ChannelError::Disabled)
    }

    fn capture(&self, _: &LeaseKey, _: u32) -> Result<Capture, ChannelError> {
        Err(ChannelError::Disabled)
    }

    fn generation(&self, _: usize) -> u64 {
        0
    }

    fn problems(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(kind: VsockKind) -> ChannelPlan {
        let spec = serde_json::from_str(
            r#"{"name": "web", "data_path": "nft", "addresses": {"plan": "prefix", "ipv4": "10.64.0.0/24"},
                "guest": {"ipv6": ""}}"#,
        )
        .unwrap();
        let plan = Plan::new(&"test".parse().unwrap(), &spec).unwrap();
        let lease = LeaseKey {
            owner_uid: 1000,
            name: "a7".parse().unwrap(),
        };
        let request = VsockRequest {
            kind,
            ..VsockRequest::default()
        };
        let record = ChannelRecord::from(&request);
        let base = Path::new("/run/sandwire/vsock");
        ChannelPlan::new(base, &plan, SlotNumber(17), &lease, &record)
    }

    #[test]
    fn a_vmm_without_a_device_of_its_own_gets_the_vhost_user_socket() {
        let channel = plan(VsockKind::VhostUser).to_api();
        let socket = "/run/sandwire/vsock/web.17/vhost.sock";
        assert_eq!(channel.vhost_user_socket.as_deref(), Some(socket));
        assert_eq!(channel.socket, "/run/sandwire/vsock/web.17/vsock.sock");
        assert!(channel.qemu_arguments.iter().any(|a| a.ends_with(socket)));
        assert_eq!(channel.cid, 3);
        assert_eq!(channel.firecracker_vsock, None);
    }

    #[test]
    fn a_vmm_with_a_device_of_its_own_gets_the_path_of_its_socket() {
        let channel = plan(VsockKind::Hybrid).to_api();
        assert_eq!(channel.vhost_user_socket, None);
        assert_eq!(channel.seqpacket_socket, None);
        let body = r#"{"guest_cid":3,"uds_path":"/run/sandwire/vsock/web.17/vsock.sock"}"#;
        assert_eq!(channel.firecracker_vsock.as_deref(), Some(body));
        let arguments = [
            "--vsock",
            "cid=3,socket=/run/sandwire/vsock/web.17/vsock.sock",
        ];
        assert_eq!(channel.cloud_hypervisor_arguments, arguments);
        assert_eq!(channel.qemu_arguments, [""; 0]);
    }

    #[test]
    fn only_folders_of_channels_are_taken_for_such() {
        for name in ["web.17", "a-b_c.0"] {
            assert!(is_folder_name(name), "{name}");
        }
        for name in [
            "control.sock",
            "vms",
            "web.017",
            "web.",
            ".17",
            "web.1.2",
            "Web.1",
        ] {
            assert!(!is_folder_name(name), "{name}");
        }
    }

    #[test]
    fn a_pool_whose_sockets_have_too_long_paths_is_told_by_how_much() {
        let pool: Name = "a".repeat(63).parse().unwrap();
        let short = Path::new("/run/v");
        assert_eq!(excess_path_bytes(short, &pool, 254), None);
        let longest = folder(short, &pool, SlotNumber(253)).join(LONGEST_FILE);
        let room = SOCKET_PATH_BYTES_MAX - longest.as_os_str().len();
        let base = PathBuf::from(format!("/run/v{}", "x".repeat(room)));
        assert_eq!(excess_path_bytes(&base, &pool, 254), None);
        let base = PathBuf::from(format!("/run/v{}", "x".repeat(room + 3)));
        assert_eq!(excess_path_bytes(&base, &pool, 254), Some(3));
    }
}
