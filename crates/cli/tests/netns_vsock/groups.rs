//! Groups of tenants, each with a service of its own.

use std::{io::Write, os::unix::net::UnixStream, path::PathBuf, time::Duration};

use rustix::process::{Signal, kill_process};
use sandwire_testlab::lab;
use sandwire_vsock_guest::{Guest, Kind, Socket, socket::State};

use super::{CONFIG, World, echo, finish, interrupt, open_until, wait_until};

/// They may acquire leases, and nothing else.
const TENANTS: &str = r#"
[[pool.access]]
verbs = ["acquire"]
uids = [2001, 2002, 2003]
"#;

/// Two groups of tenants, of whom the first has two.
const GROUPS: &str = r#"
[[vsock.group]]
name = "first"
uids = [2001, 2003]
[[vsock.group]]
name = "second"
uids = [2002]
"#;

/// A connection between two guests by a rule of the caller's.
pub(super) fn call(caller: &mut Guest, port: u32, called: &mut Guest) -> (Socket, Socket) {
    called.listen(Kind::Stream, 7000);
    let socket = caller.start_open(Kind::Stream, 2, port);
    let accepted = called.accept(Kind::Stream, 7000).unwrap();
    caller
        .wait_until("it is connected", |guest| {
            guest.socket(socket).state != State::Connecting
        })
        .unwrap();
    (socket, accepted)
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn groups_of_tenants_have_services_of_their_own() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let config = format!("socket_mode = \"0666\"\n{CONFIG}{TENANTS}{GROUPS}");
        let world = World::start_with(lab, &config, &["first", "second"]);
        let (_, mut everybodys) = world.lease("a");
        let mut caller = world.lease_of(2001, "a");
        let mut friend = world.lease_of(2003, "a");
        let mut stranger = world.lease_of(2002, "a");
        let [none, first, second] = [
            world.service(),
            world.service_of("first"),
            world.service_of("second"),
        ]
        .map(Option::unwrap);
        assert!(none != first && none != second && first != second);

        // Within a group other tenants' guests can be reached, if who manages the pool says so; beyond it not.
        for rule in [
            "7003 sandbox:2003/a:7000",
            "7002 sandbox:2002/a:7000",
            "7000 sandbox:0/a:7000",
        ] {
            world.run(&format!("vsock policy allow a --owner-uid 2001 {rule}"));
        }
        let (called, accepted) = call(&mut caller, 7003, &mut friend);
        // Both are called `a`, as is the lease of each.
        for (uid, peer) in [(2001, "a:7000 of user 2003"), (2003, "a of user 2001")] {
            let listed = world
                .daemon
                .json(&format!("vsock list a --owner-uid {uid}"));
            assert_eq!(listed.unwrap()[0]["peer"], peer);
        }
        stranger.listen(Kind::Stream, 7000);
        everybodys.listen(Kind::Stream, 7000);
        for (port, other) in [(7002, &mut stranger), (7000, &mut everybodys)] {
            assert!(caller.open_stream(port).is_err(), "port {port}");
            other.run_for(Duration::from_millis(100)).unwrap();
            assert!(other.try_accept(Kind::Stream, 7000).is_none());
        }

        // One service is killed: the connections of the others go on, its own are over.
        stranger.listen(Kind::Stream, 52);
        let mut client = world.spawn("vsock connect a --owner-uid 2002 52");
        let held = stranger.accept(Kind::Stream, 52).unwrap();
        kill_process(first, Signal::KILL).unwrap();
        let ended = caller.receive_to_end(called);
        assert!(ended.is_err(), "it is over: {ended:?}");
        assert!(friend.receive_to_end(accepted).is_err());
        wait_until("another service is there", || {
            world.service_of("first").is_some_and(|pid| pid != first)
        });
        assert_eq!(world.service_of("second"), Some(second));
        assert_eq!(world.service(), Some(none));
        let mut stdin = client.stdin.take().unwrap();
        stdin.write_all(b"still there?").unwrap();
        drop(stdin);
        assert_eq!(stranger.receive_to_end(held).unwrap(), b"still there?");
        stranger.send(held, b"yes").unwrap();
        stranger.close(held).unwrap();
        let (done, output, errors) = finish(client);
        assert!(done && output == "yes", "{errors}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_group_that_is_configured_no_more_leaves_its_channels_to_everybodys_service() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let config = format!("socket_mode = \"0666\"\n{CONFIG}{TENANTS}");
        let grouped = format!("{config}{GROUPS}");
        let mut world = World::start_with(lab, &grouped, &["first", "second"]);
        let mut guest = world.lease_of(2001, "a");
        world.run("vsock policy allow a --owner-uid 2001 1024 host");
        let path = guest_socket(&world, 2001);
        world.daemon.terminate().unwrap();
        world.daemon.configure(&config).unwrap();
        world.daemon.restart().unwrap();
        wait_until("the groups' services have ended", || {
            world.service_of("first").is_none() && world.service_of("second").is_none()
        });
        wait_until("its channel is there", || {
            UnixStream::connect(&path).is_ok()
        });
        guest.reconnect(&path).unwrap();
        let listener = world.spawn("vsock listen a --owner-uid 2001 1024 --exec cat");
        let socket = open_until(&mut guest, 1024);
        echo(&mut guest, socket, "by the other service");
        world.run("vsock policy reset a --owner-uid 2001");
        let reset = guest.receive_to_end(socket);
        assert!(reset.is_err(), "the policy counts: {reset:?}");
        let (done, _, errors) = interrupt(listener);
        assert!(done, "{errors}");
    });
}

/// Where the VMM of a tenant's lease `a` connects.
fn guest_socket(world: &World, uid: u32) -> PathBuf {
    let shown = world
        .daemon
        .json(&format!("show a --owner-uid {uid}"))
        .unwrap();
    PathBuf::from(shown["vsock"]["vhost_user_socket"].as_str().unwrap())
}
