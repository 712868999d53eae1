"""Threads of this process that wait for messages, kept from taking a busy thread's core.

Why: gloo, JAX's engine for several processes on CPU, has one thread per process that waits in
epoll. A message that comes before this process has asked for it stays in the socket, so epoll
returns at once, again and again, until the computation gets there. Where a process has one core,
the thread takes half of it from just the process that all others wait for: seen on two cores with
JAX 0.10, a dropless layer of 230 ms took 430. TPUs and GPUs have no such thread. With the lowest
priority it takes what nobody else wants, which is everything once the computation itself waits.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
_LOWEST = 19
# Longer than processes that did something together are apart afterwards.
_SECONDS = 0.6


def yield_to_others() -> int:
    """Give the lowest priority to threads that wait for messages now; how many there are.

    For this process's lifetime. Call it in all processes after something that they did together: a
    message that comes meanwhile keeps gloo's thread busy, and from being recognised. 0 where the
    system does not tell what a thread waits for.
    """
    lowered: set[str] = set()
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        time.sleep(_SECONDS / 20)
        for task in list(_TASKS.iterdir()) if _TASKS.is_dir() else []:
            if task.name not in lowered and _waits_for_messages(task):
                with suppress(OSError):  # it has ended, or may not be changed
                    os.setpriority(os.PRIO_PROCESS, int(task.name), _LOWEST)
                    lowered.add(task.name)
    return len(lowered)


def _waits_for_messages(task: Path) -> bool:
    try:
        waits_in = (task / "wchan").read_text()
    except OSError:
        return False
    # The kernel's function, by its version: ep_poll or do_epoll_wait.
    return "epoll" in waits_in or "ep_poll" in waits_in
