//! Identities of the configuration, `[[identity]]`: the options of `sandwire identity add`, by the same words.
//!
//! They are checked as far as that needs no kernel. Whether their cgroups are there, and what else this host has, is looked
//! at once the daemon runs.

use std::{net::IpAddr, path::PathBuf};

use ipnet::IpNet;
use sandwire_api::{identity::IdentityPolicy, name::Name, prefix};
use sandwire_identity::{Allowed, NewIdentity};
use serde::Deserialize;
use toml::Spanned;

use super::{ConfigError, Source};

/// An identity that the configuration has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredIdentity {
    /// Its name, unique in the file.
    pub name: Name,
    /// All of it.
    pub new: NewIdentity,
}

/// One of `[[identity]]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Section {
    name: Name,
    cgroup: PathBuf,
    #[serde(default)]
    addresses: Vec<IpAddr>,
    #[serde(default, deserialize_with = "prefix::list")]
    prefixes: Vec<IpNet>,
    interface: Option<String>,
    #[serde(default)]
    existing: bool,
    #[serde(default)]
    tcp_only: bool,
    #[serde(default)]
    allow_other_protocols: bool,
    #[serde(default)]
    allow_loopback: bool,
    #[serde(default)]
    allow_host_services: bool,
    #[serde(default)]
    policy: IdentityPolicy,
}

impl Section {
    fn declared(self, instance: &Name) -> DeclaredIdentity {
        DeclaredIdentity {
            name: self.name.clone(),
            new: NewIdentity {
                cgroup: self.cgroup,
                name: Some(self.name),
                addresses: self.addresses,
                interface: self.interface.unwrap_or_else(|| "lo".to_owned()),
                existing: self.existing,
                allowed: Allowed {
                    other_protocols: self.allow_other_protocols,
                    loopback: self.allow_loopback,
                    host_services: self.allow_host_services,
                },
                tcp_only: self.tcp_only,
                policy: self.policy,
                prefixes: self.prefixes,
                own_cgroup: false,
                declared_by: Some(instance.clone()),
            },
        }
    }
}

impl Source<'_> {
    pub(super) fn identities(
        &self,
        instance: &Name,
        sections: Vec<Spanned<Section>>,
    ) -> Result<Vec<DeclaredIdentity>, ConfigError> {
        let mut identities: Vec<DeclaredIdentity> = Vec::with_capacity(sections.len());
        for section in sections {
            let span = section.span();
            let identity = section.into_inner().declared(instance);
            if let Err(reason) = check(&identity, &identities) {
                let reason = format!("identity {}: {reason}", identity.name);
                return Err(self.invalid(span, &reason));
            }
            identities.push(identity);
        }
        Ok(identities)
    }
}

