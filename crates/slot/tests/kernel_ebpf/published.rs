//! Host ports that lead to a sandbox, whichever way its packets leave.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
};

use sandwire_api::{
    published_port::{Protocol, PublishPort},
    slot::DataPath,
};
use sandwire_datapath::{Datapath, folder_for};
use sandwire_slot::{kernel::KernelNetwork, network::Network, plan::SlotNumber};
use sandwire_testlab::{
    host::{BEYOND_IPV4, BEYOND_IPV6, Beyond, HOST_IPV4, HOST_IPV6, HTTP_PORT},
    lab,
};

use crate::{
    fixture::{
        EBPF_KINDS, INSTANCE, IPV4, IPV6, pool, prepare,
        sandbox::{Sandbox, attach, tenancy},
        talk::{IN_VAIN, PATIENCE, connect, http_get, udp_echo},
        tear_down, web,
    },
    switch::settings,
};

/// Host ports that lead to a sandbox: its web page, its echo, and UDP where nobody listens.
fn published(sandbox: &Sandbox) -> [(PublishPort, Vec<IpAddr>); 4] {
    let ports = [
        (Protocol::Tcp, 8080, 80),
        (Protocol::Tcp, 8007, 7),
        (Protocol::Udp, 8007, 7),
        (Protocol::Udp, 8999, 9999),
    ];
    ports.map(|(protocol, host_port, clone_port)| {
        let port = PublishPort {
            protocol,
            host_address: None,
            host_port,
            clone_port,
            nic: 0,
        };
        (port, sandbox.clone_addresses().to_vec())
    })
}

/// The guest says that nobody listens there, by an ICMP error that names the port as it was called.
fn is_refused(target: SocketAddr) -> bool {
    let any = if target.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let socket = UdpSocket::bind(any).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.connect(target).unwrap();
    socket.send(b"?").unwrap();
    let answer = socket.recv(&mut [0; 16]);
    answer.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Calls the ports of [`published`] on the host, from wherever the thread is.
#[track_caller]
fn assert_published(host: IpAddr, is_open: bool) {
    let (page, echo) = (SocketAddr::new(host, 8080), SocketAddr::new(host, 8007));
    if is_open {
        http_get(page).unwrap();
        udp_echo(echo, PATIENCE).unwrap();
        assert!(is_refused(SocketAddr::new(host, 8999)), "{host}");
    } else {
        connect(page, IN_VAIN).unwrap_err();
        udp_echo(echo, IN_VAIN).unwrap_err();
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn published_ports_lead_to_the_guest_until_they_are_withdrawn() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        // So an answer with the clone address as its source would arrive, and be seen as wrong.
        for prefix in [IPV4, IPV6] {
            beyond.route_through_host(prefix).unwrap();
        }
        let cases = EBPF_KINDS.map(|kind| ["{}", ROUTED].map(|policy| (kind, policy)));
        for (kind, policy) in cases.into_iter().flatten() {
            let plan = web(kind, policy);
            let network = prepare(&plan);
            let sandbox = Sandbox::start(&network, &plan, 0);
            let ports = published(&sandbox);
            for is_open in [false, true, false] {
                let published = if is_open { &ports[..] } else { &[] };
                network.set_published_ports(published).unwrap();
                for host in [IpAddr::from(HOST_IPV4), HOST_IPV6.into()] {
                    assert_published(host, is_open);
                    let remote = || {
                        assert_published(host, is_open);
                        Ok(())
                    };
                    beyond.inside(remote).unwrap();
                }
                if policy == ROUTED {
                    assert_goes_past_the_stack(&sandbox, &beyond);
                }
            }
            drop(sandbox.guest);
            tear_down(&network, &[sandbox.slot]);
            network.remove_pool(&plan).unwrap();
        }
    });
}

/// While no port is published, the kernel tracks no connections, and takes what it hears of one after that for its beginning.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_connection_of_the_host_s_stays_its_own_when_its_port_is_published() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        let plan = web("host", ROUTED);
        let network = prepare(&plan);
        let sandbox = Sandbox::start(&network, &plan, 0);
        for (host, ports) in [
            (IpAddr::from(HOST_IPV4), published(&sandbox)),
            (HOST_IPV6.into(), published(&sandbox)),
        ] {
            let at = SocketAddr::new(host, ports[0].0.host_port);
            let listener = TcpListener::bind(at).unwrap();
            let caller = beyond.inside(|| Ok(TcpStream::connect(at)?));
            let mut caller = caller.unwrap();
            let (mut own, _) = listener.accept().unwrap();
            drop(listener);
            network.set_published_ports(&ports).unwrap();
            own.set_read_timeout(Some(PATIENCE)).unwrap();
            for word in [b"one", b"two"] {
                caller.write_all(word).unwrap();
                let mut heard = [0; 3];
                own.read_exact(&mut heard).unwrap();
                assert_eq!(&heard, word);
            }
            // Others are led to the guest.
            beyond.inside(|| Ok(http_get(at)?)).unwrap();
            network.set_published_ports(&[]).unwrap();
        }
        drop(sandbox.guest);
        tear_down(&network, &[sandbox.slot]);
        network.remove_pool(&plan).unwrap();
    });
}

