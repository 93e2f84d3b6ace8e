//! Faults that need real TAPs to show, put into the programs on purpose.

use aya::{Ebpf, EbpfLoader, programs::SchedClassifier};

use super::*;

/// Loads a faulty program that goes by the maps in a folder.
fn load(mutant: &mutants::Mutant, maps: &str) -> Ebpf {
    let objects = mutants::compile(mutant).expect("it compiles");
    let bytes = std::fs::read(objects.join("from_guest.o")).expect("it is there");
    let mut loaded = EbpfLoader::new()
        .default_map_pin_directory(maps)
        .load(&bytes)
        .expect("it loads");
    from_guest(&mut loaded)
        .load()
        .expect("the verifier takes it");
    loaded
}

fn from_guest(loaded: &mut Ebpf) -> &mut SchedClassifier {
    let program = loaded.program_mut("from_guest").expect("it has that name");
    program.try_into().expect("a program of tc")
}

fn maps_in_use() -> String {
    format!("{FOLDER}/v{}", abi::ABI_VERSION)
}

/// Puts a faulty program in the place of ours on the first slot.
fn attach_mutant(setting: &Setting, mutant: &mutants::Mutant) {
    let mut loaded = load(mutant, &maps_in_use());
    let fd = from_guest(&mut loaded).fd().expect("it is loaded").as_fd();
    attach(fd, "swa", setting.slots[0].1, true);
}

/// A start with a version that has a map more exchanges programs in place; else they would count as ones by which
/// nobody goes any more.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_program_that_is_older_than_a_map_goes_by_those_in_use() {
    lab::run(|lab| {
        let setting = set_up(lab);
        let shares = |loaded: &mut Ebpf| {
            let id = from_guest(loaded).info().expect("the kernel tells").id();
            setting.datapath.shares_maps(id).expect("the kernel tells")
        };
        assert!(shares(&mut load(&mutants::faults::OLDER, &maps_in_use())));
        let others = format!("{FOLDER}/others");
        std::fs::create_dir(&others).expect("a folder of the bpffs");
        assert!(!shares(&mut load(&mutants::faults::OLDER, &others)));
    });
}

/// The tests here would see it if the path forgot that a checksum may be unfinished …
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_fault_with_unfinished_checksums_is_caught() {
    lab::run(|lab| {
        let setting = set_up(lab);
        attach_mutant(&setting, &mutants::faults::PARTIAL);
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

/// … or believed where it is, as the kernel does: the packet would go elsewhere than policy has judged …
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_fault_with_forged_checksums_is_caught() {
    lab::run(|lab| {
        let setting = set_up(lab);
        lab.shell("ethtool -K up0 tx off");
        attach_mutant(&setting, &mutants::faults::TRUSTING);
        let (slot, _) = &setting.slots[0];
        let sent = forged::forged(4, 20, forged::DESTINATION4 + 2);
        slot.file().write_all(&sent).expect("the TAP takes it");
        let (header, frame) = receive(&setting.uplink, clone(4, 0));
        let packet = Packet::parse(&frame).expect("a right packet");
        assert_eq!(header.flags & NEEDS_CHECKSUM, 0);
        assert_ne!(packet.destination, peer(4, 0));
    });
}

/// … or made payload linear.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_fault_with_what_is_linear_is_caught() {
    lab::run(|lab| {
        let setting = set_up(lab);
        attach_mutant(&setting, &mutants::faults::GREEDY);
        let (ip, gso_size) = packets(guest(4), clone(4, 1)).remove(2);
        let sent = unfinished(&ip, (GATEWAY_MAC, GUEST_MAC), gso_size);
        let slot = &setting.slots[0].0;
        slot.file().write_all(&sent).expect("the TAP takes it");
        let (header, _) = receive(&setting.slots[1].0, clone(4, 0));
        assert_ne!(header.header_length, VnetHeader::read(&sent).header_length);
    });
}
