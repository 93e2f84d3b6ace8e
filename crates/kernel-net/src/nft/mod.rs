//! nftables: tables, chains, rules, sets and maps, written in one transaction.
//!
//! A [`Batch`] is carried out as a whole or not at all. Rules are made with [`Rule`], whose methods
//! read like `nft`'s own language and put in the checks of family and protocol that `nft` adds
//! silently. Only what this product's tables need is here; why we have an encoder of our own is in
//! `docs/decisions/0003-nf-tables-encoder.md`.

mod expression;
mod flows;
mod inspect;
mod rule;
mod set;
mod watch;

use crate::{
    Error,
    capability::Required,
    netlink::{CHANGE, CREATE, Request, Socket, attribute::Writer},
    number::{narrow, octet},
};

pub use expression::{
    CT_STATUS_CONFIRMED, CT_STATUS_DNAT, CtState, Direction, Family, ICMP_ECHO_REQUEST,
    ICMPV6_ECHO_REQUEST, Protocol,
};
pub use flows::{Flows, RELAY_FLOWS, RELAY_TABLE, relayed};
pub use inspect::{CgroupRule, cgroup_rules, count_elements, generation, rules, tables};
pub use rule::{Bound, KeyPart, Rule};
pub use set::{Element, Field, Key, Set, SetKind};
pub use watch::DeletionWatcher;

/// Capabilities for nftables.
pub const REQUIRED_CAPABILITIES: Required = Required {
    operations: "nft",
    capabilities: &["CAP_NET_ADMIN"],
    reason: "write nftables tables",
};

/// Bits of the mark by which the relay's steering tells packets apart.
pub const RELAY_MARK_MASK: u32 = 0xff00_0000;
/// Mark of packets that are given to the relay's first socket; those of further ones are greater by 2^24 each.
pub const RELAY_MARK_FIRST: u32 = 0x5c00_0000;

const SUBSYSTEM: u16 = narrow(libc::NFNL_SUBSYS_NFTABLES);
/// The family of tables that see IPv4 and IPv6.
const NFPROTO_INET: u8 = 1;
pub(crate) const GENERIC_HEADER: usize = 4;

const NFT_MSG_NEWTABLE: u16 = 0;
const NFT_MSG_DELTABLE: u16 = 2;
const NFT_MSG_NEWCHAIN: u16 = 3;
const NFT_MSG_NEWRULE: u16 = 6;
const NFT_MSG_DELRULE: u16 = 8;
const NFT_MSG_NEWSET: u16 = 9;
const NFT_MSG_NEWSETELEM: u16 = 12;
const NFT_MSG_DELSETELEM: u16 = 14;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_HOOK_PRIORITY: u16 = 2;
/// Elements in one message: the list is one attribute, whose length has 16 bits.
const ELEMENTS_MAX: usize = 400;

/// Where a chain is called from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// As packets arrive, before routing.
    Prerouting,
    /// Packets for this host.
    Input,
    /// Packets that pass through.
    Forward,
    /// Packets that this host sends.
    Output,
    /// As packets leave, after routing.
    Postrouting,
}

/// What a chain may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// Pass and drop.
    Filter,
    /// Rewrite addresses, once per connection.
    Nat,
    /// At [`Hook::Output`]: packets whose mark changes are routed anew.
    Route,
}

/// What happens to packets that reach the end of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// They pass.
    Accept,
    /// They are dropped.
    Drop,
}

/// A chain that the kernel calls, or one that rules jump to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chain<'a> {
    /// Called from a hook; lower priorities first.
    Base {
        /// Name.
        name: &'a str,
        /// What it may do.
        kind: ChainKind,
        /// Where it is called from.
        hook: Hook,
        /// When, among the chains of the same hook.
        priority: i32,
        /// What happens at its end.
        policy: Policy,
    },
    /// Called by rules.
    Regular(&'a str),
}

