//! What is left of cgroups that are gone.
//!
//! A socket keeps its cgroup: what a process had not sent yet when it ended, the kernel sends for minutes after, and
//! somebody else may have been handed the socket. So a cgroup that is made anew is steered beside the former one. Which those
//! were, the rules themselves say: they have the cgroup's path as their comment.

use std::path::Path;

use sandwire_kernel_net::nft::{CgroupRule, Rule};

use super::{
    cgroups::{CgroupNumber, paths},
    entrance::{Entrance, entrances},
};
use crate::config::Egress;

/// Of each path; one more has the oldest forgotten. That many starts of a service take it longer than the kernel tries to
/// get rid of what it left.
const FORMER_MAX: usize = 32;
/// Bytes of a path that fit into a comment.
const LABEL_MAX: usize = 120;

/// A cgroup that is steered, or was and isn't there any more.
pub(super) struct Steered {
    pub(super) number: CgroupNumber,
    pub(super) entrance: Entrance,
    /// By which its rules are found again.
    pub(super) label: String,
}

impl Steered {
    /// Packets of its processes.
    pub(super) fn rule(&self) -> Rule {
        let rule = Rule::new().socket_cgroup(self.number.id, self.number.depth);
        rule.comment(self.label.clone())
    }
}

/// All that rules are to be about: for each path the cgroup that is there, and then those before it, the latest first.
pub(super) fn steered(
    egress: &Egress,
    present: &[Option<CgroupNumber>],
    before: &[CgroupRule],
) -> Vec<Steered> {
    let mut all = Vec::new();
    let entrances = entrances(egress).into_iter().skip(1);
    for ((path, entrance), now) in paths(egress).zip(entrances).zip(present) {
        let label = label(path);
        let mut numbers: Vec<CgroupNumber> = now.iter().copied().collect();
        for rule in before.iter().filter(|rule| rule.comment == label) {
            let (id, depth) = (rule.id, rule.depth);
            let is_new = numbers.iter().all(|number| number.id != id);
            if is_new && numbers.len() <= FORMER_MAX {
                numbers.push(CgroupNumber { id, depth });
            }
        }
        all.extend(numbers.into_iter().map(|number| Steered {
            number,
            entrance,
            label: label.clone(),
        }));
    }
    all
}

/// The end of a path, which is what tells it from others.
fn label(path: &Path) -> String {
    let path = path.to_string_lossy();
    let mut start = path.len().saturating_sub(LABEL_MAX);
    while !path.is_char_boundary(start) {
        start += 1;
    }
    path[start..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn number(id: u64) -> CgroupNumber {
        CgroupNumber { id, depth: 1 }
    }

    #[test]
    fn a_path_keeps_the_latest_of_its_own_former_cgroups() {
        let text = "[tls]\ncertificate = \"a\"\nkey = \"b\"\nauthorities = \"c\"\n[egress]\n\
             [[peer]]\nname = \"p\"\naddress = \"192.0.2.1:1\"\nserver_name = \"p.example\"\n\
             [[sender]]\nname = \"a\"\ncgroup = \"/sys/fs/cgroup/a\"\n\
             [[sender]]\nname = \"b\"\ncgroup = \"/sys/fs/cgroup/b\"\n\
             [[redirect]]\nvia = \"p\"\nsenders = [\"a\", \"b\"]\nto = [\"0.0.0.0/0\"]\n";
        let egress = Config::parse(Path::new("relay.toml"), text)
            .unwrap()
            .egress
            .unwrap();
        let rule = |id: u64, comment: &str| CgroupRule {
            id,
            depth: 1,
            comment: format!("/sys/fs/cgroup/{comment}"),
        };
        // Each has a rule for each redirect and version, and the sender "c" isn't configured any more.
        let mut before = vec![rule(7, "a"), rule(7, "a"), rule(5, "b"), rule(9, "c")];
        before.extend((100..200).map(|id| rule(id, "a")));
        let steered = steered(&egress, &[Some(number(8)), Some(number(5))], &before);
        let found = |place: u16| -> Vec<u64> {
            let of_place = steered.iter().filter(|one| one.entrance.place == place);
            of_place.map(|one| one.number.id).collect()
        };
        assert_eq!(found(1)[..3], [8, 7, 100]);
        assert_eq!(found(1).len(), FORMER_MAX + 1);
        assert_eq!(found(2), [5]);
    }

    #[test]
    fn a_long_path_is_known_by_its_end() {
        let long = format!("/sys/fs/cgroup/{}/ü{}", "a".repeat(100), "b".repeat(119));
        assert_eq!(label(Path::new(&long)), "b".repeat(119));
        assert_eq!(label(Path::new("/sys/fs/cgroup/a")), "/sys/fs/cgroup/a");
    }
}
