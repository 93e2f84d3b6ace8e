//! Private namespaces, a host to play, and guests: what the tests stand on.
//!
//! [`lab`] runs a test in network, mount and PID namespaces of its own, so that tests touch nothing of
//! the machine, run in parallel, and see every leak. [`host`] gives such a lab an uplink with a server
//! behind it, [`sandwire`] runs the built executable there, and guests sit on TAPs: [`fake_guest`] is a
//! thread of the test, [`guest`] has real kernels. [`capabilities`] says what this machine can do, so that
//! what can't be run is reported as not run.
//!
//! [`other_program`] is an eBPF program that somebody else put on an interface, [`older_program`] one of another version of the
//! product.
//!
//! [`podman`] runs real containers, [`containerd`] pods, [`openmetrics`] reads metrics as Prometheus does.
//!
//! [`traffic`] makes streams that can be compared at both ends; [`pinger`] pings while something changes; [`iperf3`] runs
//! that program; [`tun`] makes a tunnel without Ethernet; [`suspend`] stops a program as Ctrl-Z does; [`cgroup`]
//! makes cgroups for one test.
//!
//! The oracle is always another implementation: `ip`, `nft`, a kernel socket, a real guest. Nothing
//! here imports the product. A development dependency only; the demo uses it too.

pub mod capabilities;
pub mod cgroup;
pub mod command;
pub mod containerd;
pub mod counters;
pub mod fake_guest;
pub mod guest;
pub mod host;
pub mod http;
pub mod iperf3;
pub mod kept_program;
pub mod lab;
pub mod namespace;
pub mod older_program;
pub mod openmetrics;
pub mod other_program;
pub mod pinger;
pub mod podman;
pub mod sandwire;
pub mod snapshot;
pub mod suspend;
pub mod traffic;
pub mod tun;
