"""One end of a conversation in one protocol: `peer.py serve|call PROTOCOL ADDRESS PORT`.

The server says `ready` once it listens. Each ends with an error if something else comes than the other sends.
"""

import struct
import sys
from socket import *

IPPROTO_MPTCP, SOL_MPTCP, MPTCP_INFO, MPTCP_FALLBACK = 262, 284, 1, 1
IPPROTO_UDPLITE, SOL_UDPLITE, UDPLITE_SEND_CSCOV, UDPLITE_RECV_CSCOV = 136, 136, 10, 11
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
TCP_FASTOPEN, TCPI_OPT_SYN_DATA, SYN_DATA_AT = 23, 32, 5
SO_NO_CHECK, SO_RCVBUFFORCE = 11, 33
UDP_NO_CHECK6_TX, UDP_NO_CHECK6_RX = 101, 102
MSG_FASTOPEN = 0x20000000
STREAM = bytes(range(256)) * 8192
URGENT = b"!"

role, protocol, address, port = sys.argv[1:5]
target = (address, int(port))
family = AF_INET6 if ":" in address else AF_INET


def ready():
    print("ready", flush=True)


def receive(connection, length):
    came = bytearray()
    while len(came) < length:
        more = connection.recv(min(1 << 20, length - len(came)))
        assert more, f"ended after {len(came)} of {length} bytes"
        came += more
    return came


def bulk():
    """As much as it takes for TCP to send its longest packets."""
    connection = stream()
    connection.settimeout(30)
    for _ in range(64):
        if role == "call":
            connection.sendall(STREAM)
        else:
            assert receive(connection, len(STREAM)) == STREAM
    connection.shutdown(SHUT_WR)
    assert connection.recv(1) == b""


def exchange(connection, gone=0):
    """Sends a whole stream, of which so many bytes have gone already, and takes the other's."""
    connection.settimeout(30)
    if role == "call":
        connection.sendall(STREAM[gone:])
        assert receive(connection, len(STREAM)) == STREAM
    else:
        assert receive(connection, len(STREAM)) == STREAM
        connection.sendall(STREAM)
    connection.shutdown(SHUT_WR)
    assert connection.recv(1) == b""


def made(kind, prepare):
    end = socket(family, SOCK_STREAM, kind)
    end.settimeout(30)
    prepare(end)
    return end


def listening(kind=IPPROTO_TCP, prepare=lambda end: None):
    listener = made(kind, prepare)
    listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    listener.bind(target)
    listener.listen(4)
    ready()
    return listener


def stream(kind=IPPROTO_TCP, prepare=lambda end: None):
    if role == "serve":
        return listening(kind, prepare).accept()[0]
    connection = made(kind, prepare)
    connection.connect(target)
    return connection


def mptcp():
    connection = stream(IPPROTO_MPTCP)
    exchange(connection)
    information = connection.getsockopt(SOL_MPTCP, MPTCP_INFO, 16)
    (flags,) = struct.unpack_from("I", information, 8)
    assert not flags & MPTCP_FALLBACK, "it fell back to TCP"


def tiny_segments():
    exchange(stream(prepare=lambda end: end.setsockopt(IPPROTO_TCP, TCP_MAXSEG, 100)))


def fast_open():
    """The first connection brings a cookie, the second has data in its first packet."""
    if role == "serve":
        listener = listening(prepare=lambda end: end.setsockopt(IPPROTO_TCP, TCP_FASTOPEN, 4))
        connections = [(listener.accept()[0], 0) for _ in range(2)]
    else:
        ends = [socket(family, SOCK_STREAM) for _ in range(2)]
        connections = [(end, end.sendto(STREAM[:500], MSG_FASTOPEN, target)) for end in ends]
    for connection, sent in connections:
        exchange(connection, sent)
    last, _ = connections[-1]
    options = last.getsockopt(IPPROTO_TCP, TCP_INFO, 16)[SYN_DATA_AT]
    assert options & TCPI_OPT_SYN_DATA, f"no data in the first packet: {options}"