const ROUTED: &str = r#"{"uplink":"route"}"#;

/// What the guest begins itself, and its answers to those who call its own address, have that address.
#[track_caller]
fn assert_goes_past_the_stack(sandbox: &Sandbox, beyond: &Beyond) {
    let servers = [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()];
    for (server, own) in servers.into_iter().zip(sandbox.clone_addresses()) {
        let target = SocketAddr::new(server, HTTP_PORT);
        let page = sandbox.guest.fetch(target, PATIENCE).unwrap();
        assert!(page.contains(&own.to_string()), "{page}");
        let call = || {
            http_get(SocketAddr::new(own, 80))?;
            Ok(udp_echo(SocketAddr::new(own, 7), PATIENCE)?)
        };
        beyond.inside(call).unwrap();
    }
}

/// Has the guest echo a word over an open connection.
#[track_caller]
fn say(stream: &mut TcpStream, word: &[u8]) {
    stream.write_all(word).unwrap();
    let mut answer = vec![0; word.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, word);
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn published_ports_of_routed_sandboxes_outlive_the_daemon() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        let host = IpAddr::from(HOST_IPV4);
        let echo = SocketAddr::new(host, 8007);
        // The second time by other maps.
        let cases = EBPF_KINDS.map(|kind| [128, 256].map(|nics_max| (kind, nics_max)));
        for (kind, nics_max) in cases.into_iter().flatten() {
            let plan = web(kind, ROUTED);
            let network = KernelNetwork::open_with(settings(128)).unwrap();
            network.add_pool(&plan).unwrap();
            let sandbox = Sandbox::start(&network, &plan, 0);
            let ports = published(&sandbox);
            network.set_published_ports(&ports).unwrap();
            let mut inward = beyond.inside(|| Ok(connect(echo, PATIENCE)?)).unwrap();
            say(&mut inward, b"before");
            // As SIGKILL does: nothing is taken back.
            let after = KernelNetwork::open_with(settings(nics_max)).unwrap();
            after.add_pool(&plan).unwrap();
            let tenancy = tenancy(&after, &plan);
            after.adopt(&sandbox.slot, Some(&tenancy)).unwrap();
            after.switch_over().unwrap();
            say(&mut inward, b"before it knows of ports");
            beyond.inside(|| Ok(udp_echo(echo, PATIENCE)?)).unwrap();
            after.set_published_ports(&ports).unwrap();
            // Entries that were lost are made anew.
            after.deactivate(&sandbox.slot).unwrap();
            after.adopt(&sandbox.slot, Some(&tenancy)).unwrap();
            say(&mut inward, b"after");
            let remote = || {
                assert_published(host, true);
                Ok(())
            };
            beyond.inside(remote).unwrap();
            assert_eq!(after.inspect(&sandbox.slot).defects, []);
            after.set_published_ports(&[]).unwrap();
            drop(sandbox.guest);
            tear_down(&after, &[sandbox.slot]);
            after.remove_pool(&plan).unwrap();
            Datapath::remove(&folder_for(INSTANCE)).unwrap();
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn published_ports_of_a_routed_slot_that_moves_to_ebpf_and_back_answer_all_the_time() {
    lab::run(|_| {
        let beyond = Beyond::attach().unwrap();
        let host = IpAddr::from(HOST_IPV4);
        let nft = pool("web", ROUTED);
        let ebpf = nft.with_data_path(DataPath::Ebpf).unwrap();
        let network = prepare(&nft);
        let slot = nft.slot(SlotNumber(0));
        network.build(&slot).unwrap();
        let guest = attach(&slot);
        let sandbox = Sandbox { slot, guest };
        network.set_published_ports(&published(&sandbox)).unwrap();
        let remote = || {
            assert_published(host, true);
            Ok(())
        };
        // The guest's gateway must be known to it.
        sandbox.guest.ping(HOST_IPV4.into(), IN_VAIN).ok();
        beyond.inside(remote).unwrap();
        let echo = SocketAddr::new(host, 8007);
        let mut inward = beyond.inside(|| Ok(connect(echo, PATIENCE)?)).unwrap();
        for (plan, from) in [(&ebpf, &nft), (&nft, &ebpf)] {
            let moved = plan.slot(SlotNumber(0));
            let from = Some(from.spec.data_path);
            network.change_pool(plan, from).unwrap();
            let tenancy = moved.is_ebpf().then(|| tenancy(&network, plan));
            network.move_slot(&moved, tenancy.as_ref()).unwrap();
            network.change_pool(plan, None).unwrap();
            say(&mut inward, b"moved");
            beyond.inside(remote).unwrap();
        }
        network.set_published_ports(&[]).unwrap();
        drop(sandbox.guest);
        tear_down(&network, &[sandbox.slot]);
        network.remove_pool(&nft).unwrap();
    });
}
