//! Programs that know a channel's sockets from Firecracker's convention, or `vsock connect` from its help.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::Shutdown,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use sandwire_testlab::{lab, suspend::Suspended};
use sandwire_vsock_guest::{Guest, Kind};
use serde_json::Value;

use super::{CONFIG, World, echo, finish, interrupt, open_until, piped, wait_until};

/// Where the host calls the guest.
fn socket_of(lease: &Value) -> PathBuf {
    lease["vsock"]["socket"].as_str().unwrap().into()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn socat_calls_a_guest_and_answers_one() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (lease, mut guest) = world.lease("a");
        let path = socket_of(&lease);

        guest.listen(Kind::Stream, 52);
        let address = format!("UNIX-CONNECT:{}", path.display());
        // It waits that long for the answer after its own end; half a second is usual.
        let mut client = socat(&["-t", "60", "-", &address]);
        let mut stdin = client.stdin.take().unwrap();
        stdin.write_all(b"CONNECT 52\nquestion").unwrap();
        drop(stdin);
        let socket = guest.accept(Kind::Stream, 52).unwrap();
        assert_eq!(guest.receive_to_end(socket).unwrap(), b"question");
        let port = guest.socket(socket).address.peer_port;
        guest.send(socket, b"answer after the end").unwrap();
        guest.close(socket).unwrap();
        let (done, output, errors) = finish(client);
        assert!(done, "{errors}");
        assert_eq!(output, format!("OK {port}\nanswer after the end"));

        world.run("vsock policy allow a 1024 host");
        let address = format!("UNIX-LISTEN:{}_1024,mode=0660", path.display());
        let server = socat(&[&address, "EXEC:cat"]);
        let socket = open_until(&mut guest, 1024);
        echo(&mut guest, socket, "question");
        guest.close(socket).unwrap();
        let (done, _, errors) = finish(server);
        assert!(done, "{errors}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_listener_goes_on_after_a_connection_that_it_cannot_serve() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (_, mut guest) = world.lease("a");
        world.run("vsock policy allow a 1024 host");
        let listener = world.spawn("vsock listen a 1024 --exec cat");
        let socket = open_until(&mut guest, 1024);
        echo(&mut guest, socket, "before");
        guest.close(socket).unwrap();

        // It may have answered before the listener has closed what it was given.
        wait_until("the command has ended", || !has_children(listener.id()));
        let pid = Pid::from_child(&listener);
        let fds = format!("/proc/{}/fd", listener.id());
        let free = (0_u64..).find(|fd| !Path::new(&fds).join(fd.to_string()).exists());
        let limit = |current| Rlimit {
            current: Some(current),
            maximum: Some(1024),
        };
        // Room for the connection, and for nothing that a command would take.
        prlimit(Some(pid), Resource::Nofile, limit(free.unwrap() + 1)).unwrap();
        for _ in 0..3 {
            // It is accepted by the kernel, whatever becomes of it.
            if let Ok(socket) = guest.open_stream(1024) {
                let _ = guest.receive_to_end(socket);
            }
        }
        prlimit(Some(pid), Resource::Nofile, limit(1024)).unwrap();
        let socket = open_until(&mut guest, 1024);
        echo(&mut guest, socket, "after");
        guest.close(socket).unwrap();
        let (done, _, errors) = interrupt(listener);
        assert!(done, "{errors}");
        assert!(errors.contains("cannot accept a connection"), "{errors}");
    });
}

