//! A configuration that is read again while the relay runs: what is under way goes on, unless it may not any more.
//!
//! Redirects, senders and what the peer's side allows change so. A file that says anything else anew, or that is
//! wrong, changes nothing.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::{mpsc, oneshot, watch};

use super::{EntranceSockets, Running, ServiceError, bind_entrances, open_entrances};
use crate::{
    children::{self, NamedChild},
    config::{Config, ConfigError, Deliver, Egress},
    credentials::Clients,
    deliver::Destination,
    egress::{
        Host, tcp,
        udp::{self, Flows},
    },
    report::Report,
    steering::{self, Claim, SteeringError, upkeep::Change},
};

/// Why a configuration isn't taken over.
#[derive(Debug, thiserror::Error)]
enum ReloadError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("`{0}` has changed, which is read at the start alone: restart the relay for that")]
    Restart(&'static str),
    #[error("there is room for {0} cgroups with those that there were: restart the relay for more")]
    Places(usize),
    #[error(transparent)]
    Child(#[from] NamedChild),
    #[error(transparent)]
    Steering(#[from] SteeringError),
    #[error(transparent)]
    Entrance(#[from] ServiceError),
}

/// What holds now, and who goes by it.
pub(super) struct Live {
    path: PathBuf,
    config: Config,
    clients: watch::Sender<Clients>,
    report: Report,
    pub(super) host: Option<LiveHost>,
    pub(super) destination: Option<Arc<Destination>>,
}

/// The host's side.
pub(super) struct LiveHost {
    host: Arc<Host>,
    flows: Arc<Flows>,
    steering: mpsc::Sender<Change>,
    /// Places whose sockets are served.
    served: HashSet<u16>,
    /// As long as this runs.
    _claim: Claim,
}

/// Names of which a caller must have one.
pub(super) fn clients(config: &Config) -> Clients {
    let deliver = config.deliver.iter();
    deliver
        .flat_map(|deliver| deliver.clients.clone())
        .collect()
}

impl Live {
    pub(super) fn new(
        path: &Path,
        config: &Config,
        clients: watch::Sender<Clients>,
        report: Report,
    ) -> Self {
        Self {
            path: path.to_owned(),
            config: config.clone(),
            clients,
            report,
            host: None,
            destination: None,
        }
    }

    /// Reads the file again, and certificates in any case. The report's file may be another one by now.
    pub(super) async fn reload(&mut self, running: &mut Running) {
        self.report.open_again();
        let path = self.path.display().to_string();
        match self.take_over(running).await {
            Ok(()) => tracing::info!(path, "the configuration is read again"),
            Err(error) => tracing::error!(%error, "the configuration stays as it was"),
        }
        self.clients.send_replace(clients(&self.config));
    }

    async fn take_over(&mut self, running: &mut Running) -> Result<(), ReloadError> {
        let mut new = Config::read(&self.path)?;
        if let Some(key) = self.config.needs_restart(&new) {
            return Err(ReloadError::Restart(key));
        }
        if let (Some(live), Some(former), Some(egress)) =
            (&mut self.host, &self.config.egress, &mut new.egress)
        {
            egress.keep_places(former).map_err(ReloadError::Places)?;
            if egress != former {
                live.take_over(egress, new.limits.datagram_queue_bytes, running)
                    .await?;
            }
        }
        if let (Some(destination), Some(deliver)) = (&self.destination, &new.deliver) {
            destination.change(deliver);
        }
        self.config = new;
        Ok(())
    }
}

impl Destination {
    /// Delivers by another configuration from now on.
    fn change(&self, deliver: &Deliver) {
        self.deliver.send_replace(Arc::new(deliver.clone()));
    }
}

impl LiveHost {
    pub(super) fn new(
        host: Arc<Host>,
        flows: Arc<Flows>,
        steering: mpsc::Sender<Change>,
        claim: Claim,
    ) -> Self {
        Self {
            host,
            flows,
            steering,
            served: HashSet::new(),
            _claim: claim,
        }
    }

    /// Serves sockets of places, for as long as the relay runs.
    pub(super) fn take_entrances(&mut self, sockets: Vec<EntranceSockets>, running: &mut Running) {
        for (place, tcp, udp) in sockets {
            self.served.insert(place);
            running.spawn(tcp::serve(self.host.clone(), tcp, place));
            running.spawn(udp::serve(
                self.host.clone(),
                self.flows.clone(),
                udp,
                place,
            ));
        }
    }

    async fn take_over(
        &mut self,
        egress: &Egress,
        buffer_bytes: usize,
        running: &mut Running,
    ) -> Result<(), ReloadError> {
        if let Some(daemon) = &egress.daemon
            && let Ok(found) = children::ask(egress, daemon).await
        {
            children::check(found)?;
        }
        steering::check(egress)?;
        let mut entrances = steering::entrances(egress);
        entrances.retain(|entrance| !self.served.contains(&entrance.place));
        // A new place is nobody's by the rules that there are.
        let sockets = open_entrances(bind_entrances(entrances)?, buffer_bytes)?;
        self.take_entrances(sockets, running);
        let former = self.host.now();
        let egress = Arc::new(egress.clone());
        // First: what isn't redirected any more is cut here, before anything of it can leave in the clear; what is
        // redirected from now on is known when it comes.
        self.go_by(egress.clone()).await;
        let steered = self.steer(egress).await;
        if steered.is_err() {
            self.go_by(former).await;
        }
        Ok(steered?)
    }

    async fn go_by(&self, egress: Arc<Egress>) {
        self.host.change(egress).await;
        self.flows.judge_anew(&self.host);
    }

    async fn steer(&self, egress: Arc<Egress>) -> Result<(), SteeringError> {
        let (done, outcome) = oneshot::channel();
        // Who keeps the steering ends with the relay alone.
        let _ = self.steering.send(Change { egress, done }).await;
        outcome.await.unwrap_or(Ok(()))
    }
}
