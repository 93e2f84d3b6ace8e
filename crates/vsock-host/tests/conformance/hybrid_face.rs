//! The Unix socket by which the host reaches a guest: byte for byte what clients of Firecracker expect.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use sandwire_api::vsock::VsockRefusal;
use sandwire_vsock_guest::{Content, Guest, Kind};
use sandwire_vsock_host::limits::Limits;

use crate::host::{Host, Vm, clean, eventually, patient, read_exact, read_line, to_host, works};

const PORT: u32 = 5000;

fn client(vm: &Vm) -> UnixStream {
    patient(UnixStream::connect(vm.stream_socket()).expect("connecting"))
}

/// `OK` and a port, and nothing else.
fn assert_answer(line: &str) {
    let port = line
        .strip_prefix("OK ")
        .and_then(|rest| rest.strip_suffix('\n'))
        .and_then(|port| port.parse::<u32>().ok());
    assert!(port.is_some(), "{line:?}");
}

fn listening(vm: &Vm) -> Guest {
    let mut guest = vm.boot();
    guest.listen(Kind::Stream, PORT);
    guest
}

#[test]
fn a_handshake_may_come_in_any_pieces() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = listening(&vm);
    let line = b"CONNECT 5000\n";
    for cut in 1..line.len() {
        let mut client = client(&vm);
        client.write_all(&line[..cut]).expect("the first piece");
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(vm.traffic().connections, 0);
        client.write_all(&line[cut..]).expect("the second piece");
        let socket = guest.accept(Kind::Stream, PORT).expect("accepting");
        assert_answer(&read_line(&mut client));
        guest.reset(socket);
        vm.wait_for_connections(0);
    }
    clean(&guest);
}

#[test]
fn what_is_written_with_the_handshake_is_payload() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = listening(&vm);
    for length in [1, 20, 4096, 100_000] {
        let mut client = client(&vm);
        let payload = Content::new(length as u64).take(length);
        let mut all = b"CONNECT 5000\n".to_vec();
        all.extend(&payload);
        client.write_all(&all).expect("all at once");
        let socket = guest.accept(Kind::Stream, PORT).expect("accepting");
        let got = guest.receive_exact(socket, length).expect("receiving");
        assert_eq!(got, payload);
        assert_answer(&read_line(&mut client));
        guest.close(socket).expect("closing");
        assert_eq!(client.read(&mut [0; 8]).expect("the end"), 0);
    }
    vm.wait_for_connections(0);
    clean(&guest);
}

#[test]
fn a_second_handshake_is_payload_too() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = listening(&vm);
    let mut client = client(&vm);
    client
        .write_all(b"CONNECT 5000\nCONNECT 5001\n")
        .expect("both");
    let socket = guest.accept(Kind::Stream, PORT).expect("accepting");
    assert_eq!(
        guest.receive_exact(socket, 13).expect("receiving"),
        b"CONNECT 5001\n"
    );
    clean(&guest);
}

#[test]
fn a_guest_that_speaks_first_is_heard_after_the_answer() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = listening(&vm);
    for _ in 0..20 {
        let mut client = vm.dial(PORT);
        let socket = guest.accept(Kind::Stream, PORT).expect("accepting");
        guest.send(socket, b"SSH-2.0-guest\r\n").expect("sending");
        guest.close(socket).expect("closing");
        let mut all = String::new();
        client.read_to_string(&mut all).expect("reading to the end");
        let (answer, greeting) = all.split_once('\n').expect("two lines");
        assert_answer(&format!("{answer}\n"));
        assert_eq!(greeting, "SSH-2.0-guest\r\n");
    }
    clean(&guest);
}

#[test]
fn a_client_that_has_sent_all_hears_the_answer() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = listening(&vm);
    let mut client = client(&vm);
    client
        .write_all(b"CONNECT 5000\nrequest")
        .expect("all at once");
    client
        .shutdown(std::net::Shutdown::Write)
        .expect("half-closing");
    let socket = guest.accept(Kind::Stream, PORT).expect("accepting");
    let request = guest.receive_to_end(socket).expect("receiving");
    assert_eq!(request, b"request");
    guest.send(socket, b"response").expect("sending");
    guest.close(socket).expect("closing");
    assert_answer(&read_line(&mut client));
    assert_eq!(read_exact(&mut client, 8), b"response");
    assert_eq!(client.read(&mut [0; 8]).expect("the end"), 0);
    clean(&guest);
}