/// Whether a process has others that it started, or that have ended and of which it hasn't heard.
fn has_children(pid: u32) -> bool {
    let parent = format!("PPid:\t{pid}");
    fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        let status = fs::read_to_string(entry.path().join("status"));
        status.is_ok_and(|status| status.lines().any(|line| line == parent))
    })
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_listener_is_left_alone_by_a_second_one() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (lease, mut guest) = world.lease("a");
        world.run("vsock policy allow a 1024 host");
        let first = world.spawn("vsock listen a 1024");
        let path = PathBuf::from(format!("{}_1024", socket_of(&lease).display()));
        wait_until("the first listens", || path.exists());
        let (done, _, errors) = finish(world.spawn("vsock listen a 1024"));
        assert!(
            !done && errors.contains("somebody listens there already"),
            "{errors}"
        );

        let socket = open_until(&mut guest, 1024);
        guest.send(socket, b"for the first").unwrap();
        guest.close(socket).unwrap();
        let (done, output, errors) = finish(first);
        assert!(done, "{errors}");
        assert_eq!(output, "for the first");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn connect_goes_on_after_it_was_suspended_while_the_guest_had_not_answered() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (_, mut guest) = world.lease("a");
        guest.listen(Kind::Stream, 52);
        let child = world.spawn("vsock connect a 52");
        // It has asked by then, and the guest takes no notice yet.
        thread::sleep(Duration::from_millis(500));
        let pid = Pid::from_child(&child);
        drop(Suspended::new(pid).unwrap());
        thread::sleep(Duration::from_millis(100));
        let socket = guest.accept(Kind::Stream, 52).unwrap();
        guest.send(socket, b"hello").unwrap();
        guest.close(socket).unwrap();
        let (done, output, errors) = finish(child);
        assert!(done, "{errors}");
        assert_eq!(output, "hello");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn connect_waits_for_input_and_output_that_somebody_made_non_blocking() {
    const ANSWER_BYTES: usize = 4 << 20;
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (_, mut guest) = world.lease("a");
        guest.listen(Kind::Stream, 52);
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut command = world.daemon.command("vsock connect a 52");
        command
            .stdin(OwnedFd::from(theirs.try_clone().unwrap()))
            .stdout(OwnedFd::from(theirs))
            .stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        // It has our end of the pair too.
        drop(command);
        let socket = guest.accept(Kind::Stream, 52).unwrap();
        let caller = thread::spawn(move || {
            // Until the answer has filled all that is between.
            thread::sleep(Duration::from_millis(500));
            ours.write_all(b"question").unwrap();
            ours.shutdown(Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            ours.read_to_end(&mut answer).unwrap();
            answer
        });
        guest.send(socket, &vec![7; ANSWER_BYTES]).unwrap();
        assert_eq!(guest.receive_to_end(socket).unwrap(), b"question");
        guest.close(socket).unwrap();
        let (done, _, errors) = finish(child);
        assert!(done, "{errors}");
        let answer = caller.join().unwrap();
        assert_eq!(answer.len(), ANSWER_BYTES);
        assert!(answer.iter().all(|byte| *byte == 7));
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn connect_goes_on_after_a_message_of_no_bytes() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (_, mut guest) = world.lease("a");
        guest.listen(Kind::Seqpacket, 60);
        let mut child = world.spawn("vsock connect a 60 --seqpacket");
        let socket = guest.accept(Kind::Seqpacket, 60).unwrap();
        for message in ["a", "", "b"] {
            guest
                .send_message(socket, message.as_bytes(), true)
                .unwrap();
        }
        drop(child.stdin.take());
        assert_eq!(guest.receive_message(socket).unwrap(), None);
        guest.close(socket).unwrap();
        let (done, output, errors) = finish(child);
        assert!(done, "{errors}");
        assert_eq!(output, "ab");
    });
}

/// A file, as a read of it gives more at once than one of a pipe.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn connect_sends_a_message_as_long_as_it_reads_at_once() {
    const MESSAGE_BYTES: usize = 256 * 1024;
    lab::run_within(Duration::from_secs(120), |lab| {
        let config = CONFIG.replace("connection_bytes = 65536", "connection_bytes = 1048576");
        let world = World::start_with(lab, &config, &[]);
        let (_, mut guest) = world.lease("a");
        guest.listen(Kind::Seqpacket, 60);
        let request = lab.folder().join("request");
        fs::write(&request, vec![b'm'; MESSAGE_BYTES]).unwrap();
        let mut command = world.daemon.command("vsock connect a 60 --seqpacket");
        let child = piped(&mut command)
            .stdin(fs::File::open(&request).unwrap())
            .spawn()
            .unwrap();
        let socket = guest.accept(Kind::Seqpacket, 60).unwrap();
        let (message, _) = guest.receive_message(socket).unwrap().unwrap();
        assert_eq!(message.len(), MESSAGE_BYTES);
        assert_eq!(guest.receive_message(socket).unwrap(), None);
        guest.close(socket).unwrap();
        let (done, _, errors) = finish(child);
        assert!(done, "{errors}");
    });
}

fn socat(arguments: &[&str]) -> Child {
    piped(Command::new("socat").args(arguments))
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn ssh_greets_a_guest_through_vsock_connect() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (_, mut guest) = world.lease("a");
        let connect = world.daemon.command("vsock connect a 22");
        let words = std::iter::once(connect.get_program()).chain(connect.get_args());
        let words: Vec<&str> = words.map(|word| word.to_str().unwrap()).collect();
        greet(&mut guest, &[], &words.join(" "));
    });
}

