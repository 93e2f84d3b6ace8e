//! A guest without a VM: the driver's side of virtio-vsock on real virtqueues, over vhost-user.
//!
//! Tests use it to say things that no decent guest says, measurements to have a hundred guests in one process.
