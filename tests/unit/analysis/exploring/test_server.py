from __future__ import annotations

import socket

import pytest

from trajstore.analysis.exploring import server
from trajstore.errors import InvalidArgument


def test_a_port_that_is_free_is_found() -> None:
    port = server.free_port("127.0.0.1", 0)
    assert server.free_port("127.0.0.1", port) == port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(InvalidArgument, match=f"cannot listen on '127.0.0.1', port {port}"):
            server.free_port("127.0.0.1", port)


def test_only_the_names_of_its_own_address_may_talk_to_it() -> None:
    assert server._names("127.0.0.1") == ["127.0.0.1", "localhost"]
    assert server._names("192.0.2.7") == ["192.0.2.7"]
    assert {"127.0.0.1", socket.gethostname()} <= set(server._names("0.0.0.0"))
    assert server.address("127.0.0.1", 80) == "http://127.0.0.1:80/"
    assert server.address("0.0.0.0", 80) == f"http://{socket.gethostname()}:80/"
