//! What must survive the daemon: pools, leases, resting addresses, published ports.
//!
//! One SQLite database in the state folder, written before the answer that tells of it. It has to
//! survive SIGKILL, not a power loss (a reboot takes the kernel's side along, and a journal of an
//! older boot is discarded): `synchronous = OFF`, so that a write is one `write` call into the page
//! cache. Each change is one transaction. A change that fails changes nothing.
//!
//! A lock on the folder keeps a second daemon out for as long as a [`Journal`] is open.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rusqlite::Connection;
use rustix::fs::{FlockOperation, flock};
use sandwire_api::{
    name::Name,
    pool::{PolicySpec, PoolSpec},
    published_port::PublishedPort,
    slot::DataPath,
};

use crate::{
    attach::AttachRecord,
    channel::ChannelRecord,
    error::JournalError,
    lease::{LeaseKey, LeaseRecord},
    plan::SlotNumber,
    pool::Rest,
};

mod row;
mod schema;

/// The open journal of a state folder.
#[derive(Debug)]
pub struct Journal {
    connection: Connection,
    path: PathBuf,
    /// Why the last write failed, if it did.
    failure: Option<String>,
    /// Held, not read: the kernel unlocks it when it is closed, however the process ends.
    _lock: File,
    #[cfg(test)]
    power: crate::model::Power,
}

/// Everything that a journal holds.
#[derive(Debug, Default)]
pub struct Contents {
    /// Pools, by name.
    pub pools: Vec<PoolSpec>,
    /// Leases.
    pub leases: Vec<LeaseRecord>,
    /// Slots that were released lately.
    pub released: Vec<ReleasedSlot>,
    /// Published ports.
    pub ports: Vec<PublishedPort>,
    /// Pools whose slots are being moved, with the data path that they come from.
    pub moves: Vec<(Name, DataPath)>,
}

/// A slot whose lease has ended, until its clone address has rested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleasedSlot {
    /// Pool that it belongs to.
    pub pool: Name,
    /// Its number.
    pub slot: SlotNumber,
    /// How long it rests.
    pub rest: Rest,
    /// Whether nothing of it is in the kernel any more.
    pub is_torn_down: bool,
}

const DATABASE_FILE: &str = "journal.sqlite";
/// The database while it is being made: it gets its own name when it is complete, so that an empty
/// or half-made file by that name is a damage and not a beginning.
const NEW_DATABASE_FILE: &str = "journal.new";
const LOCK_FILE: &str = "daemon.lock";

impl Journal {
    /// Locks the state folder and opens its journal, making what is missing. `boot_id` is the
    /// kernel's name for this boot.
    ///
    /// # Errors
    /// Another daemon has the folder; it can't be written; the journal is damaged, or was written
    /// by another instance or version.
    pub fn open(
        folder: &Path,
        instance: &Name,
        boot_id: &str,
    ) -> Result<(Self, Contents), JournalError> {
        let lock = lock(folder)?;
        let path = folder.join(DATABASE_FILE);
        let connection = match schema::open(&path, instance, boot_id)? {
            Some(connection) => connection,
            None => {
                schema::create(&folder.join(NEW_DATABASE_FILE), &path, instance, boot_id)?;
                schema::open(&path, instance, boot_id)?.ok_or_else(|| JournalError::Damaged {
                    path: path.clone(),
                    reason: "it vanished just after it was made".to_owned(),
                })?
            }
        };
        let contents = row::contents(&connection, &path)?;
        let journal = Self {
            connection,
            path,
            failure: None,
            _lock: lock,
            #[cfg(test)]
            power: crate::model::Power::unlimited(),
        };
        Ok((journal, contents))
    }

    /// Whether nobody else has the state folder, for who has something to do before it is opened.
    ///
    /// # Errors
    /// Another daemon has the folder, or it can't be written.
    pub fn check_free(folder: &Path) -> Result<(), JournalError> {
        lock(folder).map(drop)
    }

    /// The instance whose journal a state folder has, if there is one that can be read.
    #[must_use]
    pub fn instance_in(folder: &Path) -> Option<String> {
        schema::instance_of(&folder.join(DATABASE_FILE))
    }

