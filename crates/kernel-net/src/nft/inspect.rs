//! What nftables has: enough to see that a table is as it was made.

use super::{
    GENERIC_HEADER, NFPROTO_INET, SUBSYSTEM,
    expression::{
        NFT_SOCKET_CGROUPV2, NFTA_CMP_DATA, NFTA_DATA_VALUE, NFTA_EXPR_DATA, NFTA_EXPR_NAME,
        NFTA_SOCKET_KEY, NFTA_SOCKET_LEVEL,
    },
    generic_header,
    rule::{NFTA_RULE_USERDATA, NFTNL_UDATA_RULE_COMMENT},
};
use crate::{
    Error,
    netlink::{
        Socket,
        attribute::{self, Attributes},
    },
};

const NFT_MSG_GETTABLE: u16 = 1;
const NFT_MSG_GETRULE: u16 = 7;
const NFT_MSG_GETSETELEM: u16 = 13;
const NFT_MSG_GETGEN: u16 = 16;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_SET: u16 = 2;
const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;
const NFTA_GEN_ID: u16 = 1;

/// Names of the `inet` tables in the socket's namespace.
///
/// # Errors
/// The kernel refuses.
pub fn tables(socket: &mut Socket) -> Result<Vec<String>, Error> {
    names(
        socket,
        (NFT_MSG_GETTABLE, None),
        ("list", "nft tables"),
        |attributes| attributes.find(NFTA_TABLE_NAME).map(attribute::text_of),
    )
}

/// The number of the last transaction in the socket's namespace: while it stays, nobody has changed a table there. What
/// packets enter into sets or time takes from them doesn't count.
///
/// # Errors
/// The kernel refuses.
pub fn generation(socket: &mut Socket) -> Result<Option<u32>, Error> {
    let told = socket.query(
        SUBSYSTEM << 8 | NFT_MSG_GETGEN,
        false,
        ("read", "the generation of nft tables"),
        |message| message.raw(&generic_header(NFPROTO_INET)),
        |reply| {
            let attributes = reply.attributes(GENERIC_HEADER);
            let number = attributes.find(NFTA_GEN_ID)?.try_into().ok()?;
            Some(u32::from_be_bytes(number))
        },
    )?;
    Ok(told.first().copied())
}

/// How many elements a set or map of an `inet` table has. Each end of a range is one.
///
/// # Errors
/// There is no such set, or the kernel refuses.
pub fn count_elements(socket: &mut Socket, table: &str, set: &str) -> Result<usize, Error> {
    let counts = elements(socket, table, set, |part| Some(part.count()))?;
    Ok(counts.into_iter().sum())
}

/// Lists the elements of a set or map, which the kernel tells part by part.
pub(super) fn elements<T>(
    socket: &mut Socket,
    table: &str,
    set: &str,
    read: impl Fn(Attributes<'_>) -> Option<T>,
) -> Result<Vec<T>, Error> {
    let object = format!("nft set {table} {set}");
    socket.query(
        SUBSYSTEM << 8 | NFT_MSG_GETSETELEM,
        true,
        ("list", &object),
        |message| {
            message.raw(&generic_header(NFPROTO_INET));
            message.put_text(NFTA_SET_ELEM_LIST_TABLE, table);
            message.put_text(NFTA_SET_ELEM_LIST_SET, set);
        },
        |reply| {
            let attributes = reply.attributes(GENERIC_HEADER);
            read(attributes.nested(NFTA_SET_ELEM_LIST_ELEMENTS))
        },
    )
}

/// Chain and number of expressions of each rule of an `inet` table, in order: a fingerprint that any
/// rule added, removed or replaced by one of another length changes.
///
/// # Errors
/// The kernel refuses.
pub fn rules(socket: &mut Socket, table: &str) -> Result<Vec<(String, usize)>, Error> {
    names(
        socket,
        (NFT_MSG_GETRULE, Some(table)),
        ("list", "nft rules"),
        |attributes| {
            let of = attributes.find(NFTA_RULE_TABLE).map(attribute::text_of)?;
            let chain = attributes.find(NFTA_RULE_CHAIN).map(attribute::text_of)?;
            (of == table).then(|| (chain, attributes.nested(NFTA_RULE_EXPRESSIONS).count()))
        },
    )
}

/// A rule about packets of a cgroup's sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupRule {
    /// Number of the cgroup.
    pub id: u64,
    /// How deep it is below the root.
    pub depth: u32,
    /// The rule's comment.
    pub comment: String,
}

/// All rules of an `inet` table that are about packets of a cgroup's sockets ([`super::Rule::socket_cgroup`]) and have a
/// comment, in order.
///
/// # Errors
/// The kernel refuses.
pub fn cgroup_rules(socket: &mut Socket, table: &str) -> Result<Vec<CgroupRule>, Error> {
    names(
        socket,
        (NFT_MSG_GETRULE, Some(table)),
        ("list", "nft rules"),
        |attributes| {
            let of = attributes.find(NFTA_RULE_TABLE).map(attribute::text_of)?;
            (of == table).then(|| cgroup_rule(attributes)).flatten()
        },
    )
}

fn cgroup_rule(rule: Attributes<'_>) -> Option<CgroupRule> {
    let mut depth = None;
    let mut id = None;
    for (_, expression) in rule.nested(NFTA_RULE_EXPRESSIONS) {
        let expression = Attributes::new(expression);
        let data = expression.nested(NFTA_EXPR_DATA);
        let number = |kind| data.find(kind).and_then(attribute::u32_be_of);
        match attribute::text_of(expression.find(NFTA_EXPR_NAME)?).as_str() {
            "socket" if number(NFTA_SOCKET_KEY) == Some(NFT_SOCKET_CGROUPV2) => {
                depth = number(NFTA_SOCKET_LEVEL);
            }
            // What is compared next is what was loaded.
            "cmp" if depth.is_some() && id.is_none() => {
                id = data.nested(NFTA_CMP_DATA).find(NFTA_DATA_VALUE);
            }
            _ => {}
        }
    }
    let [NFTNL_UDATA_RULE_COMMENT, _, comment @ ..] = rule.find(NFTA_RULE_USERDATA)? else {
        return None;
    };
    Some(CgroupRule {
        id: id?.try_into().ok().map(u64::from_ne_bytes)?,
        depth: depth?,
        comment: attribute::text_of(comment),
    })
}

fn names<T>(
    socket: &mut Socket,
    (kind, table): (u16, Option<&str>),
    label: (&'static str, &str),
    read: impl Fn(Attributes<'_>) -> Option<T>,
) -> Result<Vec<T>, Error> {
    socket.query(
        SUBSYSTEM << 8 | kind,
        true,
        label,
        |message| {
            message.raw(&generic_header(NFPROTO_INET));
            if let Some(table) = table {
                // Others may have tens of thousands of rules.
                message.put_text(NFTA_RULE_TABLE, table);
            }
        },
        |reply| read(reply.attributes(GENERIC_HEADER)),
    )
}
