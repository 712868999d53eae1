"""`cam-jax demo`: the table, its JSON, bad paths, and the paper's ordering on the shipped model."""

import dataclasses
import json

import numpy as np
import pytest

from cam_jax.cli import demo
from cam_jax.cli import main as cli
from cam_jax.demo import cases, compare
from cam_jax.demo.cases import CASES, TIGHT, UNLIMITED
from tests.cam_jax.demo import checkpoint

KEYS = [
    "policy",
    "capacity_factor",
    "metric",
    "expand",
    "bits_per_byte",
    "straggler",
    "dropped",
    "slot_use",
    "seconds",
]
SHOWN = ("No ceiling", "Token Drop", "Keep random")
SMALL = ["--share", "1", "--rows", "4", "--length", "16", "--virtual-devices", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(checkpoint.write(tmp_path_factory.mktemp("demo")))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(checkpoint.TEXT)
    return str(path)


def test_the_cases_are_those_of_the_paper():
    policies = [case.policy for case in CASES]
    assert policies[0] is None and len(set(CASES)) == 9
    listed = [(p.capacity_factor, p.metric, p.expand) for p in policies[1:]]
    assert listed == [
        (2.0, "score", None),
        (1.5, "score", None),
        (1.0, "score", None),
        (1.5, "score", "local"),
        (1.0, "score", "local"),
        (1.0, "first", None),
        (1.0, "last", None),
        (1.0, "random", None),
    ]
    assert all(dataclasses.replace(p, seed=0).group == "device" for p in policies[1:])


def test_json_is_all_that_is_on_standard_output(model, text, tmp_path, capsys, monkeypatch):
    # Some of them: each is a program. The slow test below runs all.
    monkeypatch.setattr(cases, "CASES", [case for case in CASES if case.name in SHOWN])
    out = tmp_path / "load.png"
    arguments = ["demo", "--model", model, "--text", text, "--out", str(out), "--json", *SMALL]
    assert cli.main([*arguments, "--no-generate"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    rows = found["rows"]
    assert [list(row) for row in rows] == [KEYS] * 5
    assert [row["capacity_factor"] for row in rows] == [None, 2, 1.5, 1, 1]
    assert rows[0]["metric"] is None and rows[0]["expand"] is None
    assert rows[0]["dropped"] == 0 and rows[0]["slot_use"] == 1
    for row in rows[1:]:
        assert 0 < row["dropped"] < 1 and 0 < row["slot_use"] <= 1
        # Per group of 16 tokens C = ceil(γ · 2 · 16 / 8), so γ bounds the straggler factor.
        assert row["straggler"] <= row["capacity_factor"] + 1e-6
    assert all(row["bits_per_byte"] > 0 and row["seconds"] > 0 for row in rows)
    assert found["bytes"] == len(checkpoint.TEXT.encode()) and found["generated"] is None
    assert found["picture"] == str(out) and out.read_bytes()[:4] == b"\x89PNG"
    assert "5/5 programs" in captured.err


def test_the_table_and_the_text(model, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cases, "CASES", (UNLIMITED, TIGHT))
    out = tmp_path / "load.png"
    arguments = ["demo", "--model", model, "--text", text, "--out", str(out), *SMALL]
    assert cli.main([*arguments, "--prompt", "The quick"]) == 0
    printed = capsys.readouterr().out
    assert "No ceiling" in printed and "Token Drop γ = 1" in printed
    assert "The quick" in printed and str(out) in printed.replace("\n", "")
    assert max(map(len, printed.split("\n"))) <= 80 and "…" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["--text", "/nowhere/text"], "text /nowhere/text does not exist"),
        (["--out", "/nowhere/a.png"], "folder /nowhere does not exist"),
        (["--virtual-devices", "0"], "virtual_devices=0"),
        (["--virtual-devices", "9"], "virtual_devices=9"),
        (["--rows", "0"], "rows=0"),
        (["--share", "2"], "share=2"),
        (["--length", "1"], "length=1"),
        (["--length", "129"], "128 positions"),
        (["--prompt", ""], "prompt has 0 tokens"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    model, text, tmp_path, options, message, capsys, monkeypatch
):
    def never(*args, **options):
        raise AssertionError("the model was run")

    monkeypatch.setattr(compare, "warm_up", never)
    monkeypatch.chdir(tmp_path)
    arguments = ["demo", "--model", model, "--text", text, "--length", "16", *options]
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_a_model_without_a_tokenizer(tmp_path, text, capsys):
    bare = checkpoint.write(tmp_path, tokenizer=False)
    assert cli.main(["demo", "--model", str(bare), "--text", text, "--out", "/tmp/x.png"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.slow
def test_the_shipped_model_shows_the_papers_ordering(tmp_path, capsys):
    """On real text: dropping by score costs least, expansion costs nothing, the straggler goes."""
    out = tmp_path / "load.png"
    assert cli.main(["demo", "--json", "--no-generate", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    factors = [row["capacity_factor"] for row in found["rows"]]
    assert factors == [None, 2, 1.5, 1, 1.5, 1, 1, 1, 1]
    bits = {
        (row["capacity_factor"], row["metric"], row["expand"]): row["bits_per_byte"]
        for row in found["rows"]
    }
    base = bits[None, None, None]
    rise = {
        metric: bits[1.0, metric, None] - base for metric in ("score", "random", "first", "last")
    }
    assert 0 < rise["score"] <= min(rise["random"], rise["first"], rise["last"]) / 2
    for gamma in (1.0, 1.5):
        assert bits[gamma, "score", "local"] <= bits[gamma, "score", None] + 0.002
    assert bits[2.0, "score", None] < bits[1.5, "score", None] < bits[1.0, "score", None]
    unlimited = np.array(found["layers"][0]["straggler"])
    assert np.sum(unlimited >= 2.5) >= len(unlimited) / 2
    assert all(row["straggler"] <= row["capacity_factor"] * 1.01 for row in found["rows"][1:])


def test_the_shipped_model_is_where_the_demo_looks():
    assert (demo.shipped_model() / "model.safetensors").is_file()
