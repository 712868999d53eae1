"""One process writes what lies on the devices of two."""

from pathlib import Path

import numpy as np
import pytest

from cam_jax.conversion import CheckpointSource, load_checkpoint
from cam_jax.conversion.orbax import open_orbax
from cam_jax.conversion.together import save_together
from tests.conversion.checkpoints import same, tiny_tensors, write_checkpoint
from tests.processes import free_port, report, run_processes


def test_one_process_saves_as_ever() -> None:
    leaves = {"a": np.ones(3)}
    assert save_together(lambda given: given, leaves) is leaves


@pytest.mark.slow
def test_two_processes_write_one_checkpoint(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", tiny_tensors())
    address = f"127.0.0.1:{free_port()}"
    commands = [
        [
            *("-m", "tests.conversion.processes_child"),
            *("--coordinator", address, "--num-processes", "2", "--process-id", str(number)),
            *("--cpu-devices", "2", "--source", str(source), "--folder", str(tmp_path)),
        ]
        for number in range(2)
    ]
    ended = run_processes(commands, timeout=150)
    assert all(process.code == 0 for process in ended), report(ended)
    expected = load_checkpoint(source).leaves
    opened = open_orbax(tmp_path / "orbax")
    assert all(same(opened.read_leaf(path), leaf) for path, leaf in expected.items())
    saved = CheckpointSource.open(tmp_path / "hf")
    tensors = tiny_tensors()
    assert set(saved.names()) == tensors.keys()
    assert all(same(saved.read(name), tensor) for name, tensor in tensors.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "orbax", "source"]
