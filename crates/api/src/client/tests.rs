//! The client against a server of a few lines, which says what a daemon would.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::atomic::{AtomicUsize, Ordering},
    thread::{self, JoinHandle},
};

use super::{versions::OWN_VERSION, *};

/// Answers `answers` one by one. Each connection carries `per_connection` of them and is closed.
fn serve(
    socket: &Path,
    per_connection: usize,
    answers: &'static [(u16, &'static str)],
) -> JoinHandle<(usize, Vec<String>)> {
    let listener = UnixListener::bind(socket).unwrap();
    let connections = AtomicUsize::new(0);
    thread::spawn(move || {
        let mut requests = Vec::new();
        for chunk in answers.chunks(per_connection) {
            let (mut stream, _) = listener.accept().unwrap();
            connections.fetch_add(1, Ordering::Relaxed);
            for (status, body) in chunk {
                requests.push(read_request(&mut stream));
                write!(
                    stream,
                    "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                )
                .unwrap();
            }
        }
        (connections.into_inner(), requests)
    })
}

fn read_request(stream: &mut UnixStream) -> String {
    let mut text = String::new();
    while !text.contains("\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        text.push(char::from(byte[0]));
    }
    let length = text
        .to_ascii_lowercase()
        .lines()
        .find_map(|line| Some(line.strip_prefix("content-length: ")?.parse::<u64>()))
        .map_or(0, |length| length.unwrap());
    stream.take(length).read_to_string(&mut text).unwrap();
    text
}

#[test]
fn one_connection_serves_many_requests() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let server = serve(&socket, 3, &[(200, "[]"), (200, "[]"), (200, "[]")]);
    let client = Blocking::new(&socket);
    assert_eq!(client.leases().unwrap(), []);
    assert_eq!(client.ports().unwrap(), []);
    assert_eq!(client.pools().unwrap(), []);
    let (connections, requests) = server.join().unwrap();
    assert_eq!((connections, requests.len()), (1, 3));
}

#[test]
fn a_connection_that_was_closed_in_between_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let server = serve(&socket, 1, &[(200, "[]"), (200, "[]")]);
    let client = Blocking::new(&socket);
    assert_eq!(client.leases().unwrap(), []);
    assert_eq!(client.leases().unwrap(), []);
    assert_eq!(server.join().unwrap().0, 2);
}

/// A server that closes its first connection when the second request has come, and answers one question on
/// another one.
fn serve_with_one_break(socket: &Path) -> JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        let answer = |stream: &mut UnixStream, body: &str| {
            read_request(stream);
            let length = body.len();
            write!(
                stream,
                "HTTP/1.1 200 x\r\ncontent-length: {length}\r\n\r\n{body}"
            )
            .unwrap();
        };
        let (mut first, _) = listener.accept().unwrap();
        answer(&mut first, "[]");
        read_request(&mut first);
        drop(first);
        let (mut second, _) = listener.accept().unwrap();
        answer(&mut second, "[]");
    })
}

#[test]
fn a_question_that_was_under_way_on_a_broken_connection_is_asked_anew() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let server = serve_with_one_break(&socket);
    let client = Blocking::new(&socket);
    assert_eq!(client.leases().unwrap(), []);
    assert_eq!(client.leases().unwrap(), []);
    server.join().unwrap();
}

#[test]
fn a_change_that_may_have_been_made_is_never_asked_for_twice() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let server = serve_with_one_break(&socket);
    let client = Blocking::new(&socket);
    assert_eq!(client.leases().unwrap(), []);
    let error = client.release(&"a7".parse().unwrap(), None).unwrap_err();
    assert!(matches!(error, ClientError::Transport { .. }), "{error:?}");
    // The second connection is only made by the next question.
    assert!(!server.is_finished());
    assert_eq!(client.leases().unwrap(), []);
    server.join().unwrap();
}

