"""`cam-jax plan` from end to end, on CPU devices."""

import json

import pytest

from cam_jax.cli import main as cli
from cam_jax.planning.chips import CHIPS
from cam_jax.planning.compile import CompiledProgram, _reason
from cam_jax.planning.layout import MeshSizes
from cam_jax.planning.report import balanced_flops
from tests.cam_jax.planning.tiny import LAYERS, MIXTRAL, cpu_topology, job

TOKENS = 32  # of a chip
SLOTS = 12  # ceil(1.5 * 2 * 32 / 8), of one expert for one chip's tokens


@pytest.fixture
def arguments(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIXTRAL))
    sizes = ["--length", str(TOKENS), "--new-tokens", "8", "--batch", "8"]
    return ["plan", "--config", str(file), "--topology", "cpu:2x4", *sizes]


@pytest.mark.slow
def test_json(arguments, capsys):
    assert cli.main([*arguments, "--prefill-only", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"data": 1, "expert": 8, "tensor": 1}
    assert (found["layers"], found["chips"], found["chip"]) == (LAYERS, 8, None)
    assert [(c["title"], c["capacity"]) for c in found["columns"]] == [
        ("no ceiling", None),
        ("γ = 1.5", SLOTS),
    ]
    free, capped = found["columns"]
    for column in found["columns"]:
        memory = column["prefill"]["memory"]
        parts = ("weights", "cache", "temporaries", "other")
        assert memory["total"] == sum(memory[part] for part in parts)
        assert column["prefill"]["fits"] is None and column["prefill"]["roofline"] == []
        assert "decode" not in column

    def exchanges(column):
        return [
            (t["layers"], t["number"])
            for t in column["prefill"]["traffic"]
            if t["kind"] == "all-to-all" and t["place"] == "layer"
        ]

    assert exchanges(free) == [] and exchanges(capped) == [(LAYERS, 2)]

    # Products of the capped prefill by hand: every layer, every slot. One row of 32 tokens a chip.
    width, heads = 32, 4 * 8
    projections = 2 * TOKENS * width * (heads + heads // 2 + heads // 2 + heads)
    attention = projections + 2 * 2 * TOKENS * TOKENS * heads
    experts = 3 * 2 * (8 * SLOTS) * width * 16
    router, head = 2 * TOKENS * width * 8, 2 * width * 64
    assert capped["prefill"]["flops"] == LAYERS * (attention + experts + router) + head


@pytest.mark.slow
def test_decode(arguments, capsys):
    assert cli.main([*arguments, "--json"]) == 0
    free, capped = json.loads(capsys.readouterr().out)["columns"]
    # Exempt from the ceiling, so one program for both.
    assert capped["decode"] == free["decode"]
    # On a CPU a grouped matmul is a loop over the blocks of rows that there are.
    assert all("shard_map" in loop for loop in free["decode"]["unknown_loops"])
    # One token of each sequence: every chip reads all its weights but the embedding's rows.
    assert free["decode"]["hbm_bytes"] > 0.8 * free["decode"]["memory"]["weights"]


def test_table(arguments, capsys):
    assert cli.main([*arguments, "--prefill-only"]) == 0
    captured = capsys.readouterr()
    out = " ".join(captured.out.split())
    assert "data=1 x expert=8 x tensor=1 (chosen: data=1, expert=8, tensor=1)" in out
    assert f"all-to-all, per layer x {LAYERS} none 2: " in out
    assert "no ceiling" in out and "γ = 1.5" in out and "compile time" in out
    assert "A CPU's memory and rates are not known" in out
    assert "decode, per token" not in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--topology", "v5x:4x4"], "unknown chip 'v5x'"),
        (["--topology", "cpu:99"], "needs 99 CPU devices"),
        (["--preset", "mixtral-8x7b"], "give either --preset or --config"),
        (["--batch", "4", "--expert", "8"], "a batch of 4 is smaller"),
        (["--expert", "3"], "expert=3 does not divide"),
        (["--length", "125"], "exceed the model's 128 positions"),
        (["--length", "0"], "--length 0: expected 1 to"),
        (["--batch", "1" + "0" * 22], "expected 1 to"),
        (["--layers", "100"], "--layers 100: the model has"),
        (["--topology", "v5e:1000x1000"], "v5e has at most 256"),
        (["--topology", "cpu:99999"], "cpu has at most 1024"),
        (["--capacity-factor", "1.5", "1.5"], "a value is given twice"),
        (["--config", "a" * 300], "--config: "),
        (["--capacity-factor", "-1"], "capacity_factor=-1.0"),
        (["--scope", "device", "--group", "batch"], "scope='device'"),
        (["--expand", "some"], "--expand 'some'"),
        (["--load", "0.5"], "--load 0.5: expected numbers of at least 1"),
        (["--config", "nowhere.json"], "nowhere.json does not exist"),
    ],
)
def test_refused_before_any_work(arguments, change, message, capsys, monkeypatch):
    monkeypatch.setattr("cam_jax.planning.report.compile_prefill", None)
    assert cli.main([*arguments, *change]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_work_of_a_balanced_load(devices):
    """Twice sixteen tokens a chip, two experts each, three products of 32 x 16."""
    sizes = MeshSizes(data=1, expert=8, tensor=1)
    work = job(cpu_topology(devices), sizes)
    assert balanced_flops(work, sizes, tokens=16) == LAYERS * 32 * 2 * 3 * 2 * 32 * 16
    assert balanced_flops(work, sizes, tokens=1) == LAYERS * 2 * 2 * 3 * 2 * 32 * 16


def test_a_refused_program_says_how_much_it_needed():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error.\nRan out of memory in memory space "
        "hbm. Used 20.5G of 15.75G hbm. Exceeded hbm capacity by 4.75G.\nTotal hbm usage >= 21G"
    )
    assert _reason(message).startswith("Ran out of memory in memory space hbm. Used 20.5G")
    program = CompiledProgram(
        memory=None, costs=None, tokens=8, seconds=1.0, refused=_reason(message)
    )
    assert program.text == ""


def test_chips_of_the_docstring_exist():
    assert set(CHIPS) == {"v4", "v5e", "v5p", "v6e"}
