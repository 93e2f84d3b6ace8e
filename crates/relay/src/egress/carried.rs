//! TCP connections on their way to a peer, so that a new configuration can be asked about each.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::timeout};

use super::Host;
use crate::config::{Egress, Protocol};

/// How long those that are cut may take. They take no time; who steers doesn't wait for ever nevertheless.
const PATIENCE: Duration = Duration::from_secs(1);

/// All that there are.
#[derive(Default)]
pub(crate) struct Carried {
    open: Mutex<Open>,
    ended: Notify,
}

#[derive(Default)]
struct Open {
    next: u64,
    by_number: HashMap<u64, Connection>,
}

struct Connection {
    place: u16,
    source: SocketAddr,
    destination: SocketAddr,
    via: usize,
    cut: Arc<Notify>,
}

impl Connection {
    fn via_by(&self, egress: &Egress) -> Option<usize> {
        egress.via(self.place, Protocol::Tcp, self.source, self.destination)
    }
}

/// One of them, until this is dropped.
pub(super) struct Ticket<'a> {
    carried: &'a Carried,
    number: u64,
    cut: Arc<Notify>,
    /// The peer that it goes to.
    pub(super) via: usize,
}

impl Carried {
    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a connection and finds its peer, if it is redirected.
    pub(super) fn enter(
        &self,
        host: &Host,
        place: u16,
        (source, destination): (SocketAddr, SocketAddr),
    ) -> Option<Ticket<'_>> {
        // Held: a new configuration asks about all that there are, and this one would be missed.
        let mut open = self.lock();
        let mut connection = Connection {
            place,
            source,
            destination,
            via: 0,
            cut: Arc::default(),
        };
        let via = connection.via_by(&host.now())?;
        connection.via = via;
        let cut = connection.cut.clone();
        let number = open.next;
        open.next += 1;
        open.by_number.insert(number, connection);
        Some(Ticket {
            carried: self,
            number,
            cut,
            via,
        })
    }

    /// Cuts those that a configuration doesn't lead to the peer that they go to, and waits until they are gone.
    pub(crate) async fn judge_anew(&self, egress: &Egress) {
        let mut cut = HashSet::new();
        for (number, connection) in &self.lock().by_number {
            if connection.via_by(egress) != Some(connection.via) {
                connection.cut.notify_one();
                cut.insert(*number);
            }
        }
        let gone = async {
            loop {
                let ended = self.ended.notified();
                if !cut
                    .iter()
                    .any(|number| self.lock().by_number.contains_key(number))
                {
                    return;
                }
                ended.await;
            }
        };
        if timeout(PATIENCE, gone).await.is_err() {
            tracing::warn!("connections that aren't redirected any more take long to end");
        }
    }
}

impl Ticket<'_> {
    /// Waits until it has to end, and says why.
    pub(super) async fn cut(&self) -> String {
        self.cut.notified().await;
        "it isn't redirected there any more".to_owned()
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.carried.lock().by_number.remove(&self.number);
        self.carried.ended.notify_waiters();
    }
}
