//! A capture that can't be written ends with a reason, in the service too, and the guest notices nothing.

use std::{path::Path, process::Command, time::Duration};

use sandwire_testlab::lab;

use super::{World, echo, finish, interrupt, open_until, wait_until};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_capture_without_room_says_so_and_ends_and_the_guest_goes_on() {
    lab::run_within(Duration::from_secs(120), |lab| {
        let world = World::start(lab);
        let (_, mut guest) = world.lease("a");
        world.run("vsock policy allow a 1024 host");
        let listener = world.spawn("vsock listen a 1024 --exec cat");
        let socket = open_until(&mut guest, 1024);
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

/// What tcpdump makes of a file.
fn packets(file: &Path) -> String {
    let output = Command::new("tcpdump")
        .args(["-n", "-t", "-r"])
        .arg(file)
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}
