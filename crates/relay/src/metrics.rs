//! Figures for Prometheus, at a Unix socket: `curl --unix-socket FOLDER/metrics.sock http://relay/metrics`.

use std::{
    fmt::Write,
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    time::timeout,
};

/// Where the socket is.
#[must_use]
pub fn socket(folder: &Path) -> PathBuf {
    folder.join("metrics.sock")
}

/// Whether a relay listens at the socket. One that is stopped does, however full its queue is, which nobody waits for here.
pub(crate) fn is_served(folder: &Path) -> bool {
    matches!(reach(&socket(folder)), Ok(()) | Err(Errno::AGAIN))
}

fn reach(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

macro_rules! metrics {
    ($($field:ident $kind:ident $name:literal $help:literal;)+) => {
        /// What is counted.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $(#[doc = $help] pub(crate) $field: Count,)+
        }

        impl Metrics {
            /// In the OpenMetrics text format, which Prometheus reads.
            #[must_use]
            pub fn text(&self) -> String {
                let mut text = String::new();
                $(put(&mut text, $name, stringify!($kind), $help, &self.$field);)+
                text.push_str("# EOF\n");
                text
            }

            /// Names of all figures.
            #[must_use]
            pub fn names() -> &'static [&'static str] {
                &[$($name,)+]
            }
        }
    };
}

metrics! {
    connections counter "sandwire_relay_connections_total" "TCP connections that were carried";
    connections_open gauge "sandwire_relay_connections_open" "TCP connections that are carried now";
    connections_refused counter "sandwire_relay_connections_refused_total" "TCP connections that were reset: sender unknown or at its limit, peer away, destination denied or unreachable";
    connections_limited counter "sandwire_relay_connections_refused_limit_total" "TCP connections of those refused that were beyond a limit of their sender or host here";
    connections_displaced counter "sandwire_relay_connections_displaced_total" "TCP connections of the sender that had most that were reset for another one's";
    connections_cut counter "sandwire_relay_connections_cut_total" "TCP connections that were reset though both ends held them: peer gone, time-out, certificate expired, not read";
    bytes_out counter "sandwire_relay_tcp_bytes_to_destinations_total" "Bytes of TCP connections towards destinations";
    bytes_in counter "sandwire_relay_tcp_bytes_from_destinations_total" "Bytes of TCP connections from destinations";
    connections_unread gauge "sandwire_relay_connections_unread" "TCP connections, carried in QUIC, of which something waits as their end here doesn't read it";
    cut_unread counter "sandwire_relay_connections_cut_unread_total" "TCP connections of those cut that had something waiting that their end here didn't read, and for which there was no room in unread_bytes or in their host's channel";
    datagrams_out counter "sandwire_relay_datagrams_to_destinations_total" "Datagrams towards destinations";
    datagrams_in counter "sandwire_relay_datagrams_from_destinations_total" "Datagrams from destinations";
    flows_open gauge "sandwire_relay_flows_open" "Pairs of addresses between which datagrams go now";
    dropped_unknown counter "sandwire_relay_datagrams_dropped_unknown_sender_total" "Datagrams of nobody that is known";
    dropped_policy counter "sandwire_relay_datagrams_dropped_not_redirected_total" "Datagrams whose destination isn't redirected, or may not be delivered to";
    dropped_limit counter "sandwire_relay_datagrams_dropped_limit_total" "Datagrams of flows beyond a limit of their sender or host";
    flows_displaced counter "sandwire_relay_flows_displaced_total" "Flows of the sender that had most that were ended for another one's";
    dropped_away counter "sandwire_relay_datagrams_dropped_peer_away_total" "Datagrams while the peer was away";
    dropped_full counter "sandwire_relay_datagrams_dropped_queue_full_total" "Datagrams that found a full queue or socket";
    dropped_unasked counter "sandwire_relay_datagrams_dropped_unasked_total" "Datagrams from where none had been sent";
    malformed counter "sandwire_relay_malformed_total" "Packets of a peer that make no sense";
    sessions counter "sandwire_relay_sessions_total" "TLS and QUIC connections between relays";
    sessions_failed counter "sandwire_relay_sessions_failed_total" "TLS and QUIC connections that were refused or failed";
    openings_displaced counter "sandwire_relay_openings_displaced_total" "Connections of those that failed that were given up before they had begun, for newer ones";
    openings_timed_out counter "sandwire_relay_openings_timed_out_total" "Connections of those that failed, and streams in QUIC, that did not begin in time, and those whose answer was not taken";
    steering_restored counter "sandwire_relay_steering_restored_total" "Times that rules of nftables or of routing, or elements of its sets, were gone and were made again";
    pools_not_relayed gauge "sandwire_relay_pools_not_relayed" "Pools, by redirect, whose containers have dropped what is redirected: their interfaces are children of the host's";
    reports_left_out counter "sandwire_relay_reports_left_out_total" "Refused connections that have no line of the report, as their sender or host had many";
    reports_lost counter "sandwire_relay_reports_lost_total" "Lines of the report that found a full queue, or could not be written";
}

