//! Talks to the web server inside a guest, by whatever address leads to it.

use std::{
    net::{IpAddr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::http::{self, Answer};

/// The web server of the guest behind an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestWeb {
    address: IpAddr,
}

impl GuestWeb {
    /// The guest that this address leads to.
    #[must_use]
    pub fn at(address: IpAddr) -> Self {
        Self { address }
    }

    /// The value stored in the guest's memory.
    ///
    /// # Errors
    /// If the guest doesn't answer.
    pub fn value(&self) -> Result<String> {
        Ok(self.request("GET", "/cgi-bin/value", None)?.body)
    }

    /// Stores a value in the guest's memory.
    ///
    /// # Errors
    /// If the guest doesn't answer.
    pub fn store(&self, value: &str) -> Result<()> {
        self.request("POST", "/cgi-bin/value", Some(value))?;
        Ok(())
    }

    /// Has the guest GET `/` from a web server, and returns what it got or why it got nothing.
    ///
    /// # Errors
    /// If the guest doesn't answer.
    pub fn fetch(&self, server: SocketAddr) -> Result<String> {
        self.fetch_within(server, PATIENCE / 2)
    }

    /// Like [`GuestWeb::fetch`], with the time after which the guest gives up: short where nothing is
    /// expected to come.
    ///
    /// # Errors
    /// If the guest doesn't answer.
    pub fn fetch_within(&self, server: SocketAddr, patience: Duration) -> Result<String> {
        let path = format!("/cgi-bin/fetch?{server}/{}", patience.as_secs());
        Ok(self.request("GET", &path, None)?.body)
    }

    /// Has the guest ping an address once. Returns whether there was an answer.
    ///
    /// # Errors
    /// If the guest doesn't answer.
    pub fn ping(&self, target: IpAddr) -> Result<bool> {
        let path = format!("/cgi-bin/ping?{target}");
        Ok(self
            .request("GET", &path, None)?
            .body
            .starts_with("answered"))
    }

    /// Has the guest run a shell script, and returns what it printed, errors too. The guest's tools are
    /// busybox's.
    ///
    /// # Errors
    /// If the guest doesn't answer within a minute.
    pub fn run(&self, script: &str) -> Result<String> {
        Ok(self.request("POST", "/cgi-bin/run", Some(script))?.body)
    }

    /// Waits until the web server answers.
    ///
    /// # Errors
    /// If it doesn't in time.
    pub fn wait(&self, patience: Duration) -> Result<Duration> {
        let started = Instant::now();
        loop {
            let attempt = Duration::from_secs(1);
            match http::request(self.address, 80, "GET", "/cgi-bin/value", None, attempt) {
                Ok(_) => return Ok(started.elapsed()),
                Err(error) if started.elapsed() > patience => {
                    return Err(error)
                        .with_context(|| format!("wait {patience:?} for {}", self.address));
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn request(&self, method: &str, path: &str, body: Option<&str>) -> Result<Answer> {
        let answer = http::request(self.address, 80, method, path, body, PATIENCE)?;
        http::successful(answer).with_context(|| format!("{method} {path} of {}", self.address))
    }
}

/// A guest under emulation on a busy machine takes its time.
const PATIENCE: Duration = Duration::from_secs(60);
