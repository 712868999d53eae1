"""A folder is there whole or not at all."""

import pytest

from cam_jax.training.files import write_folder


def test_replaces_the_folder_and_leaves_nothing_else(tmp_path):
    write_folder(tmp_path / "model", {"a": "old", "gone": b"\x00"})
    write_folder(tmp_path / "model", {"a": "new", "sub/b": b"\x01"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    assert (tmp_path / "model/a").read_text() == "new"
    assert (tmp_path / "model/sub/b").read_bytes() == b"\x01"
    assert not (tmp_path / "model/gone").exists()


def test_a_failure_leaves_the_old_folder(tmp_path):
    write_folder(tmp_path / "model", {"a": "old"})
    with pytest.raises(TypeError):
        write_folder(tmp_path / "model", {"a": "new", "b": 3})
    assert (tmp_path / "model/a").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
