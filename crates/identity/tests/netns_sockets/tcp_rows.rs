//! The table of identities that have TCP only: what isn't as in the other one. The players are the same.

use super::rows::{Row, rows};

/// Cases of the other table that are otherwise.
pub(crate) const OTHERWISE: &[&str] = &[
    "the loopback can't be reached by others nor by the host",
    "listening without binding leaves the socket on the wildcard, and others out",
];

pub(crate) const TCP_ROWS: &[Row] = rows! {
    "sockets of other kinds can't be made":
        a "fresh(SOCK_DGRAM, AF_INET)" => r#""EPROTONOSUPPORT""#;
        a "fresh(SOCK_DGRAM, AF_INET6)" => r#""EPROTONOSUPPORT""#;
        a "socket.socket(AF_INET, SOCK_RAW, IPPROTO_ICMP)" => r#""EPERM""#;
        a "socket.socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP)" => r#""EACCES""#;
        a "socket.socket(AF_INET, SOCK_STREAM, 262)" => r#""EPROTONOSUPPORT""#;
        a "c = socket.socket(AF_UNIX, SOCK_DGRAM)" => "null";
    "the loopback can't be reached by others nor by the host, whatever source they choose":
        a "l = listen('127.0.0.1', 5000); m = listen('::1', 5000); n = listen('0.0.0.0', 5001); o = listen('::', 5002)" => "null";
        b "dial('127.1.0.1', 5000)" => r#""ECONNREFUSED""#;
        b "dial('fd53:7764:6c6f:6f70::100', 5000)" => r#""ECONNREFUSED""#;
        host "dial('127.1.0.1', 5000)" => r#""ECONNREFUSED""#;
        host "dial('fd53:7764:6c6f:6f70::100', 5000)" => r#""ECONNREFUSED""#;
        host "dial('127.1.0.1', 5001)" => r#""ECONNREFUSED""#;
        host "dial('127.1.0.1', 5002)" => r#""ECONNREFUSED""#;
        host "dial('fd53:7764:6c6f:6f70::100', 5002)" => r#""ECONNREFUSED""#;
        host "c = socket.socket(); c.bind(('127.1.0.1', 0)); c.connect(('127.1.0.1', 5000))" => r#""ECONNREFUSED""#;
        host "c = socket.socket(AF_INET6); c.bind(('fd53:7764:6c6f:6f70::100', 0)); c.connect(('fd53:7764:6c6f:6f70::100', 5000))" => r#""ECONNREFUSED""#;
        a "c = [dial('127.0.0.1', 5000), dial('::1', 5000), dial('127.0.0.1', 5001), dial('127.0.0.1', 5002), dial('::1', 5002)]; r = [accepted(l), accepted(m), accepted(n), sorted([accepted(o)[0], accepted(o)[0]])]" => r#"[["127.0.0.1","127.0.0.1"],["::1","::1"],["127.0.0.1","127.0.0.1"],["::1","::ffff:127.0.0.1"]]"#;
        inner "c = dial('127.0.0.1', 5000); d = dial('::ffff:127.0.0.1', 5000, of=AF_INET6)" => "null";
        a "r = [accepted(l)[1], accepted(l)[1]]" => r#"["127.0.0.1","127.0.0.1"]"#;
    "the source of a call to the loopback that has ended is nobody's ticket":
        a "l = listen('127.0.0.1', 5000); c = socket.socket(); c.bind(('127.0.0.1', 6000)); c.connect(('127.0.0.1', 5000)); c.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack('ii', 1, 0)); accepted(l); c.close()" => "null";
        host "c = socket.socket(); c.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1); c.bind(('127.1.0.1', 6000)); c.connect(('127.1.0.1', 5000))" => r#""ECONNREFUSED""#;
        a "c = socket.socket(); c.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1); c.bind(('127.0.0.1', 6000)); c.connect(('127.0.0.1', 5000)); r = accepted(l)[1]" => r#""127.0.0.1""#;
    "a server of both families is at its own loopback, at no wildcard":
        a "l = listen('::', 8080); r = l.getsockname()[:2]" => r#"["::",8080]"#;
        host "r = [name for name in bound('tcp', 8080) if name != '127.1.0.1']" => "[]";
        peer "dial('192.0.2.1', 8080)" => r#""ECONNREFUSED""#;
        peer "dial('2001:db8::1', 8080)" => r#""ECONNREFUSED""#;
        peer "c = [dial(to, 8080) for to in ('10.77.0.1', '10.77.0.9', 'fd77::1', 'fd77::9')]" => "null";
        a "r = sorted(accepted(l)[0] for each in range(4))" => r#"["::ffff:10.77.0.1","::ffff:10.77.0.9","fd77::1","fd77::9"]"#;
    "IPV6_V6ONLY that was set and taken back":
        a "l = socket.socket(AF_INET6); l.setsockopt(SOL_IPV6, IPV6_V6ONLY, 1); l.setsockopt(SOL_IPV6, IPV6_V6ONLY, 0); l.bind(('::', 8080)); l.listen(4)" => "null";
        peer "c = dial('10.77.0.9', 8080)" => "null";
        a "r = accepted(l)[0]" => r#""::ffff:10.77.0.9""#;
    "a socket of both families that connects instead of listening":
        a "make(SOCK_STREAM, '::', 0).connect(('2001:db8::2', 9))" => r#""EADDRNOTAVAIL""#;
        peer "l = listen('192.0.2.2', 9000)" => "null";
        a "c = socket.socket(AF_INET6); c.setsockopt(IPPROTO_IP, 24, 1); c.bind(('::', 0)); c.connect(('::ffff:192.0.2.2', 9000)); r = c.getsockname()[0]" => r#""::ffff:10.77.0.1""#;
        peer "r = accepted(l)[1]" => r#""10.77.0.1""#;
    "who listens without a bind hears nothing":
        a "l = fresh(SOCK_STREAM, AF_INET); l.listen(4); p = l.getsockname()[1]; r = p > 0" => "true";
        a "dial('10.77.0.1', p)" => r#""ECONNREFUSED""#;
        a "dial('127.0.0.1', p)" => r#""ECONNREFUSED""#;
        a "m = fresh(SOCK_STREAM, AF_INET6); m.listen(4); q = m.getsockname()[1]; dial('fd77::1', q)" => r#""ECONNREFUSED""#;
        a "dial('2001:db8::1', q)" => r#""ECONNREFUSED""#;
        a "dial('192.0.2.1', p)" => r#""ECONNREFUSED""#;
        a "l.setsockopt(SOL_SOCKET, 25, b'')" => r#""EPERM""#;
        a "l.setsockopt(SOL_SOCKET, 62, 0)" => r#""EPERM""#;
        a "l.setsockopt(SOL_SOCKET, 62, 1)" => r#""EPERM""#;
    "nor does who listens after a bind that failed":
        host "l = listen('0.0.0.0', 7000)" => "null";
        a "l = fresh(SOCK_STREAM, AF_INET); l.bind(('0.0.0.0', 7000))" => r#""EADDRINUSE""#;
        a "l.listen(4); p = l.getsockname()[1]; dial('192.0.2.1', p)" => r#""ECONNREFUSED""#;
        a "dial('10.77.0.1', p)" => r#""ECONNREFUSED""#;
};
