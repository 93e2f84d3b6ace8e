//! The configuration file: from TOML text to checked values.
//!
//! `docs/configure.md` describes every key. What is unknown or wrong is refused with file, line and
//! column, and nothing has happened by then. Pools are checked as far as that needs no kernel; what
//! depends on the host (a prefix that it routes already) shows when the pool is made. Identities likewise.

use std::{
    fmt, fs, io,
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

use sandwire_api::{name::Name, pool::PoolSpec};
use sandwire_datapath::Order;
use sandwire_slot::{
    channel::excess_path_bytes,
    error::PlanError,
    plan::{Plan, choose_data_path},
};
use serde::Deserialize;
use toml::Spanned;

mod identity;
mod vsock;

pub use identity::DeclaredIdentity;
pub use vsock::{VsockConfig, VsockGroup, VsockService};

/// Where the configuration is unless the command line says otherwise.
pub const DEFAULT_PATH: &str = "/etc/sandwire/sandwire.toml";

/// Longest path of a Unix socket (`sun_path` without its final zero), less what a temporary name
/// beside it takes.
const SOCKET_PATH_BYTES_MAX: usize = 107 - ".new".len();
/// Most threads that build slots: beyond, they only wait for the kernel's one lock for interfaces.
const BUILDERS_MAX: usize = 16;
/// Room for sandboxes' interfaces in the eBPF data path, which has no numbers for more.
const NICS: Room = (64..=65_536, 16_384);
/// Room for callers whose answers the eBPF data path lets through.
const ANSWERS: Room = (1024..=16_777_216, 65_536);
/// Longest name of an interface (`IFNAMSIZ` without its final zero).
const INTERFACE_NAME_BYTES_MAX: usize = 15;
/// Builders unless told otherwise: as many as there are processors, up to this.
const BUILDERS_DEFAULT_MAX: usize = 4;

/// The daemon's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of this daemon, part of the names of its kernel objects.
    pub instance: Name,
    /// Folder of the journal.
    pub state_dir: PathBuf,
    /// The Unix socket of the API.
    pub socket: SocketConfig,
    /// Slots that are built at the same time.
    pub builders: usize,
    /// Time between two audits of all slots.
    pub audit_interval: Duration,
    /// What the eBPF data path is told.
    pub datapath: DatapathConfig,
    /// Whether `/metrics` has figures of each lease, beside the pools' sums.
    pub metrics_per_lease: bool,
    /// Folder of the impairment service.
    pub impair_folder: PathBuf,
    /// Folder of the pins of identities without a namespace.
    pub identity_folder: PathBuf,
    /// Services for vsock, if they are enabled.
    pub vsock: Option<VsockConfig>,
    /// Pools that the daemon keeps.
    pub pools: Vec<PoolSpec>,
    /// Identities that the daemon adds as their cgroups come.
    pub identities: Vec<DeclaredIdentity>,
}

/// What may be chosen, and what is where nothing is.
type Room = (std::ops::RangeInclusive<u32>, u32);

/// Settings of the eBPF data path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatapathConfig {
    /// Interfaces that packets leave the host by without its own stack. Absent: those of its default routes.
    pub uplinks: Option<Vec<String>>,
    /// Folder on a bpffs where programs and maps live.
    pub folder: PathBuf,
    /// Interfaces of sandboxes that there is room for.
    pub nics_max: u32,
    /// Callers that there is room for whose answers are let through.
    pub answers_max: u32,
    /// Where our programs stand among others on an uplink.
    pub uplink_order: Order,
}

/// Where the API listens, and who may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketConfig {
    /// Path of the socket.
    pub path: PathBuf,
    /// Permission bits of the socket.
    pub mode: u32,
    /// Owner of the socket; the daemon's user if absent.
    pub uid: Option<u32>,
    /// Group of the socket; the daemon's group if absent.
    pub gid: Option<u32>,
}

/// Why a configuration can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("cannot read configuration {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file says something that is unknown or impossible.
    #[error("{}:{position}: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        position: Position,
        /// What is wrong and what to do.
        reason: String,
    },
}

