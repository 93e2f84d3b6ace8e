//! The features of an interface that `ethtool -K` changes, by name.

use sandwire_kernel_net::Error;
use sandwire_kernel_net::interface::InterfaceIndex;
use sandwire_kernel_net::netlink::attribute::{Attributes, Writer, text_of};
use sandwire_kernel_net::netlink::{Request, Socket};

use super::interface::{GENERIC_HEADER, family};

/// An interface whose features can be asked for and changed, in the namespace of the socket.
#[derive(Debug)]
pub(super) struct Features {
    socket: Socket,
    family: u16,
    index: InterfaceIndex,
}

impl Features {
    /// Those of an interface in the namespace that the thread is in. The socket may be used from anywhere.
    pub(super) fn of(index: InterfaceIndex) -> Result<Self, Error> {
        let mut socket = Socket::generic()?;
        // Without the family (before Linux 5.6) the number of none is asked, and the kernel's refusal says so.
        let family = family(&mut socket, "ethtool")?.unwrap_or_default();
        Ok(Self {
            socket,
            family,
            index,
        })
    }

    /// Features that are on: what packets that the interface sends may leave to it.
    pub(super) fn active(&mut self) -> Result<Vec<String>, Error> {
        let object = format!("features of interface {}", self.index);
        let index = self.index;
        let replies = self.socket.query(
            self.family,
            false,
            ("look up", &object),
            |message| {
                message.raw(&[ETHTOOL_MSG_FEATURES_GET, 1, 0, 0]);
                header(message, index);
            },
            |reply| Some(names(reply.attributes(GENERIC_HEADER))),
        )?;
        Ok(replies.into_iter().flatten().collect())
    }

    /// Turns features on or off. What depends on one follows it without being asked for.
    pub(super) fn set(&mut self, names: &[String], on: bool) -> Result<(), Error> {
        let mut request = Request::new();
        let object = format!("interface {}", self.index);
        let index = self.index;
        request.message((self.family, 0), "change features of", object, |message| {
            message.raw(&[ETHTOOL_MSG_FEATURES_SET, 1, 0, 0]);
            header(message, index);
            message.nest(ETHTOOL_A_FEATURES_WANTED, |wanted| {
                wanted.nest(ETHTOOL_A_BITSET_BITS, |bits| {
                    for name in names {
                        bits.nest(ETHTOOL_A_BITSET_BITS_BIT, |bit| {
                            bit.put_text(ETHTOOL_A_BITSET_BIT_NAME, name);
                            if on {
                                bit.put_flag(ETHTOOL_A_BITSET_BIT_VALUE);
                            }
                        });
                    }
                });
            });
        });
        self.socket.execute(request)
    }
}

fn header(message: &mut Writer<'_>, index: InterfaceIndex) {
    message.nest(ETHTOOL_A_FEATURES_HEADER, |header| {
        header.put_u32(ETHTOOL_A_HEADER_DEV_INDEX, index.0);
    });
}

/// The names in the set of active features, which lists only those that are on.
fn names(reply: Attributes<'_>) -> Vec<String> {
    let active = reply.nested(ETHTOOL_A_FEATURES_ACTIVE);
    let bits = active.nested(ETHTOOL_A_BITSET_BITS);
    let name = |(_, bit)| Attributes::new(bit).find(ETHTOOL_A_BITSET_BIT_NAME);
    bits.filter_map(name).map(text_of).collect()
}

const ETHTOOL_MSG_FEATURES_GET: u8 = 11;
const ETHTOOL_MSG_FEATURES_SET: u8 = 12;
const ETHTOOL_A_FEATURES_HEADER: u16 = 1;
const ETHTOOL_A_FEATURES_WANTED: u16 = 3;
const ETHTOOL_A_FEATURES_ACTIVE: u16 = 4;
const ETHTOOL_A_HEADER_DEV_INDEX: u16 = 1;
const ETHTOOL_A_BITSET_BITS: u16 = 3;
const ETHTOOL_A_BITSET_BITS_BIT: u16 = 1;
const ETHTOOL_A_BITSET_BIT_NAME: u16 = 2;
const ETHTOOL_A_BITSET_BIT_VALUE: u16 = 3;
