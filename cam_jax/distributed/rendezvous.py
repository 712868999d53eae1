"""The processes meet before JAX connects them, so that what does not fit is a Python error.

JAX's own client aborts the process when the coordinator cannot be reached or an id is taken, and
its service crashes on a port that is in use. Here process 0 listens on the coordinator's port,
hears from every other one who it is, tells all of them the verdict and leaves the port to JAX.
"""

import errno
import json
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

from cam_jax.errors import DistributedError

GREETING = "cam_jax.distributed 1"
# Who comes after a refusal is told for so long; then it finds nobody and times out.
_LINGER = 2.0
# Longer than the coordinator waits, so that its verdict (who is missing) comes first.
_GRACE = 3.0
_LONGEST_MESSAGE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a process says about itself."""

    process_id: int
    num_processes: int
    settings: dict[str, Any]  # what all processes must have alike, by name


def meet(me: Member, address: tuple[str, int], *, timeout: float) -> None:
    """Returns once all processes are here and fit.

    Raises:
        DistributedError: within ``timeout`` and a few seconds, in every process that could be
            reached: the coordinator cannot be reached or its port is taken, a process is missing,
            an id comes twice, or numbers and settings differ.
    """
    if me.process_id:
        _join(me, address, timeout=timeout)
        return
    try:
        server = _listen(address[1])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise DistributedError(
                f"process 0 cannot listen on port {address[1]} of --coordinator: {error}"
            ) from error
        # Perhaps another process 0 has it; then all of them should hear of the second one.
        try:
            _join(me, ("localhost", address[1]), timeout=min(timeout, 3.0))
        except DistributedError as refusal:
            raise DistributedError(
                f"process 0 cannot listen on port {address[1]} of --coordinator, which is in use "
                f"on this machine; choose a free one, and start process 0 once ({refusal})"
            ) from error
        return
    with server:
        _Host(me, server, deadline=time.monotonic() + timeout, waited=timeout).gather()


class _Host:
    """Process 0 while it hears the others."""

    def __init__(self, me: Member, server: socket.socket, *, deadline: float, waited: float):
        self.me, self.server, self.deadline, self.waited = me, server, deadline, waited
        self.members = {me.process_id: me}
        self.lines: list[socket.socket] = []

    def gather(self) -> None:
        verdict = self._hear_all()
        for line in self.lines:
            _tell(line, verdict)
        if verdict is None:
            return
        until = time.monotonic() + (_LINGER if len(self.members) < self.me.num_processes else 0)
        while (left := until - time.monotonic()) > 0:
            accepted = self._accept(left)
            if accepted is not None:
                _tell(accepted[0], verdict)
        raise DistributedError(verdict)

    def _hear_all(self) -> str | None:
        """What does not fit; None: all are here."""
        while len(self.members) < self.me.num_processes:
            accepted = self._accept(self.deadline - time.monotonic())
            if accepted is None:
                if time.monotonic() < self.deadline:
                    continue
                missing = sorted(set(range(self.me.num_processes)) - set(self.members))
                return (
                    f"of {self.me.num_processes} processes {_some(missing)} did not come within "
                    f"{self.waited:g} s: start the same command on every host, with "
                    f"--num-processes {self.me.num_processes} and ids from 0"
                )
            line, member = accepted
            self.lines.append(line)
            problem = self._problem_with(member)
            if problem is not None:
                return problem
            self.members[member.process_id] = member
        return None

    def _accept(self, timeout: float) -> tuple[socket.socket, Member] | None:
        """The next process; None: nobody came, or it was something else."""
        self.server.settimeout(max(timeout, 0.01))
        try:
            line, _ = self.server.accept()
        except OSError:
            return None
        try:
            line.settimeout(2)
            said = _receive(line)
            if said.pop("greeting", None) == GREETING:
                return line, Member(**said)
        except (OSError, ValueError, TypeError, AttributeError):
            pass
        line.close()
        return None

    def _problem_with(self, member: Member) -> str | None:
        me, other = self.me, member
        if other.num_processes != me.num_processes:
            return (
                f"process 0 was started with --num-processes {me.num_processes}, process "
                f"{other.process_id} with {other.num_processes}: give all the same"
            )
        if other.process_id in self.members:
            return (
                f"--process-id {other.process_id} was given to two processes: the ids are 0 to "
                f"{me.num_processes - 1}, each once"
            )
        for name in sorted(me.settings.keys() | other.settings.keys()):
            mine, theirs = me.settings.get(name), other.settings.get(name)
            if mine != theirs:
                return (
                    f"{name} is {mine} in process 0 and {theirs} in process {other.process_id}: "
                    "it must be the same in all"
                )
        return None


def _join(me: Member, address: tuple[str, int], *, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    where = f"{address[0]}:{address[1]}"
    reason: Exception = TimeoutError("no answer")
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(left, 5)) as line:
                line.settimeout(left + _GRACE)
                line.sendall(_encoded({"greeting": GREETING, **asdict(me)}))
                verdict = _receive(line)["verdict"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            # Not there yet, or not yet known by name: hosts do not start at the same moment.
            reason = error
            time.sleep(0.1)
            continue
        if verdict is not None:
            raise DistributedError(verdict)
        return
    raise DistributedError(
        f"process {me.process_id} cannot reach the coordinator {where} within {timeout:g} s "
        f"({type(reason).__name__}: {reason}): is process 0 running, and is the address its own?"
    )


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512
        )
    return socket.create_server(("", port), backlog=512)


def _tell(line: socket.socket, verdict: str | None) -> None:
    with line:
        try:
            line.sendall(_encoded({"verdict": verdict}))
        except OSError:
            return  # it has gone: JAX's heartbeat or its own deadline ends the others


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _receive(line: socket.socket) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        part = line.recv(4096)
        if not part or len(data) > _LONGEST_MESSAGE:
            raise ValueError("who answers is not waiting for processes, or no longer")
        data += part
    return json.loads(data)


def _some(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
    return f"{'process' if len(ids) == 1 else 'processes'} {shown}"