def urgent():
    connection = stream()
    connection.settimeout(30)
    if role == "call":
        connection.sendall(b"before")
        connection.send(URGENT, MSG_OOB)
        connection.sendall(b"after")
        assert receive(connection, 4) == b"seen"
        return
    came = receive(connection, 6)
    assert connection.recv(1, MSG_OOB) == URGENT
    assert came + receive(connection, 11 - len(came)) == b"beforeafter"
    connection.sendall(b"seen")


def segments(data, segment):
    return -(-len(data) // segment)


def told(data, segment):
    return b"%d in %d" % (len(data), segments(data, segment))


def datagrams(payloads, kind=0, prepare=lambda end: None, send=lambda end, payload, _: end.send(payload)):
    """Each way of sending in turn: what one send takes along arrives whole, and is told of before the next."""
    end = socket(family, SOCK_DGRAM, kind)
    end.setsockopt(SOL_SOCKET, SO_RCVBUFFORCE, 1 << 22)
    end.settimeout(30)
    prepare(end)
    if role == "call":
        end.connect(target)
        for payload, segment in payloads:
            send(end, payload, segment)
            assert end.recv(100) == told(payload, segment), (len(payload), segment)
        return
    end.bind(target)
    ready()
    for payload, segment in payloads:
        came, count = b"", 0
        while len(came) < len(payload):
            more, control, _, sender = end.recvmsg(1 << 16, 100)
            sizes = [struct.unpack("i", data)[0] for _, kind, data in control if kind == UDP_GRO]
            assert set(sizes) <= {segment}, f"{sizes} for {segment}"
            count += segments(more, segment)
            came += more
        assert came == payload and count == segments(payload, segment), f"{count} of {segment}"
        end.sendto(told(came, segment), sender)


def in_segments(take_as_one):
    """Runs of datagrams, of sizes about those of headers that are pulled into a packet's linear part."""
    sizes = [1, 2, 7, 8, 11, 12, 13, 20, 100, 1000, 1400]
    payloads = [(STREAM[: size * count + more], size) for size in sizes for count in (2, 40) for more in (0, size // 2)]

    def prepare(end):
        if take_as_one:
            end.setsockopt(SOL_UDP, UDP_GRO, 1)

    def send(end, payload, segment):
        end.sendmsg([payload], [(SOL_UDP, UDP_SEGMENT, struct.pack("H", segment))])

    datagrams(payloads, prepare=prepare, send=send)


def large():
    datagrams([(STREAM[:size], size) for size in (1, 1400, 1500, 3000, 9000, 60000)])


def without_checksums():
    """Which both ends have to ask for where it is IPv6."""

    def prepare(end):
        end.setsockopt(SOL_SOCKET, SO_NO_CHECK, 1)
        if family == AF_INET6:
            end.setsockopt(SOL_UDP, UDP_NO_CHECK6_TX, 1)
            end.setsockopt(SOL_UDP, UDP_NO_CHECK6_RX, 1)

    datagrams([(STREAM[:size], size) for size in (1, 1400, 9000)], prepare=prepare)


def udp_lite():
    def prepare(end):
        end.setsockopt(SOL_UDPLITE, UDPLITE_SEND_CSCOV, 20)
        end.setsockopt(SOL_UDPLITE, UDPLITE_RECV_CSCOV, 20)

    datagrams([(STREAM[:size], size) for size in (1, 12, 13, 1400)], IPPROTO_UDPLITE, prepare)


conversations = {
    "tcp": lambda: exchange(stream()),
    "tcp-bulk": bulk,
    "tcp-tiny-segments": tiny_segments,
    "tcp-fast-open": fast_open,
    "tcp-urgent": urgent,
    "mptcp": mptcp,
    "udp-large": large,
    "udp-without-checksums": without_checksums,
    "udp-segments": lambda: in_segments(False),
    "udp-segments-as-one": lambda: in_segments(True),
    "udp-lite": udp_lite,
}
conversations[protocol]()