/// A place in a text; both count from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Line.
    pub line: usize,
    /// Character in the line.
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.line, self.column)
    }
}

impl Config {
    /// Reads `path`, or, if none is given, [`DEFAULT_PATH`], which may be missing.
    ///
    /// # Errors
    /// Names file, line and column of what is unknown or wrong.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let file = path.unwrap_or(Path::new(DEFAULT_PATH));
        match fs::read_to_string(file) {
            Ok(text) => Self::parse(&text, file),
            Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_none() => {
                Self::parse("", file)
            }
            Err(source) => Err(ConfigError::Read {
                path: file.to_owned(),
                source,
            }),
        }
    }

    /// Reads the text of a file; `path` is for messages only.
    ///
    /// # Errors
    /// Names file, line and column of what is unknown or wrong.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        Source { text, path }.read()
    }
}

/// What the file may hold.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    instance: Option<Name>,
    state_dir: Option<Spanned<PathBuf>>,
    socket: Option<Spanned<PathBuf>>,
    socket_mode: Option<Spanned<String>>,
    socket_uid: Option<u32>,
    socket_gid: Option<u32>,
    builders: Option<Spanned<usize>>,
    audit_seconds: Option<Spanned<u64>>,
    uplinks: Option<Vec<Spanned<String>>>,
    bpf_folder: Option<Spanned<PathBuf>>,
    identity_folder: Option<Spanned<PathBuf>>,
    nics_max: Option<Spanned<u32>>,
    answers_max: Option<Spanned<u32>>,
    uplink_order: Option<OrderWord>,
    metrics_per_lease: Option<bool>,
    #[serde(default)]
    impair: ImpairSection,
    vsock: Option<vsock::Section>,
    #[serde(default)]
    pool: Vec<Spanned<PoolSpec>>,
    #[serde(default)]
    identity: Vec<Spanned<identity::Section>>,
}

/// The section `[impair]`.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ImpairSection {
    folder: Option<Spanned<PathBuf>>,
}

/// [`Order`], as it is written.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OrderWord {
    First,
    Last,
}

struct Source<'a> {
    text: &'a str,
    path: &'a Path,
}

