//! Policies in the maps.
//!
//! A policy is written under a new index first: its prefixes, its lists of rules, and its text, which is what is shown.
//! Then the identity's entry of `policies` is exchanged, so it holds as a whole from one call to the next; then what no
//! entry stands for any more is deleted. The entry of number 0, which no identity has, says which index was given out
//! last and whether a change is under way: who finds that it is cleans up behind a crash. An identity without an entry
//! may reach nothing.

use std::{collections::BTreeSet, net::IpAddr, path::Path, thread, time::Duration};

use aya::maps::{
    HashMap, Map, MapData, MapError,
    lpm_trie::{Key, LpmTrie},
};
use rustix::thread::{MembarrierCommand, membarrier};
use sandwire_api::{
    drop_reason::DropReason, identity::IdentityPolicy, name::Name, policy::PolicyAction,
    pool::HostService,
};
use sandwire_datapath::{
    abi::PortRule as Rule,
    group_number,
    policy::{Compiled, compile},
};

use crate::{
    Error,
    abi::{
        PartKey, Policy, PortRule, Prefix, PrefixKey, RuleList, TALKS_MAX, TEXT_PART,
        address_bytes, policy_flag,
    },
    maps::{absent_is_fine, entries, failed, open_map},
};

const POLICY: usize = size_of::<Policy>();
const LIST: usize = size_of::<RuleList>();
const PART: usize = size_of::<PartKey>();
const PREFIX_KEY: usize = size_of::<PrefixKey>();
/// What the trie's key has behind its length.
const PREFIX: usize = PREFIX_KEY - 4;
/// Where the state of all changes is.
const STATE: u32 = 0;
/// Flag of that entry.
const UNDER_WAY: u32 = 1;
/// Longer than any program runs, where the kernel can't tell.
const GRACE: Duration = Duration::from_secs(1);

/// The maps of policies.
pub(crate) struct Policies {
    policies: HashMap<MapData, u32, [u8; POLICY]>,
    prefixes: LpmTrie<MapData, [u8; PREFIX], [u8; size_of::<Prefix>()]>,
    lists: HashMap<MapData, [u8; PART], [u8; LIST]>,
    texts: HashMap<MapData, [u8; PART], [u8; TEXT_PART]>,
}

/// A policy that can be had, as the maps hold it.
pub(crate) struct Prepared {
    compiled: Compiled,
    value: Policy,
    text: Vec<u8>,
}

impl Prepared {
    /// Checks and compiles the policy of the identity `name`.
    pub(crate) fn new(name: &Name, policy: &IdentityPolicy) -> Result<Self, Error> {
        let compiled = compiled(policy)?;
        let text = serde_json::to_vec(policy).map_err(|error| Error::PolicyText {
            reason: error.to_string(),
        })?;
        Ok(Self {
            value: value(name, policy, &compiled),
            compiled,
            text,
        })
    }
}

/// Compiles a policy, if the maps can hold it.
pub(crate) fn compiled(policy: &IdentityPolicy) -> Result<Compiled, Error> {
    let compiled = compile(&policy.as_pool_policy(), &[])?;
    let groups = policy.talks_to.len();
    if groups > TALKS_MAX {
        return Err(Error::Talks { groups });
    }
    Ok(compiled)
}

impl Policies {
    pub(crate) fn open(folder: &Path) -> Result<Self, Error> {
        let hash = |name: &'static str| Ok::<_, Error>(Map::HashMap(open_map(folder, name)?));
        let prefixes = Map::LpmTrie(open_map(folder, "prefixes")?);
        Ok(Self {
            policies: HashMap::try_from(hash("policies")?).map_err(failed("open", "policies"))?,
            prefixes: LpmTrie::try_from(prefixes).map_err(failed("open", "prefixes"))?,
            lists: HashMap::try_from(hash("rule_lists")?).map_err(failed("open", "rule_lists"))?,
            texts: HashMap::try_from(hash("texts")?).map_err(failed("open", "texts"))?,
        })
    }

    /// An identity's policy as it was written; `None` if it has none.
    pub(crate) fn get(&self, number: u32) -> Result<Option<IdentityPolicy>, Error> {
        let Some(value) = self.value(number)? else {
            return Ok(None);
        };
        let mut text = Vec::new();
        for part in 0.. {
            let key = part_key(value.word(Policy::index()), part);
            match self.texts.get(&key, 0) {
                Ok(bytes) => text.extend_from_slice(&bytes),
                Err(MapError::KeyNotFound) => break,
                Err(error) => return Err(failed("read", "texts")(error)),
            }
        }
        let end = text.iter().position(|byte| *byte == 0);
        let text = &text[..end.unwrap_or(text.len())];
        let read = serde_json::from_slice(text).map_err(|error| Error::PolicyText {
            reason: error.to_string(),
        });
        read.map(Some)
    }

