"""Many processes: they come together, compute the same as one, and never wait for a dead one.

Timeouts are short, so that a test takes seconds; the defaults are within the same minute.
"""

import sys
import threading

import jax
import numpy as np
import pytest

from cam_jax.distributed import Processes, agree, fetch, is_main, start
from cam_jax.distributed.values import describe
from cam_jax.errors import DistributedError, InputError, MeshError
from tests.processes import free_port, report, run_processes

CHILD = ("-m", "tests.cam_jax.distributed_child")
# A dead process has to have ended the others after so many seconds.
LIMIT = 60


def launch(
    number, *options, cpu_devices=2, timeout=150, wait_for=None, ids=None, numbers=None, each=None
):
    """The same command line in ``number`` processes, apart from the id."""
    address = f"127.0.0.1:{free_port()}"
    commands = []
    for i in range(number):
        commands.append(
            [
                *CHILD,
                *("--coordinator", address, "--cpu-devices", str(cpu_devices)),
                *("--num-processes", str(number if numbers is None else numbers[i])),
                *("--process-id", str(i if ids is None else ids[i])),
                *options,
                *(() if each is None else each[i]),
            ]
        )
    return run_processes(commands, timeout=timeout, wait_for=wait_for)


# --- options ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"coordinator": "a:1"}, "--num-processes, --process-id missing"),
        ({"process_id": 0}, "--coordinator, --num-processes missing"),
        ({"num_processes": 2, "process_id": 0}, "--coordinator missing"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "the ids are 0 to 1"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": -1}, "at least 0"),
        ({"coordinator": "a:1", "num_processes": 0, "process_id": 0}, "at least 1"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "expected HOST:PORT"),
        ({"coordinator": ":1", "num_processes": 2, "process_id": 0}, "expected HOST:PORT"),
        ({"coordinator": "a:0", "num_processes": 2, "process_id": 0}, "port of 1 to 65535"),
        ({"coordinator": "a:70000", "num_processes": 2, "process_id": 0}, "1 to 65535"),
        ({"coordinator": "http://a:1", "num_processes": 2, "process_id": 0}, "HOST:PORT"),
        ({"distributed": True, "process_id": 0}, "leave --process-id out"),
        ({"coordinator": "a b:1", "num_processes": 2, "process_id": 0}, "HOST:PORT"),
        ({"coordinator": "a:" + "9" * 5000, "num_processes": 2, "process_id": 0}, "HOST:PORT"),
        ({"cpu_devices": 0}, "--cpu-devices 0"),
        ({"start_timeout": 0}, "--start-timeout 0"),
        ({"heartbeat_timeout": 31}, "2 to 30"),
        ({"shutdown_timeout": 100}, "2 to 30"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(options, said):
    with pytest.raises(DistributedError, match=said):
        start(Processes(**options))


@pytest.mark.usefixtures("unchecked")
def test_values_of_a_wrong_type_are_refused():
    for wrong in (None, 3, Processes):
        with pytest.raises(DistributedError, match="start takes Processes"):
            start(wrong)
    with pytest.raises(DistributedError, match="--heartbeat-timeout None"):
        start(Processes(heartbeat_timeout=None))
    with pytest.raises(DistributedError, match="HOST:PORT"):
        start(Processes(coordinator=5, num_processes=2, process_id=0))
    with pytest.raises(InputError, match="addresses in memory"):
        agree(np.array([object()]), "w")


def test_addresses():
    options = {"num_processes": 2, "process_id": 1}
    assert Processes(coordinator="host:8476", **options).address() == ("host", 8476)
    assert Processes(coordinator="[::1]:8476", **options).address() == ("::1", 8476)


@pytest.mark.parametrize(
    "options",
    [
        {"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": 1},
        {"cpu_devices": 2},
        {"distributed": True},
    ],
)
def test_after_jax_has_started_it_is_too_late(options, devices):
    with pytest.raises(DistributedError, match=r"call cam_jax\.distributed\.start before"):
        start(Processes(**options))


def test_one_process_sets_nothing_up(devices):
    hooks = sys.excepthook, threading.excepthook
    with start(Processes()) as me:
        assert (me.process_id, me.num_processes, me.name) == (0, 1, "process 0 of 1")
        assert (sys.excepthook, threading.excepthook) == hooks
        assert not jax.distributed.is_initialized()
    with pytest.raises(SystemExit, match="3"), start(Processes()):
        sys.exit(3)


# --- values, in one process ---


def test_values_that_are_here_are_plain(devices):
    tree = {"a": jax.numpy.arange(3), "b": np.ones(2), "c": "text"}
    found = fetch(tree)
    assert all(type(found[name]) is np.ndarray for name in "ab")
    assert np.array_equal(found["a"], [0, 1, 2])
    assert found["c"] == "text"
    assert is_main()
    agree((1, "a"), "anything")


def test_what_is_compared():
    array = np.arange(4)
    assert describe(array) == describe(array.copy())
    assert describe(array) != describe(array.astype(np.int32))
    assert describe(array) != describe(array[::-1])
    assert describe(jax.numpy.zeros((2, 3))) == describe(jax.numpy.ones((2, 3)))
    assert describe({"a": 1}) != describe({"b": 1})
    assert describe(Processes(process_id=1)) != describe(Processes(process_id=2))
    with pytest.raises(InputError, match="address"):
        agree(object(), "an object")


# --- real processes ---


def test_two_processes_disagree_about_a_shape():
    ended = launch(2, "--what", "agree", each=[["--rows", "4"], ["--rows", "5"]])
    for i, process in enumerate(ended):
        assert process.code == 2, report(ended)
        assert f"process {i} of 2: error: DistributedError" in process.output, report(ended)
        assert "[1] differs from process 0; process 0 has the batch 4, 6" in process.output


@pytest.mark.slow
def test_three_processes_disagree_and_the_one_is_named():
    each = [["--rows", "4"], ["--rows", "4"], ["--rows", "5"]]
    ended = launch(3, "--what", "agree", each=each, cpu_devices=1)
    assert all(process.code == 2 for process in ended), report(ended)
    assert all("[2] differs from process 0" in process.output for process in ended)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The file of what one process with four devices computes."""
    out = tmp_path_factory.mktemp("one") / "one.npz"
    [alone] = run_processes([[*CHILD, "--cpu-devices", "4", "--out", str(out)]], timeout=150)
    assert alone.code == 0, report([alone])
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("number", "cpu_devices"), [(2, 2), (4, 1)])
def test_the_layer_is_the_same_in_one_process_and_in_many(
    number, cpu_devices, one_process, tmp_path
):
    out = tmp_path / "many.npz"
    ended = launch(number, "--out", str(out), cpu_devices=cpu_devices, timeout=300)
    assert all(process.code == 0 for process in ended), report(ended)
    with np.load(one_process) as one, np.load(out) as many:
        assert one.keys() == many.keys()
        for name in one:
            assert np.allclose(one[name], many[name], atol=1e-5), name


# How one process ends, and its exit code; None: not of its own accord.
WAYS = {
    "kill": -9,
    "term": -15,
    "raise": 1,
    "thread": 1,
    "mismatch": 2,
    "exit": 3,
    "return": None,
    "stop": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("what", "way"),
    [("sum", way) for way in WAYS] + [("wait", way) for way in ("kill", "raise", "return", "stop")],
)
def test_a_dead_process_ends_the_other(what, way, victim):
    """The other one is in a collective (`sum`), or does something on its own (`wait`)."""
    other = 1 - victim
    ended = launch(
        2,
        *("--what", what, "--victim", str(victim), "--way", way),
        *("--heartbeat-timeout", "10", "--shutdown-timeout", "10"),
        # With two devices the runtime has to end the survivor, with one gloo notices.
        cpu_devices=2 if way in ("kill", "exit") else 1,
        timeout=LIMIT + 60,
        wait_for=[other] if way == "stop" else None,
    )
    assert ended[other].code not in (None, 0), report(ended)
    assert ended[other].seconds < LIMIT, report(ended)  # from the start on, so this is too strict
    if WAYS[way] is not None:
        assert ended[victim].code == WAYS[way], report(ended)
    if way in ("raise", "thread", "mismatch", "exit"):
        assert f"process {victim} of 2" in ended[victim].output
    said = ended[other].output
    assert f"process {other} of 2: error" in said or "another task died" in said, report(ended)


@pytest.mark.slow
def test_a_coordinator_that_cannot_be_reached():
    command = ["--coordinator", f"127.0.0.1:{free_port()}", "--start-timeout", "3"]
    [ended] = run_processes(
        [[*CHILD, *command, "--num-processes", "2", "--process-id", "1"]], timeout=60
    )
    assert ended.code == 1, report([ended])
    assert "DistributedError: process 1 cannot reach the coordinator" in ended.output
    assert ended.seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"number": 3, "ids": [0, 1, 1]}, "--process-id 1 was given to two processes"),
        ({"number": 2, "numbers": [2, 3]}, "--num-processes 2, process 1 with 3"),
        ({"number": 2, "numbers": [3, 3]}, "process 2 did not come within 6 s"),
    ],
)
def test_processes_that_do_not_fit_end_with_a_typed_error(options, said):
    number = options.pop("number")
    ended = launch(number, "--start-timeout", "6", timeout=60, **options)
    for process in ended:
        assert process.code == 1, report(ended)
        assert f"DistributedError: {said}" in process.output or said in process.output


@pytest.mark.slow
def test_a_cluster_that_jax_does_not_know():
    [ended] = run_processes([[*CHILD, "--distributed"]], timeout=60)
    assert ended.code == 1, report([ended])
    assert "DistributedError" in ended.output
    assert "JAX knows no cluster here" in ended.output


def slurm(ids, *options):
    """Processes that find each other as under Slurm, on this machine: JAX's own detection."""
    commands = []
    for i in ids:
        variables = {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(i),
            "SLURM_LOCALID": "0",
        }
        program = f"import os, sys, runpy\nos.environ.update({variables!r})\n"
        program += f"sys.argv[1:] = {['--distributed', *options]!r}\n"
        program += f"runpy.run_module({CHILD[1]!r}, run_name='__main__')"
        commands.append(["-c", program])
    return run_processes(
        commands, timeout=60, environment={"JAX_COORDINATOR_PORT": str(free_port())}
    )


@pytest.mark.slow
def test_jax_finds_the_cluster_itself():
    ended = slurm([0, 1], "--what", "agree")
    assert all(process.code == 0 for process in ended), report(ended)


@pytest.mark.slow
def test_a_cluster_whose_first_process_is_missing():
    [ended] = slurm([1], "--what", "agree", "--start-timeout", "4")
    assert ended.code == 2, report([ended])
    assert "jax.distributed found no other processes within 4 s" in ended.output


@pytest.mark.slow
def test_after_jax_was_used_in_a_real_process():
    [ended] = run_processes([[*CHILD, "--used", "--cpu-devices", "2"]], timeout=60)
    assert "JAX has looked for its devices already" in ended.output, report([ended])


@pytest.mark.slow
def test_flags_of_xla_that_ask_for_another_number():
    flags = "--xla_force_host_platform_device_count=3"
    [ended] = run_processes(
        [[*CHILD, "--cpu-devices", "2"]], timeout=60, environment={"XLA_FLAGS": flags}
    )
    assert "XLA_FLAGS asks for 3" in ended.output, report([ended])


def test_fetch_needs_a_device_of_the_mesh(monkeypatch):
    class Elsewhere:
        """A global array that lies on other hosts."""

        is_fully_addressable, shape, addressable_shards = False, (2,), ()

    monkeypatch.setattr("cam_jax.distributed.values.jax.Array", Elsewhere)
    with pytest.raises(MeshError, match="holds no device"):
        fetch(Elsewhere())
