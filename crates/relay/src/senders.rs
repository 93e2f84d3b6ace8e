//! Whose an address is: senders of the configuration, and leases that the daemon tells of.
//!
//! The daemon is asked every second, and when an unknown address appears ([`wanted`]), by a task of its own: who looks an
//! address up gets what is known. While the daemon doesn't answer, what it told last holds.

mod wanted;

use std::{
    collections::HashMap,
    net::IpAddr,
    path::Path,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

use sandwire_api::{client::Client, lease::Lease};
use tokio::{
    sync::{Notify, watch},
    time::{sleep, timeout},
};

use self::wanted::Wanted;
use crate::config::Egress;

/// How often the daemon is asked.
const REFRESH: Duration = Duration::from_secs(1);
/// How soon it is asked again for an unknown address.
const REFRESH_MIN: Duration = Duration::from_millis(50);

/// Who has which address.
pub(crate) struct Senders {
    /// Whose senders come first.
    egress: RwLock<Arc<Egress>>,
    leases: RwLock<HashMap<IpAddr, Arc<str>>>,
    has_daemon: bool,
    unknown: Mutex<Wanted>,
    wanted: Notify,
    rounds: watch::Sender<u64>,
}

impl Senders {
    pub(crate) fn new(egress: Arc<Egress>) -> Self {
        Self {
            has_daemon: egress.daemon.is_some(),
            egress: RwLock::new(egress),
            leases: RwLock::default(),
            unknown: Mutex::default(),
            wanted: Notify::new(),
            rounds: watch::Sender::new(0),
        }
    }

    /// Goes by the senders of another configuration from now on.
    pub(crate) fn change(&self, egress: Arc<Egress>) {
        *self.egress.write().unwrap_or_else(PoisonError::into_inner) = egress;
    }

    /// Who has an address, as far as is known now.
    pub(crate) fn find(&self, address: IpAddr) -> Option<Arc<str>> {
        let address = address.to_canonical();
        let egress = self.egress.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = egress.sender_of(address) {
            return Some(sender.name.clone());
        }
        drop(egress);
        let leases = self.leases.read().unwrap_or_else(PoisonError::into_inner);
        let found = leases.get(&address).cloned();
        drop(leases);
        if found.is_none() && self.has_daemon {
            let round = *self.rounds.borrow();
            let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
            if unknown.is_to_be_asked(address, round, Instant::now()) {
                self.wanted.notify_one();
            }
        }
        found
    }

    /// Who has an address; of an unknown one, the daemon is asked once more first.
    pub(crate) async fn ask(&self, address: IpAddr) -> Option<Arc<str>> {
        let mut rounds = self.rounds.subscribe();
        // A round that runs already may have asked before the lease was there.
        for _ in 0..2 {
            let before = *rounds.borrow_and_update();
            let found = self.find(address);
            if found.is_some() || !self.has_daemon {
                return found;
            }
            // Without an answer, what is known has to do.
            let _ = timeout(2 * REFRESH, rounds.wait_for(|round| *round > before)).await;
        }
        self.find(address)
    }

    fn know(&self, leases: HashMap<IpAddr, Arc<str>>) {
        let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        unknown.forget_known(|address| leases.contains_key(address));
        drop(unknown);
        *self.leases.write().unwrap_or_else(PoisonError::into_inner) = leases;
    }

    /// Asks the daemon, for ever.
    pub(crate) async fn keep(&self, daemon: &Path) {
        let client = Client::new(daemon).with_timeout(Duration::from_secs(10));
        let mut is_failing = false;
        loop {
            match client.leases().await {
                Ok(leases) => {
                    is_failing = false;
                    self.know(by_address(&leases));
                }
                Err(error) if !is_failing => {
                    is_failing = true;
                    tracing::warn!(%error, "the daemon can't be asked for its leases; those that are known stay");
                }
                Err(_) => {}
            }
            self.rounds.send_modify(|round| *round += 1);
            sleep(REFRESH_MIN).await;
            // In time or because somebody wants it: both are reasons to ask.
            let _ = timeout(REFRESH, self.wanted.notified()).await;
        }
    }
}

fn by_address(leases: &[Lease]) -> HashMap<IpAddr, Arc<str>> {
    let mut found = HashMap::new();
    for lease in leases {
        let name: Arc<str> = format!("{}/{}", lease.pool, lease.name).into();
        for nic in &lease.nics {
            found.extend(nic.clone_addresses().map(|address| (address, name.clone())));
        }
    }
    found
}

/// How many of something each sender has, at most so many.
pub(crate) struct Quota {
    most: usize,
    taken: Mutex<HashMap<Arc<str>, usize>>,
}

/// One of them; given back when dropped.
pub(crate) struct Share {
    quota: Arc<Quota>,
    sender: Arc<str>,
}

impl Quota {
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            taken: Mutex::default(),
        })
    }

    /// Takes one, unless the sender has as many as it may.
    pub(crate) fn take(self: &Arc<Self>, sender: &Arc<str>) -> Option<Share> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.entry(sender.clone()).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Share {
            quota: self.clone(),
            sender: sender.clone(),
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self
            .quota
            .taken
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.sender) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.sender);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn egress(senders: &str) -> Arc<Egress> {
        let text = format!(
            "[tls]\ncertificate = \"a\"\nkey = \"b\"\nauthorities = \"c\"\n[egress]\ndaemon = \"/nowhere\"\n\
             [[peer]]\nname = \"p\"\naddress = \"192.0.2.1:1\"\nserver_name = \"p.example\"\n\
             [[redirect]]\nfrom = [\"10.64.0.0/10\"]\nto = [\"::/0\"]\nvia = \"p\"\n{senders}"
        );
        let config = Config::parse(Path::new("relay.toml"), &text).unwrap();
        config.egress.unwrap().into()
    }

    fn senders() -> Senders {
        Senders::new(egress(""))
    }

    /// Whether the daemon would be asked now.
    async fn is_asked(senders: &Senders) -> bool {
        timeout(Duration::ZERO, senders.wanted.notified())
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn the_daemon_is_asked_for_a_new_address_and_not_with_each_packet_of_an_unknown_one() {
        let senders = senders();
        let [first, second] = ["10.64.0.2", "10.64.0.3"].map(|text| text.parse().unwrap());
        assert!(senders.find(first).is_none() && is_asked(&senders).await);
        for _ in 0..100 {
            assert!(senders.find(first).is_none());
        }
        assert!(!is_asked(&senders).await);
        assert!(senders.find(second).is_none() && is_asked(&senders).await);
        senders.know(HashMap::from([(second, "web/a7".into())]));
        assert_eq!(senders.find(second).as_deref(), Some("web/a7"));
        assert!(!is_asked(&senders).await);
    }

    #[test]
    fn a_configuration_s_senders_come_before_leases_until_another_one_holds() {
        let senders = senders();
        let address: IpAddr = "10.64.0.2".parse().unwrap();
        senders.know(HashMap::from([(address, "web/a7".into())]));
        let name = || senders.find(address);
        assert_eq!(name().as_deref(), Some("web/a7"));
        senders.change(egress(
            "[[sender]]\nname = \"vm\"\naddresses = [\"10.64.0.0/24\"]\n",
        ));
        assert_eq!(name().as_deref(), Some("vm"));
        senders.change(egress(""));
        assert_eq!(name().as_deref(), Some("web/a7"));
    }

    #[test]
    fn a_sender_has_no_more_than_it_may_and_gives_back() {
        let quota = Quota::new(2);
        let (web, batch): (Arc<str>, Arc<str>) = ("web".into(), "batch".into());
        let one = quota.take(&web).unwrap();
        let _other = quota.take(&web).unwrap();
        assert!(quota.take(&web).is_none());
        assert!(quota.take(&batch).is_some());
        drop(one);
        assert!(quota.take(&web).is_some());
    }
}