#[test]
fn a_refusal_arrives_with_its_code_and_number() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let body = r#"{"code":"not_found","message":"no lease a7","request_id":"1f-2"}"#;
    let server = serve(&socket, 1, vec![(404, body)].leak());
    let error = Blocking::new(&socket)
        .release(&"a7".parse().unwrap(), Some(1000))
        .unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::NotFound));
    assert!(error.is_refusal());
    assert_eq!(error.to_string(), "no lease a7");
    let (_, requests) = server.join().unwrap();
    assert!(requests[0].starts_with("DELETE /v1/leases/a7?owner_uid=1000 HTTP/1.1\r\n"));
}

/// What a client says of a port that a daemon of that version refuses.
fn refusal_by(version: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let refusal = r#"{"code":"invalid_request","message":"query: unknown field `hide_host_service`","request_id":"1"}"#;
    let health =
        format!(r#"{{"ready":true,"version":"{version}","instance":"default","problems":[]}}"#);
    let answers = vec![(400, refusal), (200, &*health.leak())];
    serve(&socket, 2, answers.leak());
    let port = PublishPort {
        protocol: Protocol::Tcp,
        host_address: None,
        host_port: 80,
        clone_port: 80,
        nic: 0,
    };
    let lease = "a7".parse().unwrap();
    let client = Blocking::new(&socket);
    let error = client.publish(&lease, None, &port, true).unwrap_err();
    assert!(error.is_refusal());
    error.to_string()
}

#[test]
fn what_a_daemon_of_another_version_does_not_know_is_told_with_both_versions() {
    let said = refusal_by("0.0.1");
    let needed = format!("of version 0.0.1 and this program of {OWN_VERSION}");
    assert!(
        said.contains("unknown field") && said.contains(&needed),
        "{said}"
    );
    let said = refusal_by(OWN_VERSION);
    assert!(said.ends_with("`hide_host_service`"), "{said}");
}

#[test]
fn an_answer_of_another_version_that_cannot_be_read_is_told_with_both_versions() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let health = r#"{"ready":true,"version":"9.0.0","instance":"default","problems":[]}"#;
    serve(
        &socket,
        2,
        vec![(200, r#"[{"new":1}]"#), (200, health)].leak(),
    );
    let error = Blocking::new(&socket).leases().unwrap_err().to_string();
    assert!(error.contains("missing field"), "{error}");
    assert!(error.contains("of version 9.0.0"), "{error}");
}

#[test]
fn health_is_read_from_a_503_too() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let body = r#"{"ready":false,"version":"1","instance":"default","problems":[]}"#;
    let server = serve(&socket, 1, vec![(503, body)].leak());
    assert!(!Blocking::new(&socket).health().unwrap().ready);
    server.join().unwrap();
}

#[test]
fn a_missing_daemon_is_told_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let error = Blocking::new(folder.path().join("absent"))
        .pools()
        .unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error:?}");
    assert!(
        error.to_string().contains("systemctl start sandwire"),
        "{error}"
    );
    assert!(!error.is_refusal());
}

#[test]
fn a_daemon_that_never_answers_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let _listener = UnixListener::bind(&socket).unwrap();
    let error = Blocking::new(&socket)
        .with_timeout(Duration::from_millis(20))
        .pools()
        .unwrap_err();
    assert!(error.to_string().contains("longer than 0.02 s"), "{error}");
}

#[test]
fn an_answer_that_is_not_of_this_api_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let server = serve(&socket, 1, &[(200, "<html>")]);
    let error = Blocking::new(&socket).pools().unwrap_err();
    assert!(matches!(error, ClientError::Decode { .. }), "{error:?}");
    server.join().unwrap();
}

/// As of a burst of callers, who all come before the daemon accepts the next.
#[test]
fn who_finds_the_queue_full_waits_for_its_turn() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let first = UnixStream::connect(&socket).unwrap();
    let client = Client::new(&socket);
    let accept = async {
        // The client is asked first, and finds no room.
        drop(first);
        let (mut stream, _) = listener.accept().unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the first");
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            read_request(&mut stream);
            write!(stream, "HTTP/1.1 200 x\r\ncontent-length: 2\r\n\r\n[]").unwrap();
        })
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let both = async { tokio::join!(biased; client.ports(), accept) };
    let (answer, server) = runtime.block_on(both);
    assert_eq!(answer.unwrap(), []);
    server.join().unwrap();
}
