//! Faults that need real TAPs to show, put into the programs on purpose.

use aya::{EbpfLoader, programs::SchedClassifier};

use super::*;

/// Puts a faulty program in the place of ours on the first slot.
fn attach_mutant(setting: &Setting, mutant: &mutants::Mutant) {
    let objects = mutants::compile(mutant).expect("it compiles");
    let bytes = std::fs::read(objects.join("from_guest.o")).expect("it is there");
    let mut loaded = EbpfLoader::new()
        .default_map_pin_directory(format!("{FOLDER}/v{}", abi::ABI_VERSION))
        .load(&bytes)
        .expect("it loads");
    let program = loaded.program_mut("from_guest").expect("it has that name");
    let program: &mut SchedClassifier = program.try_into().expect("a program of tc");
    program.load().expect("the verifier takes it");
    let fd = program.fd().expect("it is loaded").as_fd();
    attach(fd, "swa", setting.slots[0].1, true);
}

/// The tests here would see it if the path forgot that a checksum may be unfinished …
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_fault_with_unfinished_checksums_is_caught() {
    lab::run(|lab| {
        let setting = set_up(lab);
        attach_mutant(&setting, &mutants::PARTIAL);
        let (slot, _) = &setting.slots[0];
        let (ip, _) = packets(guest(4), clone(4, 1)).remove(0);
        let sent = unfinished(&ip, (GATEWAY_MAC, GUEST_MAC), 0);
        slot.file().write_all(&sent).expect("the TAP takes it");
        let (header, frame) = receive(&setting.slots[1].0, clone(4, 0));
        let packet = Packet::parse(&frame).expect("a right packet");
        assert_eq!(header.flags & NEEDS_CHECKSUM, NEEDS_CHECKSUM);
        assert_ne!(be16(&frame, packet.transport + 16), pseudo_sum(&packet));
    });
}

/// … or made payload linear.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_fault_with_what_is_linear_is_caught() {
    lab::run(|lab| {
        let setting = set_up(lab);
        attach_mutant(&setting, &mutants::GREEDY);
        let (ip, gso_size) = packets(guest(4), clone(4, 1)).remove(2);
        let sent = unfinished(&ip, (GATEWAY_MAC, GUEST_MAC), gso_size);
        let slot = &setting.slots[0].0;
        slot.file().write_all(&sent).expect("the TAP takes it");
        let (header, _) = receive(&setting.slots[1].0, clone(4, 0));
        assert_ne!(header.header_length, VnetHeader::read(&sent).header_length);
    });
}
