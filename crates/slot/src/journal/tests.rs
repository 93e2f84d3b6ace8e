use std::{sync::Arc, time::Duration};

use sandwire_api::{
    attach::AttachedDevice,
    lease::LeaseState,
    published_port::{Protocol, PublishPort},
    vsock::{VsockKind, VsockPolicy},
};

use super::*;
use crate::lease::Expiry;

const BOOT: &str = "11111111-1111-1111-1111-111111111111";

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn open(folder: &Path) -> Result<(Journal, Contents), JournalError> {
    Journal::open(folder, &name("default"), BOOT)
}

fn pool() -> PoolSpec {
    serde_json::from_str(
        r#"{"name": "web", "data_path": "nft", "addresses": {"plan": "prefix", "ipv4": "10.64.0.0/24"},
            "guest": {"ipv6": ""}}"#,
    )
    .unwrap()
}

fn lease(text: &str, slot: u32) -> LeaseRecord {
    LeaseRecord {
        key: LeaseKey {
            owner_uid: 1000,
            name: name(text),
        },
        pool: name("web"),
        slot: SlotNumber(slot),
        state: LeaseState::Active,
        acquired_at: 1_700_000_000,
        expiry: Some(Expiry {
            since_boot: Duration::from_millis(1500),
            since_epoch_seconds: 1_700_000_060,
        }),
        policy: None,
        is_process: false,
        channel: None,
        attach: None,
    }
}

fn released(of: &LeaseRecord) -> ReleasedSlot {
    ReleasedSlot {
        pool: of.pool.clone(),
        slot: of.slot,
        rest: Rest {
            tenant: of.key.clone(),
            until: Duration::from_millis(2500),
        },
        is_torn_down: false,
    }
}

fn port(of: &LeaseRecord, host_port: u16) -> PublishedPort {
    PublishedPort {
        lease: of.key.name.clone(),
        owner_uid: of.key.owner_uid,
        port: PublishPort {
            protocol: Protocol::Udp,
            host_address: Some("fd00::1".parse().unwrap()),
            host_port,
            clone_port: 80,
            nic: 1,
        },
    }
}

/// A journal with one of everything.
fn write_some(folder: &Path) {
    let (mut journal, _) = open(folder).unwrap();
    journal.put_pool(&pool()).unwrap();
    let (held, gone) = (lease("held", 1), lease("gone", 2));
    journal.insert_lease(&held).unwrap();
    journal.insert_lease(&gone).unwrap();
    journal.insert_port(&port(&held, 8080)).unwrap();
    journal.insert_port(&port(&gone, 8081)).unwrap();
    journal.mark_releasing(&held.key).unwrap();
    journal.mark_releasing(&gone.key).unwrap();
    journal.end_lease(&released(&gone)).unwrap();
}

#[test]
fn what_was_written_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    write_some(folder.path());
    let (mut journal, contents) = open(folder.path()).unwrap();
    let mut held = lease("held", 1);
    assert_eq!(contents.pools, [pool()]);
    assert_eq!(contents.ports, [port(&held, 8080)]);
    held.state = LeaseState::Releasing;
    assert_eq!(contents.leases, [held]);
    let gone = released(&lease("gone", 2));
    assert_eq!(contents.released, std::slice::from_ref(&gone));

    journal
        .torn_down(&[(name("web"), SlotNumber(2), true)])
        .unwrap();
    drop(journal);
    let (mut journal, contents) = open(folder.path()).unwrap();
    assert!(contents.released[0].is_torn_down);

    journal.end_rests(&[(name("web"), SlotNumber(2))]).unwrap();
    journal.remove_pool(&name("web")).unwrap();
    drop(journal);
    let (_journal, contents) = open(folder.path()).unwrap();
    assert!(contents.released.is_empty() && contents.pools.is_empty());
}

