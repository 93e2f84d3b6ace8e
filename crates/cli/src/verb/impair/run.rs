//! `sandwire impair run`: carries a scenario out on an interface, by the clock.

use std::{
    fs,
    os::{fd::AsFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::getuid,
};
use sandwire_impair::scenario::{Change, Scenario};
use sandwire_impair_host::control::{
    Cleared, Client, ClientError, Owner, State, Target, control_socket,
};
use serde::Serialize;

use super::{service, target::Which};
use crate::{
    Context,
    failure::{Failure, Outcome},
    interruption::Interruption,
    output::note,
};

/// Command line of `sandwire impair run`.
#[derive(Debug, Args)]
#[command(
    after_help = "At the end of the scenario, and upon Ctrl-C, SIGTERM or SIGHUP, the impairment is cleared: packets under way are \
    let go first; a signal meanwhile drops them. A scenario that can't be read is refused with the line, before anything changes."
)]
pub(crate) struct Arguments {
    /// The scenario, in TOML.
    scenario: PathBuf,

    #[command(flatten)]
    which: Which,

    /// Also if it is the interface of the machine's default route, or somebody else impairs it.
    #[arg(long)]
    force: bool,
}

/// How long a service that has died is waited for that somebody else starts it, as systemd does.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a step of a scenario may call the interface, whatever its name is.
const TARGET: &str = "target";

/// What was done.
#[derive(Debug, Serialize)]
struct Answer {
    target: Target,
    /// Changes that were made.
    changes: u64,
    /// How late the latest was, in milliseconds.
    latest_milliseconds: u64,
    /// Whether it ran to its end.
    completed: bool,
    /// Whether packets were released in time. Absent where that can't be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    valid: Option<bool>,
    #[serde(flatten)]
    cleared: Cleared,
}

impl Answer {
    /// Of a scenario that hasn't begun.
    fn new(target: Target) -> Self {
        Self {
            target,
            changes: 0,
            latest_milliseconds: 0,
            completed: false,
            valid: None,
            cleared: Cleared::default(),
        }
    }
}

pub(super) fn run(context: &Context, folder: &Path, arguments: &Arguments) -> Outcome {
    let scenario = read(&arguments.scenario)?;
    // What can't be meant starts no service.
    arguments.which.target()?;
    let signals = Interruption::catch()?;
    let (mut client, _) = service::connect_or_start(folder)?;
    let target = arguments.which.target_for(&mut client)?;
    let mut answer = Answer::new(target);
    let mut begun = false;
    let ran = carry_out(
        &scenario,
        folder,
        &mut client,
        &signals,
        arguments.force,
        &mut answer,
        &mut begun,
    );
    // Whatever happened: what was begun ends, and what others have begun doesn't.
    let cleared = if begun {
        // What has ended the scenario ends no more than that.
        while signals.has_come() {}
        // What isn't impaired any more isn't listed.
        answer.valid = is_valid(&mut client, &answer.target);
        let end = |client: &mut Client| clear(folder, client, &answer.target, &signals);
        ended(folder, ask(folder, &mut client, end))
    } else {
        Ok(Cleared::default())
    };
    ran?;
    answer.cleared = cleared.map_err(service::failure)?;
    context.output.answer(&answer, text)
}

/// Makes all changes, each at its moment, and waits for the scenario's end, or for good if it has none; `signals` can be
/// read when somebody wants it to end before.
fn carry_out(
    scenario: &Scenario,
    folder: &Path,
    client: &mut Client,
    signals: &impl AsFd,
    force: bool,
    answer: &mut Answer,
    begun: &mut bool,
) -> Result<(), Failure> {
    let owner = Owner::User {
        uid: getuid().as_raw(),
    };
    let start = Instant::now();
    for Change { at, impairment, .. } in scenario.changes() {
        let due = Duration::from_nanos(at);
        if is_ended(signals, Some(due.saturating_sub(start.elapsed())))? {
            return Ok(());
        }
        let change =
            |client: &mut Client| client.set_with(&answer.target, &owner, &impairment, force);
        let set = ask(folder, client, change);
        *begun |= !matches!(set, Err(ClientError::Refused { .. }));
        set.map_err(service::failure)?;
        let late = start.elapsed().saturating_sub(due).as_millis();
        answer.latest_milliseconds = answer
            .latest_milliseconds
            .max(u64::try_from(late).unwrap_or(u64::MAX));
        answer.changes += 1;
        note(&format!(
            "{:.3} s: {impairment}",
            start.elapsed().as_secs_f64()
        ));
    }
    // One that is repeated for ever comes here when a repetition has changed nothing: then what there is stays.
    let length = scenario.length().map(Duration::from_nanos);
    let rest = length.map(|length| length.saturating_sub(start.elapsed()));
    answer.completed = !is_ended(signals, rest)?;
    Ok(())
}