/// Why no host could have it beside those before it.
fn check(identity: &DeclaredIdentity, earlier: &[DeclaredIdentity]) -> Result<(), String> {
    let new = &identity.new;
    if !new.cgroup.is_absolute() {
        return Err("cgroup must be an absolute path, as /sys/fs/cgroup/web.slice".to_owned());
    }
    new.check().map_err(|error| error.to_string())?;
    for other in earlier {
        let (name, its) = (&other.name, &other.new);
        if *name == identity.name {
            return Err("an earlier identity has that name".to_owned());
        }
        if new.cgroup.starts_with(&its.cgroup) || its.cgroup.starts_with(&new.cgroup) {
            return Err(format!(
                "its cgroup is that of identity {name}, or one is inside the other"
            ));
        }
        let taken = new.addresses.iter().find(|one| its.addresses.contains(one));
        if let Some(address) = taken {
            return Err(format!("{address} is an address of identity {name}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("s.toml")).map_err(|error| error.to_string())
    }

    const WEB: &str = "[[identity]]\nname = \"web\"\ncgroup = \"/sys/fs/cgroup/web.slice\"\n";
    const ADDRESS: &str = "addresses = [\"10.0.0.5\"]\n";

    #[test]
    fn an_identity_has_what_its_command_would_give_it() {
        let few = parse(&format!("instance = \"b\"\n{WEB}{ADDRESS}")).unwrap();
        let [few] = &few.identities[..] else {
            panic!("{few:?}");
        };
        assert_eq!(few.name.as_str(), "web");
        assert_eq!(few.new.declared_by.as_ref().unwrap().as_str(), "b");
        assert_eq!(few.new.name.as_ref(), Some(&few.name));
        assert_eq!(few.new.interface, "lo");
        assert_eq!(few.new.allowed, Allowed::default());
        assert!(!few.new.existing && !few.new.tcp_only && !few.new.own_cgroup);
        assert_eq!(few.new.policy, IdentityPolicy::default());

        let all = format!(
            "{WEB}addresses = [\"10.0.0.5\", \"2001:db8::5\"]\nprefixes = [\"10.1.0.0/24\"]\ninterface = \"dummy0\"\n\
             existing = true\nallow_other_protocols = true\nallow_loopback = true\nallow_host_services = true\n\
             [identity.policy]\nclone_to_clone = true\n[identity.policy.egress]\ndefault = \"deny\"\n\
             [[identity.policy.egress.rules]]\naction = \"allow\"\nprefixes = [\"10.0.0.0/8\"]\nports = [\"tcp/443\"]\n"
        );
        let all = parse(&all).unwrap().identities.remove(0).new;
        assert_eq!(all.addresses.len(), 2);
        assert_eq!(all.prefixes.len(), 1);
        assert_eq!(all.interface, "dummy0");
        assert!(all.existing && all.policy.clone_to_clone);
        assert_eq!(all.policy.egress.rules.len(), 1);
        let allowed = all.allowed;
        assert!(allowed.other_protocols && allowed.loopback && allowed.host_services);
        let tcp_only = parse(&format!("{WEB}{ADDRESS}tcp_only = true\n")).unwrap();
        assert!(tcp_only.identities[0].new.tcp_only);
    }

    #[test]
    fn what_no_host_could_have_is_told_by_name_and_place() {
        for (more, words) in [
            ("", "1 to 16 addresses"),
            ("addresses = [\"127.0.0.1\"]", "loopback"),
            ("addresses = [\"10.0.0.5\", \"10.0.0.5\"]", "twice"),
            (
                "prefixes = [\"10.0.0.0/24\"]\ninterface = \"a-name-too-long0\"",
                "no interface",
            ),
            (
                "prefixes = [\"10.0.0.0/24\"]\ntcp_only = true\nallow_other_protocols = true",
                "TCP alone",
            ),
        ] {
            let error = parse(&format!("{WEB}{more}\n")).unwrap_err();
            let place = "s.toml:1:1: identity web: ";
            assert!(error.starts_with(place), "{more}: {error}");
            assert!(error.contains(words), "{more}: {error}");
        }
        let relative = WEB.replace("/sys", "sys") + ADDRESS;
        let error = parse(&relative).unwrap_err();
        assert!(error.contains("absolute"), "{error}");
        for (more, words) in [
            ("address = [\"10.0.0.5\"]", "unknown field `address`"),
            ("policy = { uplink = \"deny\" }", "unknown field `uplink`"),
            ("prefixes = [\"10.0.0.0\"]", "is no prefix"),
        ] {
            let error = parse(&format!("{WEB}{more}\n")).unwrap_err();
            assert!(error.starts_with("s.toml:4:"), "{more}: {error}");
            assert!(error.contains(words), "{more}: {error}");
        }
    }

    #[test]
    fn two_identities_of_one_name_cgroup_or_address_are_refused() {
        let other = |name: &str, cgroup: &str, address: &str| {
            let first = format!("{WEB}{ADDRESS}");
            let second = first.replace("\"web\"", &format!("\"{name}\""));
            let second = second.replace("web.slice", cgroup);
            parse(&format!("{first}{}", second.replace("10.0.0.5", address)))
        };
        assert_eq!(
            other("b", "b.slice", "10.0.0.6").unwrap().identities.len(),
            2
        );
        for (name, cgroup, address, words) in [
            ("web", "b.slice", "10.0.0.6", "earlier identity"),
            ("b", "web.slice", "10.0.0.6", "that of identity web"),
            ("b", "web.slice/b.service", "10.0.0.6", "inside"),
            ("b", "b.slice", "10.0.0.5", "10.0.0.5 is an address of"),
        ] {
            let error = other(name, cgroup, address).unwrap_err();
            assert!(error.starts_with("s.toml:5:1: identity "), "{error}");
            assert!(error.contains(words), "{error}");
        }
    }
}
