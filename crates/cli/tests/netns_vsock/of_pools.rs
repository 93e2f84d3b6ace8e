//! A pool's policy, and what becomes of its leases' channels when one of them can't have it.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use sandwire_testlab::lab;
use sandwire_vsock_guest::{Guest, Kind, Socket};

use super::{World, interrupt, wait_until};

/// Sets a policy of the pool: port 6000 leads to the guest of lease a, port 5000 where it says. What is wrong with it.
fn set(world: &World, folder: &Path, to: &str) -> Result<(), String> {
    let file = folder.join("policy.toml");
    let rules = format!(
        "rules = [{{ port = \"6000\", to = {{ kind = \"sandbox\", lease = \"a\", port = 7000 }} }},\n\
         {{ port = \"5000\", to = {to} }}]\n"
    );
    fs::write(&file, rules).unwrap();
    let verb = format!("pool set web --vsock-policy {}", file.display());
    let output = world.daemon.output(&verb).unwrap();
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// A guest behind a hybrid VMM calls one of ours.
fn call(path: &Path, called: &mut Guest, port: u32) -> (UnixStream, Socket) {
    called.listen(Kind::Stream, port);
    let stream = UnixStream::connect(path).unwrap();
    let accepted = called.accept(Kind::Stream, port).unwrap();
    (stream, accepted)
}

fn pass(stream: &mut UnixStream, called: &mut Guest, accepted: Socket) {
    stream.write_all(b"hello").unwrap();
    assert_eq!(called.receive_exact(accepted, 5).unwrap(), b"hello");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_policy_that_one_lease_cannot_have_changes_nothing_for_any() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let folder = lab.folder();
        set(&world, folder, r#"{ kind = "host" }"#).unwrap();
        let (_, mut called) = world.lease("a");
        let lease = world.daemon.json("acquire web h --vsock=hybrid").unwrap();
        let socket = PathBuf::from(lease["vsock"]["socket"].as_str().unwrap());
        let port = |port: u32| PathBuf::from(format!("{}_{port}", socket.display()));
        let _vmm = UnixListener::bind(&socket).unwrap();
        // The owner has the port that the refused rule is for.
        let listener = world.spawn("vsock listen h 5000 --exec cat");
        wait_until("the owner listens", || port(5000).exists());
        let (mut stream, accepted) = call(&port(6000), &mut called, 7000);
        pass(&mut stream, &mut called, accepted);

        for (to, says) in [
            (r#"{ kind = "unix", path = "/run/nobody" }"#, "lease 'h'"),
            (r#"{ kind = "tcp", address = "0.0.0.0:80" }"#, "0.0.0.0:80"),
        ] {
            let refused = set(&world, folder, to).unwrap_err();
            assert!(refused.contains(says), "{refused}");
        }
        // Longer than until the daemon has compared its journal with the service.
        thread::sleep(Duration::from_secs(3));
        assert!(UnixStream::connect(&socket).is_ok(), "the VMM's socket");
        pass(&mut stream, &mut called, accepted);
        let mut owners = UnixStream::connect(port(5000)).unwrap();
        owners.write_all(b"cat").unwrap();
        let mut back = [0; 3];
        owners.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"cat");
        drop(owners);

        // With the port free, both have it at once, and what runs goes on.
        let (done, _, errors) = interrupt(listener);
        assert!(done, "{errors}");
        let to = r#"{ kind = "sandbox", lease = "a", port = 7001 }"#;
        set(&world, folder, to).unwrap();
        let (mut second, accepted_second) = call(&port(5000), &mut called, 7001);
        pass(&mut second, &mut called, accepted_second);
        pass(&mut stream, &mut called, accepted);
    });
}
