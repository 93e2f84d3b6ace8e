//! Making, opening and checking the database file.

use std::{
    fs::{self, File},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::Duration,
};

use rusqlite::{Connection, ErrorCode as SqliteCode, OpenFlags, OptionalExtension};
use sandwire_api::name::Name;

use crate::error::JournalError;

/// Grows with each change of the tables.
const SCHEMA_VERSION: &str = "4";
/// What schema 1 lacked.
const FROM_1_TO_2: &str = "
    BEGIN;
    ALTER TABLE leases ADD COLUMN policy TEXT;
    ALTER TABLE leases ADD COLUMN is_process INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE moves (pool TEXT PRIMARY KEY, data_path TEXT NOT NULL) WITHOUT ROWID;
    UPDATE meta SET value = '2' WHERE key = 'schema_version';
    COMMIT;
";
/// What schema 2 lacked.
const FROM_2_TO_3: &str = "
    BEGIN;
    ALTER TABLE leases ADD COLUMN channel TEXT;
    UPDATE meta SET value = '3' WHERE key = 'schema_version';
    COMMIT;
";
/// What schema 3 lacked.
const FROM_3_TO_4: &str = "
    BEGIN;
    ALTER TABLE leases ADD COLUMN attach TEXT;
    UPDATE meta SET value = '4' WHERE key = 'schema_version';
    COMMIT;
";
/// Makes the end of a lease find its ports without going through all of them. A journal of an earlier version gets it
/// too, and keeps its schema: that version needs not know of it.
const PORTS_BY_LEASE: &str = "
    CREATE INDEX IF NOT EXISTS published_ports_by_lease ON published_ports (owner_uid, lease);
";

const TABLES: &str = "
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE pools (name TEXT PRIMARY KEY, spec TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE moves (pool TEXT PRIMARY KEY, data_path TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE leases (
        owner_uid INTEGER NOT NULL,
        name TEXT NOT NULL,
        pool TEXT NOT NULL,
        slot INTEGER NOT NULL,
        is_releasing INTEGER NOT NULL,
        acquired_at INTEGER NOT NULL,
        expires_milliseconds_since_boot INTEGER,
        expires_at INTEGER,
        policy TEXT,
        is_process INTEGER NOT NULL DEFAULT 0,
        channel TEXT,
        attach TEXT,
        PRIMARY KEY (owner_uid, name),
        UNIQUE (pool, slot)
    ) WITHOUT ROWID;
    CREATE TABLE released_slots (
        pool TEXT NOT NULL,
        slot INTEGER NOT NULL,
        owner_uid INTEGER NOT NULL,
        name TEXT NOT NULL,
        rests_until_milliseconds_since_boot INTEGER NOT NULL,
        is_torn_down INTEGER NOT NULL,
        PRIMARY KEY (pool, slot)
    ) WITHOUT ROWID;
    CREATE TABLE published_ports (
        protocol TEXT NOT NULL,
        host_port INTEGER NOT NULL,
        host_address TEXT NOT NULL,
        clone_port INTEGER NOT NULL,
        nic INTEGER NOT NULL,
        owner_uid INTEGER NOT NULL,
        lease TEXT NOT NULL,
        PRIMARY KEY (protocol, host_port, host_address, owner_uid, lease)
    ) WITHOUT ROWID;
    INSERT INTO meta VALUES ('next_lease_number', '0');
";

/// Opens the database if there is one of this boot; one of an older boot is deleted.
pub(super) fn open(
    path: &Path,
    instance: &Name,
    boot_id: &str,
) -> Result<Option<Connection>, JournalError> {
    let size = match fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(unusable(path, source)),
    };
    if size == 0 {
        return Err(damaged(path, "it is empty".to_owned()));
    }
    let read = |error| cannot_open(path, error);
    let connection = connect(path).map_err(read)?;
    let found = meta(&connection, "boot_id").map_err(read)?;
    if found.as_deref() != Some(boot_id) {
        drop(connection);
        discard(path)?;
        return Ok(None);
    }
    check(&connection, path, instance)?;
    Ok(Some(connection))
}

/// Whose a database is, if there is one that can be read. Its files stay as they are: whose it is stands in there from the
/// beginning, and needs nothing of what was written last.
pub(super) fn instance_of(path: &Path) -> Option<String> {
    let path = std::path::absolute(path).ok()?;
    let mut address = "file:".to_owned();
    for character in path.to_str()?.chars() {
        match character {
            '%' | '?' | '#' => address.push_str(&format!("%{:02x}", u32::from(character))),
            other => address.push(other),
        }
    }
    address.push_str("?immutable=1");
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY
        | OpenFlags::SQLITE_OPEN_URI
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(address, flags).ok()?;
    meta(&connection, "instance").ok()?
}

/// Makes an empty database under a name of its own, then gives it its place.
pub(super) fn create(
    new: &Path,
    path: &Path,
    instance: &Name,
    boot_id: &str,
) -> Result<(), JournalError> {
    discard(new)?;
    // Tenants may enter the folder, for the socket; the journal is none of theirs. SQLite gives the
    // files beside it the same mode.
    File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(new)
        .map_err(|source| unusable(new, source))?;
    let make = || -> rusqlite::Result<()> {
        let connection = Connection::open(new)?;
        connection
            .execute_batch("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY; BEGIN;")?;
        connection.execute_batch(TABLES)?;
        connection.execute_batch(PORTS_BY_LEASE)?;
        for (key, value) in [
            ("schema_version", SCHEMA_VERSION),
            ("instance", instance.as_str()),
            ("boot_id", boot_id),
        ] {
            connection.execute("INSERT INTO meta VALUES (?, ?)", (key, value))?;
        }
        connection.execute_batch("COMMIT")
    };
    make().map_err(|source| JournalError::Write {
        operation: "make journal",
        path: new.to_owned(),
        source,
    })?;
    fs::rename(new, path).map_err(|source| unusable(path, source))
}

fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(Duration::from_secs(1))?;
    // Exclusive, so that SQLite needs neither shared memory nor a lock per transaction. A small
    // checkpoint now and then, because it happens within some unlucky hand-out.
    connection.execute_batch(
        "PRAGMA locking_mode = EXCLUSIVE;
         PRAGMA journal_mode = WAL;
         PRAGMA synchronous = OFF;
         PRAGMA wal_autocheckpoint = 250;
         PRAGMA temp_store = MEMORY;",
    )?;
    connection.set_prepared_statement_cache_capacity(32);
    Ok(connection)
}

