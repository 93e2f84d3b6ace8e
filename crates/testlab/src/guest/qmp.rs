//! A client for QEMU's machine protocol: one JSON document a line over a Unix socket.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// A connection to a QEMU, ready for commands.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects as soon as QEMU listens.
    ///
    /// # Errors
    /// If it doesn't in time.
    pub fn connect(socket: &Path, patience: Duration) -> Result<Self> {
        let deadline = Instant::now() + patience;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= deadline => {
                    return Err(error).with_context(|| format!("connect to {}", socket.display()));
                }
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        };
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut qmp = Self {
            reader: BufReader::new(stream),
        };
        qmp.next_document()?;
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its answer. Events that come in between are passed over.
    ///
    /// # Errors
    /// If QEMU refuses.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        self.reader
            .get_mut()
            .write_all(line.as_bytes())
            .with_context(|| format!("send '{command}' to QEMU"))?;
        loop {
            let mut document = self.next_document()?;
            if let Some(error) = document.get("error") {
                bail!("QEMU refused '{command}': {}", error["desc"]);
            }
            if let Some(answer) = document.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }

    /// Repeats a query until its `status` is one of these; returns which.
    ///
    /// # Errors
    /// If QEMU refuses or the status doesn't come in time.
    pub fn wait_status(
        &mut self,
        query: &str,
        wanted: &[&str],
        patience: Duration,
    ) -> Result<String> {
        let deadline = Instant::now() + patience;
        loop {
            let answer = self.execute(query, &json!({}))?;
            let status = answer["status"].as_str().unwrap_or_default();
            if wanted.contains(&status) {
                return Ok(status.to_owned());
            }
            if Instant::now() >= deadline {
                bail!("'{query}' still answers {answer} after {patience:?}");
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until there is no object at this path any more, such as a device that was unplugged.
    ///
    /// # Errors
    /// If it is still there in the end.
    pub fn wait_gone(&mut self, path: &str, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        while self.execute("qom-list", &json!({"path": path})).is_ok() {
            if Instant::now() >= deadline {
                bail!("QEMU still has {path} after {patience:?}");
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn next_document(&mut self) -> Result<Value> {
        let mut line = String::new();
        let length = self.reader.read_line(&mut line).context("hear from QEMU")?;
        if length == 0 {
            bail!("QEMU closed the connection");
        }
        serde_json::from_str(&line).with_context(|| format!("QEMU sent no JSON: {line}"))
    }
}
