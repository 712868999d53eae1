"""Damaged safetensors headers: each is refused with the file and the tensor in the message."""

import json
import struct
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from cam_jax.conversion.header import MAX_HEADER_BYTES, read_header, read_json
from cam_jax.errors import CheckpointError
from tests.conversion.checkpoints import encode, write_file


def entry(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_specs_of_a_good_file(path: Path) -> None:
    write_file(path, {"b": np.ones((2, 3), np.float32), "a": np.ones(4, np.float16)})
    specs = read_header(path)
    assert list(specs) == ["b", "a"]  # in the order of the data
    assert (specs["b"].dtype, specs["b"].shape, specs["b"].nbytes) == ("F32", (2, 3), 24)
    assert specs["a"].begin == specs["b"].end
    assert specs["a"].end == path.stat().st_size


def test_empty_tensors_and_scalars_are_allowed(path: Path) -> None:
    header = {"none": entry(0, 0, (0, 3)), "one": entry(0, 4, ()), "void": entry(4, 4, (2, 0))}
    path.write_bytes(encode(header, bytes(4)))
    assert {name: spec.shape for name, spec in read_header(path).items()} == {
        "none": (0, 3),
        "one": (),
        "void": (2, 0),
    }


def test_missing_file(path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7])
def test_file_shorter_than_its_length_field(path: Path, size: int) -> None:
    assert "truncated" in refused(path, bytes(size))


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_absurd_header_length(path: Path, length: int) -> None:
    assert str(length) in refused(path, struct.pack("<Q", length) + b"{}")


def test_header_longer_than_the_file(path: Path) -> None:
    assert "truncated" in refused(path, struct.pack("<Q", 1000) + b"{}")


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b"[]", b"null", b'{"a": 1} x', b"1" * 5000],
    ids=["empty", "open", "utf8", "deep", "list", "null", "tail", "long number"],
)
def test_header_that_is_no_json_object(path: Path, header: bytes) -> None:
    assert "JSON" in refused(path, encode(header))


def test_a_name_given_twice(path: Path) -> None:
    one = json.dumps(entry(0, 8))
    header = f'{{"a": {one}, "a": {one}}}'.encode()
    assert "'a' is given twice" in refused(path, encode(header, bytes(8)))


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (5, "no description"),
        ({}, "dtype None"),
        (entry(0, 8, dtype="F31"), "unknown dtype 'F31'"),
        (entry(0, 8, dtype=["F32"]), "unknown dtype"),
        (entry(0, 8, shape=(-2, -1)), "impossible shape"),
        (entry(0, 8, shape=(2.0,)), "impossible shape"),
        (entry(0, 8, shape=(True, 2)), "impossible shape"),
        ({"dtype": "F32", "shape": "22", "data_offsets": [0, 8]}, "impossible shape"),
        (entry(8, 0), "impossible data_offsets"),
        (entry(-8, 0), "impossible data_offsets"),
        (entry(0, 8.0), "impossible data_offsets"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}, "impossible data_offsets"),
        (entry(0, 8, shape=(3,)), "takes 12 bytes"),
        (entry(0, 8, shape=(2**40, 2**40)), "takes 4835703278458516698824704 bytes"),
        (entry(0, 12, shape=(3,)), "truncated"),
        (entry(2**60, 2**60 + 8), "truncated"),
    ],
)
def test_bad_entries_name_the_tensor(path: Path, bad: Any, word: str) -> None:
    message = refused(path, encode({"good": entry(0, 0, (0,)), "bad.weight": bad}, bytes(8)))
    assert "'bad.weight'" in message and word in message


def test_overlap_gap_and_tail(path: Path) -> None:
    overlap = refused(path, encode({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)))
    assert "tensor 'b' overlaps tensor 'a'" in overlap
    inside = refused(path, encode({"a": entry(0, 16, (4,)), "b": entry(4, 12)}, bytes(16)))
    assert "overlaps" in inside
    gap = refused(path, encode({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)))
    assert "4 bytes between tensor 'a' and tensor 'b'" in gap
    assert "3 bytes after tensor 'a'" in refused(path, encode({"a": entry(0, 8)}, bytes(11)))


@pytest.mark.parametrize("cut", [1, 24, 30])
def test_truncated_data_names_the_first_tensor_that_suffers(path: Path, cut: int) -> None:
    write_file(path, {"first": np.ones(6, np.float32), "second": np.ones((2, 3), np.float32)})
    message = refused(path, path.read_bytes()[:-cut])
    assert "truncated" in message and ("'second'" if cut <= 24 else "'first'") in message


@hypothesis.given(data=st.data())
def test_damaged_bytes_never_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    good = write_file(path, {"a": np.ones(3, np.float32), "b": np.ones(2, np.float16)})
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        specs = read_header(path)
    except CheckpointError:
        return
    assert all(spec.end <= path.stat().st_size for spec in specs.values())


def test_read_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_json(path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        read_json(path)
    path.write_text('{"a": {"b": 1, "b": 2}}')
    with pytest.raises(CheckpointError, match=r"config\.json: the key 'b' is given twice"):
        read_json(path)
    for text in ("[" * 100_000, '{"a":' * 100_000):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
            read_json(path)
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
