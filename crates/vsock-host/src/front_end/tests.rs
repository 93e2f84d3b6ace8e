//! What a transport answers, without a VMM.

use std::os::unix::net::UnixStream;

use super::*;

#[test]
fn any_part_of_the_configuration_can_be_read() {
    let mut transport = Transport::new(0x0102_0304);
    let flags = VhostUserConfigFlags::empty();
    let mut read = |offset, size| {
        transport
            .get_config(offset, size, flags)
            .expect("it never fails")
    };
    assert_eq!(read(0, 8), [4, 3, 2, 1, 0, 0, 0, 0]);
    assert_eq!(read(2, 2), [2, 1]);
    assert_eq!(read(6, 6), [0; 6]);
    assert_eq!(read(4000, 96), [0; 96]);
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let mut transport = Transport::new(3);
    let offered = transport.get_features().expect("features");
    assert!(transport.set_features(offered).is_ok());
    assert!(transport.has_seqpacket());
    assert!(transport.set_features(offered | 1 << 40).is_err());
    assert!(transport.set_features(0).is_ok());
    assert!(!transport.has_seqpacket());
}

#[test]
fn rings_that_do_not_exist_or_have_no_place_are_refused() {
    let mut transport = Transport::new(3);
    assert!(transport.set_vring_num(3, 128).is_err());
    assert!(transport.set_vring_num(0, 100).is_err());
    assert!(transport.set_vring_num(0, 1 << 16).is_err());
    assert!(transport.set_vring_num(0, 128).is_ok());
    assert!(transport.set_vring_base(0, 1 << 16).is_err());
    assert!(transport.set_vring_base(0, 65535).is_ok());
    let (kick, _other) = UnixStream::pair().expect("a pair");
    let kick = File::from(std::os::fd::OwnedFd::from(kick));
    assert!(
        transport.set_vring_kick(0, Some(kick)).is_err(),
        "it has no addresses"
    );
    assert!(transport.set_vring_kick(1, None).is_err());
    assert!(!transport.is_serving());
    let base = transport
        .get_vring_base(0)
        .expect("a stopped ring has a position too");
    assert_eq!({ base.num }, 65535);
}
