"""One computation on many hosts: the same command line on every one of them.

    with start(Processes(coordinator="host0:8476", num_processes=4, process_id=i)):
        ...

Without options there is one process and nothing is set up. `jax.distributed` is the engine.
"""

from cam_jax.distributed.processes import Processes
from cam_jax.distributed.start import Running, start
from cam_jax.distributed.values import agree, fetch, is_main

__all__ = ["Processes", "Running", "agree", "fetch", "is_main", "start"]
