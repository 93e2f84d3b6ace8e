//! The whole device from outside: guests on real virtqueues on one side, sockets of the host on the other.
//!
//! Guests are `vsock-guest`'s, which judge the device by themselves; a test ends with [`host::clean`] where
//! the guest is a decent one. Nothing here needs a VM, a privilege or the network.

mod aborts;
mod bulk;
mod ceilings;
mod changes;
mod credit;
mod descriptors;
mod ending;
mod floods;
mod front_end;
mod hold_ups;
mod host;
mod hybrid_face;
mod malformed;
mod messages;
mod no_memory;
mod notifications;
mod policy;
mod process;
mod random;
mod restore;
mod siblings;
mod streams;
