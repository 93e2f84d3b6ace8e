//! Whether there is any IPv6.

use std::{path::Path, sync::OnceLock};

/// Where the kernel has the settings of each version that it knows.
const SETTINGS: &str = "/proc/sys/net";

/// Whether the kernel knows IPv6: it may have been built without, or booted with `ipv6.disable=1`. Looked at once.
#[must_use]
pub fn is_known() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| may_be_known(Path::new(SETTINGS)))
}

/// Where no settings are to be seen at all, as in a `/proc` of processes alone, nothing speaks against it.
fn may_be_known(settings: &Path) -> bool {
    !settings.exists() || settings.join("ipv6").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_knows_ipv6_unless_it_shows_settings_of_other_versions_alone() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!may_be_known(folder.path()));
        std::fs::create_dir(folder.path().join("ipv6")).unwrap();
        assert!(may_be_known(folder.path()));
        assert!(may_be_known(&folder.path().join("nowhere")));
    }
}