#[test]
fn policies_of_leases_and_moves_of_pools_are_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(folder.path()).unwrap();
    journal.put_pool(&pool()).unwrap();
    let mut own = lease("own", 1);
    let policy = PolicySpec {
        talks_to: vec![name("db")],
        ..PolicySpec::default()
    };
    own.policy = Some(policy.into());
    own.is_process = true;
    let mut reset = lease("reset", 2);
    for lease in [&own, &reset, &lease("gone", 3)] {
        journal.insert_lease(lease).unwrap();
    }
    journal
        .set_lease_policy(&reset.key, own.policy.as_deref())
        .unwrap();
    journal.remove_lease(&lease("gone", 3).key).unwrap();
    let mut moved = pool();
    moved.data_path = DataPath::Ebpf;
    journal.begin_move(&moved, DataPath::Nft).unwrap();
    drop(journal);

    let (mut journal, contents) = open(folder.path()).unwrap();
    reset.policy.clone_from(&own.policy);
    assert_eq!(contents.leases, [own.clone(), reset.clone()]);
    assert_eq!(contents.pools, [moved]);
    assert_eq!(contents.moves, [(name("web"), DataPath::Nft)]);
    journal.end_move(&name("web")).unwrap();
    journal.set_lease_policy(&reset.key, None).unwrap();
    drop(journal);
    let (_journal, contents) = open(folder.path()).unwrap();
    assert!(contents.moves.is_empty() && contents.leases[1].policy.is_none());
}

#[test]
fn a_journal_of_the_version_before_is_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    write_some(folder.path());
    let older = Connection::open(folder.path().join(DATABASE_FILE)).unwrap();
    older
        .execute_batch(
            "DROP TABLE moves;
             ALTER TABLE leases DROP COLUMN policy;
             ALTER TABLE leases DROP COLUMN is_process;
             ALTER TABLE leases DROP COLUMN channel;
             ALTER TABLE leases DROP COLUMN attach;
             UPDATE meta SET value = '1' WHERE key = 'schema_version';",
        )
        .unwrap();
    drop(older);
    for _ in 0..2 {
        let (_journal, contents) = open(folder.path()).unwrap();
        let mut held = lease("held", 1);
        held.state = LeaseState::Releasing;
        assert_eq!(contents.leases, [held]);
        assert!(contents.moves.is_empty());
    }
}

