//! A capture that can't be written ends with a reason, in the service too, and the guest notices nothing.

use std::{
    fs,
    io::Read,
    path::Path,
    process::{Child, Command},
    time::Duration,
};

use rustix::process::{Signal, kill_process};
use sandwire_testlab::lab::{self, Lab};
use sandwire_vsock_guest::{Guest, Socket};

use super::{World, echo, finish, interrupt, open_until, piped, wait_until};

/// What is there before any packet.
const FILE_HEADER_BYTES: usize = 24;

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_capture_without_room_says_so_and_ends_and_the_guest_goes_on() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let (world, mut guest, listener, socket) = connected(lab);
        echo(&mut guest, socket, "before");

        let mut full = world.spawn("vsock capture a -w /dev/full");
        wait_until("the capture ends", || {
            echo(&mut guest, socket, "meanwhile");
            full.try_wait().unwrap().is_some()
        });
        let output = full.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let reason = "cannot capture vsock packets of lease a: /dev/full: No space left on device";
        assert!(errors.contains(reason), "{errors}");
        assert_eq!(output.status.code(), Some(2));

        // While one runs, there can't be a second: so the service has ended it.
        let file = lab.folder().join("a.pcap");
        let verb = format!("vsock capture a -w {}", file.display());
        let mut running = None;
        wait_until("another capture runs", || {
            let mut child = world.spawn(&verb);
            wait_until("it runs or is refused", || {
                file.exists() || child.try_wait().unwrap().is_some()
            });
            if file.exists() {
                running = Some(child);
            } else {
                finish(child);
            }
            running.is_some()
        });
        echo(&mut guest, socket, "after");
        wait_until("the packets are in its file, both ways", || {
            let text = packets(&file);
            text.contains("> 2.1024 PAYLOAD") && text.contains("2.1024 > 3.")
        });
        // The listener's command would go on for as long as the connection does.
        guest.close(socket).unwrap();
        for child in [running.unwrap(), listener] {
            let (done, _, errors) = interrupt(child);
            assert!(done, "{errors}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_capture_that_fills_its_disk_is_readable_to_its_end() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let (world, mut guest, listener, socket) = connected(lab);

        const ROOM: u64 = 256 * 1024;
        let disk = lab.folder().join("disk");
        fs::create_dir(&disk).unwrap();
        lab.run(&format!(
            "mount -t tmpfs -o size={ROOM} tmpfs {}",
            disk.display()
        ));
        let file = disk.join("a.pcap");
        let mut capture = world.spawn(&format!("vsock capture a -w {}", file.display()));
        // Lengths that end nowhere near the end of a page.
        let text = "x".repeat(1517);
        wait_until("the capture ends", || {
            echo(&mut guest, socket, &text);
            capture.try_wait().unwrap().is_some()
        });
        let output = capture.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let reason = format!(
            "cannot capture vsock packets of lease a: {}: No space left on device",
            file.display()
        );
        assert!(errors.contains(&reason), "{errors}");
        assert_eq!(output.status.code(), Some(2));

        // The disk is full but for a record, and what is there is read to its end.
        let length = fs::metadata(&file).unwrap().len();
        assert!((ROOM - 4096..=ROOM).contains(&length), "{length} bytes");
        let (done, text, errors) = tcpdump(&file);
        assert!(done && !errors.contains("truncated"), "{errors}");
        assert!(text.lines().count() > 150, "{text}");

        guest.close(socket).unwrap();
        let (done, _, errors) = interrupt(listener);
        assert!(done, "{errors}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_capture_says_how_much_is_missing_when_its_reader_was_slow() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let (world, mut guest, listener, socket) = connected(lab);
        let mut capture = world.spawn("vsock capture a -w -");
        let mut output = capture.stdout.take().unwrap();
        output.read_exact(&mut [0; FILE_HEADER_BYTES]).unwrap();
        // More than fits all that is between, both ways.
        let text = "x".repeat(64 * 1024);
        for _ in 0..256 {
            echo(&mut guest, socket, &text);
        }
        drop(output);
        let (done, _, errors) = finish(capture);
        assert!(done && errors.contains("packets are missing"), "{errors}");
        let traffic = world.daemon.json("vsock list a --channels").unwrap();
        let counted = &traffic[0]["traffic"]["capture_dropped_packets"];
        assert!(counted.as_u64().unwrap() > 0, "{traffic}");
        guest.close(socket).unwrap();
        let (done, _, errors) = interrupt(listener);
        assert!(done, "{errors}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_capture_ends_in_good_order_with_its_channel_and_not_with_its_service() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        for (name, is_released) in [("a", true), ("b", false)] {
            let (_, guest) = world.lease(name);
            let file = lab.folder().join(name);
            let capture = world.spawn(&format!("vsock capture {name} -w {}", file.display()));
            wait_until("it runs", || file.exists());
            match is_released {
                true => drop(world.run(&format!("release {name}"))),
                false => kill_process(world.service().unwrap(), Signal::KILL).unwrap(),
            }
            let output = capture.wait_with_output().unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            let expected = match is_released {
                true => (0, "the channel has ended"),
                false => (2, "the daemon or the service for vsock has ended"),
            };
            assert_eq!(output.status.code(), Some(expected.0), "{errors}");
            assert!(errors.contains(expected.1), "{errors}");
            drop(guest);
        }
    });
}

/// A world with a guest on the lease `a` that is connected to `cat`.
fn connected(lab: &Lab) -> (World, Guest, Child, Socket) {
    let world = World::start(lab);
    let (_, mut guest) = world.lease("a");
    world.run("vsock policy allow a 1024 host");
    let listener = world.spawn("vsock listen a 1024 --exec cat");
    let socket = open_until(&mut guest, 1024);
    (world, guest, listener, socket)
}

/// What tcpdump makes of a file that is still written to.
fn packets(file: &Path) -> String {
    tcpdump(file).1
}

/// Whether tcpdump reads a file, the packets, and what it has to complain about.
fn tcpdump(file: &Path) -> (bool, String, String) {
    let mut command = Command::new("tcpdump");
    command.args(["-n", "-t", "-r"]).arg(file);
    finish(piped(&mut command).spawn().unwrap())
}
