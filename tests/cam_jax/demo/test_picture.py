"""The picture: written by rename, for any number of layers, and refused before any work."""

import struct

import numpy as np
import pytest

from cam_jax.demo import picture
from cam_jax.demo.cases import TIGHT, UNLIMITED
from cam_jax.demo.measure import Measured
from cam_jax.errors import InputError


def measured(case, layers, scale):
    load = np.tile(np.array([8, 4, 2, 2], np.int64), (layers, 1))
    return Measured(
        case=case,
        bits_per_byte=1.5,
        straggler=np.full(layers, 2.0 * scale),
        device_straggler=None,
        dropped=np.zeros(layers),
        slot_use=np.ones(layers),
        load=np.minimum(load, int(8 * scale)),
        demand=load,
        seconds=1.0,
        notes=(),
    )


@pytest.mark.parametrize("layers", [1, 2, 5, 40])
def test_any_number_of_layers(tmp_path, layers):
    out = tmp_path / "load.png"
    picture.draw(
        out,
        measured(UNLIMITED, layers, 1),
        measured(TIGHT, layers, 0.5),
        layers=tuple(range(layers)),
        subtitle="A text",
    )
    head = out.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    assert width > 600 and height > 600
    assert [path.name for path in tmp_path.iterdir()] == ["load.png"]


def test_an_interrupted_write_leaves_the_old_picture(tmp_path):
    class Broken:
        def savefig(self, file, format):
            file.write(b"half")
            raise KeyboardInterrupt

    out = tmp_path / "load.png"
    out.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        picture._save(Broken(), out)
    assert out.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["load.png"]


def test_paths_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        picture.check_picture_path(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        picture.check_picture_path(tmp_path / "nowhere" / "a.png")
    assert picture.check_picture_path(tmp_path / "a.png") == tmp_path / "a.png"
