//! Rows of the journal's tables, and back.

use std::{path::Path, sync::Arc, time::Duration};

use rusqlite::{Connection, Row, params};
use sandwire_api::{
    lease::LeaseState,
    name::Name,
    pool::{PolicySpec, PoolSpec},
    published_port::{Protocol, PublishPort, PublishedPort},
    slot::DataPath,
};
use serde::Serialize;

use super::{Contents, ReleasedSlot, schema};
use crate::{
    attach::AttachRecord,
    channel::ChannelRecord,
    error::JournalError,
    lease::{Expiry, LeaseKey, LeaseRecord},
    plan::SlotNumber,
    pool::Rest,
};

type Sql<T = ()> = rusqlite::Result<T>;

/// Reads everything.
pub(super) fn contents(connection: &Connection, path: &Path) -> Result<Contents, JournalError> {
    let read = || -> Sql<Contents> {
        Ok(Contents {
            pools: all(connection, "SELECT spec FROM pools ORDER BY name", pool)?,
            leases: all(
                connection,
                "SELECT owner_uid, name, pool, slot, is_releasing, acquired_at,
                        expires_milliseconds_since_boot, expires_at, policy, is_process,
                        channel, attach
                 FROM leases ORDER BY owner_uid, name",
                lease,
            )?,
            released: all(
                connection,
                "SELECT pool, slot, owner_uid, name, rests_until_milliseconds_since_boot,
                        is_torn_down
                 FROM released_slots ORDER BY pool, slot",
                released,
            )?,
            ports: all(
                connection,
                "SELECT protocol, host_port, host_address, clone_port, nic, owner_uid, lease
                 FROM published_ports ORDER BY protocol, host_port, host_address",
                port,
            )?,
            moves: all(connection, "SELECT pool, data_path FROM moves", moved)?,
        })
    };
    read().map_err(|error| schema::cannot_open(path, error))
}

pub(super) fn put_pool(connection: &Connection, spec: &PoolSpec) -> Sql {
    let text = to_text(spec)?;
    connection
        .prepare_cached("INSERT OR REPLACE INTO pools (name, spec) VALUES (?, ?)")?
        .execute(params![spec.name.as_str(), text])?;
    Ok(())
}

pub(super) fn remove_pool(connection: &Connection, pool: &Name) -> Sql {
    connection.execute("DELETE FROM released_slots WHERE pool = ?", [pool.as_str()])?;
    connection.execute("DELETE FROM moves WHERE pool = ?", [pool.as_str()])?;
    connection.execute("DELETE FROM pools WHERE name = ?", [pool.as_str()])?;
    Ok(())
}

pub(super) fn begin_move(connection: &Connection, spec: &PoolSpec, from: DataPath) -> Sql {
    put_pool(connection, spec)?;
    connection.execute(
        "INSERT OR REPLACE INTO moves VALUES (?, ?)",
        [spec.name.as_str(), &to_text(&from)?],
    )?;
    Ok(())
}

pub(super) fn end_move(connection: &Connection, pool: &Name) -> Sql {
    connection.execute("DELETE FROM moves WHERE pool = ?", [pool.as_str()])?;
    Ok(())
}

pub(super) fn insert_lease(connection: &Connection, lease: &LeaseRecord) -> Sql {
    connection
        .prepare_cached("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")?
        .execute(params![
            lease.key.owner_uid,
            lease.key.name.as_str(),
            lease.pool.as_str(),
            lease.slot.0,
            lease.state == LeaseState::Releasing,
            to_integer(lease.acquired_at),
            lease
                .expiry
                .map(|expiry| to_milliseconds(expiry.since_boot)),
            lease
                .expiry
                .map(|expiry| to_integer(expiry.since_epoch_seconds)),
            lease.policy.as_deref().map(to_text).transpose()?,
            lease.is_process,
            lease.channel.as_deref().map(to_text).transpose()?,
            lease.attach.as_ref().map(to_text).transpose()?,
        ])?;
    Ok(())
}

pub(super) fn remove_lease(connection: &Connection, lease: &LeaseKey) -> Sql {
    connection
        .prepare_cached("DELETE FROM leases WHERE owner_uid = ? AND name = ?")?
        .execute(params![lease.owner_uid, lease.name.as_str()])?;
    Ok(())
}

pub(super) fn set_lease_policy(
    connection: &Connection,
    lease: &LeaseKey,
    policy: Option<&PolicySpec>,
) -> Sql {
    let text = policy.map(to_text).transpose()?;
    connection
        .prepare_cached("UPDATE leases SET policy = ? WHERE owner_uid = ? AND name = ?")?
        .execute(params![text, lease.owner_uid, lease.name.as_str()])?;
    Ok(())
}

