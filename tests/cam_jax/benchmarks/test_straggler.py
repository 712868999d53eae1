"""The straggler benchmark: routing is as designed, predictions are arithmetic, processes end."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from cam_jax import CapacityPolicy, moe_layer, route, select
from cam_jax.benchmarks import pinned, waiting_threads
from cam_jax.benchmarks.straggler import (
    BALANCED,
    DEVICES,
    DROPLESS,
    SkewedLayer,
    busiest_rows,
    cases,
    choose_experts,
    device_loads,
    hidden_states,
    router_weight,
)
from cam_jax.cli.bench_straggler import Options, as_arguments, run
from cam_jax.cli.clean_output import only_ours
from cam_jax.distributed import Processes
from cam_jax.errors import DistributedError, InputError, PolicyError
from tests.cam_jax.moe_reference import make_params
from tests.processes import report, run_processes

SMALL = SkewedLayer(tokens=40, features=16, hidden=8)
HOT_EXPERT = dataclasses.replace(SMALL, skew="expert", share=0.75)
LAYERS = [
    SMALL,
    HOT_EXPERT,
    dataclasses.replace(SMALL, share=1.0),
    dataclasses.replace(SMALL, share=0.5, tokens=41, top_k=3),
    dataclasses.replace(HOT_EXPERT, share=1.0, top_k=5),
    dataclasses.replace(SMALL, num_experts=2, top_k=1, tokens=33),
]

# --- routing by design ---


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.skew}-{layer.share}")
@pytest.mark.parametrize("balanced", [False, True])
def test_the_router_selects_exactly_what_was_designed(layer, balanced):
    layer.check()
    chosen = choose_experts(layer, balanced=balanced, seed=1)
    x = hidden_states(chosen, layer, seed=1)
    selection = select(jnp.asarray(x @ router_weight(layer).T), layer.router)
    np.testing.assert_array_equal(np.sort(selection.experts, -1), np.sort(chosen, -1))
    assert all(len(set(row)) == layer.top_k for row in chosen)
    counts = np.asarray(route(selection, CapacityPolicy()).load.demand)
    np.testing.assert_array_equal(
        counts.reshape(DEVICES, -1) * DEVICES, device_loads(layer, balanced=balanced)
    )


def test_a_hot_device_has_its_share_evenly_over_its_experts():
    loads = device_loads(SMALL, balanced=False)
    assert loads.sum(1).tolist() == [144, 16]  # of 2 · 40 · 2 = 160
    assert np.ptp(loads[0]) <= DEVICES and np.ptp(loads[1]) <= DEVICES
    assert device_loads(SMALL, balanced=True).tolist() == [[20] * 4] * 2


def test_a_hot_expert_has_its_share_of_the_tokens_and_the_others_are_alike():
    loads = device_loads(HOT_EXPERT, balanced=False).reshape(-1)
    assert loads[0] == 60  # of 80 tokens
    assert loads.sum() == 160 and np.ptp(loads[1:]) <= DEVICES


def test_tokens_differ_in_order_between_devices_but_not_in_their_counts():
    first, second = choose_experts(SMALL, seed=0), choose_experts(SMALL, seed=1)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(np.bincount(first.ravel()), np.bincount(second.ravel()))


# --- predictions ---


def test_rows_are_the_load_without_a_ceiling_and_the_slots_with_one():
    rows = {case.name: busiest_rows(SMALL, case) for case in cases((1.5, 1.0))}
    assert rows == {
        "dropless, balanced": 80,
        "dropless": 144,
        "Token Drop γ=1.5": 120,  # 4 experts · 2 devices of origin · ceil(1.5 · 2 · 40 / 8)
        "Token Drop γ=1": 80,
        "Expanded Drop γ=1.5": 120,
        "Expanded Drop γ=1": 80,
    }


@pytest.mark.parametrize(
    "layer", [SMALL, HOT_EXPERT], ids=lambda layer: f"{layer.skew}-{layer.share}"
)
@pytest.mark.parametrize("case", cases((1.0,)), ids=lambda case: case.name)
def test_the_layer_has_the_rows_that_were_predicted(layer, case):
    x = np.stack(
        [
            hidden_states(choose_experts(layer, balanced=case.balanced, seed=d), layer, seed=d)
            for d in range(DEVICES)
        ]
    )
    params = dataclasses.replace(
        make_params(num_experts=8, features=layer.features, hidden=layer.hidden),
        router=jnp.asarray(router_weight(layer)),
    )
    load = moe_layer(jnp.asarray(x), params, layer.router, case.policy, virtual_devices=DEVICES)[1]
    rows = busiest_rows(layer, case)
    if case.policy is None:
        assert float(load.straggler(devices=DEVICES)) == pytest.approx(rows / 80)
    else:
        assert int(load.slots) == DEVICES * rows
        assert float(load.straggler(devices=DEVICES)) <= rows / 80 + 1e-6


# --- input ---


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 0}, "--tokens 0"),
        ({"num_experts": 7}, "multiple of 2"),
        ({"top_k": 8}, "--top-k 8 of 8"),
        ({"features": 4}, "--features 4"),
        ({"share": 0.4}, "0.5 .balanced. to 1"),
        ({"share": 1.1}, "0.5 .balanced. to 1"),
        ({"share": float("nan")}, "--share nan"),
        ({"share": 0.9, "top_k": 5}, "to 0.8"),
        ({"skew": "expert", "share": 0.2}, "0.25 .balanced. to 1"),
    ],
)
def test_layers_that_cannot_be_are_refused(change, said):
    with pytest.raises(InputError, match=said):
        dataclasses.replace(SMALL, **change).check()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"layer": dataclasses.replace(SMALL, share=2.0)}, InputError, "--share 2"),
        ({"capacity_factor": (0.0,)}, PolicyError, "capacity_factor"),
        ({"capacity_factor": (1.0, 1.0)}, InputError, "twice"),
        ({"rounds": 0}, InputError, "--rounds"),
        ({"time_limit": 0}, InputError, "--time-limit"),
        ({"core": 0}, InputError, "--core is for one of several"),
        ({"out": Path("/nowhere/there/p.png")}, InputError, "does not exist"),
        ({"processes": Processes(process_id=0)}, DistributedError, "missing"),
        ({"processes": Processes(cpu_devices=2)}, DistributedError, "one device each"),
        (
            {"processes": Processes(coordinator="a:1", num_processes=3, process_id=0)},
            DistributedError,
            "of 2 processes",
        ),
    ],
)
def test_bad_options_are_refused_before_anything_starts(monkeypatch, change, error, said):
    monkeypatch.setattr(pinned, "run_together", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(error, match=said):
        run(dataclasses.replace(Options(), **change))


def test_a_single_core_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    monkeypatch.setattr(pinned, "run_together", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(InputError, match=r"need a core each, this process may use 1 \(3\)"):
        run(Options())


def test_a_system_that_cannot_pin_is_refused(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with pytest.raises(InputError, match="does not pin"):
        run(Options())


def test_threads_of_one_physical_core_come_last(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(pinned, "_siblings", lambda core: f"{core // 2}")
    assert pinned.free_cores() == [0, 2, 1, 3]
    assert pinned.separate([0, 2]) and not pinned.separate([0, 1])
    with pytest.raises(InputError, match="--core 4"):
        pinned.pin(4)


def test_options_survive_the_way_to_the_processes(tmp_path):
    options = Options(
        capacity_factor=(2.0, 1.25),
        layer=HOT_EXPERT,
        keep_priorities=True,
        json=True,
        core=1,
        out=tmp_path / "a b.png",
        processes=Processes(coordinator="127.0.0.1:5", num_processes=2, process_id=1),
    )
    config = (tyro.conf.FlagCreatePairsOff,)
    assert tyro.cli(Options, args=as_arguments(options), config=config) == options
    assert tyro.cli(Options, args=as_arguments(Options()), config=config) == Options()


# --- processes ---


def python(program, *arguments):
    return [sys.executable, "-c", program, *map(str, arguments)]


def test_one_that_fails_is_named():
    with pytest.raises(DistributedError, match="process 1 ended with exit code 7"):
        pinned.run_together([python("pass"), python("raise SystemExit(7)")], seconds=30.0)


def test_time_is_limited_and_none_is_left(tmp_path):
    program = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(99)"
    began = time.monotonic()
    with pytest.raises(DistributedError, match="not finished within 5 s"):
        pinned.run_together([python(program, tmp_path / "pid")], seconds=5.0)
    assert time.monotonic() - began < 40
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_foreign_output_goes_to_standard_error(capfd):
    with only_ours():
        os.write(1, b"gloo\n")
    os.write(1, b"ours\n")
    captured = capfd.readouterr()
    assert captured.out == "ours\n" and "gloo" in captured.err


def test_only_threads_that_wait_for_messages_are_lowered(tmp_path, monkeypatch):
    for task, waits_in in (("11", "ep_poll"), ("12", "futex_do_wait"), ("13", "do_epoll_wait")):
        (tmp_path / task).mkdir()
        (tmp_path / task / "wchan").write_text(waits_in)
    (tmp_path / "14").mkdir()  # one that has ended
    lowered = []
    monkeypatch.setattr(os, "setpriority", lambda which, task, level: lowered.append(task))
    monkeypatch.setattr(waiting_threads, "_TASKS", tmp_path)
    monkeypatch.setattr(waiting_threads, "_SECONDS", 0.1)
    assert waiting_threads.yield_to_others() == 2
    assert sorted(lowered) == [11, 13]
    monkeypatch.setattr(waiting_threads, "_TASKS", tmp_path / "no proc")
    assert waiting_threads.yield_to_others() == 0


TINY = ("--tokens", "64", "--features", "16", "--hidden", "32", "--rounds", "2")


@pytest.mark.slow
@pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores"
)
@pytest.mark.parametrize("skew", ["device", "expert"])
def test_the_command_measures_in_two_processes(tmp_path, skew):
    out = tmp_path / "p.png"
    layer = dataclasses.replace(SkewedLayer(tokens=64, features=16, hidden=32), skew=skew)
    done = subprocess.run(
        [
            *python("import sys; from cam_jax.cli.main import main; sys.exit(main())"),
            *("bench-straggler", *TINY, "--skew", skew, "--json", "--out", str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env={key: value for key, value in os.environ.items() if key != "XLA_FLAGS"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # nothing else is there
    assert found["layer"] == dataclasses.asdict(layer)
    rows = {row["name"]: row for row in found["rows"]}
    expected = cases((1.5, 1.0))
    assert list(rows) == [case.name for case in expected]
    for case in expected:
        row = rows[case.name]
        assert row["rows"] == busiest_rows(layer, case)
        assert row["predicted"] == pytest.approx(busiest_rows(layer, DROPLESS) / row["rows"])
        assert min(row["seconds"], row["expert_seconds"], row["measured"]) > 0
        assert row["least_seconds"] <= row["seconds"]
        assert (row["capacity"] is None) == (case.policy is None)
    # What the devices really had, as the layer counts it.
    for case in (DROPLESS, BALANCED):
        factor = busiest_rows(layer, case) / (layer.tokens * layer.top_k)
        assert rows[case.name]["straggler_after"] == pytest.approx(factor)
        assert rows[case.name]["dropped_share"] == 0
    assert rows["Token Drop γ=1"]["dropped_share"] > 0
    assert rows["Token Drop γ=1"]["expert_straggler_after"] <= 1
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_processes_that_disagree_about_the_layer_end_with_the_reason():
    program = ["-c", "import sys; from cam_jax.cli.main import main; sys.exit(main())"]
    common = ["bench-straggler", *TINY, "--coordinator", f"127.0.0.1:{pinned.free_port()}"]
    commands = [
        [*program, *common, "--num-processes", "2", "--process-id", str(i), "--share", share]
        for i, share in enumerate(("0.9", "0.8"))
    ]
    ended = run_processes(commands, timeout=120)
    assert [e.code for e in ended] == [2, 2], report(ended)
    assert "the processes disagree" in ended[0].output, report(ended)
