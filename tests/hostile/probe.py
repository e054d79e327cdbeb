"""`python -m tests.hostile.probe URL`: asks for /health again and again until its input ends, and prints how long each
answer took. A process of its own, so that the threads of a test take no part in the measurement.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

PAUSE_S = 0.01
REQUEST = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def ask(connection: socket.socket) -> float:
    """Seconds until a whole answer of status 200 has come."""
    began = time.monotonic()
    connection.sendall(REQUEST)
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(65536)
        assert part, "the server closed the connection"
        answer += part
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    return time.monotonic() - began


def main() -> None:
    """Ask until the input ends."""
    host, _, port = sys.argv[1].removeprefix("http://").rpartition(":")
    took = []
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            took.append(ask(connection))
            if len(took) == 1:
                sys.stdout.write("begun\n")
                sys.stdout.flush()
    json.dump(took, sys.stdout)


if __name__ == "__main__":
    main()
