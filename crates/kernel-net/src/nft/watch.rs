//! Hears of tables that are deleted.

use std::time::Duration;

use super::{GENERIC_HEADER, NFPROTO_INET, SUBSYSTEM};
use crate::{
    Error,
    netlink::{
        Socket,
        attribute::{self, Attributes},
    },
};

const NFNLGRP_NFTABLES: u32 = 7;
const NFT_MSG_DELTABLE: u16 = 2;
const NFTA_TABLE_NAME: u16 = 1;

/// Tells that an `inet` table of one namespace was deleted, by whomever.
#[derive(Debug)]
pub struct DeletionWatcher {
    socket: Socket,
    table: String,
}

impl DeletionWatcher {
    /// Watches the namespace that the thread is in.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(table: &str) -> Result<Self, Error> {
        let mut socket = Socket::netfilter()?;
        socket
            .join(NFNLGRP_NFTABLES)
            .map_err(|source| Error::system("watch", format!("nft table {table}"), source))?;
        Ok(Self {
            socket,
            table: table.to_owned(),
        })
    }

    /// Whether the table was deleted, or may have been, waiting at most this long.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn deleted(&mut self, at_most: Duration) -> Result<bool, Error> {
        let table = &self.table;
        let heard = self.socket.listen(at_most, |reply| {
            (reply.kind == SUBSYSTEM << 8 | NFT_MSG_DELTABLE).then_some(())?;
            (*reply.payload.first()? == NFPROTO_INET).then_some(())?;
            let attributes = Attributes::new(reply.payload.get(GENERIC_HEADER..)?);
            let name = attributes.find(NFTA_TABLE_NAME).map(attribute::text_of)?;
            (name == *table).then_some(())
        });
        match heard {
            // Others have changed more than was read.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(true),
            heard => heard
                .map(|heard| !heard.is_empty())
                .map_err(|source| Error::system("watch", format!("nft table {table}"), source)),
        }
    }
}
