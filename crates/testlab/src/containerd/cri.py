"""One call of the container runtime interface (CRI), as a kubelet makes them: cri.py SOCKET CALL WORD..., the answer as JSON.

The few messages that are needed are written out by their numbers in CRI's api.proto (runtime.v1); Debian has no client of it.
"""

import json
import sys

import grpc


def varint(number):
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number, value):
    """One field of a message: a number, a text, or another message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, str):
        value = value.encode()
    return varint(number << 3 | 2) + varint(len(value)) + value


def fields(message):
    """All fields of a message, by number: numbers and bytes."""
    found, at = {}, 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = number()
        if tag & 7 == 0:
            value = number()
        elif tag & 7 == 2:
            length = number()
            value = message[at : at + length]
            at += length
        else:
            raise ValueError(f"a field of kind {tag & 7}")
        found.setdefault(tag >> 3, []).append(value)
    return found


def call(method, request):
    channel = grpc.insecure_channel("unix:" + sys.argv[1])
    ask = channel.unary_unary(
        "/runtime.v1.RuntimeService/" + method,
        request_serializer=bytes,
        response_deserializer=bytes,
    )
    return fields(ask(request, timeout=60, wait_for_ready=True))


def run(name, folder, *more):
    """Starts a pod; `more` are ports of the host and the pod, HOST:POD, and annotations, NAME=VALUE."""
    metadata = field(1, name) + field(2, "uid-" + name) + field(3, "default")
    config = field(1, metadata) + field(3, folder)
    for one in more:
        if "=" in one:
            key, value = one.split("=")
            config += field(7, field(1, key) + field(2, value))
        else:
            host, pod = map(int, one.split(":"))
            config += field(5, field(2, pod) + field(3, host))
    return {"id": call("RunPodSandbox", field(1, config))[1][0].decode()}


def status(pod):
    answer = call("PodSandboxStatus", field(1, pod) + field(2, 1))
    network = fields(fields(answer[1][0])[5][0])
    more = [fields(address)[1][0] for address in network.get(2, [])]
    info = [fields(entry) for entry in answer[2]]
    info = next(entry[2][0] for entry in info if entry[1][0] == b"info")
    ips = [address.decode() for address in [network[1][0], *more]]
    return {"ips": ips, "pid": json.loads(info)["pid"]}


def pods():
    return [fields(pod)[1][0].decode() for pod in call("ListPodSandbox", b"").get(1, [])]


def stop(pod):
    return call("StopPodSandbox", field(1, pod))


def remove(pod):
    return call("RemovePodSandbox", field(1, pod))


try:
    print(json.dumps(globals()[sys.argv[2]](*sys.argv[3:])))
except grpc.RpcError as error:
    sys.exit(error.details())
