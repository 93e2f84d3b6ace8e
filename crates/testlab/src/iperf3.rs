//! iperf3 between two network namespaces: a server as long as its value lives, and the reports of its clients.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{command, namespace};

/// How long a server may take to listen, or to be done with the client before.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server on iperf3's own port, ended on drop.
#[derive(Debug)]
pub struct Server(Child);

impl Server {
    /// Starts one in a namespace, or in that of the caller, and waits until it listens.
    ///
    /// # Errors
    /// If iperf3 can't be started, or doesn't listen.
    pub fn start(netns: Option<&Path>) -> Result<Self> {
        let child = command_in(netns, "iperf3")
            .arg("--server")
            .stdout(Stdio::null())
            .spawn()
            .context("start iperf3")?;
        let mut server = Self(child);
        let deadline = Instant::now() + PATIENCE;
        while listeners(netns)?.is_empty() {
            if let Some(status) = server.0.try_wait()? {
                bail!("iperf3 ended instead of listening: {status}");
            }
            ensure!(Instant::now() < deadline, "iperf3 doesn't listen");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a client, with the arguments given, and returns its report.
///
/// A server still busy with the client before makes a report too, of an error: then the client is run again.
///
/// # Errors
/// If there is no report of a whole test within a minute; the error holds what the last client said.
pub fn report(netns: Option<&Path>, arguments: &str) -> Result<Value> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut client = command_in(netns, "iperf3");
        client.arg("--json").args(arguments.split_whitespace());
        let said = command::output_of(&mut client);
        let parsed = said.and_then(|text| Ok(serde_json::from_str::<Value>(&text)?));
        if let Ok(report) = &parsed
            && report["end"]["sum_received"].is_object()
        {
            return parsed;
        }
        ensure!(
            Instant::now() < deadline,
            "iperf3 {arguments} gives no report: {parsed:?}"
        );
        thread::sleep(Duration::from_millis(100));
    }
}

fn listeners(netns: Option<&Path>) -> Result<String> {
    let mut list = command_in(netns, "ss");
    command::output_of(list.args(["-Hltn", "sport = :5201"]))
}

fn command_in(netns: Option<&Path>, program: &str) -> Command {
    netns.map_or_else(
        || Command::new(program),
        |path| namespace::command_in(path, program),
    )
}
