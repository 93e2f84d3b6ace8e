"""An application that does with sockets what each line of its input says, and answers with a line of JSON."""
import errno, json, struct, sys
from socket import *
import socket

SOL_IPV6, IPV6_V6ONLY = 41, 26
IP_FREEBIND, IP_TRANSPARENT, IP_PKTINFO = 15, 19, 8


def family(address):
    return AF_INET6 if ":" in address else AF_INET


def make(kind, address, port, **options):
    made = socket.socket(options.get("family", family(address)), kind)
    made.settimeout(options.get("patience", 60))
    if "v6only" in options:
        made.setsockopt(SOL_IPV6, IPV6_V6ONLY, options["v6only"])
    if options.get("reuseport"):
        made.setsockopt(SOL_SOCKET, SO_REUSEPORT, 1)
    if kind == SOCK_STREAM:
        # As servers do: connections of the row before may still be in TIME_WAIT.
        made.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    if options.get("freebind"):
        made.setsockopt(IPPROTO_IP, IP_FREEBIND, 1)
    if options.get("transparent"):
        made.setsockopt(IPPROTO_IP, IP_TRANSPARENT, 1)
    made.bind((address, port))
    return made


def listen(address, port, **options):
    made = make(SOCK_STREAM, address, port, **options)
    made.listen(16)
    return made


def udp(address, port, **options):
    return make(SOCK_DGRAM, address, port, **options)


def fresh(kind, of):
    made = socket.socket(of, kind)
    made.settimeout(60)
    return made


def dial(address, port, patience=60, kind=SOCK_STREAM, of=None):
    made = socket.socket(of or family(address), kind)
    made.settimeout(patience)
    made.connect((address, port))
    return made


def accepted(listener):
    """Our address and the peer's, of the next connection."""
    connection, peer = listener.accept()
    keep.append(connection)
    return [connection.getsockname()[0], peer[0]]


def heard(server):
    """What came, and from which address; the answer is sent."""
    data, peer = server.recvfrom(100)
    server.sendto(b"answer", peer)
    return [data.decode(), peer[0]]


def answer(client):
    data, peer = client.recvfrom(100)
    return [data.decode(), peer[0]]


def hears(server, patience=0.5):
    server.settimeout(patience)
    return server.recvfrom(100)[0].decode()


def sent_from(client, source, address, port):
    info = struct.pack("=I4s4s", 0, inet_aton(source), inet_aton("0.0.0.0"))
    return client.sendmsg([b"question"], [(IPPROTO_IP, IP_PKTINFO, info)], 0, (address, port))


def text4(digits):
    return inet_ntop(AF_INET, struct.pack("=I", int(digits, 16)))


def text6(digits):
    words = [int(digits[at : at + 8], 16) for at in range(0, 32, 8)]
    return inet_ntop(AF_INET6, struct.pack("=4I", *words))


def bound(protocol, port):
    """The kernel's own list: addresses of listening or unconnected sockets of a port."""
    found = []
    for name, text in ((protocol, text4), (protocol + "6", text6)):
        for line in open("/proc/net/" + name).readlines()[1:]:
            words = line.split()
            address, number = words[1].split(":")
            if int(number, 16) == port and words[3] in ("0A", "07"):
                found.append(text(address))
    return sorted(found)


def name(error):
    if isinstance(error, TimeoutError) and error.errno is None:
        return "TIMEOUT"
    return errno.errorcode.get(error.errno, repr(error))


keep, known = [], dict(globals())
for line in sys.stdin:
    request = json.loads(line)
    if request is None:
        for value in list(globals().values()) + keep:
            if isinstance(value, socket.socket):
                value.close()
        keep.clear()
        result = None
    else:
        try:
            r = None
            exec(request)
            result = r
        except OSError as error:
            result = name(error)
        except Exception as error:
            result = "BROKEN " + repr(error)
    print(json.dumps(result), flush=True)