impl Source<'_> {
    fn read(&self) -> Result<Config, ConfigError> {
        let file: File = toml::from_str(self.text)
            .map_err(|error| self.invalid(error.span().unwrap_or(0..0), error.message()))?;
        let instance = match file.instance {
            Some(name) => name,
            None => "default".parse().expect("it is of the alphabet"),
        };
        let state_dir = match &file.state_dir {
            Some(folder) => self.absolute("state_dir", folder)?,
            None => PathBuf::from("/run/sandwire"),
        };
        let socket = SocketConfig {
            path: match &file.socket {
                Some(socket) => self.absolute("socket", socket)?,
                None => state_dir.join("sandwire.sock"),
            },
            mode: self.mode(file.socket_mode.as_ref())?,
            uid: file.socket_uid,
            gid: file.socket_gid,
        };
        if socket.path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            let span = file.socket.as_ref().map(Spanned::span);
            let span = span.or(file.state_dir.as_ref().map(Spanned::span));
            return Err(self.invalid(
                span.unwrap_or(0..0),
                &format!(
                    "socket path {} is too long: at most {SOCKET_PATH_BYTES_MAX} bytes",
                    socket.path.display()
                ),
            ));
        }
        let datapath = DatapathConfig {
            uplinks: self.uplinks(file.uplinks.as_deref())?,
            folder: match &file.bpf_folder {
                Some(folder) => self.absolute("bpf_folder", folder)?,
                None => sandwire_datapath::folder_for(instance.as_str()),
            },
            nics_max: self.room("nics_max", file.nics_max.as_ref(), &NICS)?,
            answers_max: self.room("answers_max", file.answers_max.as_ref(), &ANSWERS)?,
            uplink_order: match file.uplink_order {
                None | Some(OrderWord::First) => Order::First,
                Some(OrderWord::Last) => Order::Last,
            },
        };
        let vsock = self.vsock(file.vsock, &state_dir)?;
        let channels = vsock.as_ref().map(|vsock| vsock.folder.as_path());
        Ok(Config {
            pools: self.pools(&instance, channels, file.pool)?,
            identities: self.identities(&instance, file.identity)?,
            vsock,
            impair_folder: match &file.impair.folder {
                Some(folder) => self.absolute("impair.folder", folder)?,
                None => crate::impair::default_folder(),
            },
            identity_folder: match &file.identity_folder {
                Some(folder) => self.absolute("identity_folder", folder)?,
                None => crate::identities::default_folder().to_owned(),
            },
            datapath,
            metrics_per_lease: file.metrics_per_lease.unwrap_or(false),
            instance,
            state_dir,
            socket,
            builders: self.builders(file.builders.as_ref())?,
            audit_interval: self.audit_interval(file.audit_seconds.as_ref())?,
        })
    }

    fn absolute(&self, key: &str, path: &Spanned<PathBuf>) -> Result<PathBuf, ConfigError> {
        if path.get_ref().is_absolute() {
            Ok(path.get_ref().clone())
        } else {
            let reason = format!("{key} must be an absolute path");
            Err(self.invalid(path.span(), &reason))
        }
    }

    fn mode(&self, mode: Option<&Spanned<String>>) -> Result<u32, ConfigError> {
        let Some(mode) = mode else { return Ok(0o660) };
        match u32::from_str_radix(mode.get_ref(), 8) {
            Ok(bits) if bits <= 0o777 => Ok(bits),
            _ => Err(self.invalid(
                mode.span(),
                "socket_mode must be three or four octal digits, as \"0660\"",
            )),
        }
    }

    fn builders(&self, builders: Option<&Spanned<usize>>) -> Result<usize, ConfigError> {
        match builders {
            None => Ok(std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(BUILDERS_DEFAULT_MAX)),
            Some(count) if (1..=BUILDERS_MAX).contains(count.get_ref()) => Ok(*count.get_ref()),
            Some(count) => Err(self.invalid(
                count.span(),
                &format!("builders must be between 1 and {BUILDERS_MAX}"),
            )),
        }
    }

    fn audit_interval(&self, seconds: Option<&Spanned<u64>>) -> Result<Duration, ConfigError> {
        match seconds {
            None => Ok(Duration::from_secs(30)),
            Some(seconds) if (1..=86_400).contains(seconds.get_ref()) => {
                Ok(Duration::from_secs(*seconds.get_ref()))
            }
            Some(seconds) => Err(self.invalid(
                seconds.span(),
                "audit_seconds must be between 1 and 86400 (a day)",
            )),
        }
    }

    fn uplinks(
        &self,
        names: Option<&[Spanned<String>]>,
    ) -> Result<Option<Vec<String>>, ConfigError> {
        let Some(names) = names else { return Ok(None) };
        let mut uplinks: Vec<String> = Vec::with_capacity(names.len());
        for spanned in names {
            let name = spanned.get_ref();
            let reason = if name.is_empty() || name.len() > INTERFACE_NAME_BYTES_MAX {
                Some("has 1 to 15 bytes")
            } else if name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace()) {
                Some("has no blanks, '/' or ':'")
            } else if name == "lo" || name == "." || name == ".." {
                Some("is that of an interface that leads out of the host")
            } else if uplinks.contains(name) {
                Some("stands here once")
            } else {
                None
            };
            if let Some(reason) = reason {
                let reason = format!("uplinks: '{name}': the name of an uplink {reason}");
                return Err(self.invalid(spanned.span(), &reason));
            }
            uplinks.push(name.clone());
        }
        Ok(Some(uplinks))
    }

    fn room(
        &self,
        name: &str,
        count: Option<&Spanned<u32>>,
        (range, default): &Room,
    ) -> Result<u32, ConfigError> {
        match count {
            None => Ok(*default),
            Some(count) if range.contains(count.get_ref()) => Ok(*count.get_ref()),
            Some(count) => Err(self.invalid(
                count.span(),
                &format!(
                    "{name} must be between {} and {}",
                    range.start(),
                    range.end()
                ),
            )),
        }
    }

    fn pools(
        &self,
        instance: &Name,
        channels: Option<&Path>,
        pools: Vec<Spanned<PoolSpec>>,
    ) -> Result<Vec<PoolSpec>, ConfigError> {
        let mut specs = Vec::with_capacity(pools.len());
        let mut plans: Vec<Plan> = Vec::with_capacity(pools.len());
        for pool in pools {
            let span = pool.span();
            let spec = pool.into_inner();
            let refuse =
                |reason: &str| self.invalid(span.clone(), &format!("pool {}: {reason}", spec.name));
            if plans.iter().any(|earlier| earlier.spec.name == spec.name) {
                return Err(refuse("an earlier pool has that name"));
            }
            // Which data path the host can have isn't known yet, and makes no difference to addresses.
            let planned = choose_data_path(&spec, || true);
            let plan = Plan::new(instance, &planned).map_err(|error| refuse(&error.to_string()))?;
            let pool = &plan.spec.name;
            let excess = channels.and_then(|base| excess_path_bytes(base, pool, plan.slots_max));
            if let Some(excess) = excess {
                return Err(refuse(&PlanError::ChannelPath { excess }.to_string()));
            }
            for earlier in &plans {
                if let Some((ours, theirs)) = plan.overlaps(earlier) {
                    let other = &earlier.spec.name;
                    return Err(refuse(&format!("{ours} overlaps {theirs} of pool {other}")));
                }
            }
            plans.push(plan);
            specs.push(spec);
        }
        Ok(specs)
    }

    fn invalid(&self, span: Range<usize>, reason: &str) -> ConfigError {
        ConfigError::Invalid {
            path: self.path.to_owned(),
            position: position(self.text, span.start),
            reason: reason.trim_end().replace('\n', "; "),
        }
    }
}

