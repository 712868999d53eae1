"""There and back: every used tensor bit for bit; half a conversion is none."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cam_jax.conversion import CheckpointSource, load_checkpoint, open_checkpoint
from cam_jax.conversion.either import load_any, open_any
from cam_jax.conversion.orbax import OpenOrbax, is_orbax
from cam_jax.conversion.streaming import convert
from cam_jax.errors import CheckpointError, ConfigError
from tests.conversion.checkpoints import same, tiny_config, tiny_tensors, write_checkpoint


def assert_same_tensors(a: Path, b: Path) -> None:
    """Names, types and bytes of all tensors that the model uses."""
    left, right = CheckpointSource.open(a), CheckpointSource.open(b)
    assert set(left.names()) - set(open_checkpoint(a).plan.ignored) == set(right.names())
    assert all(same(left.read(name), right.read(name)) for name in right.names())


@pytest.mark.parametrize(
    "name",
    [
        "dsv3_bf16_4x_yarn",
        "mixtral_bf16_5x",
        "qwen2moe_bf16_4x",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "dsv1_moe16b_style",
                "dsv2_lite_4x_bf16_yarn",
                "olmoe_bf16_4x",
                "qwen3moe_bf16_4x",
            )
        ),
    ],
)
def test_there_and_back(data_dir: Path, tmp_path: Path, name: str) -> None:
    source = data_dir / "checkpoints" / name
    there = convert(source, tmp_path / "orbax")
    back = convert(tmp_path / "orbax", tmp_path / "hf", to="hf")
    assert_same_tensors(source, tmp_path / "hf")
    assert (there.source_format, there.target_format) == ("hf", "orbax")
    assert (back.source_format, back.target_format) == ("orbax", "hf")
    assert there.nbytes == back.nbytes == open_checkpoint(source).plan.nbytes
    for file in ("config.json", "generation_config.json"):
        if (source / file).exists():
            old, new = (json.loads((d / file).read_text()) for d in (source, tmp_path / "hf"))
            assert old == new


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_layout_and_type_come_back(tmp_path: Path, fused: bool, dtype: Any) -> None:
    source = write_checkpoint(
        tmp_path / "a", tiny_tensors(fused=fused, dtype=dtype), tiny_config(torch_dtype=None)
    )
    convert(source, tmp_path / "b")
    found = convert(tmp_path / "b", tmp_path / "c", to="hf")
    assert found.layout == ("fused" if fused else "per_expert")
    assert_same_tensors(source, tmp_path / "c")


def test_other_ways(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a", tiny_tensors())
    convert(source, tmp_path / "fused", to="hf", layout="fused")
    assert_same_tensors(
        write_checkpoint(tmp_path / "expected", tiny_tensors(fused=True)), tmp_path / "fused"
    )
    convert(source, tmp_path / "wide", dtype="f32")
    convert(tmp_path / "wide", tmp_path / "narrow", dtype="bf16")
    convert(tmp_path / "narrow", tmp_path / "back", to="hf")
    assert_same_tensors(source, tmp_path / "back")
    for name, dtype in (("wide", np.float32), ("narrow", ml_dtypes.bfloat16)):
        opened = open_any(tmp_path / name)
        assert isinstance(opened, OpenOrbax)
        assert {leaf.dtype for leaf in opened.leaves.values()} == {np.dtype(dtype)}
        assert opened.config_json["torch_dtype"] == np.dtype(dtype).name
        assert load_any(opened)["embed"].dtype == dtype


def test_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "a", tiny_tensors())
    read: list[str] = []
    read_slice = CheckpointSource.read_slice

    def count(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        read.append(name)
        return read_slice(self, name, *args, **kwargs)

    monkeypatch.setattr(CheckpointSource, "read_slice", count)
    convert(source, tmp_path / "b")
    assert len(read) == len(set(read)) == len(tiny_tensors())


# What is refused, before long work.


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "a", tiny_tensors())


def test_refused(source: Path, tmp_path: Path, unchecked: None) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    target = tmp_path / "b"
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (source, target, {"to": "gguf"}, ConfigError, "to='gguf'"),
        (source, target, {"dtype": "int4"}, ConfigError, "int4"),
        (source, target, {"layout": "x"}, ConfigError, "per_expert, fused"),
        (source, source, {"overwrite": True}, CheckpointError, "into itself"),
        (source, tmp_path / "taken", {}, CheckpointError, "exists"),
        (source, tmp_path / "taken", {"overwrite": True}, CheckpointError, "left alone"),
        (tmp_path / "empty", target, {}, CheckpointError, "neither a Hugging Face"),
        (tmp_path / "./absent", target, {}, CheckpointError, "neither"),
    ]
    for src, dst, options, kind, words in cases:
        with pytest.raises(kind, match=words):
            convert(src, dst, **options)
        assert not target.exists()


def test_overwrite(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "b", to="hf")
    convert(source, tmp_path / "b", overwrite=True)
    assert is_orbax(tmp_path / "b")
    convert(source, tmp_path / "b", to="hf", overwrite=True)
    assert not is_orbax(tmp_path / "b")


def test_tied_tensors_that_differ(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a", tiny_tensors(), tiny_config(tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        convert(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.norm.weight"][0] = np.nan
    source = write_checkpoint(tmp_path / "a", tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight") as caught:
        convert(source, tmp_path / "new" / "b")
    # The source is at fault, not the writing.
    assert "cannot be written" not in str(caught.value)
    assert "allow_nonfinite=True" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_target_that_holds_the_source(source: Path, tmp_path: Path) -> None:
    outer = write_checkpoint(tmp_path / "outer", tiny_tensors())
    inner = outer / "inner"
    shutil.copytree(source, inner)
    link = tmp_path / "link"
    link.symlink_to(inner)
    for src in (inner, link):
        for dst in (outer, tmp_path, inner / ".."):
            with pytest.raises(CheckpointError, match=r"holds the source .* would be lost"):
                convert(src, dst, overwrite=True)
    assert open_checkpoint(inner)


def test_a_target_that_holds_files_of_the_source(source: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for name in ("config.json", "model.safetensors"):
        (links / name).symlink_to(source / name)
    with pytest.raises(CheckpointError, match="is a link into"):
        convert(links, source, overwrite=True)
    assert open_checkpoint(links)


def test_a_target_among_the_weights_of_the_source(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "b")
    with pytest.raises(CheckpointError, match="among the weights"):
        convert(tmp_path / "b", tmp_path / "b" / "weights" / "c")
    assert open_any(tmp_path / "b")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("path", ["", "a\0b", "a" * 5000, "b/" * 5000, "~nobody-of-that-name/x", 3])
def test_paths_that_cannot_be(source: Path, path: Any) -> None:
    for src, dst in ((path, source.parent / "new"), (source, path)):
        with pytest.raises(CheckpointError) as caught:
            convert(src, dst)
        assert len(str(caught.value)) < 300


# Interrupted.


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_interrupt_leaves_nothing(source: Path, tmp_path: Path, to: Any) -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "b", to=to, progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_disk_full_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        convert(source, tmp_path / "b", to=to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


STUCK = """
import sys, time
from cam_jax.conversion.streaming import convert
def progress(done, total):
    if done == total:
        print("written", flush=True)
        time.sleep(600)
convert(sys.argv[1], sys.argv[2], progress=progress)
"""


def test_killed_and_started_again(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "b"
    command = [sys.executable, "-c", STUCK, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "written\n"
        child.send_signal(signal.SIGKILL)
    (left,) = tmp_path.glob(".b.*.tmp")
    assert not target.exists()
    with pytest.raises(CheckpointError):
        open_any(left)
    deadline = time.monotonic() + 10
    convert(source, target)
    assert time.monotonic() < deadline
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    expected = load_checkpoint(source).leaves
    opened = open_any(target)
    assert isinstance(opened, OpenOrbax)
    assert all(same(opened.read_leaf(path), leaf) for path, leaf in expected.items())