pub(super) fn set_lease_attach(
    connection: &Connection,
    lease: &LeaseKey,
    attach: &AttachRecord,
) -> Sql {
    connection
        .prepare_cached("UPDATE leases SET attach = ? WHERE owner_uid = ? AND name = ?")?
        .execute(params![
            to_text(attach)?,
            lease.owner_uid,
            lease.name.as_str()
        ])?;
    Ok(())
}

pub(super) fn set_lease_channel(
    connection: &Connection,
    lease: &LeaseKey,
    channel: Option<&ChannelRecord>,
) -> Sql {
    let text = channel.map(to_text).transpose()?;
    connection
        .prepare_cached("UPDATE leases SET channel = ? WHERE owner_uid = ? AND name = ?")?
        .execute(params![text, lease.owner_uid, lease.name.as_str()])?;
    Ok(())
}

pub(super) fn mark_releasing(connection: &Connection, lease: &LeaseKey) -> Sql {
    connection
        .prepare_cached("UPDATE leases SET is_releasing = 1 WHERE owner_uid = ? AND name = ?")?
        .execute(params![lease.owner_uid, lease.name.as_str()])?;
    Ok(())
}

pub(super) fn end_lease(connection: &Connection, released: &ReleasedSlot) -> Sql {
    let LeaseKey { owner_uid, name } = &released.rest.tenant;
    let key = params![owner_uid, name.as_str()];
    connection
        .prepare_cached("DELETE FROM leases WHERE owner_uid = ? AND name = ?")?
        .execute(key)?;
    connection
        .prepare_cached("DELETE FROM published_ports WHERE owner_uid = ? AND lease = ?")?
        .execute(key)?;
    insert_released(connection, released)
}

pub(super) fn insert_released(connection: &Connection, released: &ReleasedSlot) -> Sql {
    let LeaseKey { owner_uid, name } = &released.rest.tenant;
    connection
        .prepare_cached("INSERT OR REPLACE INTO released_slots VALUES (?, ?, ?, ?, ?, ?)")?
        .execute(params![
            released.pool.as_str(),
            released.slot.0,
            owner_uid,
            name.as_str(),
            to_milliseconds(released.rest.until),
            released.is_torn_down,
        ])?;
    Ok(())
}

pub(super) fn mark_torn_down(connection: &Connection, pool: &Name, slot: SlotNumber) -> Sql {
    connection
        .prepare_cached("UPDATE released_slots SET is_torn_down = 1 WHERE pool = ? AND slot = ?")?
        .execute(params![pool.as_str(), slot.0])?;
    Ok(())
}

pub(super) fn forget_released(connection: &Connection, pool: &Name, slot: SlotNumber) -> Sql {
    connection
        .prepare_cached("DELETE FROM released_slots WHERE pool = ? AND slot = ?")?
        .execute(params![pool.as_str(), slot.0])?;
    Ok(())
}

pub(super) fn insert_port(connection: &Connection, published: &PublishedPort) -> Sql {
    let PublishedPort {
        lease,
        owner_uid,
        port,
    } = published;
    connection
        .prepare_cached("INSERT INTO published_ports VALUES (?, ?, ?, ?, ?, ?, ?)")?
        .execute(params![
            port.protocol.to_string(),
            port.host_port,
            host_address(port),
            port.clone_port,
            port.nic,
            owner_uid,
            lease.as_str(),
        ])?;
    Ok(())
}

pub(super) fn remove_port(connection: &Connection, published: &PublishedPort) -> Sql {
    let port = &published.port;
    connection
        .prepare_cached(
            "DELETE FROM published_ports
             WHERE protocol = ? AND host_port = ? AND host_address = ?
               AND owner_uid = ? AND lease = ?",
        )?
        .execute(params![
            port.protocol.to_string(),
            port.host_port,
            host_address(port),
            published.owner_uid,
            published.lease.as_str(),
        ])?;
    Ok(())
}

pub(super) fn write_nothing_new(connection: &Connection) -> Sql {
    connection.execute(
        "UPDATE meta SET value = value WHERE key = 'next_lease_number'",
        [],
    )?;
    Ok(())
}

pub(super) fn reserve_lease_numbers(connection: &Connection, count: u32) -> Sql<u64> {
    let query = "SELECT value FROM meta WHERE key = 'next_lease_number'";
    let next: u64 = connection.query_row(query, [], |row| parsed(row, 0))?;
    connection.execute(
        "UPDATE meta SET value = ? WHERE key = 'next_lease_number'",
        [(next + u64::from(count)).to_string()],
    )?;
    Ok(next)
}