fn check(connection: &Connection, path: &Path, instance: &Name) -> Result<(), JournalError> {
    let read = |error| cannot_open(path, error);
    for (version, change) in [("1", FROM_1_TO_2), ("2", FROM_2_TO_3), ("3", FROM_3_TO_4)] {
        if meta(connection, "schema_version").map_err(read)?.as_deref() == Some(version) {
            connection.execute_batch(change).map_err(read)?;
        }
    }
    let schema_version = meta(connection, "schema_version").map_err(read)?;
    if schema_version.as_deref() != Some(SCHEMA_VERSION) {
        return Err(JournalError::ForeignVersion {
            path: path.to_owned(),
            found: schema_version.unwrap_or_default(),
            ours: SCHEMA_VERSION,
        });
    }
    let found = meta(connection, "instance").map_err(read)?;
    if found.as_deref() != Some(instance.as_str()) {
        return Err(JournalError::ForeignInstance {
            path: path.to_owned(),
            found: found.unwrap_or_default(),
            ours: instance.clone(),
        });
    }
    let verdict: String = connection
        .query_row("PRAGMA quick_check(1)", [], |row| row.get(0))
        .map_err(read)?;
    if verdict != "ok" {
        return Err(damaged(path, verdict));
    }
    if let Err(error) = connection.execute_batch(PORTS_BY_LEASE) {
        // A full disk for example. Without it all is as true, and slower.
        tracing::warn!(%error, "the journal gets no index of published ports; ending a lease goes through all of them");
    }
    Ok(())
}

fn meta(connection: &Connection, key: &str) -> rusqlite::Result<Option<String>> {
    connection
        .query_row("SELECT value FROM meta WHERE key = ?", [key], |row| {
            row.get(0)
        })
        .optional()
}

/// Deletes a database with the files that SQLite keeps beside it.
fn discard(path: &Path) -> Result<(), JournalError> {
    for suffix in ["-wal", "-shm", "-journal", ""] {
        let mut file = path.as_os_str().to_owned();
        file.push(suffix);
        match fs::remove_file(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(unusable(path, error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Tells damage, which the operator must decide about, from a folder that can't be used and from a journal of another
/// version.
pub(super) fn cannot_open(path: &Path, error: rusqlite::Error) -> JournalError {
    if let Some(unknown) = unknown_word(&error) {
        return JournalError::ForeignWords {
            path: path.to_owned(),
            reason: unknown.to_string(),
        };
    }
    let is_unusable = matches!(
        error.sqlite_error_code(),
        Some(
            SqliteCode::CannotOpen
                | SqliteCode::ReadOnly
                | SqliteCode::DiskFull
                | SqliteCode::SystemIoFailure
                | SqliteCode::PermissionDenied
                | SqliteCode::DatabaseBusy
                | SqliteCode::DatabaseLocked
        )
    );
    if is_unusable {
        JournalError::Open {
            path: path.to_owned(),
            source: error,
        }
    } else {
        damaged(path, error.to_string())
    }
}

/// JSON that is sound, but isn't what this version would have written.
fn unknown_word(error: &rusqlite::Error) -> Option<&serde_json::Error> {
    let rusqlite::Error::FromSqlConversionFailure(_, _, source) = error else {
        return None;
    };
    let source = source.downcast_ref::<serde_json::Error>()?;
    source.is_data().then_some(source)
}

fn damaged(path: &Path, reason: String) -> JournalError {
    JournalError::Damaged {
        path: path.to_owned(),
        reason,
    }
}

fn unusable(path: &Path, source: std::io::Error) -> JournalError {
    JournalError::Folder {
        folder: path.parent().unwrap_or(path).to_owned(),
        source,
    }
}
