"""Processes come together, and end together.

What was seen with JAX 0.10 on CPU (gloo), two processes, timeouts of 10 to 20 s:

- One is killed, fails or exits while the other waits for it in a collective: with one device per
  process the collective fails within a second, as a Python error. With two the other devices of the
  survivor keep waiting, and JAX's runtime aborts it (SIGABRT, with a message) when the heartbeat
  timeout is over. So it does with a survivor that waits for something else.
- The same with process 0, the coordinator: all others end within a second.
- One is frozen (SIGSTOP): the others are aborted when the heartbeat timeout is over. The frozen one
  cannot end itself: who started it has to.
- One leaves early without an error: all are aborted when the shutdown timeout is over.
- SIGTERM: JAX's preemption service catches it and the process goes on; it is switched off here.
"""

import importlib.metadata
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax

from cam_jax.distributed.ending import Hooks, end_with, ends_after, install, says_after
from cam_jax.distributed.processes import Processes
from cam_jax.distributed.rendezvous import Member, meet
from cam_jax.errors import DistributedError

# Seconds that JAX gets after all have met, even if they were late.
_LEAST_INITIALIZATION = 20


@dataclass(frozen=True, kw_only=True)
class Running:
    """This process among the others. As a context manager it ends with them:

    on success it waits for the others and leaves JAX's cluster, on an error it prints and ends this
    process at once, which ends the others.
    """

    process_id: int
    num_processes: int
    shutdown_timeout: int
    hooks: Hooks | None
    """None: there is one process, and nothing was changed."""

    @property
    def name(self) -> str:
        return _name(self.process_id, self.num_processes)

    def close(self) -> None:
        """Wait for the others to finish, at most ``shutdown_timeout``; then JAX aborts all."""
        if self.hooks is None:
            return
        with says_after(
            0.8 * self.shutdown_timeout,
            f"cam-jax: {self.name} has finished, another one has not: JAX ends all of them "
            f"{self.shutdown_timeout} s after the first",
        ):
            jax.distributed.shutdown()
        self.hooks.restore()

    def __enter__(self) -> "Running":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        orderly = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if self.hooks is not None and error is not None and not orderly:
            end_with(self.name, error)
        self.close()


def start(processes: Processes) -> Running:
    """Bring this process together with the others, before anything else uses JAX.

    Alone (no options) nothing is set up. Otherwise an uncaught exception from here on ends the
    process at once, with a message.

    Raises:
        DistributedError: options that cannot be, JAX was used already, the processes did not find
            each other or disagree, or JAX came up with other processes or devices than were asked
            for. Where only JAX can know, after its own time limit, the process ends with that
            message.
        MeshError: `XLA_FLAGS` that XLA would end the process over.
    """
    if not isinstance(processes, Processes):
        raise DistributedError(f"start takes Processes(...), got a {type(processes).__name__}")
    processes.check()
    if processes.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", processes.cpu_devices)
    if not processes.several:
        if processes.cpu_devices is not None:
            _check_devices(processes)
        return Running(
            process_id=0,
            num_processes=1,
            shutdown_timeout=processes.shutdown_timeout,
            hooks=None,
        )
    if (jax.config.values["jax_platforms"] or "cpu").split(",")[0] == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would catch SIGTERM, for trainers that poll it; here a process that is told to end ends.
    jax.config.update("jax_enable_preemption_service", False)
    _initialize(processes)
    try:
        return _running(processes)
    except DistributedError as error:
        # The others are waiting already: no way back through Python's clean-up.
        end_with(_name(processes.process_id, processes.num_processes), error)


def _running(processes: Processes) -> Running:
    """Starts the backend, and checks that what came up is what was asked for."""
    seconds = max(processes.start_timeout, _LEAST_INITIALIZATION)
    with ends_after(
        float(seconds),
        f"cam-jax: {_name(processes.process_id, processes.num_processes)}: error: "
        f"DistributedError: no devices of the other processes within {seconds} s: look at their "
        "messages",
    ):
        number, process_id = jax.process_count(), jax.process_index()
    wanted = (processes.num_processes, processes.process_id)
    if not processes.distributed and wanted != (number, process_id):
        raise DistributedError(
            f"asked for process {wanted[1]} of {wanted[0]}, JAX came up as {process_id} of "
            f"{number} on {jax.default_backend()}: is an accelerator busy, or does JAX_PLATFORMS "
            "name another platform?"
        )
    _check_devices(processes)
    return Running(
        process_id=process_id,
        num_processes=number,
        shutdown_timeout=processes.shutdown_timeout,
        hooks=install(_name(process_id, number)),
    )


def _initialize(processes: Processes) -> None:
    """`jax.distributed.initialize`, after all processes have met."""
    began = time.monotonic()
    arguments: dict[str, Any] = {}
    if not processes.distributed:
        assert processes.num_processes is not None and processes.process_id is not None
        me = Member(
            process_id=processes.process_id,
            num_processes=processes.num_processes,
            settings={
                "the version of jax": jax.__version__,
                "the version of cam-jax": importlib.metadata.version("cam-jax"),
                "--cpu-devices": processes.cpu_devices,
                "the platform (JAX_PLATFORMS)": jax.config.values["jax_platforms"] or None,
            },
        )
        meet(me, processes.address(), timeout=float(processes.start_timeout))
        arguments = {
            "coordinator_address": processes.coordinator,
            "num_processes": processes.num_processes,
            "process_id": processes.process_id,
        }
    limit = processes.start_timeout
    if not processes.distributed:
        limit = max(_LEAST_INITIALIZATION, int(limit - (time.monotonic() - began)))
    name = _name(processes.process_id, processes.num_processes)
    # JAX's client aborts the process at its time limit; a moment before, this can still say why.
    with ends_after(
        max(limit - 1, 0.5),
        f"cam-jax: {name}: error: DistributedError: jax.distributed found no other processes "
        f"within {limit} s: were all of them started, and can they reach process 0?",
    ):
        try:
            jax.distributed.initialize(
                **arguments,
                initialization_timeout=limit,
                heartbeat_timeout_seconds=processes.heartbeat_timeout,
                shutdown_timeout_seconds=processes.shutdown_timeout,
            )
        except (RuntimeError, ValueError, OSError) as error:
            hint = (
                ": JAX knows no cluster here; give --coordinator, --num-processes and --process-id"
                if processes.distributed
                else ""
            )
            raise DistributedError(f"jax.distributed.initialize: {error}{hint}") from error


def _check_devices(processes: Processes) -> None:
    here, number = jax.local_device_count(), jax.process_count()
    cpu = jax.default_backend() == "cpu"
    if processes.cpu_devices not in (None, here):
        raise DistributedError(
            f"--cpu-devices {processes.cpu_devices}, but this process has {here} devices of "
            f"{jax.default_backend()}"
            + ("" if cpu else ": set JAX_PLATFORMS=cpu, or leave the option out")
        )
    if jax.device_count() != here * number:
        raise DistributedError(
            f"this process has {here} of {jax.device_count()} devices in {number} processes: all "
            "need the same number"
        )


def _name(process_id: int | None, number: int | None) -> str:
    return "this process" if process_id is None else f"process {process_id} of {number}"
