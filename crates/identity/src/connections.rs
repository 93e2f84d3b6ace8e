//! Has what connections have done counted that are open: of identities that have TCP only, whose packets nothing counts.

use crate::looker::Looker;

/// Looks through all TCP sockets, and adds to the tallies of the identities what those have done since the last time.
pub(crate) const LOOKER: Looker = Looker {
    name: "on_tcp",
    object: aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/open.o")),
    list: "tcp",
    maps: &["sockets", "tcp_tallies", "counted"],
};
