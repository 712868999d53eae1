"""Processes meet and say who they are: what does not fit is an error in all of them, at once.

Without JAX: the processes are threads.
"""

import socket
import threading
import time

import pytest

from cam_jax.distributed.rendezvous import Member, meet
from cam_jax.errors import DistributedError
from tests.processes import free_port


def meeting(*members, timeout=10.0, port=None):
    """What each of (id, number, settings) hears, in order, and how long it took."""
    port = free_port() if port is None else port
    heard: list[str | None] = [None] * len(members)

    def run(i, process_id, number, settings):
        member = Member(process_id=process_id, num_processes=number, settings=settings)
        try:
            meet(member, ("127.0.0.1", port), timeout=timeout)
        except DistributedError as error:
            heard[i] = str(error)

    threads = [threading.Thread(target=run, args=(i, *m)) for i, m in enumerate(members)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard, time.monotonic() - began


def test_processes_that_fit_come_together():
    heard, seconds = meeting((0, 3, {"a": 1}), (1, 3, {"a": 1}), (2, 3, {"a": 1}))
    assert heard == [None] * 3
    assert seconds < 5


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([(0, 3, {}), (1, 3, {}), (1, 3, {})], "--process-id 1 was given to two processes"),
        ([(0, 2, {}), (0, 2, {}), (1, 2, {})], None),
        ([(0, 2, {}), (1, 3, {})], "with --num-processes 2, process 1 with 3"),
        ([(0, 2, {"x": 1}), (1, 2, {"x": 2})], "x is 1 in process 0 and 2 in process 1"),
    ],
)
def test_what_does_not_fit_is_told_to_all_at_once(members, said):
    heard, seconds = meeting(*members, timeout=20.0)
    assert seconds < 8
    if said is None:  # which of the two is heard first is chance; one of them is refused at least
        assert any(text is not None and "start process 0 once" in text for text in heard)
    else:
        assert all(text is not None and said in text for text in heard), heard


def test_who_is_missing_is_named():
    heard, seconds = meeting((0, 4, {}), (2, 4, {}), timeout=2.0)
    assert all("of 4 processes processes 1, 3 did not come within 2 s" in t for t in heard), heard
    assert seconds < 8


def test_an_unreachable_coordinator_is_named():
    heard, seconds = meeting((1, 2, {}), timeout=1.0)
    assert "process 1 cannot reach the coordinator 127.0.0.1" in heard[0]
    assert seconds < 4


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as other:
        heard, seconds = meeting((0, 2, {}), timeout=1.0, port=other.getsockname()[1])
    assert "in use" in heard[0]
    assert seconds < 8
