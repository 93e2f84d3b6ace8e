//! VMMs that change what they have said while their guest runs: memory that goes and comes back, another kick.

use std::{io::Write, thread::sleep, time::Duration};

use sandwire_vsock_guest::{
    Guest, Settings,
    transport::{RECEIVE, TRANSMIT},
};
use vhost::{VhostBackend, vhost_user::VhostUserFrontend};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::host::{Host, clean, connected, eventually, read_exact, works};

/// Longer than the worker takes for whatever it has been told.
const WHILE: Duration = Duration::from_millis(50);

/// Waits until the device has used every buffer that the guest has offered.
fn wait_until_starved(guest: &mut Guest) {
    eventually("all buffers to be used", || {
        let (ring, memory) = guest.transport().ring(RECEIVE);
        ring.used_index(memory) == ring.next_available()
    });
    // It has seen by then that there are no more.
    sleep(WHILE);
}

#[test]
fn rings_whose_memory_was_away_go_on_when_it_is_back() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    works(&vm, &mut guest);
    let (socket, mut peer) = connected(&vm, &mut guest);
    // All rings are in the first of its two regions.
    let region = guest.transport().memory().table()[0];
    for _ in 0..3 {
        let session = guest.transport().front_end().session();
        session.remove_mem_region(&region).expect("removing it");
        // With kicks that are in vain.
        let before = vm.traffic();
        guest.send(socket, b"hello").expect("sending");
        guest.transport().kick_queue(TRANSMIT);
        peer.write_all(b"there").expect("writing");
        sleep(WHILE);
        let after = vm.traffic();
        assert_eq!(after.egress_packets, before.egress_packets);
        assert_eq!(after.ingress_packets, before.ingress_packets);
        let session = guest.transport().front_end().session();
        session.add_mem_region(&region).expect("adding it");
        assert_eq!(read_exact(&mut peer, 5), b"hello");
        assert_eq!(guest.receive_exact(socket, 5).expect("it"), b"there");
    }
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn buffers_that_were_offered_by_a_kick_of_before_are_found() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot_with(&Settings {
        receive_buffers: 4,
        ..Settings::default()
    });
    let (_socket, mut peer) = connected(&vm, &mut guest);
    peer.write_all(&[7; 100_000]).expect("writing");
    wait_until_starved(&mut guest);
    // The same buffers are offered again, and the kick for them is lost with the descriptor that it went to.
    while guest.transport().receive().is_some() {}
    let before = vm.traffic().ingress_bytes;
    sleep(WHILE);
    assert_eq!(vm.traffic().ingress_bytes, before);
    let kick = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).expect("an eventfd");
    let session = guest.transport().front_end().session();
    session.set_vring_kick(RECEIVE, &kick).expect("a kick");
    wait_until_starved(&mut guest);
    assert!(vm.traffic().ingress_bytes > before);
}
