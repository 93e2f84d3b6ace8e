//! A configuration that takes another one's place while the relay runs: what may differ, and what stays as it was.

use std::{collections::HashSet, path::PathBuf};

use super::{CGROUPS_MAX, Config, Egress, Origin, Owners};

impl Config {
    /// The first key in which they differ although it is read at the relay's start alone.
    pub(crate) fn needs_restart(&self, new: &Self) -> Option<&'static str> {
        let (host, new_host) = (self.egress.as_ref(), new.egress.as_ref());
        let (peer, new_peer) = (self.deliver.as_ref(), new.deliver.as_ref());
        let keys = [
            ("folder", self.folder == new.folder),
            ("report", self.report == new.report),
            ("tls", self.tls == new.tls),
            ("limits", self.limits == new.limits),
            ("egress", host.is_some() == new_host.is_some()),
            (
                "egress.listen_port",
                same(host, new_host, |host| host.listen_port),
            ),
            ("egress.daemon", same(host, new_host, |host| &host.daemon)),
            ("egress.seed", same(host, new_host, |host| host.seed)),
            ("peer", same(host, new_host, |host| &host.peers)),
            ("deliver", peer.is_some() == new_peer.is_some()),
            ("deliver.listen", same(peer, new_peer, |peer| &peer.listen)),
        ];
        let different = keys.into_iter().find(|(_, is_same)| !is_same);
        different.map(|(key, _)| key)
    }
}

fn same<'a, T, U: PartialEq>(
    one: Option<&'a T>,
    other: Option<&'a T>,
    of: impl Fn(&'a T) -> U,
) -> bool {
    one.map(&of) == other.map(&of)
}

impl Egress {
    /// Leaves each cgroup the place that it has in a former configuration. New ones get places that nobody has in
    /// either: what still comes to a place is never taken for somebody else's.
    ///
    /// # Errors
    /// There are too few, or no ports for them: how many there are.
    pub(crate) fn keep_places(&mut self, former: &Self) -> Result<(), usize> {
        let mut known: Vec<(&PathBuf, u16)> = former.cgroups().collect();
        let room = usize::from(u16::MAX - self.listen_port).min(CGROUPS_MAX);
        let mut taken: HashSet<u16> = known.iter().map(|(_, place)| *place).collect();
        for sender in &mut self.senders {
            let Origin::Cgroup { path, place } = &mut sender.origin else {
                continue;
            };
            let before = known.iter().position(|(known, _)| *known == path);
            *place = match before {
                Some(index) => known.swap_remove(index).1,
                None => {
                    let mut places = (1..).take(room);
                    places.find(|place| !taken.contains(place)).ok_or(room)?
                }
            };
            taken.insert(*place);
        }
        self.owners = Owners::new(&self.senders);
        Ok(())
    }

    /// Cgroups of senders, in the file's order, with their places.
    pub(crate) fn cgroups(&self) -> impl Iterator<Item = (&PathBuf, u16)> {
        self.senders
            .iter()
            .filter_map(|sender| match &sender.origin {
                Origin::Cgroup { path, place } => Some((path, *place)),
                _ => None,
            })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(rest: &str) -> Config {
        let text = format!(
            "[tls]\ncertificate = \"a\"\nkey = \"b\"\nauthorities = \"c\"\n[egress]\nlisten_port = 65500\n\
             [[peer]]\nname = \"p\"\naddress = \"192.0.2.1:1\"\nserver_name = \"p.example\"\n{rest}"
        );
        Config::parse(Path::new("relay.toml"), &text).unwrap()
    }

    fn of_cgroups(names: &[&str]) -> Egress {
        let senders = names.iter().map(|name| {
            format!("[[sender]]\nname = \"{name}\"\ncgroup = \"/sys/fs/cgroup/{name}\"\n")
        });
        let senders: String = senders.collect();
        let redirect = format!("[[redirect]]\nvia = \"p\"\nsenders = {names:?}\nto = [\"::/0\"]\n");
        config(&(senders + &redirect)).egress.unwrap()
    }

    fn places(egress: &Egress) -> Vec<u16> {
        egress.cgroups().map(|(_, place)| place).collect()
    }

    #[test]
    fn a_cgroup_keeps_its_place_and_a_new_one_gets_nobodys() {
        let former = of_cgroups(&["a", "b", "c"]);
        assert_eq!(places(&former), [1, 2, 3]);
        let mut new = of_cgroups(&["c", "d", "a"]);
        new.keep_places(&former).unwrap();
        assert_eq!(places(&new), [3, 4, 1]);
        let at_places = [1, 2, 3, 4].map(|place| new.sender_at(place).map(|sender| &*sender.name));
        assert_eq!(at_places, [Some("a"), None, Some("c"), Some("d")]);
        let mut third = of_cgroups(&["e", "d", "a"]);
        third.keep_places(&new).unwrap();
        assert_eq!(places(&third), [2, 4, 1]);
        let names: Vec<String> = (0..35).map(|number| format!("n{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(of_cgroups(&names).keep_places(&third), Err(35));
    }

    #[test]
    fn what_is_read_at_the_start_alone_is_named() {
        let redirect = "[[redirect]]\nvia = \"p\"\nfrom = [\"10.0.0.0/8\"]\nto = [\"::/0\"]\n";
        let before = config(redirect);
        assert_eq!(before.needs_restart(&before.clone()), None);
        let mut new = config(&redirect.replace("10.0.0.0/8", "10.64.0.0/16"));
        assert_eq!(before.needs_restart(&new), None);
        new.limits.openings += 1;
        assert_eq!(before.needs_restart(&new), Some("limits"));
        let mut new = before.clone();
        new.egress.as_mut().unwrap().peers[0].name = "q".to_owned();
        assert_eq!(before.needs_restart(&new), Some("peer"));
        let mut new = before.clone();
        new.egress = None;
        assert_eq!(before.needs_restart(&new), Some("egress"));
    }
}