fn position(text: &str, offset: usize) -> Position {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    Position {
        line: before.matches('\n').count() + 1,
        column: before[line_start..].chars().count() + 1,
    }
}

#[cfg(test)]
mod tests {
    use sandwire_api::{policy::PolicyAction, slot::DataPath};

    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("s.toml")).map_err(|error| error.to_string())
    }

    const POOL: &str = r#"
[[pool]]
name = "web"
[pool.addresses]
plan = "prefix"
ipv4 = "10.64.0.0/16"
ipv6 = "fd00:c10e::/64"
"#;

    #[test]
    fn an_empty_file_means_the_defaults() {
        let config = parse("").unwrap();
        assert_eq!(config.instance.as_str(), "default");
        assert_eq!(config.state_dir, Path::new("/run/sandwire"));
        assert_eq!(config.socket.path, Path::new(sandwire_api::DEFAULT_SOCKET));
        assert_eq!(config.socket.mode, 0o660);
        assert_eq!(config.pools, []);
        assert!((1..=4).contains(&config.builders));
        assert_eq!(config.audit_interval, Duration::from_secs(30));
        assert_eq!(config.datapath.uplinks, None);
        assert_eq!(
            config.datapath.folder,
            Path::new("/sys/fs/bpf/sandwire/default")
        );
        assert_eq!(config.datapath.nics_max, 16_384);
        assert_eq!(config.datapath.answers_max, 65_536);
        assert!(!config.metrics_per_lease);
    }

    #[test]
    fn settings_of_the_data_path_are_read() {
        let text = "instance = \"b\"\nuplinks = [\"eth0\", \"wg0\"]\nnics_max = 64\nanswers_max = 1048576\nmetrics_per_lease = true\nuplink_order = \"last\"";
        let config = parse(text).unwrap();
        assert_eq!(config.datapath.uplinks.unwrap(), ["eth0", "wg0"]);
        assert!(config.datapath.folder.ends_with("sandwire/b"));
        assert_eq!(config.datapath.uplink_order, Order::Last);
        assert!(config.metrics_per_lease && config.datapath.nics_max == 64);
        assert_eq!(config.datapath.answers_max, 1 << 20);
        assert_eq!(
            parse("uplinks = []").unwrap().datapath.uplinks.unwrap(),
            [""; 0]
        );
    }

    #[test]
    fn a_file_that_is_named_must_be_there() {
        let error = Config::load(Some(Path::new("/absent/s.toml"))).unwrap_err();
        assert!(error.to_string().contains("/absent/s.toml"), "{error}");
    }

    #[test]
    fn the_example_is_valid_as_it_is_and_with_its_comments_taken_away() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/sandwire.toml");
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(Config::parse(&text, &path).unwrap().pools, []);
        let bare: String = text
            .lines()
            .map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')))
            .map(|line| line.unwrap_or_default().to_owned() + "\n")
            .collect();
        let config = Config::parse(&bare, &path).unwrap();
        assert_eq!(config.pools.len(), 1);
        assert_eq!(config.pools[0].access.len(), 1);
        assert_eq!(config.identities.len(), 1);
    }

    /// So an operator may uncomment a line that isn't called an example, and nothing changes.
    #[test]
    fn what_the_example_shows_of_a_pool_is_the_default_or_called_an_example() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/sandwire.toml");
        let text = fs::read_to_string(&path).unwrap();
        let pool = text.split("\n#[[pool]]\n").nth(1).unwrap();
        let pool = pool.split("\n#[[pool.access]]\n").next().unwrap();
        let mut shown = "[[pool]]\n".to_owned();
        let mut is_example = false;
        for line in pool.lines() {
            let key = line.strip_prefix('#').filter(|rest| !rest.starts_with(' '));
            if let Some(key) = key.filter(|key| !is_example || key.starts_with('[')) {
                shown.push_str(key);
                shown.push('\n');
            }
            is_example = line.starts_with("# Example");
        }
        assert_eq!(parse(&shown).unwrap().pools, parse(POOL).unwrap().pools);
    }

    /// Blocks of TOML in a document that are of this file: those with pools, or with settings of one that is left out.
    fn pools_of(document: &str) -> Vec<String> {
        let blocks = document.split("```toml\n").skip(1);
        let blocks = blocks.filter_map(|rest| rest.split_once("\n```"));
        let blocks = blocks.map(|(block, _)| match block.starts_with("[pool.") {
            true => format!("{POOL}{block}"),
            false => block.to_owned(),
        });
        blocks.filter(|block| block.contains("[[pool]]")).collect()
    }

    #[test]
    fn the_pools_of_the_documents_are_valid() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        let mut found = Vec::new();
        for document in ["policy.md", "containers.md", "cni.md"] {
            let text = fs::read_to_string(docs.join(document)).unwrap();
            for block in pools_of(&text) {
                let config = parse(&block).unwrap_or_else(|error| panic!("{document}: {error}"));
                found.extend(config.pools);
            }
        }
        assert!(found.len() >= 5, "{found:?}");
        // The policy that leaves the public internet alone.
        let private =
            "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 169.254.0.0/16 fc00::/7";
        let private: Vec<ipnet::IpNet> =
            private.split(' ').map(|net| net.parse().unwrap()).collect();
        let denies = |pool: &PoolSpec| {
            let rule = pool.policy.egress.rules.first()?;
            Some(rule.action == PolicyAction::Deny && rule.prefixes == private)
        };
        assert_eq!(
            found
                .iter()
                .filter(|pool| denies(pool) == Some(true))
                .count(),
            1
        );
    }

    #[test]
    fn the_socket_follows_the_state_folder() {
        let config = parse("state_dir = \"/srv/s\"").unwrap();
        assert_eq!(config.socket.path, Path::new("/srv/s/sandwire.sock"));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        for (text, place, words) in [
            ("\nsize = 3", "s.toml:2:1", "unknown field `size`"),
            ("a\nb", "s.toml:1:2", ""),
            ("builders = \"two\"", "s.toml:1:12", "invalid type"),
            ("builders = 0", "s.toml:1:12", "between 1 and 16"),
            ("audit_seconds = 0", "s.toml:1:17", "between 1 and 86400"),
            ("socket_mode = \"999\"", "s.toml:1:15", "octal"),
            ("socket_mode = \"1777\"", "s.toml:1:15", "octal"),
            ("\nsocket = \"run/s\"", "s.toml:2:10", "absolute"),
            ("instance = \"A\"", "s.toml:1:12", "not a valid name"),
            ("uplinks = \"eth0\"", "s.toml:1:11", "invalid type"),
            ("uplinks = [\"eth0\", \"\"]", "s.toml:1:20", "1 to 15"),
            (
                "uplinks = [\n\"a-name-too-long0\"]",
                "s.toml:2:1",
                "1 to 15",
            ),
            ("uplinks = [\"a b\"]", "s.toml:1:12", "no blanks"),
            ("uplinks = [\"lo\"]", "s.toml:1:12", "out of the host"),
            ("uplinks = [\"e\", \"e\"]", "s.toml:1:17", "once"),
            ("bpf_folder = \"sandwire\"", "s.toml:1:14", "absolute"),
            ("[impair]\nfolder = \"here\"", "s.toml:2:10", "absolute"),
            ("[impair]\nfolders = \"/a\"", "s.toml:2:1", "unknown"),
            ("nics_max = 63", "s.toml:1:12", "between 64 and 65536"),
            ("nics_max = -1", "s.toml:1:12", ""),
            (
                "answers_max = 9",
                "s.toml:1:15",
                "between 1024 and 16777216",
            ),
            (
                "uplink_order = \"second\"",
                "s.toml:1:16",
                "unknown variant",
            ),
            ("metrics_per_lease = 1", "s.toml:1:21", "invalid type"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(
                error.starts_with(&format!("{place}: ")),
                "{text:?}: {error}"
            );
            assert!(error.contains(words), "{text:?}: {error}");
        }
        let error = parse(&format!("socket = \"/{}\"", "x".repeat(120))).unwrap_err();
        assert!(error.starts_with("s.toml:1:10: "), "{error}");
    }

    #[test]
    fn a_wrong_key_of_a_pool_is_told_with_its_place() {
        let error = parse(&format!("{POOL}[pool.tap]\nmtuu = 1500\n")).unwrap_err();
        assert!(error.starts_with("s.toml:9:1: "), "{error}");
        assert!(error.contains("unknown field `mtuu`"), "{error}");
    }

    #[test]
    fn a_pool_that_cannot_be_is_told_by_name_and_place() {
        let text = format!("{POOL}[pool.tap]\nname = \"a-name-too-long-for-linux\"\n");
        let error = parse(&text).unwrap_err();
        assert!(error.starts_with("s.toml:2:1: pool web: "), "{error}");
        assert!(error.contains("15"), "{error}");
    }

    #[test]
    fn a_data_path_that_is_left_to_the_host_stays_so_until_a_pool_is_made() {
        let said = POOL.replace("\"web\"\n", "\"web\"\ndata_path = \"auto\"\n");
        for text in [POOL, &said] {
            let config = parse(text).unwrap();
            assert_eq!(config.pools[0].data_path, DataPath::Auto, "{text}");
        }
    }

    #[test]
    fn two_pools_of_one_name_or_one_prefix_are_refused() {
        let error = parse(&format!("{POOL}{POOL}")).unwrap_err();
        assert!(error.starts_with("s.toml:9:1: "), "{error}");
        assert!(error.contains("earlier pool"), "{error}");
        let error = parse(&format!("{POOL}{}", POOL.replace("web", "other"))).unwrap_err();
        assert!(error.starts_with("s.toml:9:1: pool other: "), "{error}");
        assert!(error.contains("10.64.0.0/16 of pool web"), "{error}");
    }
}