/// One figure.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn add_many(&self, count: usize) {
        self.add(count as u64);
    }

    pub(crate) fn subtract(&self, count: u64) {
        self.0.fetch_sub(count, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, count: u64) {
        self.0.store(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

fn put(text: &mut String, name: &str, kind: &str, help: &str, count: &Count) {
    let value = count.get();
    // Only a counter's value has the suffix.
    let family = name.strip_suffix("_total").unwrap_or(name);
    // Writing to a text doesn't fail.
    let _ = writeln!(
        text,
        "# HELP {family} {help}.\n# TYPE {family} {kind}\n{name} {value}"
    );
}

/// Opens the socket, in place of one that nobody listens at any more.
///
/// # Errors
/// Somebody listens there, or the kernel refuses.
pub(crate) fn listen(folder: &Path) -> io::Result<UnixListener> {
    let path = socket(folder);
    if is_served(folder) {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o660))?;
    Ok(listener)
}

/// Answers whoever asks, for ever.
pub(crate) async fn serve(listener: UnixListener, metrics: Arc<Metrics>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let metrics = metrics.clone();
                tokio::spawn(async move {
                    // Who doesn't ask or read in time gets nothing.
                    let _ = timeout(Duration::from_secs(5), answer(stream, &metrics)).await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the socket for metrics");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn answer(mut stream: UnixStream, metrics: &Metrics) -> io::Result<()> {
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < 8192 {
        match stream.read(&mut part).await? {
            0 => break,
            count => request.extend_from_slice(&part[..count]),
        }
    }
    let body = metrics.text();
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await
}

#[cfg(test)]
mod tests {
    use std::{os::fd::OwnedFd, sync::mpsc, thread};

    use rustix::net::{bind, listen as listen_with};

    use super::*;

    fn unix_socket() -> OwnedFd {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    }

    /// What is asked, unless it takes for ever.
    fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        let (tell, told) = mpsc::channel();
        thread::spawn(move || tell.send(work()));
        told.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    #[test]
    fn a_socket_whose_queue_is_full_is_served_and_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        assert!(!is_served(&path), "there is none");
        let address = SocketAddrUnix::new(socket(&path)).unwrap();
        let listener = unix_socket();
        bind(&listener, &address).unwrap();
        assert!(!is_served(&path), "nobody listens");
        listen_with(&listener, 0).unwrap();
        let mut waiting = Vec::new();
        loop {
            let caller = unix_socket();
            match connect(&caller, &address) {
                Ok(()) => waiting.push(caller),
                Err(error) => {
                    assert_eq!(error, Errno::AGAIN);
                    break;
                }
            }
        }
        let folder = path.clone();
        assert!(in_time(move || is_served(&folder)));
        let refused = in_time({
            let folder = path.clone();
            move || listen(&folder).unwrap_err().kind()
        });
        assert_eq!(refused, io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(!is_served(&path), "it is gone");
    }

    #[test]
    fn the_page_names_every_figure() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/relay.md");
        let page = fs::read_to_string(page).unwrap();
        for name in Metrics::names() {
            assert!(page.contains(&format!("| `{name}` |")), "{name}");
        }
        let text = Metrics::default().text();
        for line in text.lines().filter_map(|line| line.strip_prefix("# HELP ")) {
            let (name, help) = line.split_once(' ').unwrap();
            assert!(page.contains(&format!("| {help} |")), "{name}: {help}");
        }
    }
}