    /// Why the last write failed, if it did.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Writes something that changes nothing, to see whether it can be written again.
    ///
    /// # Errors
    /// It can't.
    pub fn try_again(&mut self) -> Result<(), JournalError> {
        self.write("write", row::write_nothing_new)
    }

    /// Changes a pool's settings, or adds it.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn put_pool(&mut self, spec: &PoolSpec) -> Result<(), JournalError> {
        self.write("store pool", |transaction| row::put_pool(transaction, spec))
    }

    /// Adds a pool in which some addresses rest already.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn create_pool(
        &mut self,
        spec: &PoolSpec,
        rests: &[ReleasedSlot],
    ) -> Result<(), JournalError> {
        self.transaction("store pool", |transaction| {
            row::put_pool(transaction, spec)?;
            rests
                .iter()
                .try_for_each(|released| row::insert_released(transaction, released))
        })
    }

    /// Removes a pool with what is known of its released slots. It has no leases.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn remove_pool(&mut self, pool: &Name) -> Result<(), JournalError> {
        self.transaction("remove pool", |transaction| {
            row::remove_pool(transaction, pool)
        })
    }

    /// Adds a lease.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn insert_lease(&mut self, lease: &LeaseRecord) -> Result<(), JournalError> {
        self.write("store lease", |connection| {
            row::insert_lease(connection, lease)
        })
    }

    /// Removes a lease of which nobody was told.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn remove_lease(&mut self, lease: &LeaseKey) -> Result<(), JournalError> {
        self.write("remove lease", |connection| {
            row::remove_lease(connection, lease)
        })
    }

    /// Gives a lease a policy of its own, or takes it away.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn set_lease_policy(
        &mut self,
        lease: &LeaseKey,
        policy: Option<&PolicySpec>,
    ) -> Result<(), JournalError> {
        self.write("store policy", |connection| {
            row::set_lease_policy(connection, lease, policy)
        })
    }

    /// Changes what a lease's channel is, its policy for example.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn set_lease_channel(
        &mut self,
        lease: &LeaseKey,
        channel: Option<&ChannelRecord>,
    ) -> Result<(), JournalError> {
        self.write("store vsock channel", |connection| {
            row::set_lease_channel(connection, lease, channel)
        })
    }

    /// Changes what is remembered of a lease's interface in somebody's namespace.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn set_lease_attach(
        &mut self,
        lease: &LeaseKey,
        attach: &AttachRecord,
    ) -> Result<(), JournalError> {
        self.write("store the interface of", |connection| {
            row::set_lease_attach(connection, lease, attach)
        })
    }

    /// Changes a pool's settings and notes that its slots still have the data path `from`.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn begin_move(&mut self, spec: &PoolSpec, from: DataPath) -> Result<(), JournalError> {
        self.transaction("begin move of pool", |transaction| {
            row::begin_move(transaction, spec, from)
        })
    }

    /// Notes that all slots of a pool have its data path.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn end_move(&mut self, pool: &Name) -> Result<(), JournalError> {
        self.write("end move of pool", |connection| {
            row::end_move(connection, pool)
        })
    }

    /// Notes that a lease is being released.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn mark_releasing(&mut self, lease: &LeaseKey) -> Result<(), JournalError> {
        self.write("release lease", |connection| {
            row::mark_releasing(connection, lease)
        })
    }

    /// Turns a lease, with its published ports, into a released slot.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn end_lease(&mut self, released: &ReleasedSlot) -> Result<(), JournalError> {
        self.transaction("end lease", |transaction| {
            row::end_lease(transaction, released)
        })
    }

    /// Notes which released slots are torn down. Those that needn't rest are forgotten.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn torn_down(&mut self, slots: &[(Name, SlotNumber, bool)]) -> Result<(), JournalError> {
        self.transaction("note tear-down", |transaction| {
            slots.iter().try_for_each(|(pool, slot, rests)| {
                if *rests {
                    row::mark_torn_down(transaction, pool, *slot)
                } else {
                    row::forget_released(transaction, pool, *slot)
                }
            })
        })
    }

    /// Forgets released slots whose rest is over.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn end_rests(&mut self, slots: &[(Name, SlotNumber)]) -> Result<(), JournalError> {
        self.transaction("end rest of addresses", |transaction| {
            slots
                .iter()
                .try_for_each(|(pool, slot)| row::forget_released(transaction, pool, *slot))
        })
    }

    /// Adds a published port.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn insert_port(&mut self, port: &PublishedPort) -> Result<(), JournalError> {
        self.write("store published port", |connection| {
            row::insert_port(connection, port)
        })
    }

    /// Removes a published port.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn remove_port(&mut self, port: &PublishedPort) -> Result<(), JournalError> {
        self.write("remove published port", |connection| {
            row::remove_port(connection, port)
        })
    }

    /// Sets numbers aside for names of leases, and returns the first. None is ever given twice.
    ///
    /// # Errors
    /// Nothing changed.
    pub fn reserve_lease_numbers(&mut self, count: u32) -> Result<u64, JournalError> {
        self.transaction("reserve names of leases", |transaction| {
            row::reserve_lease_numbers(transaction, count)
        })
    }

    /// A single statement, which SQLite wraps in a transaction by itself.
    fn write<T>(
        &mut self,
        operation: &'static str,
        change: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, JournalError> {
        #[cfg(test)]
        self.step(operation)?;
        let before = self.connection.total_changes();
        let written = change(&self.connection).map_err(|source| self.failed(operation, source));
        match &written {
            Err(error) => self.failure = Some(error.to_string()),
            // What changes no row takes no room on the disk, and shows nothing.
            Ok(_) if self.connection.total_changes() == before => {}
            Ok(_) => self.failure = None,
        }
        #[cfg(test)]
        self.step(operation)?;
        written
    }

    fn transaction<T>(
        &mut self,
        operation: &'static str,
        change: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, JournalError> {
        self.write(operation, |connection| {
            // Rolled back when it is dropped without a commit.
            let transaction = connection.unchecked_transaction()?;
            let value = change(&transaction)?;
            transaction.commit()?;
            Ok(value)
        })
    }

    fn failed(&self, operation: &'static str, source: rusqlite::Error) -> JournalError {
        JournalError::Write {
            operation,
            path: self.path.clone(),
            source,
        }
    }
}

#[cfg(test)]
impl Journal {
    /// Has the journal stop with the rest of the model.
    pub(crate) fn run_on(&mut self, power: &crate::model::Power) {
        self.power = power.clone();
    }

    /// A disk that has no more room, or has some again.
    pub(crate) fn set_full(&self, is_full: bool) {
        // Less than there are means as many as there are.
        let pages_max = if is_full { 1 } else { i64::from(u32::MAX - 1) };
        let set = format!("PRAGMA max_page_count = {pages_max}");
        self.connection.query_row(&set, [], |_| Ok(())).unwrap();
        let fill = "CREATE TABLE IF NOT EXISTS ballast (bytes BLOB)";
        if is_full && self.connection.execute(fill, []).is_ok() {
            let more = "INSERT INTO ballast VALUES (zeroblob(100))";
            while self.connection.execute(more, []).is_ok() {}
        }
    }

    /// A file system that is read-only, or no longer.
    pub(crate) fn set_read_only(&self, is_read_only: bool) {
        let set = format!("PRAGMA query_only = {is_read_only}");
        self.connection.execute_batch(&set).unwrap();
    }

    fn step(&self, operation: &'static str) -> Result<(), JournalError> {
        match self.power.step() {
            true => Ok(()),
            false => Err(self.failed(operation, rusqlite::Error::InvalidQuery)),
        }
    }
}

/// Makes the folder if need be, and locks it.
fn lock(folder: &Path) -> Result<File, JournalError> {
    let unusable = |source| JournalError::Folder {
        folder: folder.to_owned(),
        source,
    };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(unusable)?;
    let path = folder.join(LOCK_FILE);
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(unusable)?;
    if let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(unusable(error.into()));
        }
        let pid = fs::read_to_string(&path).unwrap_or_default();
        return Err(JournalError::Locked {
            folder: folder.to_owned(),
            pid: pid.trim().parse().ok(),
        });
    }
    // For the error message of who comes second.
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(unusable)?;
    Ok(file)
}

#[cfg(test)]
mod tests;
