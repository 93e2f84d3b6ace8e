//! The operations, one file each.

pub(crate) mod add;
pub(crate) mod check;
pub(crate) mod del;
pub(crate) mod gc;
pub(crate) mod status;
pub(crate) mod version;
