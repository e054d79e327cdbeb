"""Binding, and how many connections there may be."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from frontend.errors import PortUnavailable
from frontend.http_server import MAX_CONNECTIONS, RESERVED_DESCRIPTORS, bind, connection_limit


def test_binding(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortUnavailable, match=rf"127\.0\.0\.1:{port}"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port
    for host in ("no such host", "a" * 64):
        with pytest.raises(PortUnavailable, match=host):
            bind(host, 80)


def limit_under(soft: int) -> int:
    """The connection limit of a process with so many descriptors."""
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {soft}))\n"
        "from frontend.http_server import connection_limit, raise_descriptor_limit\n"
        "raise_descriptor_limit(); print(connection_limit())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    return int(done.stdout)


def test_connections_leave_descriptors_for_the_rest() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == resource.RLIM_INFINITY or connection_limit() == min(MAX_CONNECTIONS, soft - RESERVED_DESCRIPTORS)
    assert limit_under(256) == 256 - RESERVED_DESCRIPTORS
    assert limit_under(RESERVED_DESCRIPTORS) == 1
