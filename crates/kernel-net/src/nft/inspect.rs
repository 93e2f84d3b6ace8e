//! What nftables has: enough to see that a table is as it was made.

use super::{GENERIC_HEADER, NFPROTO_INET, SUBSYSTEM, generic_header};
use crate::{
    Error,
    netlink::{Socket, attribute},
};

const NFT_MSG_GETTABLE: u16 = 1;
const NFT_MSG_GETRULE: u16 = 7;
const NFT_MSG_GETSETELEM: u16 = 13;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_SET: u16 = 2;
const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;

/// Names of the `inet` tables in the socket's namespace.
///
/// # Errors
/// The kernel refuses.
pub fn tables(socket: &mut Socket) -> Result<Vec<String>, Error> {
    names(
        socket,
        NFT_MSG_GETTABLE,
        ("list", "nft tables"),
        |attributes| attributes.find(NFTA_TABLE_NAME).map(attribute::text_of),
    )
}

/// How many elements a set or map of an `inet` table has. Each end of a range is one.
///
/// # Errors
/// There is no such set, or the kernel refuses.
pub fn count_elements(socket: &mut Socket, table: &str, set: &str) -> Result<usize, Error> {
    let object = format!("nft set {table} {set}");
    let counts = socket.query(
        SUBSYSTEM << 8 | NFT_MSG_GETSETELEM,
        true,
        ("list", &object),
        |message| {
            message.raw(&generic_header(NFPROTO_INET));
            message.put_text(NFTA_SET_ELEM_LIST_TABLE, table);
            message.put_text(NFTA_SET_ELEM_LIST_SET, set);
        },
        |reply| {
            let elements = reply
                .attributes(GENERIC_HEADER)
                .nested(NFTA_SET_ELEM_LIST_ELEMENTS);
            Some(elements.count())
        },
    )?;
    Ok(counts.into_iter().sum())
}

/// Chain and number of expressions of each rule of an `inet` table, in order: a fingerprint that any
/// rule added, removed or replaced by one of another length changes.
///
/// # Errors
/// The kernel refuses.
pub fn rules(socket: &mut Socket, table: &str) -> Result<Vec<(String, usize)>, Error> {
    names(
        socket,
        NFT_MSG_GETRULE,
        ("list", "nft rules"),
        |attributes| {
            let of = attributes.find(NFTA_RULE_TABLE).map(attribute::text_of)?;
            let chain = attributes.find(NFTA_RULE_CHAIN).map(attribute::text_of)?;
            (of == table).then(|| (chain, attributes.nested(NFTA_RULE_EXPRESSIONS).count()))
        },
    )
}

fn names<T>(
    socket: &mut Socket,
    kind: u16,
    label: (&'static str, &str),
    read: impl Fn(attribute::Attributes<'_>) -> Option<T>,
) -> Result<Vec<T>, Error> {
    socket.query(
        SUBSYSTEM << 8 | kind,
        true,
        label,
        |message| message.raw(&generic_header(NFPROTO_INET)),
        |reply| read(reply.attributes(GENERIC_HEADER)),
    )
}
