//! Gives the lease back at a command's end, also where the daemon is just being restarted.
//!
//! A release may be asked for again: where an answer was lost and the lease is gone, it was ours that ended it.

use std::time::Duration;

use sandwire_api::{
    client::{Client, ClientError},
    error::ErrorCode,
    lease::{Lease, ReleaseOutcome, Released},
};
use tokio::time::{Instant, sleep};

use crate::{connection::cannot, failure::Failure, output::note};

/// How long the daemon may be away.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// The first pause between two tries, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Releases a lease, and tries again for so long, unless it is told to stop, while there is no daemon to do it.
pub(super) async fn release(
    client: &Client,
    lease: &Lease,
    patience: Duration,
    stop: impl Future<Output = ()>,
) -> Result<Released, Failure> {
    let name = &lease.name;
    let begun = Instant::now();
    let mut stop = std::pin::pin!(stop);
    let mut pause = FIRST_PAUSE;
    let mut is_first = true;
    loop {
        let error = match client.release(name, None).await {
            Ok(released) => return Ok(released),
            Err(error) if error.code() == Some(ErrorCode::NotFound) && !is_first => {
                return Ok(gone(lease));
            }
            Err(error) => error,
        };
        let left = patience.saturating_sub(begun.elapsed());
        if !may_pass(&error) || left.is_zero() {
            return Err(left_over(lease, error));
        }
        if is_first {
            let seconds = left.as_secs();
            note(&format!(
                "lease {name} isn't released yet, trying again for {seconds} s: {error}"
            ));
        }
        is_first = false;
        tokio::select! {
            () = sleep(pause.min(left)) => {}
            () = &mut stop => return Err(left_over(lease, error)),
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The exit status at the end of a command that had this one: nobody must take a lease that is left for released.
pub(super) fn exit_status(of_command: u8, released: &Result<Released, Failure>) -> u8 {
    match (of_command, released) {
        (0, Err(failure)) if is_left(failure) => 2,
        _ => of_command,
    }
}

/// Whether the lease is still there, as far as we know.
fn is_left(failure: &Failure) -> bool {
    failure.code != ErrorCode::NotFound
}

/// Whether the daemon may just be starting or stopping.
fn may_pass(error: &ClientError) -> bool {
    match error {
        ClientError::Connect { .. } | ClientError::Transport { .. } => true,
        ClientError::Api(answer) => answer.code == ErrorCode::Unavailable,
        ClientError::Decode { .. } => false,
    }
}

/// What the answer must have been that was lost.
fn gone(lease: &Lease) -> Released {
    Released {
        name: lease.name.clone(),
        pool: lease.pool.clone(),
        slot: lease.slot,
        outcome: ReleaseOutcome::Released,
        held_by: Vec::new(),
    }
}

fn left_over(lease: &Lease, error: ClientError) -> Failure {
    let name = &lease.name;
    let mut failure = cannot(format!("release lease {name}"))(error);
    if is_left(&failure) {
        let what = format!("; the lease is left: 'sandwire release {name}' ends it");
        failure.message.push_str(&what);
    }
    failure
}

#[cfg(test)]
mod tests {
    use std::{
        future::pending,
        io::{Read, Write},
        os::unix::net::UnixListener,
        path::Path,
        thread::{self, JoinHandle},
    };

    use super::*;
    use crate::verb::show::tests::lease;

    const HELD: (u16, &str) = (
        200,
        r#"{"name": "a7", "pool": "web", "slot": 17, "outcome": "held", "held_by": []}"#,
    );
    const NOT_FOUND: (u16, &str) = (
        404,
        r#"{"code": "not_found", "message": "no such lease", "request_id": "r"}"#,
    );
    const UNAVAILABLE: (u16, &str) = (
        503,
        r#"{"code": "unavailable", "message": "it is stopping", "request_id": "r"}"#,
    );
    const FORBIDDEN: (u16, &str) = (
        403,
        r#"{"code": "forbidden", "message": "not yours", "request_id": "r"}"#,
    );

    /// A daemon that gives these answers; none is a connection that breaks.
    fn answer(listener: &UnixListener, answers: &[Option<(u16, &str)>]) {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let length = stream.read(&mut request).unwrap();
            assert!(request[..length].starts_with(b"DELETE /v1/leases/a7 "));
            if let Some((status, text)) = answer {
                let length = text.len();
                let head = format!(
                    "HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{text}"
                );
                stream.write_all(head.as_bytes()).unwrap();
            }
        }
    }

    /// The same at a time when nobody has connected yet.
    fn daemon(socket: &Path, answers: &[Option<(u16, &'static str)>]) -> JoinHandle<()> {
        let (listener, answers) = (UnixListener::bind(socket).unwrap(), answers.to_vec());
        thread::spawn(move || answer(&listener, &answers))
    }

    fn release_by(
        socket: &Path,
        patience: Duration,
        stop: impl Future<Output = ()>,
    ) -> Result<Released, Failure> {
        let client = Client::new(socket);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(release(&client, &lease(), patience, stop))
    }

    #[test]
    fn a_daemon_that_is_restarted_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let late = socket.clone();
        let daemon = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            let answers = [Some(UNAVAILABLE), None, Some(HELD)];
            answer(&UnixListener::bind(late).unwrap(), &answers);
        });
        let released = release_by(&socket, PATIENCE, pending()).unwrap();
        assert_eq!(released.outcome, ReleaseOutcome::Held);
        daemon.join().unwrap();
    }

    #[test]
    fn a_lease_that_is_gone_after_an_answer_was_lost_is_released() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let lost = daemon(&socket, &[None, Some(NOT_FOUND)]);
        let released = release_by(&socket, PATIENCE, pending()).unwrap();
        assert_eq!(released, gone(&lease()));
        lost.join().unwrap();
    }

    #[test]
    fn what_the_daemon_refuses_is_not_asked_for_again() {
        for (answer, left) in [(FORBIDDEN, true), (NOT_FOUND, false)] {
            let folder = tempfile::tempdir().unwrap();
            let socket = folder.path().join("socket");
            let daemon = daemon(&socket, &[Some(answer)]);
            let failure = release_by(&socket, PATIENCE, pending()).unwrap_err();
            let statuses = [0, 7].map(|status| exit_status(status, &Err(failure.clone())));
            assert_eq!(statuses, if left { [2, 7] } else { [0, 7] });
            let says_how = failure.message.contains("'sandwire release a7'");
            assert_eq!(says_how, left, "{}", failure.message);
            daemon.join().unwrap();
        }
    }

    #[test]
    fn a_daemon_that_stays_away_is_given_up_at_the_end_or_by_a_signal() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let signal = async { sleep(Duration::from_millis(100)).await };
        for failure in [
            release_by(&socket, Duration::from_millis(300), pending()),
            release_by(&socket, PATIENCE, signal),
        ] {
            let failure = failure.unwrap_err();
            assert!(is_left(&failure));
            assert!(
                failure.message.contains("'sandwire release a7'"),
                "{}",
                failure.message
            );
        }
    }
}