/// Asks the service; if that has died meanwhile, the next one, which takes up what it has left.
fn ask<T>(
    folder: &Path,
    client: &mut Client,
    question: impl Fn(&mut Client) -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    let broken = match question(client) {
        Err(error @ ClientError::Broken { .. }) => error,
        answer => return answer,
    };
    note(&format!("cannot {broken}; asking again"));
    let Some(next) = next_service(folder, PATIENCE) else {
        return Err(broken);
    };
    *client = next;
    question(client)
}

/// What came of the end of an impairment: a service that is gone and has left nothing has ended it by itself.
fn ended(folder: &Path, cleared: Result<Cleared, ClientError>) -> Result<Cleared, ClientError> {
    match cleared {
        Err(ClientError::Broken { .. }) if service::left_targets(folder) == 0 => {
            Ok(Cleared::default())
        }
        cleared => cleared,
    }
}

/// The service that follows one that is gone. Where nobody else starts one in that time, we do, unless the last was told to end.
fn next_service(folder: &Path, patience: Duration) -> Option<Client> {
    let socket = control_socket(folder);
    let deadline = Instant::now() + patience;
    loop {
        if let Ok(next) = Client::connect(&socket) {
            return Some(next);
        }
        if Instant::now() >= deadline {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    if service::left_targets(folder) == 0 {
        note(
            "the impairment service is gone and has left nothing impaired; it isn't started again",
        );
        return None;
    }
    let (next, _) = service::connect_or_start(folder).ok()?;
    Some(next)
}

/// Whether packets of a target were released in time, if it still is impaired.
fn is_valid(client: &mut Client, target: &Target) -> Option<bool> {
    let mut all = client.list().ok()?.into_iter();
    let found = all.find(|status| {
        let listed = &status.target;
        listed.netns == target.netns && listed.interface == target.interface
    })?;
    let is_valid = found.egress.line.valid && found.ingress.line.valid;
    (found.state == State::Impaired).then_some(is_valid)
}

/// Ends the impairment when the packets under way have gone, or with them when `signals` can be read before.
fn clear(
    folder: &Path,
    client: &mut Client,
    target: &Target,
    signals: &(impl AsFd + Sync),
) -> Result<Cleared, ClientError> {
    // Whose other end is dropped when there is nothing to wait for any more.
    let Ok((going_on, ended)) = UnixStream::pair() else {
        return client.clear(target, false);
    };
    let flush = || {
        let mut fds = [
            PollFd::new(signals, PollFlags::IN),
            PollFd::new(&ended, PollFlags::IN),
        ];
        while matches!(poll(&mut fds, None), Err(rustix::io::Errno::INTR)) {}
        if fds[1].revents().is_empty() {
            note("dropping the packets under way");
            // The other connection waits for its answer, which tells what has become of them.
            let flushed = Client::connect(&control_socket(folder))
                .and_then(|mut other| other.clear(target, true));
            if let Err(error) = flushed {
                note(&format!("cannot {error}; waiting for them"));
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(flush);
        let cleared = client.clear(target, false);
        drop(going_on);
        cleared
    })
}

/// Waits that long, or for good if that isn't said; whether a signal came first.
fn is_ended(signals: &impl AsFd, patience: Option<Duration>) -> Result<bool, Failure> {
    let end = patience.map(|patience| Instant::now() + patience);
    loop {
        let rest = end.map(|end| end.saturating_duration_since(Instant::now()));
        let mut fds = [PollFd::new(signals, PollFlags::IN)];
        let timeout = rest.and_then(|rest| Timespec::try_from(rest).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) if end.is_some_and(|end| Instant::now() >= end) => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(Failure::failed(format!("cannot wait: {error}"))),
        }
    }
}

fn read(path: &Path) -> Result<Scenario, Failure> {
    let refused = |problem: String| {
        Failure::refused(format!(
            "cannot read scenario {}: {problem}",
            path.display()
        ))
    };
    let text = fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
    let mut scenario =
        Scenario::parse(&text, &[TARGET]).map_err(|error| refused(error.to_string()))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    scenario
        .read_files(|file| fs::read_to_string(folder.join(file)))
        .map_err(|error| refused(error.to_string()))?;
    Ok(scenario)
}

fn text(answer: &Answer) -> String {
    let how = if answer.completed {
        "ran to its end"
    } else {
        "was ended"
    };
    let invalid = match answer.valid {
        Some(false) => {
            "INVALID: packets were released too late; nothing measured meanwhile is worth much\n"
        }
        _ => "",
    };
    format!(
        "{}: the scenario {how} after {} changes, the latest {} ms late; {} packets were let go, {} flushed\n{invalid}",
        answer.target,
        answer.changes,
        answer.latest_milliseconds,
        answer.cleared.released,
        answer.cleared.flushed
    )
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Write},
        os::unix::net::UnixListener,
    };

    use sandwire_impair_host::control::{Response, Side};

    use super::*;

    /// A service that agrees to one request, and a while later has something written to `end`.
    fn agree_once(listener: &UnixListener, mut end: &UnixStream) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = String::new();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        reader.read_line(&mut request).unwrap();
        let mut answer = serde_json::to_vec(&Response::Done).unwrap();
        answer.push(b'\n');
        stream.write_all(&answer).unwrap();
        thread::sleep(Duration::from_millis(200));
        end.write_all(b"enough").unwrap();
    }

    #[test]
    fn a_repetition_without_a_change_lasts_until_a_signal_comes() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (end, signals) = UnixStream::pair().unwrap();
        let text =
            "duration = \"20ms\"\nrepeat = \"forever\"\n[[rule]]\nflap = \"up 10ms down 5ms\"";
        let scenario = Scenario::parse(text, &[TARGET]).unwrap();
        let mut answer = Answer::new(Target {
            netns: None,
            interface: "near0".to_owned(),
            side: Side::Host,
        });
        let mut begun = false;
        let start = Instant::now();
        let lasted = thread::scope(|scope| {
            scope.spawn(|| agree_once(&listener, &end));
            let mut client = Client::connect(&socket).unwrap();
            let (answer, begun) = (&mut answer, &mut begun);
            let folder = folder.path();
            carry_out(
                &scenario,
                folder,
                &mut client,
                &signals,
                false,
                answer,
                begun,
            )
            .unwrap();
            start.elapsed()
        });
        assert!(lasted >= Duration::from_millis(200), "{lasted:?}");
        assert_eq!((answer.changes, answer.completed, begun), (1, false, true));
    }

    /// As after SIGKILL, and a start by systemd.
    #[test]
    fn the_next_service_is_asked_what_the_last_one_did_not_answer() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (end, _signals) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let mut client = Client::connect(&socket).unwrap();
            drop(listener.accept().unwrap());
            scope.spawn(|| agree_once(&listener, &end));
            let target = Target {
                netns: None,
                interface: "near0".to_owned(),
                side: Side::Host,
            };
            let (owner, impairment) = (Owner::User { uid: 0 }, "loss 1%".parse().unwrap());
            let change = |client: &mut Client| client.set(&target, &owner, &impairment);
            ask(folder.path(), &mut client, change).unwrap();
        });
    }

    /// As after SIGTERM, which leaves nothing that is to be taken up.
    #[test]
    fn a_service_that_was_told_to_end_is_not_started_again() {
        let folder = tempfile::tempdir().unwrap();
        assert!(next_service(folder.path(), Duration::ZERO).is_none());
        let begun = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(begun, 0, "neither a lock nor a log");
        let broken = ClientError::Broken {
            operation: "end an impairment",
            source: std::io::ErrorKind::BrokenPipe.into(),
        };
        assert!(ended(folder.path(), Err(broken)).is_ok());
    }

    #[test]
    fn a_wait_that_has_an_end_comes_to_it() {
        let (_end, signals) = UnixStream::pair().unwrap();
        assert!(!is_ended(&signals, Some(Duration::from_millis(5))).unwrap());
    }
}