    /// Gives an identity a policy; if that fails it has the one that it had. `watch` is told of each step before it
    /// is done.
    pub(crate) fn set(
        &mut self,
        number: u32,
        prepared: &Prepared,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<(), Error> {
        let index = self.next_index()?;
        let is_first = self.value(number)?.is_none();
        watch("policy: begin");
        self.set_state(index, UNDER_WAY)?;
        let written = self.write(number, index, prepared, watch);
        watch("policy: sweep");
        // A first one takes no other's place.
        let swept = if is_first && written.is_ok() {
            Ok(())
        } else {
            self.sweep()
        };
        written.and(swept)?;
        watch("policy: end");
        self.set_state(index, 0)
    }

    fn write(
        &mut self,
        number: u32,
        index: u32,
        prepared: &Prepared,
        watch: &mut dyn FnMut(&'static str),
    ) -> Result<(), Error> {
        watch("policy: lists");
        for (part, list) in (1..).zip(&prepared.compiled.lists) {
            let written = self
                .lists
                .insert(part_key(index, part), list_bytes(list).0, 0);
            written.map_err(failed("write", "rule_lists"))?;
        }
        watch("policy: prefixes");
        for (key, prefix) in &prepared.compiled.prefixes {
            let mut bytes = PrefixKey::default();
            bytes.set_word(PrefixKey::policy(), index);
            let address = address_bytes(IpAddr::from(key.address));
            bytes
                .get_mut(PrefixKey::address())
                .copy_from_slice(&address);
            let rest = bytes.0[4..].try_into().expect("the key without its length");
            let mut value = Prefix::default();
            value.set_word(Prefix::list(), prefix.list);
            value.set_half(Prefix::allows(), prefix.action);
            let is_metadata = prefix.reason == u16::from(DropReason::Metadata as u8);
            value.set_half(Prefix::metadata(), u16::from(is_metadata));
            let written = self
                .prefixes
                .insert(&Key::new(key.prefix_length, rest), value.0, 0);
            written.map_err(failed("write", "prefixes"))?;
        }
        watch("policy: text");
        for (part, bytes) in (0..).zip(prepared.text.chunks(TEXT_PART)) {
            let mut padded = [0; TEXT_PART];
            padded[..bytes.len()].copy_from_slice(bytes);
            let written = self.texts.insert(part_key(index, part), padded, 0);
            written.map_err(failed("write", "texts"))?;
        }
        watch("policy: exchange");
        let mut value = prepared.value;
        value.set_word(Policy::index(), index);
        let written = self.policies.insert(number, value.0, 0);
        written.map_err(failed("write", "policies"))
    }

    /// Takes the policies of identities away, of those that have one: they may reach nothing then.
    pub(crate) fn remove(&mut self, numbers: &[u32]) -> Result<(), Error> {
        let mut known = Vec::new();
        for number in numbers {
            if self.value(*number)?.is_some() {
                known.push(*number);
            }
        }
        if known.is_empty() {
            return Ok(());
        }
        let state = self.value(STATE)?.unwrap_or_default();
        let index = state.word(Policy::index());
        self.set_state(index, UNDER_WAY)?;
        for number in known {
            absent_is_fine(self.policies.remove(&number)).map_err(failed("write", "policies"))?;
        }
        self.sweep()?;
        self.set_state(index, 0)
    }

    /// Cleans up if a change was cut off.
    pub(crate) fn repair(&mut self) -> Result<(), Error> {
        let state = self.value(STATE)?.unwrap_or_default();
        if state.word(Policy::flags()) & UNDER_WAY == 0 {
            return Ok(());
        }
        self.sweep()?;
        self.set_state(state.word(Policy::index()), 0)
    }

    /// Those groups in the policies of other identities that the kernel knows by one of these numbers.
    pub(crate) fn groups_of_others(
        &self,
        number: u32,
        groups: &BTreeSet<u32>,
    ) -> Result<BTreeSet<Name>, Error> {
        let mut found = BTreeSet::new();
        for (other, policy) in self.all()? {
            if other != number && group_numbers(&policy).any(|group| groups.contains(&group)) {
                let policy = self.get(other)?.unwrap_or_default();
                let named = policy.group.into_iter().chain(policy.talks_to);
                found.extend(named.filter(|name| groups.contains(&group_number(name.as_str()))));
            }
        }
        Ok(found)
    }

    /// The policies of all identities, by number.
    fn all(&self) -> Result<Vec<(u32, Policy)>, Error> {
        let found = entries(&self.policies, "policies")?.into_iter();
        let found = found.map(|(number, bytes)| (u32::from_ne_bytes(number), Policy(bytes)));
        Ok(found.filter(|(number, _)| *number != STATE).collect())
    }

    fn value(&self, number: u32) -> Result<Option<Policy>, Error> {
        match self.policies.get(&number, 0) {
            Ok(bytes) => Ok(Some(Policy(bytes))),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(failed("read", "policies")(error)),
        }
    }

    fn set_state(&mut self, index: u32, flags: u32) -> Result<(), Error> {
        let mut state = Policy::default();
        state.set_word(Policy::index(), index);
        state.set_word(Policy::flags(), flags);
        let written = self.policies.insert(STATE, state.0, 0);
        written.map_err(failed("write", "policies"))
    }

    /// Indices that stand for something.
    fn used(&self) -> Result<BTreeSet<u32>, Error> {
        let policies = self.all()?.into_iter();
        Ok(policies
            .map(|(_, policy)| policy.word(Policy::index()))
            .collect())
    }

    fn next_index(&self) -> Result<u32, Error> {
        let used = self.used()?;
        let mut index = self.value(STATE)?.unwrap_or_default().word(Policy::index());
        loop {
            index = index.wrapping_add(1).max(1);
            if !used.contains(&index) {
                return Ok(index);
            }
        }
    }

    /// Deletes what belongs to no policy, once no program looks there any more: one that found a policy before it was
    /// exchanged would find none of its prefixes, and let pass what they deny.
    fn sweep(&mut self) -> Result<(), Error> {
        let used = self.used()?;
        let is_stray = |key: &[u8]| {
            let index = key.first_chunk().map(|index| u32::from_ne_bytes(*index));
            index.is_some_and(|index| !used.contains(&index))
        };
        let prefixes = entries(&self.prefixes, "prefixes")?.into_iter();
        let prefixes = prefixes.map(|(key, _)| prefix_key(key));
        let prefixes: Vec<_> = prefixes.filter(|key| is_stray(&key.data())).collect();
        let lists = entries(&self.lists, "rule_lists")?.into_iter();
        let lists = lists.map(|(key, _): ([u8; PART], _)| key);
        let lists: Vec<_> = lists.filter(|key| is_stray(key)).collect();
        let texts = entries(&self.texts, "texts")?.into_iter();
        let texts = texts.map(|(key, _): ([u8; PART], _)| key);
        let texts: Vec<_> = texts.filter(|key| is_stray(key)).collect();
        // Each policy has a text: so also before the kernel may use the former one's entry again.
        if !(prefixes.is_empty() && lists.is_empty() && texts.is_empty()) {
            wait_for_programs();
        }
        for key in prefixes {
            absent_is_fine(self.prefixes.remove(&key)).map_err(failed("write", "prefixes"))?;
        }
        for key in lists {
            absent_is_fine(self.lists.remove(&key)).map_err(failed("write", "rule_lists"))?;
        }
        for key in texts {
            absent_is_fine(self.texts.remove(&key)).map_err(failed("write", "texts"))?;
        }
        Ok(())
    }
}

fn prefix_key(bytes: [u8; PREFIX_KEY]) -> Key<[u8; PREFIX]> {
    let (length, rest) = bytes.split_at(4);
    let length = length.try_into().expect("four bytes");
    let rest = rest.try_into().expect("the key without its length");
    Key::new(u32::from_ne_bytes(length), rest)
}

/// The numbers of the groups that a policy names.
fn group_numbers(policy: &Policy) -> impl Iterator<Item = u32> {
    let (talks, _) = policy.get(Policy::talks()).as_chunks::<4>();
    let count = policy.word(Policy::talk_count()) as usize;
    let talks = talks.iter().take(count).copied().map(u32::from_ne_bytes);
    talks.chain([policy.word(Policy::group())])
}

fn wait_for_programs() {
    // Not where processors are kept free of ticks (nohz_full).
    if membarrier(MembarrierCommand::Global).is_err() {
        thread::sleep(GRACE);
    }
}

fn part_key(policy: u32, part: u32) -> [u8; PART] {
    let mut key = PartKey::default();
    key.set_word(PartKey::policy(), policy);
    key.set_word(PartKey::part(), part);
    key.0
}

/// The fixed part, without its index.
fn value(name: &Name, policy: &IdentityPolicy, compiled: &Compiled) -> Policy {
    let mut value = Policy::default();
    let flags = [
        (
            policy.egress.default == PolicyAction::Allow,
            policy_flag::ALLOW,
        ),
        (!compiled.prefixes.is_empty(), policy_flag::PREFIXES),
        (
            policy.host_services.contains(&HostService::All),
            policy_flag::HOST_ALL,
        ),
        (
            policy.host_services.contains(&HostService::Icmp),
            policy_flag::HOST_ICMP,
        ),
        (policy.clone_to_clone, policy_flag::SAME_GROUP),
    ];
    let set = flags.into_iter().filter(|(is_set, _)| *is_set);
    value.set_word(
        Policy::flags(),
        set.fold(0, |flags, (_, flag)| flags | flag),
    );
    let group = policy.group.as_ref().unwrap_or(name);
    value.set_word(Policy::group(), group_number(group.as_str()));
    let talks = value.get_mut(Policy::talks()).chunks_exact_mut(4);
    let mut talk_count = 0;
    for (place, group) in talks.zip(&policy.talks_to) {
        place.copy_from_slice(&group_number(group.as_str()).to_ne_bytes());
        talk_count += 1;
    }
    value.set_word(Policy::talk_count(), talk_count);
    let services = &compiled.policy.services[..compiled.policy.service_count as usize];
    put_rules(value.get_mut(Policy::services()), services);
    value.set_word(Policy::service_count(), compiled.policy.service_count);
    value
}

fn list_bytes(list: &sandwire_datapath::abi::RuleList) -> RuleList {
    let mut bytes = RuleList::default();
    bytes.set_word(RuleList::count(), list.count);
    put_rules(
        bytes.get_mut(RuleList::rules()),
        &list.rules[..list.count as usize],
    );
    bytes
}

fn put_rules(places: &mut [u8], rules: &[Rule]) {
    for (place, rule) in places.chunks_exact_mut(size_of::<PortRule>()).zip(rules) {
        let mut bytes = PortRule::default();
        bytes.get_mut(PortRule::protocol())[0] = rule.protocol;
        bytes.get_mut(PortRule::allows())[0] = rule.action;
        bytes.set_half(PortRule::first(), rule.first);
        bytes.set_half(PortRule::last(), rule.last);
        place.copy_from_slice(&bytes.0);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
mod tests {
    use sandwire_api::policy::CLOUD_METADATA;

    use super::*;

    fn prepared(text: &str) -> Result<Prepared, Error> {
        Prepared::new(
            &"web".parse().unwrap(),
            &serde_json::from_str(text).unwrap(),
        )
    }

    #[test]
    fn nothing_asked_for_is_the_rest_of_the_world_alone() {
        let prepared = prepared("{}").unwrap();
        let flags = prepared.value.word(Policy::flags());
        // The prefixes are those of cloud metadata.
        assert_eq!(flags, policy_flag::ALLOW | policy_flag::PREFIXES);
        assert_eq!(prepared.compiled.prefixes.len(), CLOUD_METADATA.len());
        assert_eq!(prepared.value.word(Policy::group()), group_number("web"));
    }

    #[test]
    fn groups_and_services_are_counted() {
        let prepared = prepared(
            r#"{"group": "a", "talks_to": ["b", "c"], "host_services": ["tcp/80", "udp/53-54"], "clone_to_clone": true,
                "egress": {"default": "deny"}}"#,
        )
        .unwrap();
        let value = prepared.value;
        assert_eq!(value.word(Policy::talk_count()), 2);
        assert_eq!(value.word(Policy::service_count()), 2);
        assert_eq!(
            value.get(Policy::talks())[4..8],
            group_number("c").to_ne_bytes()
        );
        let service = &value.get(Policy::services())[8..16];
        assert_eq!(service[..2], [17, 1]);
        assert_eq!(service[2..4], 53_u16.to_ne_bytes());
        assert_eq!(
            value.word(Policy::flags()),
            policy_flag::PREFIXES | policy_flag::SAME_GROUP
        );
    }

    #[test]
    fn what_the_maps_cannot_hold_is_refused() {
        let groups: Vec<String> = (0..17).map(|number| format!("\"g{number}\"")).collect();
        let text = format!("{{\"talks_to\": [{}]}}", groups.join(","));
        let error = prepared(&text).err().unwrap();
        assert!(error.is_refusal() && error.to_string().contains("17 groups"));
        let text =
            r#"{"egress": {"rules": [{"action": "deny", "prefixes": ["::ffff:10.0.0.0/104"]}]}}"#;
        let error = prepared(text).err().unwrap();
        assert!(error.is_refusal() && error.to_string().contains("as IPv4"));
    }
}
