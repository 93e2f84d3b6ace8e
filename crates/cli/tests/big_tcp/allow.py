"""`allow.py INTERFACE…`: lets super-packets of TCP be longer than 64 KiB there, in both families.

Debian 12's `ip` knows the setting for IPv6 alone, which older kernels have alone: those leave the other out.
"""

import socket
import struct
import sys

RTM_NEWLINK, REQUEST_AND_ACKNOWLEDGE = 16, 5
IFLA_GSO_MAX_SIZE, IFLA_GRO_MAX_SIZE = 41, 58
IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE = 63, 64
KINDS = IFLA_GSO_MAX_SIZE, IFLA_GRO_MAX_SIZE, IFLA_GSO_IPV4_MAX_SIZE, IFLA_GRO_IPV4_MAX_SIZE
BYTES = 185_000

for interface in sys.argv[1:]:
    index = socket.if_nametoindex(interface)
    body = struct.pack("BxHiII", socket.AF_UNSPEC, 0, index, 0, 0)
    body += b"".join(struct.pack("HHI", 8, kind, BYTES) for kind in KINDS)
    head = struct.pack("IHHII", 16 + len(body), RTM_NEWLINK, REQUEST_AND_ACKNOWLEDGE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(head + body)
        (error,) = struct.unpack_from("i", kernel.recv(4096), 16)
    assert not error, f"{interface}: error {-error}"