#[test]
fn what_is_no_handshake_is_hung_up_on() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = listening(&vm);
    let lines: [&[u8]; 9] = [
        b"\n",
        b"HELLO\n",
        b"CONNECT\n",
        b"CONNECT \n",
        b"CONNECT x\n",
        b"CONNECT -1\n",
        b"CONNECT 4294967296\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\0\0\0\0\0\n",
    ];
    for (count, line) in (1u64..).zip(lines) {
        let mut client = client(&vm);
        client.write_all(line).expect("writing");
        match client.read(&mut [0; 8]) {
            Ok(count) => assert_eq!(count, 0, "{line:?}"),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
        eventually("it to be counted", || {
            vm.refused(VsockRefusal::Handshake) == count
        });
    }
    guest.poll();
    assert!(guest.try_accept(Kind::Stream, PORT).is_none());
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn a_handshake_without_end_is_hung_up_on() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = vm.boot();
    let mut client = client(&vm);
    let mut written = 0;
    while client.write_all(&[b'C'; 1000]).is_ok() {
        written += 1000;
        assert!(written < 10_000_000, "it takes an endless line");
    }
    eventually("it to be counted", || {
        vm.refused(VsockRefusal::Handshake) == 1
    });
    works(&vm, &mut guest);
    clean(&guest);
}

#[test]
fn clients_that_never_speak_are_few_and_hung_up_on_in_time() {
    let mut host = Host::new(1);
    let limits = Limits {
        handshakes: 10,
        handshake_timeout: Duration::from_millis(500),
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[crate::host::PORT]));
    let mut guest = listening(&vm);
    let asked = Instant::now();
    let mut silent: Vec<UnixStream> = (0..10).map(|_| client(&vm)).collect();
    for client in &mut silent {
        assert!(matches!(client.read(&mut [0; 8]), Ok(0) | Err(_)));
    }
    let waited = asked.elapsed();
    assert!(waited >= Duration::from_millis(400), "only {waited:?}");
    assert!(waited < Duration::from_secs(60), "{waited:?}");
    // A thousand of them: those that speak are served as soon as there is room again.
    let crowd: Vec<UnixStream> = (0..300)
        .map(|_| UnixStream::connect(vm.stream_socket()).expect("connecting"))
        .collect();
    works(&vm, &mut guest);
    drop(crowd);
    let mut speaking = vm.dial(PORT);
    guest.accept(Kind::Stream, PORT).expect("accepting");
    assert_answer(&read_line(&mut speaking));
    clean(&guest);
}

#[test]
fn a_client_that_goes_before_the_answer_leaves_nothing() {
    let mut host = Host::new(1);
    let vm = host.vm();
    let mut guest = listening(&vm);
    for _ in 0..100 {
        drop(vm.dial(PORT));
    }
    guest
        .run_for(Duration::from_millis(100))
        .expect("answering them");
    while let Some(socket) = guest.try_accept(Kind::Stream, PORT) {
        drop(guest.receive_to_end(socket));
        guest.close(socket).expect("closing");
    }
    vm.wait_for_connections(0);
    works(&vm, &mut guest);
}

#[test]
fn a_guest_that_is_not_there_answers_nobody() {
    let mut host = Host::new(1);
    let limits = Limits {
        connect_timeout: Duration::from_millis(300),
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[crate::host::PORT]));
    let mut client = vm.dial(PORT);
    assert!(matches!(client.read(&mut [0; 8]), Ok(0) | Err(_)));
    vm.wait_for_connections(0);
    works(&vm, &mut vm.boot());
}

#[test]
fn a_guest_that_does_not_answer_is_given_up_in_time() {
    let mut host = Host::new(1);
    let limits = Limits {
        connect_timeout: Duration::from_millis(300),
        ..Limits::default()
    };
    let vm = host.vm_with(limits, to_host(&[crate::host::PORT]));
    let mut guest = listening(&vm);
    let mut client = vm.dial(PORT);
    // The guest sleeps. What it says afterwards comes too late, and harms nothing.
    assert!(matches!(client.read(&mut [0; 8]), Ok(0) | Err(_)));
    assert_eq!(vm.refused(VsockRefusal::TimedOut), 1);
    guest.run_for(Duration::from_millis(50)).expect("waking up");
    vm.wait_for_connections(0);
    works(&vm, &mut guest);
}