fn all<T>(connection: &Connection, query: &str, read: fn(&Row<'_>) -> Sql<T>) -> Sql<Vec<T>> {
    connection.prepare(query)?.query_map([], read)?.collect()
}

fn pool(row: &Row<'_>) -> Sql<PoolSpec> {
    let text: String = row.get(0)?;
    serde_json::from_str(&text).map_err(|error| unreadable(0, error))
}

fn moved(row: &Row<'_>) -> Sql<(Name, DataPath)> {
    let text: String = row.get(1)?;
    let data_path = serde_json::from_str(&text).map_err(|error| unreadable(1, error))?;
    Ok((parsed(row, 0)?, data_path))
}

fn lease(row: &Row<'_>) -> Sql<LeaseRecord> {
    let policy: Option<String> = row.get(8)?;
    let policy = policy.map(|text| serde_json::from_str(&text).map(Arc::new));
    let channel: Option<String> = row.get(10)?;
    let channel = channel.map(|text| serde_json::from_str(&text).map(Arc::new));
    let attach: Option<String> = row.get(11)?;
    let attach = attach.map(|text| serde_json::from_str(&text));
    let is_releasing: bool = row.get(4)?;
    let since_boot: Option<i64> = row.get(6)?;
    let since_epoch: Option<i64> = row.get(7)?;
    Ok(LeaseRecord {
        key: LeaseKey {
            owner_uid: row.get(0)?,
            name: parsed(row, 1)?,
        },
        pool: parsed(row, 2)?,
        slot: SlotNumber(row.get(3)?),
        state: if is_releasing {
            LeaseState::Releasing
        } else {
            LeaseState::Active
        },
        acquired_at: from_integer(row.get(5)?),
        expiry: since_boot.zip(since_epoch).map(|(boot, epoch)| Expiry {
            since_boot: Duration::from_millis(from_integer(boot)),
            since_epoch_seconds: from_integer(epoch),
        }),
        policy: policy.transpose().map_err(|error| unreadable(8, error))?,
        is_process: row.get(9)?,
        channel: channel.transpose().map_err(|error| unreadable(10, error))?,
        attach: attach.transpose().map_err(|error| unreadable(11, error))?,
    })
}

fn released(row: &Row<'_>) -> Sql<ReleasedSlot> {
    let tenant = LeaseKey {
        owner_uid: row.get(2)?,
        name: parsed(row, 3)?,
    };
    Ok(ReleasedSlot {
        pool: parsed(row, 0)?,
        slot: SlotNumber(row.get(1)?),
        rest: Rest {
            tenant,
            until: Duration::from_millis(from_integer(row.get(4)?)),
        },
        is_torn_down: row.get(5)?,
    })
}

fn port(row: &Row<'_>) -> Sql<PublishedPort> {
    let protocol: String = row.get(0)?;
    let host_address: String = row.get(2)?;
    Ok(PublishedPort {
        lease: parsed(row, 6)?,
        owner_uid: row.get(5)?,
        port: PublishPort {
            protocol: match &*protocol {
                "tcp" => Protocol::Tcp,
                "udp" => Protocol::Udp,
                other => return Err(unreadable(0, UnknownProtocol(other.to_owned()))),
            },
            host_address: if host_address.is_empty() {
                None
            } else {
                Some(parsed(row, 2)?)
            },
            host_port: row.get(1)?,
            clone_port: row.get(3)?,
            nic: row.get(4)?,
        },
    })
}

#[derive(Debug, thiserror::Error)]
#[error("'{0}' is no protocol of a published port")]
struct UnknownProtocol(String);

/// The empty text stands for all of the host's addresses: a null would make rows incomparable.
fn host_address(port: &PublishPort) -> String {
    port.host_address
        .map(|address| address.to_string())
        .unwrap_or_default()
}

fn parsed<T>(row: &Row<'_>, column: usize) -> Sql<T>
where
    T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>,
{
    let text: String = row.get(column)?;
    text.parse().map_err(|error| unreadable(column, error))
}

fn unreadable(
    column: usize,
    error: impl std::error::Error + Send + Sync + 'static,
) -> rusqlite::Error {
    let kind = rusqlite::types::Type::Text;
    rusqlite::Error::FromSqlConversionFailure(column, kind, Box::new(error))
}

fn to_text<T: Serialize>(value: &T) -> Sql<String> {
    serde_json::to_string(value)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

/// SQLite's integers are signed; times beyond 292 million years are cut.
fn to_integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn from_integer(value: i64) -> u64 {
    u64::try_from(value).unwrap_or_default()
}

fn to_milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}
