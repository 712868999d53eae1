"""How many processes there are, which one this is, and how long they wait for each other."""

import os
import re
from dataclasses import dataclass

import jax

from cam_jax.errors import DistributedError
from cam_jax.xla_flags import backend_started, check_xla_flags, forced_devices

# So that a dead process has ended the others within a minute.
LONGEST_TIMEOUT = 30


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Several processes, on one machine or many. Give all three of coordinator, number and id, or
    --distributed where JAX knows the cluster (Cloud TPU, Slurm, Open MPI, Kubernetes)."""

    coordinator: str | None = None
    """HOST:PORT of process 0, which must be free there."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which one this is: 0 to the number - 1."""
    distributed: bool = False
    """Let JAX find coordinator, number and id in the cluster."""
    cpu_devices: int | None = None
    """Devices of this process, on CPU."""
    start_timeout: int = 60
    """Seconds that the processes wait for each other at the start."""
    heartbeat_timeout: int = 20
    """Seconds of silence after which a process counts as dead, at most 30."""
    shutdown_timeout: int = 20
    """Seconds that a process which has finished waits for the others, at most 30."""

    @property
    def several(self) -> bool:
        """Whether anything was said about other processes; False: this one is alone."""
        return self.distributed or None not in (
            self.coordinator,
            self.num_processes,
            self.process_id,
        )

    def check(self) -> None:
        """Refuses options that cannot be, and a JAX that cannot take them any more.

        Raises:
            DistributedError: an option that is missing, out of range or contradicts another one, or
                JAX has started its backend.
            MeshError: `XLA_FLAGS` that XLA would end the process over.
        """
        self._check_identity()
        for name, least, most in (
            ("cpu_devices", 1, None),
            ("start_timeout", 1, 86400),
            ("heartbeat_timeout", 2, LONGEST_TIMEOUT),
            ("shutdown_timeout", 2, LONGEST_TIMEOUT),
        ):
            value = getattr(self, name)
            if value is None and name != "cpu_devices":
                raise DistributedError(f"{_flags([name])} None: expected a whole number")
            _check_number(name, value, least, most)
        if self.several or self.cpu_devices is not None:
            self._check_jax()

    def _check_identity(self) -> None:
        names = ("coordinator", "num_processes", "process_id")
        given = [name for name in names if getattr(self, name) is not None]
        if self.distributed and given:
            raise DistributedError(
                f"--distributed finds coordinator, number and id itself: leave {_flags(given)} out"
            )
        if not given:
            return
        if missing := [name for name in names if name not in given]:
            raise DistributedError(
                f"{_flags(given)} given, {_flags(missing)} missing: give all three, the same "
                "--coordinator and --num-processes to every process, or none for one process"
            )
        _check_number("num_processes", self.num_processes, 1, None)
        _check_number("process_id", self.process_id, 0, None)
        assert self.num_processes is not None and self.process_id is not None
        if self.process_id >= self.num_processes:
            raise DistributedError(
                f"--process-id {self.process_id} with --num-processes {self.num_processes}: the "
                f"ids are 0 to {self.num_processes - 1}"
            )
        self.address()

    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator.

        Raises:
            DistributedError: it is not HOST:PORT.
        """
        text = self.coordinator if isinstance(self.coordinator, str) else ""
        host, _, port = text.rpartition(":")
        # Five digits at most: Python refuses to read thousands of them.
        number = int(port) if re.fullmatch("[0-9]{1,5}", port) else 0
        if not host.strip("[]") or not 1 <= number <= 65535 or re.search(r"[/\s]", host):
            raise DistributedError(
                f"--coordinator {self.coordinator!r}: expected HOST:PORT with a port of 1 to 65535"
            )
        return host.strip("[]"), number

    def _check_jax(self) -> None:
        if jax.distributed.is_initialized():
            raise DistributedError(
                "jax.distributed is initialised already: call cam_jax.distributed.start once, and "
                "not jax.distributed.initialize"
            )
        if backend_started():
            raise DistributedError(
                "JAX has looked for its devices already, so no processes can join any more: call "
                "cam_jax.distributed.start before jax.devices(), make_mesh and any array"
            )
        check_xla_flags()
        forced = forced_devices(os.environ.get("XLA_FLAGS", ""))
        if self.cpu_devices is not None and forced not in (None, self.cpu_devices):
            raise DistributedError(
                f"--cpu-devices {self.cpu_devices}, but XLA_FLAGS asks for {forced}: give one"
            )


def _check_number(name: str, value: int | None, least: int, most: int | None) -> None:
    if value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise DistributedError(f"{_flags([name])} {value!r}: expected a whole number, {limits}")


def _flags(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)