/// What Kata's runtime does for `hvsock://PATH:1024` (`HybridVSockDialer`), and containerd's for its shims in a guest: it
/// asks again and again until a line with `OK` is the answer. The latter goes on after an end alone, not after a reset.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn who_dials_as_kata_does_waits_until_the_agent_listens() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (lease, mut guest) = world.lease("a");
        let socket = socket_of(&lease);
        let (refused, refusals) = mpsc::channel();
        let runtime = thread::spawn(move || {
            loop {
                let stream = UnixStream::connect(&socket).unwrap();
                (&stream).write_all(b"CONNECT 1024\n").unwrap();
                let mut reader = BufReader::new(&stream);
                let mut answer = String::new();
                reader.read_line(&mut answer).unwrap();
                if answer.contains("OK") {
                    (&stream).write_all(b"a request").unwrap();
                    stream.shutdown(Shutdown::Write).unwrap();
                    let mut rest = String::new();
                    reader.read_to_string(&mut rest).unwrap();
                    return rest;
                }
                assert_eq!(answer, "");
                refused.send(()).unwrap();
            }
        });
        // The kernel of the guest answers for an agent that isn't there yet.
        for _ in 0..3 {
            let told = |_: &mut Guest| refusals.try_recv().is_ok();
            guest
                .wait_until("the caller hears a refusal", told)
                .unwrap();
        }
        guest.listen(Kind::Stream, 1024);
        let socket = guest.accept(Kind::Stream, 1024).unwrap();
        assert_eq!(guest.receive_to_end(socket).unwrap(), b"a request");
        guest.send(socket, b"an answer").unwrap();
        guest.close(socket).unwrap();
        assert_eq!(runtime.join().unwrap(), "an answer");
    });
}

/// What systemd-ssh-proxy does for `vsock-mux/PATH`: it asks for the port, and ssh gets the socket itself.
/// Without `peek` that is all, as in its first versions. Later ones look at as many bytes as `OK 65535\n` has, and
/// take the line off if it ends there. Ours is longer: ssh reads it, before the guest's greeting.
const PROXY: &str = r#"
import array, socket, sys
path, port, *peek = sys.argv[1:]
mux = socket.socket(socket.AF_UNIX)
mux.connect(path)
mux.sendall(b"CONNECT " + port.encode() + b"\n")
if peek:
    answer = mux.recv(9, socket.MSG_PEEK)
    assert answer == b"OK 1073741824\n"[:9], answer
descriptor = array.array("i", [mux.fileno()])
rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)
socket.socket(fileno=1).sendmsg([b"\0"], [rights])
"#;

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn ssh_greets_a_guest_through_a_socket_that_a_proxy_asked_for() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (lease, mut guest) = world.lease("a");
        let proxy = lab.folder().join("proxy.py");
        fs::write(&proxy, PROXY).unwrap();
        let command = |proxy: &Path, more: &str| {
            let socket = socket_of(&lease);
            format!("python3 {} {} 22{more}", proxy.display(), socket.display())
        };
        for more in ["", " peek"] {
            greet(&mut guest, &["ProxyUseFdpass=yes"], &command(&proxy, more));
        }
    });
}

/// Starts ssh with a proxy to port 22 of the guest; each hears the other's greeting. There is no server behind it.
fn greet(guest: &mut Guest, options: &[&str], proxy: &str) {
    guest.listen(Kind::Stream, 22);
    let mut command = Command::new("ssh");
    command.args(["-v", "-F", "none", "-o", "BatchMode=yes"]);
    command.args(["-o", &format!("ProxyCommand={proxy}")]);
    for option in options {
        command.args(["-o", option]);
    }
    let client = piped(command.arg("guest")).spawn().unwrap();
    let socket = guest.accept(Kind::Stream, 22).unwrap();
    guest.send(socket, b"SSH-2.0-in_the_guest\r\n").unwrap();
    let mut greeting = Vec::new();
    while !greeting.ends_with(b"\r\n") {
        greeting.extend(guest.receive_exact(socket, 1).unwrap());
    }
    let greeting = String::from_utf8_lossy(&greeting);
    assert!(greeting.starts_with("SSH-2.0-OpenSSH"), "{greeting}");
    guest.close(socket).unwrap();
    let (_, _, errors) = finish(client);
    let heard = "remote software version in_the_guest";
    assert!(errors.contains(heard), "{proxy}: {errors}");
}