/// Changes of one table of the `inet` family, carried out together.
#[derive(Debug)]
pub struct Batch<'a> {
    table: &'a str,
    request: Request,
    rules: Vec<(String, usize)>,
    extended: Vec<String>,
}

impl<'a> Batch<'a> {
    /// An empty transaction on a table.
    #[must_use]
    pub fn new(table: &'a str) -> Self {
        let mut request = Request::new();
        write_mark(&mut request, libc::NFNL_MSG_BATCH_BEGIN);
        Self {
            table,
            request,
            rules: Vec::new(),
            extended: Vec::new(),
        }
    }

    /// The table's name.
    #[must_use]
    pub fn table(&self) -> &'a str {
        self.table
    }

    /// Creates the table unless it is there.
    pub fn add_table(&mut self) {
        // Without EXCL an existing table is left as it is.
        let flags = narrow(libc::NLM_F_CREATE);
        self.table_message(NFT_MSG_NEWTABLE, flags, "create");
    }

    /// Deletes the table with everything in it; it must exist.
    pub fn delete_table(&mut self) {
        self.table_message(NFT_MSG_DELTABLE, CHANGE, "delete");
    }

    /// Leaves the table empty, whether it was there or not.
    pub fn recreate_table(&mut self) {
        self.add_table();
        self.empty_table();
    }

    /// Leaves the table empty; it must exist, or else nothing of the batch is carried out.
    pub fn empty_table(&mut self) {
        self.delete_table();
        self.add_table();
    }

    fn table_message(&mut self, kind: u16, flags: u16, operation: &'static str) {
        let table = self.table;
        let object = format!("nft table {table}");
        self.message((kind, flags), operation, object, |message| {
            message.put_text(NFTA_TABLE_NAME, table);
        });
    }

    /// Creates a chain.
    pub fn add_chain(&mut self, chain: &Chain<'_>) {
        self.chain_message(chain, CREATE);
    }

    /// Creates a chain unless it is there.
    pub fn ensure_chain(&mut self, chain: &Chain<'_>) {
        self.chain_message(chain, narrow(libc::NLM_F_CREATE));
    }

    fn chain_message(&mut self, chain: &Chain<'_>, flags: u16) {
        let table = self.table;
        let (Chain::Base { name, .. } | Chain::Regular(name)) = *chain;
        let object = format!("nft chain {table} {name}");
        self.message((NFT_MSG_NEWCHAIN, flags), "create", object, |message| {
            message.put_text(NFTA_CHAIN_TABLE, table);
            message.put_text(NFTA_CHAIN_NAME, name);
            if let Chain::Base {
                kind,
                hook,
                priority,
                policy,
                ..
            } = *chain
            {
                message.nest(NFTA_CHAIN_HOOK, |attributes| {
                    attributes.put_u32_be(NFTA_HOOK_HOOKNUM, hook as u32);
                    attributes.put_u32_be(NFTA_HOOK_PRIORITY, priority.cast_unsigned());
                });
                let policy = match policy {
                    Policy::Accept => libc::NF_ACCEPT,
                    Policy::Drop => libc::NF_DROP,
                };
                message.put_u32_be(NFTA_CHAIN_POLICY, policy.cast_unsigned());
                let kind = match kind {
                    ChainKind::Filter => "filter",
                    ChainKind::Nat => "nat",
                    ChainKind::Route => "route",
                };
                message.put_text(NFTA_CHAIN_TYPE, kind);
            }
        });
    }

    /// Deletes all rules of a chain, which must be there.
    pub fn clear_chain(&mut self, name: &str) {
        let table = self.table;
        let object = format!("nft chain {table} {name}");
        self.message((NFT_MSG_DELRULE, CHANGE), "clear", object, |message| {
            message.put_text(NFTA_RULE_TABLE, table);
            message.put_text(NFTA_RULE_CHAIN, name);
        });
    }

    /// Appends a rule to a chain.
    pub fn add_rule(&mut self, chain: &str, rule: &Rule) {
        self.rules.push((chain.to_owned(), rule.instructions()));
        let table = self.table;
        let flags = narrow(libc::NLM_F_CREATE | libc::NLM_F_APPEND);
        let object = format!("nft rule in chain {table} {chain}");
        self.message((NFT_MSG_NEWRULE, flags), "append", object, |message| {
            rule.write(message, table, chain);
        });
    }

    /// Chain and number of instructions of each rule that it appends, in order: what [`rules`] finds of a table that is made by it alone,
    /// chain by chain.
    #[must_use]
    pub fn rules(&self) -> &[(String, usize)] {
        &self.rules
    }

    /// Creates a set or map unless it is there.
    pub fn add_set(&mut self, set: &Set<'_>) {
        let table = self.table;
        // The kernel wants a number that is unique in the transaction.
        let id = u32::try_from(self.request.len()).expect("a batch has fewer than 2^32 messages");
        let object = format!("nft set {table} {}", set.name);
        let flags = narrow(libc::NLM_F_CREATE);
        self.message((NFT_MSG_NEWSET, flags), "create", object, |message| {
            set.write(message, table, id);
        });
    }

    /// Sets and maps that it adds elements to.
    #[must_use]
    pub fn extended(&self) -> &[String] {
        &self.extended
    }

    /// Adds elements to a set or map. Equal elements that are there already are fine.
    pub fn add_elements(&mut self, set: &str, elements: &[Element]) {
        self.extended.push(set.to_owned());
        let flags = narrow(libc::NLM_F_CREATE);
        self.element_messages((NFT_MSG_NEWSETELEM, flags), "extend", set, elements);
    }

    /// Deletes elements of a set or map, which must be there.
    pub fn delete_elements(&mut self, set: &str, elements: &[Element]) {
        self.element_messages((NFT_MSG_DELSETELEM, CHANGE), "shrink", set, elements);
    }

    /// Deletes all elements of a set or map.
    pub fn clear_set(&mut self, set: &str) {
        let table = self.table;
        let object = format!("nft set {table} {set}");
        self.message((NFT_MSG_DELSETELEM, CHANGE), "clear", object, |message| {
            Element::write_list(message, table, set, &[]);
        });
    }

    fn element_messages(
        &mut self,
        kind: (u16, u16),
        operation: &'static str,
        set: &str,
        elements: &[Element],
    ) {
        let table = self.table;
        for chunk in elements.chunks(ELEMENTS_MAX) {
            let object = format!("nft set {table} {set}");
            self.message(kind, operation, object, |message| {
                Element::write_list(message, table, set, chunk);
            });
        }
    }

    fn message(
        &mut self,
        (kind, flags): (u16, u16),
        operation: &'static str,
        object: String,
        fill: impl FnOnce(&mut Writer<'_>),
    ) {
        let kind = (SUBSYSTEM << 8 | kind, flags);
        self.request.message(kind, operation, object, |message| {
            message.raw(&generic_header(NFPROTO_INET));
            fill(message);
        });
    }

    /// Carries out all changes.
    ///
    /// # Errors
    /// The first change that the kernel refuses; nothing has changed then.
    pub fn commit(mut self, socket: &mut Socket) -> Result<(), Error> {
        let last = self.request.len() - 1;
        if last == 0 {
            return Ok(());
        }
        write_mark(&mut self.request, libc::NFNL_MSG_BATCH_END);
        socket.execute_transaction(self.request, last)
    }
}

/// Header of nfnetlink messages.
pub(crate) fn generic_header(family: u8) -> [u8; GENERIC_HEADER] {
    [family, octet(libc::NFNETLINK_V0), 0, 0]
}

fn write_mark(request: &mut Request, kind: libc::c_int) {
    let kind = u16::try_from(kind).expect("message types have 16 bits");
    request.message((kind, 0), "commit", "nft transaction", |message| {
        let [high, low] = SUBSYSTEM.to_be_bytes();
        message.raw(&[0, octet(libc::NFNETLINK_V0), high, low]);
    });
}