#[test]
fn a_journal_without_attached_interfaces_is_taken_over_and_then_holds_some() {
    let folder = tempfile::tempdir().unwrap();
    write_some(folder.path());
    let older = Connection::open(folder.path().join(DATABASE_FILE)).unwrap();
    older
        .execute_batch(
            "ALTER TABLE leases DROP COLUMN attach;
             UPDATE meta SET value = '3' WHERE key = 'schema_version';",
        )
        .unwrap();
    drop(older);
    let mut attached = lease("new", 3);
    let mut attach = AttachRecord {
        request: serde_json::from_str(r#"{"netns": "/run/netns/blue", "mtu": 1400}"#).unwrap(),
        netns_cookie: Some(4242),
        device: AttachedDevice::Netkit,
        device_reason: Some("it is there".to_owned()),
        parent: None,
        has_mac_of_all: true,
        is_done: false,
    };
    attached.attach = Some(attach.clone());
    {
        let (mut journal, contents) = open(folder.path()).unwrap();
        assert!(contents.leases.iter().all(|lease| lease.attach.is_none()));
        journal.insert_lease(&attached).unwrap();
        attach.is_done = true;
        journal.set_lease_attach(&attached.key, &attach).unwrap();
    }
    attached.attach = Some(attach);
    let (_journal, contents) = open(folder.path()).unwrap();
    assert!(contents.leases.contains(&attached));
}

#[test]
fn a_journal_without_channels_is_taken_over_and_then_holds_some() {
    let folder = tempfile::tempdir().unwrap();
    write_some(folder.path());
    let older = Connection::open(folder.path().join(DATABASE_FILE)).unwrap();
    older
        .execute_batch(
            "ALTER TABLE leases DROP COLUMN channel;
             ALTER TABLE leases DROP COLUMN attach;
             UPDATE meta SET value = '2' WHERE key = 'schema_version';",
        )
        .unwrap();
    drop(older);
    let channel = ChannelRecord {
        kind: VsockKind::Hybrid,
        cid: 5,
        virtual_cid: Some(77),
        policy: Some(VsockPolicy::default()),
        lent: serde_json::from_str(r#"[{"port": "9", "to": {"kind": "unix", "path": "/a"}}]"#)
            .unwrap(),
    };
    let mut with_channel = lease("new", 3);
    with_channel.channel = Some(Arc::new(channel.clone()));
    {
        let (mut journal, contents) = open(folder.path()).unwrap();
        assert!(contents.leases.iter().all(|lease| lease.channel.is_none()));
        journal.insert_lease(&with_channel).unwrap();
    }
    let (mut journal, contents) = open(folder.path()).unwrap();
    assert_eq!(contents.leases.len(), 2);
    assert!(contents.leases.contains(&with_channel));
    let without_policy = ChannelRecord {
        policy: None,
        ..channel
    };
    journal
        .set_lease_channel(&with_channel.key, Some(&without_policy))
        .unwrap();
    drop(journal);
    let (_journal, contents) = open(folder.path()).unwrap();
    with_channel.channel = Some(Arc::new(without_policy));
    assert!(contents.leases.contains(&with_channel));
}

#[test]
fn the_end_of_a_lease_finds_its_ports_by_an_index_also_in_an_older_journal() {
    let folder = tempfile::tempdir().unwrap();
    write_some(folder.path());
    let by_index = |journal: &Journal| -> bool {
        let query =
            "EXPLAIN QUERY PLAN DELETE FROM published_ports WHERE owner_uid = 0 AND lease = 'a'";
        let plan = journal
            .connection
            .query_row(query, [], |row| row.get::<_, String>(3));
        plan.unwrap().contains("INDEX published_ports_by_lease")
    };
    let (journal, _) = open(folder.path()).unwrap();
    assert!(by_index(&journal));
    let forget = "DROP INDEX published_ports_by_lease";
    journal.connection.execute_batch(forget).unwrap();
    assert!(!by_index(&journal));
    drop(journal);
    let (mut journal, contents) = open(folder.path()).unwrap();
    assert!(by_index(&journal));
    let held = lease("held", 1);
    assert_eq!(contents.ports, [port(&held, 8080)]);
    journal.end_lease(&released(&held)).unwrap();
    drop(journal);
    let (_journal, contents) = open(folder.path()).unwrap();
    assert!(contents.ports.is_empty());
}

#[test]
fn a_slot_or_name_is_not_leased_twice() {
    let folder = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(folder.path()).unwrap();
    journal.insert_lease(&lease("a", 1)).unwrap();
    assert!(journal.insert_lease(&lease("b", 1)).is_err());
    assert!(journal.insert_lease(&lease("a", 2)).is_err());
    journal.insert_lease(&lease("b", 2)).unwrap();
}

#[test]
fn numbers_for_names_are_never_given_twice() {
    let folder = tempfile::tempdir().unwrap();
    for expected in [0, 10, 20] {
        let (mut journal, _) = open(folder.path()).unwrap();
        assert_eq!(journal.reserve_lease_numbers(10).unwrap(), expected);
    }
}

#[test]
fn a_journal_of_an_older_boot_is_discarded() {
    let folder = tempfile::tempdir().unwrap();
    write_some(folder.path());
    let (_journal, contents) =
        Journal::open(folder.path(), &name("default"), "another boot").unwrap();
    assert!(contents.pools.is_empty() && contents.leases.is_empty());
}

#[test]
fn a_second_daemon_is_refused_and_told_who_is_first() {
    let folder = tempfile::tempdir().unwrap();
    let (journal, _) = open(folder.path()).unwrap();
    let error = open(folder.path()).unwrap_err();
    let pid = std::process::id();
    assert!(matches!(error, JournalError::Locked { pid: Some(found), .. } if found == pid));
    assert!(
        error
            .to_string()
            .contains(&*folder.path().to_string_lossy()),
        "{error}"
    );
    drop(journal);
    open(folder.path()).unwrap();
}

#[test]
fn a_journal_of_another_instance_or_version_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_some(folder.path());
    let error = Journal::open(folder.path(), &name("other"), BOOT).unwrap_err();
    assert!(
        matches!(error, JournalError::ForeignInstance { .. }),
        "{error}"
    );

    let (journal, _) = open(folder.path()).unwrap();
    let change = "UPDATE meta SET value = '999' WHERE key = 'schema_version'";
    journal.connection.execute(change, []).unwrap();
    drop(journal);
    let error = open(folder.path()).unwrap_err();
    assert!(
        matches!(error, JournalError::ForeignVersion { .. }),
        "{error}"
    );
}

#[test]
fn a_journal_of_a_newer_version_is_not_called_damaged() {
    for (change, word) in [
        (
            "UPDATE pools SET spec = json_set(spec, '$.colour', 'red')",
            "colour",
        ),
        (
            "UPDATE pools SET spec = json_set(spec, '$.data_path', 'beam')",
            "beam",
        ),
        (
            "UPDATE leases SET policy = '{\"colour\": \"red\"}'",
            "colour",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write_some(folder.path());
        let path = folder.path().join(DATABASE_FILE);
        Connection::open(&path)
            .unwrap()
            .execute_batch(change)
            .unwrap();
        let error = open(folder.path()).unwrap_err();
        assert!(
            matches!(error, JournalError::ForeignWords { .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains(word) && text.contains("the version that wrote it"),
            "{text}"
        );
        // To damage it is still told.
        Connection::open(&path)
            .unwrap()
            .execute_batch("UPDATE pools SET spec = '{'; UPDATE leases SET policy = '{'")
            .unwrap();
        let error = open(folder.path()).unwrap_err();
        assert!(matches!(error, JournalError::Damaged { .. }), "{error}");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_refused() {
    // Neither can be written by root either.
    for folder in ["/proc/sandwire", "/dev/null/sandwire"] {
        let error = open(Path::new(folder)).unwrap_err();
        assert!(matches!(error, JournalError::Folder { .. }), "{error}");
    }
}

#[test]
fn a_full_disk_is_an_error_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (mut journal, _) = open(folder.path()).unwrap();
    journal.insert_lease(&lease("before", 0)).unwrap();
    journal.set_full(true);
    let failed = (1..1000).find_map(|slot| {
        let text = format!("while-full-{slot}");
        let error = journal.insert_lease(&lease(&text, slot)).err()?;
        Some((slot, error))
    });
    let (slot, error) = failed.expect("the disk has room for a thousand leases");
    assert!(
        error.to_string().contains("cannot store lease in journal"),
        "{error}"
    );
    // What has nothing to write succeeds all the same.
    journal.torn_down(&[]).unwrap();
    journal
        .torn_down(&[(name("web"), SlotNumber(7), false)])
        .unwrap();
    assert_eq!(journal.failure(), Some(&*error.to_string()));
    journal.set_full(false);
    journal.try_again().unwrap();
    assert_eq!(journal.failure(), None);
    journal.insert_lease(&lease("after", slot)).unwrap();
    drop(journal);
    let (_journal, contents) = open(folder.path()).unwrap();
    assert_eq!(contents.leases.len(), usize::try_from(slot).unwrap() + 1);
}

#[test]
fn a_damaged_journal_is_refused_or_read_but_never_a_panic() {
    let folder = tempfile::tempdir().unwrap();
    write_some(folder.path());
    let path = folder.path().join(DATABASE_FILE);
    let sound = fs::read(&path).unwrap();
    let check = |bytes: &[u8], how: &str| {
        fs::write(&path, bytes).unwrap();
        match open(folder.path()) {
            // The damage hit a part that holds nothing.
            Ok((_, contents)) => assert_eq!(contents.leases.len(), 1, "{how}"),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(&*path.to_string_lossy()), "{how}: {text}");
            }
        }
        // Whatever SQLite made of it must not help the next one.
        let _ = fs::remove_file(folder.path().join(format!("{DATABASE_FILE}-wal")));
    };
    for length in (0..sound.len()).step_by(509) {
        check(&sound[..length], &format!("cut to {length}"));
        let error = matches!(open(folder.path()), Err(JournalError::Damaged { .. }));
        assert!(error, "cut to {length} of {} bytes", sound.len());
    }
    for place in (0..sound.len()).step_by(97) {
        let mut bytes = sound.clone();
        for byte in bytes.iter_mut().skip(place).take(16) {
            *byte ^= 0x5a;
        }
        check(&bytes, &format!("16 bytes from {place}"));
    }
    check(
        b"this is not a database, but long enough to look at it twice",
        "text",
    );
    let error = open(folder.path()).unwrap_err();
    assert!(error.to_string().contains("sandwire cleanup"), "{error}");
}

#[test]
fn only_the_daemon_reads_the_journal_even_in_a_folder_that_all_may_enter() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (mut journal, _) = open(folder.path()).unwrap();
    journal.put_pool(&pool()).unwrap();
    for entry in fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{:?} has mode {mode:o}", entry.path());
    }
}
