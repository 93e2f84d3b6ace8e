//! A pool that moves between data paths under traffic.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    thread,
};

use sandwire_testlab::{host::ECHO_PORT, lab};
use serde_json::json;

use crate::{
    assert_in_touch,
    ebpf::{Pings, SECOND, World, pool, wait_until},
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_pool_moves_between_data_paths_under_traffic() {
    lab::run(|lab| {
        let world = World::without_pools(lab);
        let mut spec = pool("web", "netns", 0, 2, &json!({"uplink": "route"}));
        spec["data_path"] = json!("nft");
        world.daemon.create_pool(&spec).unwrap();
        world.route_back(0);
        let (lease, guest) = world.guest("web", "one");
        assert_in_touch(&lease, &guest);
        let mut connection = EchoConnection::open(&world, lease.ipv4);
        // The first move loads the programs, which takes seconds on a machine that runs other tests beside
        // this one.
        for (data_path, seconds) in [("ebpf", 15), ("nft", 8), ("ebpf", 8)] {
            let beyond = Pings::start_beyond(&world.beyond, lease.ipv4, seconds);
            let host = Pings::start(lease.ipv6, seconds);
            let pings = [("from beyond", beyond), ("from the host", host)];
            thread::sleep(SECOND);
            let change = json!({"data_path": data_path});
            world
                .daemon
                .call("PATCH", "/v1/pools/web", Some(&change))
                .unwrap();
            wait_until("the lease has moved", 20 * SECOND, || {
                world.detail(&lease)["data_path"] == data_path
            });
            let are_going_on = pings.iter().all(|(_, ping)| ping.go_on());
            assert!(are_going_on, "the pings were over before the move");
            for (whence, ping) in pings {
                assert_eq!(ping.lost(), 0, "packets lost to {data_path}, {whence}");
            }
            assert_in_touch(&lease, &guest);
            assert_eq!(
                world.detail(&lease)["defects"],
                json!([]),
                "with {data_path}"
            );
            connection.assert_alive();
        }
    });
}

/// A TCP connection from beyond to a guest's echo server.
struct EchoConnection(TcpStream);

impl EchoConnection {
    fn open(world: &World, address: IpAddr) -> Self {
        let target = SocketAddr::new(address, ECHO_PORT);
        let connect = || Ok(TcpStream::connect_timeout(&target, 5 * SECOND)?);
        let stream = world.beyond.inside(connect).unwrap();
        stream.set_read_timeout(Some(5 * SECOND)).unwrap();
        Self(stream)
    }

    fn assert_alive(&mut self) {
        self.0.write_all(b"still there?").unwrap();
        let mut answer = [0; 12];
        self.0.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"still there?");
    }
}
