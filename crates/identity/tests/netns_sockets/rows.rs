//! The table. Identity a: 10.77.0.1, fd77::1, and as further addresses 10.77.0.9, fd77::9. Identity b: 10.77.0.2,
//! fd77::2. Identity only4: 10.77.0.3. The host: 192.0.2.1, 2001:db8::1. The peer on the wire: 192.0.2.2, 2001:db8::2.

/// One case.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) case: &'static str,
    /// Who, what, and the answer as JSON; several that are right with `|` between.
    pub(crate) steps: &'static [(&'static str, &'static str, &'static str)],
}

macro_rules! rows {
    ($($case:literal: $($who:ident $code:literal => $expected:literal;)+)+) => {
        &[$(Row { case: $case, steps: &[$((stringify!($who), $code, $expected),)+] },)+]
    };
}
pub(crate) use rows;

pub(crate) const ROWS: &[Row] = rows! {
    "two identities serve the same port on the wildcard":
        a "l = listen('0.0.0.0', 8080)" => "null";
        b "l = listen('0.0.0.0', 8080)" => "null";
        host "r = bound('tcp', 8080)" => r#"["10.77.0.1","10.77.0.2"]"#;
        peer "c = dial('10.77.0.1', 8080); d = dial('10.77.0.2', 8080)" => "null";
        a "r = accepted(l)" => r#"["10.77.0.1","192.0.2.2"]"#;
        b "r = accepted(l)" => r#"["10.77.0.2","192.0.2.2"]"#;
    "two identities serve the same port on the wildcard of IPv6":
        a "l = listen('::', 8080)" => "null";
        b "l = listen('::', 8080)" => "null";
        host "r = bound('tcp', 8080)" => "[]";
        peer "c = dial('fd77::1', 8080); d = dial('fd77::2', 8080)" => "null";
        a "r = accepted(l)" => r#"["fd77::1","2001:db8::2"]"#;
        b "r = accepted(l)" => r#"["fd77::2","2001:db8::2"]"#;
    "getsockname shows the wildcard that was asked for, and the truth once connected":
        a "l = listen('0.0.0.0', 8080); m = listen('::', 8081); r = [l.getsockname()[0], m.getsockname()[0]]" => r#"["0.0.0.0","::"]"#;
        peer "l = listen('192.0.2.2', 9000)" => "null";
        a "c = make(SOCK_STREAM, '0.0.0.0', 0); c.connect(('192.0.2.2', 9000)); r = c.getsockname()[0]" => r#""10.77.0.1""#;
    "own addresses may be bound to":
        a "l = listen('10.77.0.1', 8080); m = listen('10.77.0.9', 8080); n = listen('fd77::9', 8080)" => "null";
        host "r = bound('tcp', 8080)" => r#"["10.77.0.1","10.77.0.9","fd77::9"]"#;
    "addresses of others and of the host may not be bound to":
        a "listen('10.77.0.2', 8080)" => r#""EADDRNOTAVAIL""#;
        a "listen('fd77::2', 8080)" => r#""EADDRNOTAVAIL""#;
        a "listen('192.0.2.1', 8080)" => r#""EADDRNOTAVAIL""#;
        a "udp('192.0.2.1', 8080)" => r#""EADDRNOTAVAIL""#;
        a "listen('::ffff:192.0.2.1', 8080)" => r#""EADDRNOTAVAIL""#;
        a "udp('127.1.1.1', 8080)" => r#""EADDRNOTAVAIL""#;
    "a wildcard without an address of its family can't be had":
        only4 "l = listen('::', 8080)" => "null";
        host "r = bound('tcp', 8080)" => r#"["::ffff:10.77.0.3"]"#;
        only4 "listen('::', 8081, v6only=1)" => r#""EINVAL""#;
        only4 "dial('2001:db8::2', 9000)" => r#""ENETUNREACH""#;
    "IP_FREEBIND and IP_TRANSPARENT give no address of others":
        a "listen('10.77.0.2', 8080, freebind=1)" => r#""EADDRNOTAVAIL""#;
        a "listen('198.51.100.1', 8080, freebind=1)" => r#""EADDRNOTAVAIL""#;
        a "listen('198.51.100.1', 8080, transparent=1)" => r#""EADDRNOTAVAIL""#;
    "a multicast address may be bound to":
        a "u = udp('239.1.2.3', 8080); v = udp('ff05::114', 8080)" => "null";
    "outgoing TCP carries the identity's address":
        peer "l = listen('192.0.2.2', 9000); m = listen('2001:db8::2', 9000)" => "null";
        a "c = dial('192.0.2.2', 9000); d = dial('2001:db8::2', 9000); r = [c.getsockname()[0], c.getpeername()[0]]" => r#"["10.77.0.1","192.0.2.2"]"#;
        peer "r = [accepted(l)[1], accepted(m)[1]]" => r#"["10.77.0.1","fd77::1"]"#;
        b "c = dial('::ffff:192.0.2.2', 9000)" => "null";
        peer "r = accepted(l)[1]" => r#""10.77.0.2""#;
    "a further address can be the source of TCP that asks for it":
        peer "l = listen('192.0.2.2', 9000)" => "null";
        a "c = make(SOCK_STREAM, '10.77.0.9', 0); c.connect(('192.0.2.2', 9000))" => "null";
        peer "r = accepted(l)[1]" => r#""10.77.0.9""#;
    "a process in a cgroup below has the identity":
        peer "l = listen('192.0.2.2', 9000)" => "null";
        inner "c = dial('192.0.2.2', 9000)" => "null";
        peer "r = accepted(l)[1]" => r#""10.77.0.1""#;
    "outgoing UDP of an unbound socket carries the identity's address":
        peer "s = udp('192.0.2.2', 9000); t = udp('2001:db8::2', 9000)" => "null";
        a "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('192.0.2.2', 9000))" => "null";
        peer "r = heard(s)" => r#"["question","10.77.0.1"]"#;
        a "r = answer(c)" => r#"["answer","192.0.2.2"]"#;
        a "c = fresh(SOCK_DGRAM, AF_INET6); c.sendto(b'question', ('2001:db8::2', 9000))" => "null";
        peer "r = heard(t)" => r#"["question","fd77::1"]"#;
        a "r = answer(c)" => r#"["answer","2001:db8::2"]"#;
    "connected UDP carries the identity's address":
        peer "s = udp('192.0.2.2', 9000)" => "null";
        a "c = dial('192.0.2.2', 9000, kind=SOCK_DGRAM); c.send(b'question'); r = c.getsockname()[0]" => r#""10.77.0.1""#;
        peer "r = heard(s)" => r#"["question","10.77.0.1"]"#;
        a "r = answer(c)" => r#"["answer","192.0.2.2"]"#;
    "UDP may be connected again, and to another family's mapped addresses":
        peer "s = udp('192.0.2.2', 9000); t = udp('192.0.2.2', 9001)" => "null";
        a "c = dial('::ffff:192.0.2.2', 9000, kind=SOCK_DGRAM); c.connect(('::ffff:192.0.2.2', 9001)); c.send(b'question')" => "null";
        peer "r = heard(t)" => r#"["question","10.77.0.1"]"#;
    "UDP that was sent from before it is connected has no source of its own any more":
        a "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('192.0.2.2', 9000)); c.connect(('192.0.2.2', 9000))" => r#""EADDRNOTAVAIL""#;
    "UDP with the wildcard of both families and no port sends to both":
        peer "s = udp('192.0.2.2', 9000); t = udp('2001:db8::2', 9000)" => "null";
        a "c = udp('::', 0); c.sendto(b'question', ('::ffff:192.0.2.2', 9000)); c.sendto(b'question', ('2001:db8::2', 9000))" => "null";
        peer "r = [heard(s)[1], heard(t)[1]]" => r#"["10.77.0.1","fd77::1"]"#;
        a "r = sorted([answer(c)[1], answer(c)[1]])" => r#"["2001:db8::2","::ffff:192.0.2.2"]"#;
    "UDP with the wildcard of both families and no port can't be connected":
        a "udp('::', 0).connect(('2001:db8::2', 9000))" => r#""EADDRNOTAVAIL""#;
        a "udp('::', 0).connect(('::ffff:192.0.2.2', 9000))" => r#""EADDRNOTAVAIL""#;
        a "c = udp('fd77::1', 0); c.connect(('2001:db8::2', 9000)); d = udp('0.0.0.0', 0); d.connect(('192.0.2.2', 9000)); r = [c.getsockname()[0], d.getsockname()[0]]" => r#"["fd77::1","10.77.0.1"]"#;
        only4 "c = udp('::', 0); c.connect(('::ffff:192.0.2.2', 9000)); r = c.getsockname()[0]" => r#""::ffff:10.77.0.3""#;
    "UDP on the wildcard that the kernel keeps hears nothing for the host":
        peer "s = udp('192.0.2.2', 9000)" => "null";
        a "c = udp('::', 0); c.sendto(b'question', ('::ffff:192.0.2.2', 9000))" => "null";
        peer "d, p = s.recvfrom(100); s.sendto(b'x', ('192.0.2.1', p[1]))" => "null";
        a "hears(c)" => r#""TIMEOUT""#;
        peer "s.sendto(b'x', ('10.77.0.1', p[1]))" => "null";
        a "r = hears(c, 60)" => r#""x""#;
    "a source chosen with the message must be the identity's own":
        peer "s = udp('192.0.2.2', 9000)" => "null";
        a "c = fresh(SOCK_DGRAM, AF_INET); sent_from(c, '10.77.0.2', '192.0.2.2', 9000)" => r#""EADDRNOTAVAIL""#;
        a "sent_from(c, '192.0.2.1', '192.0.2.2', 9000)" => r#""EADDRNOTAVAIL""#;
        a "sent_from(c, '10.77.0.9', '192.0.2.2', 9000)" => "null";
        peer "r = heard(s)" => r#"["question","10.77.0.9"]"#;
    "UDP servers of two identities on one port":
        a "s = udp('0.0.0.0', 5353)" => "null";
        b "s = udp('0.0.0.0', 5353)" => "null";
        host "r = bound('udp', 5353)" => r#"["10.77.0.1","10.77.0.2"]"#;
        peer "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('10.77.0.2', 5353))" => "null";
        b "r = heard(s)" => r#"["question","192.0.2.2"]"#;
        peer "r = answer(c)" => r#"["answer","10.77.0.2"]"#;
    "identities reach each other, and see who it is":
        a "l = listen('0.0.0.0', 8080); s = udp('0.0.0.0', 8080)" => "null";
        b "c = dial('10.77.0.1', 8080); d = fresh(SOCK_DGRAM, AF_INET); d.sendto(b'question', ('10.77.0.1', 8080))" => "null";
        a "r = [accepted(l)[1], heard(s)[1]]" => r#"["10.77.0.2","10.77.0.2"]"#;
        b "r = answer(d)" => r#"["answer","10.77.0.1"]"#;
    "the loopback is the identity's own":
        a "l = listen('127.0.0.1', 5000); r = l.getsockname()[0]" => r#""127.0.0.1""#;
        b "l = listen('127.0.0.1', 5000)" => "null";
        host "l = listen('127.0.0.1', 5000); r = bound('tcp', 5000)" => r#"["127.0.0.1","127.1.0.1","127.1.1.1"]"#;
        a "c = dial('127.0.0.1', 5000); r = [c.getsockname()[0], c.getpeername()[0]]" => r#"["127.0.0.1","127.0.0.1"]"#;
        a "r = accepted(l)" => r#"["127.0.0.1","127.0.0.1"]"#;
    "the loopback can't be reached by others nor by the host":
        a "l = listen('127.0.0.1', 5000); m = listen('::1', 5000)" => "null";
        b "dial('127.0.0.1', 5000)" => r#""ECONNREFUSED""#;
        b "dial('127.1.0.1', 5000)" => r#""ECONNREFUSED""#;
        b "dial('::1', 5000)" => r#""ECONNREFUSED""#;
        b "dial('fd53:7764:6c6f:6f70::100', 5000)" => r#""ECONNREFUSED""#;
        host "dial('127.0.0.1', 5000)" => r#""ECONNREFUSED""#;
        host "dial('127.1.0.1', 5000, patience=2)" => r#""TIMEOUT""#;
        host "dial('fd53:7764:6c6f:6f70::100', 5000, patience=2)" => r#""TIMEOUT""#;
        host "c = socket.socket(); c.settimeout(2); c.bind(('127.1.0.1', 0)); c.connect(('127.1.0.1', 5000))" => r#""TIMEOUT""#;
    "UDP at the loopback can't be reached by the host":
        a "s = udp('127.0.0.1', 5000); t = udp('::1', 5000)" => "null";
        host "c = udp('127.1.0.1', 0); c.sendto(b'x', ('127.1.0.1', 5000)); d = fresh(SOCK_DGRAM, AF_INET6); d.sendto(b'x', ('fd53:7764:6c6f:6f70::100', 5000))" => "null";
        a "hears(s)" => r#""TIMEOUT""#;
        a "hears(t)" => r#""TIMEOUT""#;
        a "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('127.0.0.1', 5000)); s.settimeout(60); r = heard(s)" => r#"["question","127.0.0.1"]"#;
        a "r = answer(c)" => r#"["answer","127.0.0.1"]"#;
    "the loopback of IPv6":
        a "l = listen('::1', 5000); s = udp('::1', 5000)" => "null";
        b "l = listen('::1', 5000)" => "null";
        a "c = dial('::1', 5000); r = [c.getsockname()[0], c.getpeername()[0]]" => r#"["::1","::1"]"#;
        a "r = accepted(l)" => r#"["::1","::1"]"#;
        a "c = fresh(SOCK_DGRAM, AF_INET6); c.sendto(b'question', ('::1', 5000)); r = heard(s)" => r#"["question","::1"]"#;
        a "r = answer(c)" => r#"["answer","::1"]"#;
    "other addresses of 127.0.0.0/24, and the wildcard as a destination":
        a "l = listen('127.0.0.53', 5000); m = listen('127.0.0.1', 5001); c = dial('127.0.0.53', 5000); d = dial('0.0.0.0', 5001); r = [c.getpeername()[0], d.getpeername()[0]]" => r#"["127.0.0.53","127.0.0.1"]"#;
        host "r = bound('tcp', 5000)" => r#"["127.1.0.53"]"#;
    "a TCP server on the wildcard hears the loopback and every address":
        a "l = listen('0.0.0.0', 8080); c = dial('127.0.0.1', 8080); r = [c.getpeername()[0], accepted(l)]" => r#"["127.0.0.1",["127.0.0.1","127.0.0.1"]]"#;
        peer "c = dial('10.77.0.9', 8080)" => "null";
        a "r = accepted(l)" => r#"["10.77.0.9","192.0.2.2"]"#;
    "a TCP server of both families hears every address of both":
        a "l = listen('::', 8080)" => "null";
        peer "c = [dial(to, 8080) for to in ('10.77.0.1', '10.77.0.9', 'fd77::1', 'fd77::9')]" => "null";
        a "r = sorted(accepted(l)[0] for each in range(4))" => r#"["::ffff:10.77.0.1","::ffff:10.77.0.9","fd77::1","fd77::9"]"#;
        a "c = [dial('127.0.0.1', 8080), dial('::1', 8080)]; r = sorted(accepted(l)[0] for each in range(2))" => r#"["::1","::ffff:127.0.0.1"]"#;
    "IPV6_V6ONLY keeps IPv4 out":
        a "l = listen('::', 8080, v6only=1)" => "null";
        peer "dial('10.77.0.1', 8080)" => r#""ECONNREFUSED""#;
        peer "c = dial('fd77::9', 8080)" => "null";
        a "r = accepted(l)[0]" => r#""fd77::9""#;
        a "m = listen('0.0.0.0', 8080)" => "null";
        peer "c = dial('10.77.0.9', 8080)" => "null";
        a "r = accepted(m)[0]" => r#""10.77.0.9""#;
    "a port is shared between the wildcard and one address":
        a "l = listen('0.0.0.0', 8080); m = listen('10.77.0.9', 8080)" => "null";
        peer "c = dial('10.77.0.9', 8080); d = dial('10.77.0.1', 8080)" => "null";
        a "r = [accepted(m)[0], accepted(l)[0]]" => r#"["10.77.0.9","10.77.0.1"]"#;
    "a port that is let go of is closed at every address":
        a "l = listen('0.0.0.0', 8080); l.close()" => "null";
        peer "dial('10.77.0.9', 8080)" => r#""ECONNREFUSED""#;
        peer "dial('10.77.0.1', 8080)" => r#""ECONNREFUSED""#;
    "a service of the host on the wildcard is not at the identity's addresses":
        host "l = listen('0.0.0.0', 7000)" => "null";
        peer "dial('10.77.0.1', 7000)" => r#""ECONNREFUSED""#;
        a "dial('127.0.0.1', 7000)" => r#""ECONNREFUSED""#;
        a "c = dial('192.0.2.1', 7000)" => "null";
        host "r = accepted(l)[1]" => r#""10.77.0.1""#;
    "a port that the host holds on the wildcard can be had for TCP of both families":
        host "l = listen('0.0.0.0', 7000); m = listen('::', 7000, v6only=1)" => "null";
        a "l = listen('::', 7000); r = l.getsockname()[:2]" => r#"["::",7000]"#;
        peer "c = dial('10.77.0.1', 7000); d = dial('fd77::9', 7000)" => "null";
        a "r = sorted([accepted(l)[0], accepted(l)[0]])" => r#"["::ffff:10.77.0.1","fd77::9"]"#;
    "a port of both families that another socket of the identity has":
        a "l = listen('::', 8080); listen('::', 8080)" => r#""EADDRINUSE""#;
        a "l.close(); l = listen('::', 8080, reuseport=1); m = listen('::', 8080, reuseport=1)" => "null";
    "a socket on the wildcard of both families is not at the host's addresses":
        a "l = listen('::', 8080)" => "null";
        peer "dial('192.0.2.1', 8080)" => r#""ECONNREFUSED""#;
        a "m = listen('::', 0); r = m.getsockname()[1] > 0" => "true";
        a "c = dial('10.77.0.1', m.getsockname()[1]); r = accepted(m)[0]" => r#""::ffff:10.77.0.1""#;
        a "make(SOCK_STREAM, '::', 0).connect(('2001:db8::2', 9))" => r#""EADDRNOTAVAIL""#;
    "a port that the host holds on the wildcard can't be had otherwise":
        host "l = listen('0.0.0.0', 7000); u = udp('0.0.0.0', 7000)" => "null";
        a "listen('0.0.0.0', 7000)" => r#""EADDRINUSE""#;
        a "udp('0.0.0.0', 7000)" => r#""EADDRINUSE""#;
    "a UDP service of the host on the wildcard is not at the identity's loopback":
        host "u = udp('0.0.0.0', 7000)" => "null";
        a "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('127.0.0.1', 7000))" => r#""ECONNREFUSED""#;
        a "dial('127.0.0.1', 7000, kind=SOCK_DGRAM)" => r#""ECONNREFUSED""#;
    "SO_REUSEPORT shares a port inside an identity, and not with others":
        a "l = listen('0.0.0.0', 8080, reuseport=1); m = listen('0.0.0.0', 8080, reuseport=1)" => "null";
        b "l = listen('0.0.0.0', 8080, reuseport=1)" => "null";
        peer "c = [dial('10.77.0.9', 8080) for each in range(16)]" => "null";
        a "m.settimeout(0.2); l.settimeout(0.2); r = 0\nfor each in (l, m):\n try:\n  while True: accepted(each); r += 1\n except OSError: pass" => "16";
        a "m.close()" => "null";
        peer "c = dial('10.77.0.9', 8080)" => "null";
        a "l.settimeout(60); r = accepted(l)[0]" => r#""10.77.0.9""#;
    "SO_REUSEPORT shares a port of both families, if all who have it say so":
        a "l = listen('::', 8080, reuseport=1); m = listen('::', 8080, reuseport=1)" => "null";
        peer "c = [dial(to, 8080) for to in ('10.77.0.9', 'fd77::1') for each in range(8)]" => "null";
        a "m.settimeout(0.2); l.settimeout(0.2); count = []\nfor each in (l, m):\n found = 0\n try:\n  while True: accepted(each); found += 1\n except OSError: count.append(found)\nr = [sum(count), min(count) > 0]" => "[16,true]";
        a "m.close(); l.settimeout(60)" => "null";
        peer "c = dial('10.77.0.9', 8080)" => "null";
        a "r = accepted(l)[0]" => r#""::ffff:10.77.0.9""#;
        a "l = listen('::', 8081); listen('::', 8081, reuseport=1)" => r#""EADDRINUSE""#;
    "a listener that was shut down, and is not closed, takes nothing from others of its port":
        a "l = listen('0.0.0.0', 8080, reuseport=1); l.shutdown(socket.SHUT_RD); m = listen('0.0.0.0', 8080, reuseport=1)" => "null";
        peer "c = dial('10.77.0.9', 8080)" => "null";
        a "r = accepted(m)[0]" => r#""10.77.0.9""#;
        a "n = listen('::', 8081, reuseport=1); n.shutdown(socket.SHUT_RD); o = listen('::', 8081, reuseport=1)" => "null";
        peer "d = dial('fd77::1', 8081)" => "null";
        a "r = accepted(o)[0]" => r#""fd77::1""#;
        a "l.listen(4); m.close()" => "null";
        peer "e = dial('10.77.0.9', 8080)" => "null";
        a "r = accepted(l)[0]" => r#""10.77.0.9""#;
    "a UDP server on the wildcard is at the loopback too":
        a "s = udp('0.0.0.0', 5353); c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('127.0.0.1', 5353)); r = heard(s)[0]" => r#""question""#;
        a "r = answer(c)" => r#"["answer","127.0.0.1"]"#;
        a "d = dial('127.0.0.1', 5353, kind=SOCK_DGRAM); d.send(b'question'); heard(s); r = [d.getpeername()[0], answer(d)]" => r#"["127.0.0.1",["answer","127.0.0.1"]]"#;
        a "t = udp('::', 5354)" => "null";
        daemon "look" => "null";
        a "e = fresh(SOCK_DGRAM, AF_INET6); e.sendto(b'question', ('::1', 5354)); heard(t); r = answer(e)" => r#"["answer","::1"]"#;
    "a UDP server on the wildcard has one address until a daemon looks":
        a "s = udp('0.0.0.0', 5353)" => "null";
        host "r = bound('udp', 5353)" => r#"["10.77.0.1"]"#;
        peer "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('10.77.0.9', 5353))" => "null";
        a "hears(s)" => r#""TIMEOUT""#;
        daemon "look" => "null";
        peer "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('10.77.0.9', 5353))" => "null";
        a "r = heard(s)" => r#"["question","192.0.2.2"]"#;
        peer "r = answer(c)" => r#"["answer","10.77.0.9"]"#;
        peer "c.sendto(b'question', ('10.77.0.1', 5353))" => "null";
        a "r = heard(s)" => r#"["question","192.0.2.2"]"#;
        peer "r = answer(c)" => r#"["answer","10.77.0.1"]"#;
        peer "d = dial('10.77.0.9', 5353, kind=SOCK_DGRAM); d.send(b'question')" => "null";
        a "r = heard(s)" => r#"["question","192.0.2.2"]"#;
        peer "r = answer(d)" => r#"["answer","10.77.0.9"]"#;
        b "e = dial('10.77.0.9', 5353, kind=SOCK_DGRAM); e.send(b'question')" => "null";
        a "r = heard(s)" => r#"["question","10.77.0.2"]"#;
        b "r = answer(e)" => r#"["answer","10.77.0.9"]"#;
        a "f = dial('10.77.0.9', 5353, kind=SOCK_DGRAM); f.send(b'question'); r = [heard(s), answer(f)]" => r#"[["question","10.77.0.1"],["answer","10.77.0.9"]]"#;
    "a UDP server on the wildcard of both families hears both, and answers from where it was asked":
        a "t = udp('::', 5354); r = t.getsockname()[:2]" => r#"["::",5354]"#;
        host "r = bound('udp', 5354)" => r#"["::ffff:10.77.0.1"]"#;
        daemon "look" => "null";
        peer "c = fresh(SOCK_DGRAM, AF_INET6); c.sendto(b'question', ('fd77::1', 5354))" => "null";
        a "r = heard(t)" => r#"["question","2001:db8::2"]"#;
        peer "r = answer(c)" => r#"["answer","fd77::1"]"#;
        peer "c.sendto(b'question', ('fd77::9', 5354))" => "null";
        a "r = heard(t)" => r#"["question","2001:db8::2"]"#;
        peer "r = answer(c)" => r#"["answer","fd77::9"]"#;
        peer "d = fresh(SOCK_DGRAM, AF_INET); d.sendto(b'question', ('10.77.0.1', 5354))" => "null";
        a "r = heard(t)" => r#"["question","::ffff:192.0.2.2"]"#;
        peer "r = answer(d)" => r#"["answer","10.77.0.1"]"#;
        peer "d.sendto(b'question', ('10.77.0.9', 5354))" => "null";
        a "r = heard(t)" => r#"["question","::ffff:192.0.2.2"]"#;
        peer "r = answer(d)" => r#"["answer","10.77.0.9"]"#;
        a "e = dial('::1', 5354, kind=SOCK_DGRAM); e.send(b'question'); r = [heard(t)[0], answer(e)]" => r#"["question",["answer","::1"]]"#;
        a "f = dial('127.0.0.1', 5354, kind=SOCK_DGRAM); f.send(b'question'); r = [heard(t)[0], answer(f)]" => r#"["question",["answer","127.0.0.1"]]"#;
    "a UDP server on the wildcard of both families calls both":
        peer "s = udp('192.0.2.2', 9000); t = udp('2001:db8::2', 9000)" => "null";
        a "c = udp('::', 5354); c.sendto(b'question', ('::ffff:192.0.2.2', 9000)); c.sendto(b'question', ('2001:db8::2', 9000))" => "null";
        daemon "look" => "null";
        peer "r = [heard(s), heard(t)]" => r#"[["question","10.77.0.1"],["question","fd77::1"]]"#;
        a "r = sorted([answer(c), answer(c)])" => r#"[["answer","2001:db8::2"],["answer","::ffff:192.0.2.2"]]"#;
        a "c.connect(('2001:db8::2', 9000))" => r#""ENETUNREACH""#;
        a "c.connect(('::ffff:192.0.2.2', 9000)); r = c.getsockname()[0]" => r#""::ffff:10.77.0.1""#;
    "a UDP server with IPV6_V6ONLY leaves IPv4 to another":
        a "t = udp('::', 5354, v6only=1); s = udp('0.0.0.0', 5354)" => "null";
        host "r = bound('udp', 5354)" => r#"["10.77.0.1","fd77::1"]"#;
        daemon "look" => "null";
        peer "c = fresh(SOCK_DGRAM, AF_INET6); c.sendto(b'question', ('fd77::9', 5354))" => "null";
        a "r = heard(t)[0]" => r#""question""#;
        peer "r = answer(c)" => r#"["answer","fd77::9"]"#;
        peer "d = fresh(SOCK_DGRAM, AF_INET); d.sendto(b'question', ('10.77.0.9', 5354))" => "null";
        a "r = heard(s)[0]" => r#""question""#;
        peer "r = answer(d)" => r#"["answer","10.77.0.9"]"#;
    "a UDP socket on an address comes before one on the wildcard":
        a "s = udp('0.0.0.0', 5353); t = udp('10.77.0.9', 5353)" => "null";
        daemon "look" => "null";
        peer "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('10.77.0.9', 5353))" => "null";
        a "r = heard(t)[0]" => r#""question""#;
        peer "r = answer(c)" => r#"["answer","10.77.0.9"]"#;
        a "t.close()" => "null";
        peer "c.sendto(b'question', ('10.77.0.9', 5353))" => "null";
        a "r = heard(s)[0]" => r#""question""#;
        peer "r = answer(c)" => r#"["answer","10.77.0.9"]"#;
    "a UDP client on an address keeps its port from a server on the wildcard":
        a "s = udp('0.0.0.0', 5353); c = udp('10.77.0.9', 0); p = c.getsockname()[1]; v = udp('0.0.0.0', p)" => "null";
        daemon "look" => "null";
        peer "s = udp('192.0.2.2', 9000)" => "null";
        a "c.sendto(b'question', ('192.0.2.2', 9000))" => "null";
        peer "r = heard(s)[0]" => r#""question""#;
        a "r = answer(c)" => r#"["answer","192.0.2.2"]"#;
    "UDP servers with SO_REUSEPORT follow each other":
        a "s = udp('0.0.0.0', 5353, reuseport=1); t = udp('0.0.0.0', 5353, reuseport=1)" => "null";
        daemon "look" => "null";
        a "s.close()" => "null";
        daemon "look" => "null";
        peer "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('10.77.0.9', 5353))" => "null";
        a "r = heard(t)[0]" => r#""question""#;
        peer "r = answer(c)" => r#"["answer","10.77.0.9"]"#;
    "a UDP server that is connected hears its peer alone":
        peer "s = udp('192.0.2.2', 9000); t = udp('192.0.2.2', 9001)" => "null";
        a "s = udp('0.0.0.0', 5353)" => "null";
        daemon "look" => "null";
        a "s.connect(('192.0.2.2', 9000))" => "null";
        peer "t.sendto(b'x', ('10.77.0.9', 5353))" => "null";
        a "hears(s)" => r#""TIMEOUT""#;
        peer "s.sendto(b'y', ('10.77.0.1', 5353))" => "null";
        a "r = hears(s)" => r#""y""#;
    "the size of a datagram is told to who reads a byte of it, and not to who reads none":
        a "s = udp('0.0.0.0', 5353)" => "null";
        daemon "look" => "null";
        peer "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('10.77.0.9', 5353))" => "null";
        a "r = s.recv_into(bytearray(0), 0, MSG_PEEK | MSG_TRUNC)" => "0|8";
        a "r = s.recv_into(bytearray(1), 1, MSG_PEEK | MSG_TRUNC)" => "8";
    "UDP servers of two identities have their further addresses apart":
        a "s = udp('0.0.0.0', 5353)" => "null";
        b "s = udp('::', 5353)" => "null";
        daemon "look" => "null";
        peer "c = fresh(SOCK_DGRAM, AF_INET6); c.sendto(b'question', ('fd77::2', 5353)); d = fresh(SOCK_DGRAM, AF_INET); d.sendto(b'other', ('10.77.0.9', 5353))" => "null";
        b "r = heard(s)[0]" => r#""question""#;
        a "r = heard(s)[0]" => r#""other""#;
        peer "r = [answer(c)[1], answer(d)[1]]" => r#"["fd77::2","10.77.0.9"]"#;
    "an unbound UDP socket hears nothing that is for the host":
        peer "s = udp('192.0.2.2', 9000)" => "null";
        a "c = fresh(SOCK_DGRAM, AF_INET); c.sendto(b'question', ('192.0.2.2', 9000))" => "null";
        peer "d, p = s.recvfrom(100); s.sendto(b'x', ('192.0.2.1', p[1]))" => "null";
        a "hears(c)" => r#""TIMEOUT""#;
        peer "s.sendto(b'x', ('10.77.0.1', p[1]))" => "null";
        a "r = hears(c, 60)" => r#""x""#;
    "raw sockets, pings, MPTCP and other kinds can't be made":
        a "socket.socket(AF_INET, SOCK_RAW, IPPROTO_ICMP)" => r#""EPERM""#;
        a "socket.socket(AF_INET6, SOCK_RAW, IPPROTO_UDP)" => r#""EPERM""#;
        a "socket.socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP)" => r#""EACCES""#;
        a "socket.socket(AF_INET, SOCK_STREAM, 262)" => r#""EPROTONOSUPPORT""#;
        a "socket.socket(AF_INET, SOCK_DGRAM, 136)" => r#""EPROTONOSUPPORT""#;
        a "socket.socket(AF_INET, SOCK_STREAM, 132)" => r#""EPROTONOSUPPORT""#;
    "packet sockets can be made: no hook of cgroups knows of them":
        a "p = socket.socket(AF_PACKET, SOCK_RAW, 3)" => "null";
    "listening without binding leaves the socket on the wildcard, and others out":
        a "l = fresh(SOCK_STREAM, AF_INET); l.listen(4); port = l.getsockname()[1]; c = dial('10.77.0.1', port); r = accepted(l)[0]" => r#""10.77.0.1""#;
};
