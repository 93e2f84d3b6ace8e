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
    ebpf::{HERE, SECOND, World, assert_none_lost, ping, pool, wait_until},
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
        for data_path in ["ebpf", "nft", "ebpf"] {
            let pingers = [
                ("from beyond", ping(&world.beyond.path(), lease.ipv4)),
                ("from the host", ping(HERE.as_ref(), lease.ipv6)),
            ];
            thread::sleep(SECOND / 2);
            let change = json!({"data_path": data_path});
            // Refused while the slots that wait for sandboxes are still built anew after the move before.
            wait_until("the pool can be moved", 20 * SECOND, || {
                let moved = world.daemon.call("PATCH", "/v1/pools/web", Some(&change));
                moved.is_ok()
            });
            wait_until("the lease has moved", 20 * SECOND, || {
                world.detail(&lease)["data_path"] == data_path
            });
            thread::sleep(SECOND / 2);
            for (whence, pinger) in pingers {
                assert_none_lost(pinger, &format!("to {data_path}, {whence}"));
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
