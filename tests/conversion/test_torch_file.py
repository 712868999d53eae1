"""PyTorch's own files, read without PyTorch; pickles that want more than tensors never run."""

import builtins
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from cam_jax.conversion import load_checkpoint, torch_file
from cam_jax.conversion.source import CheckpointSource
from cam_jax.conversion.torch_file import read_torch_file
from cam_jax.conversion.torch_pickle import read_state_dict
from cam_jax.errors import CheckpointError
from tests.conversion.checkpoints import (
    BF16,
    same,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
    write_file,
)
from tests.conversion.torch_files import (
    ORDERED_DICT,
    Raw,
    c_strides,
    call,
    name,
    pickled,
    program,
    storage,
    tensor,
    tensor_3,
    write_archive,
    write_torch,
)

SINGLE = "pytorch_model.bin"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / SINGLE


def refused(path: Path, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_torch_file(path)
    for word in (str(path), *words):
        assert word in str(caught.value)
    return str(caught.value)


def refused_pickle(path: Path, content: bytes, *words: str) -> str:
    return refused(write_archive(path, content, {"0": bytes(64)}), *words)


def refused_tensor(path: Path, value: Any, *words: str) -> str:
    return refused_pickle(path, program({"layer.weight": value}), *words)


@pytest.mark.parametrize("padding", [0, 1, 61])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64])
def test_reads_every_tensor_bit_for_bit(path: Path, dtype: Any, padding: int) -> None:
    tensors = tiny_tensors(dtype=dtype)
    write_torch(path, tensors, padding=padding)
    source = CheckpointSource.open(path.parent)
    assert list(source.names()) == list(tensors)
    for key, array in tensors.items():
        assert same(source.read(key), array)
        assert source.spec(key).path == path


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.bool_])
@pytest.mark.parametrize("shape", [(), (7,), (4, 3, 2), (0, 3), (1, 5, 1)])
def test_other_types_and_ranks(path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    write_torch(path, {"t": array}, folder="pytorch_model", order=None)
    assert same(CheckpointSource.open(path.parent).read("t"), array)


def test_types_without_a_storage_class(path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.float8_e4m3fn)
    held = storage("0", 12, name("torch.storage", "UntypedStorage"))
    value = tensor_3(held, 0, (3, 4), (4, 1), name("torch", "float8_e4m3fn"))
    write_archive(path, program({"t": value}), {"0": array.tobytes()})
    assert same(CheckpointSource.open(path.parent).read("t"), array)


def test_tensors_that_share_a_storage(path: Path) -> None:
    array = np.arange(12, dtype=np.float32)
    held = storage("0", 12)
    value = {
        "whole": tensor(held, 0, (3, 4), (4, 1)),
        "same": tensor(held, 0, (3, 4), (4, 1)),
        "rows": tensor(held, 4, (2, 4), (4, 1)),
        "one": tensor(held, 11, (1, 1), (99, 7)),  # strides of single elements mean nothing
    }
    write_archive(path, program(value), {"0": array.tobytes()})
    source = CheckpointSource.open(path.parent)
    assert same(source.read("same"), array.reshape(3, 4))
    assert same(source.read("rows"), array.reshape(3, 4)[1:].copy())
    assert source.read("one") == 11


def test_parameters_are_their_tensors(path: Path) -> None:
    inner = tensor(storage("0", 16), 0, (16,), (1,))
    for kind, more in (("_rebuild_parameter", ()), ("_rebuild_parameter_with_state", ({"a": 1},))):
        value = call(name("torch._utils", kind), inner, True, ORDERED_DICT, *more)
        write_archive(path, program({"t": value}), {"0": bytes(64)})
        assert read_torch_file(path)["t"].shape == (16,)


@hypothesis.given(data=st.data())
def test_slices_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    path = tmp_path_factory.mktemp("slices") / SINGLE
    write_torch(path, {"other": np.ones(3, np.float16), "t": array}, padding=5)
    bound = st.integers(-6, 6)
    ranges = tuple(
        slice(data.draw(bound), data.draw(bound))
        for _ in range(data.draw(st.integers(0, len(shape))))
    )
    part = CheckpointSource.open(path.parent).read_slice("t", ranges)
    assert same(part, np.ascontiguousarray(array[ranges]))


def test_zip64(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tiny_tensors()
    with monkeypatch.context() as patch:
        # From this size on zipfile writes the directory in its 64-bit form.
        patch.setattr(zipfile, "ZIP64_LIMIT", 300)
        write_torch(path, tensors)
    assert b"PK\x06\x06" in path.read_bytes()
    source = CheckpointSource.open(path.parent)
    assert all(same(source.read(key), array) for key, array in tensors.items())


def write_shards(directory: Path, tensors: dict[str, np.ndarray], shards: int = 3) -> None:
    weight_map = {}
    for number in range(shards):
        shard = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        part = {key: tensors[key] for key in list(tensors)[number::shards]}
        write_torch(directory / shard, part)
        weight_map.update(dict.fromkeys(part, shard))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_shards(tmp_path, tensors)
    source = CheckpointSource.open(tmp_path)
    assert sorted(source.names()) == sorted(tensors)
    assert all(same(source.read(key), array) for key, array in tensors.items())
    write_torch(tmp_path / "pytorch_model-00004-of-00004.bin", {"x": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match="stale"):
        CheckpointSource.open(tmp_path)
    (tmp_path / "pytorch_model-00004-of-00004.bin").unlink()
    (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        CheckpointSource.open(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"nor the index pytorch_model\.bin\.index\.json"):
        CheckpointSource.open(tmp_path)


def test_safetensors_win(tmp_path: Path) -> None:
    write_torch(tmp_path / SINGLE, {"t": np.zeros(2, np.float32)})
    write_file(tmp_path / "model.safetensors", {"t": np.ones(2, np.float32)})
    assert CheckpointSource.open(tmp_path).read("t").tolist() == [1, 1]


def test_a_whole_checkpoint_loads(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    expected = load_checkpoint(write_checkpoint(tmp_path / "a", tensors)).leaves
    directory = tmp_path / "b"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_config()))
    write_torch(directory / SINGLE, tensors)
    found = load_checkpoint(directory).leaves
    assert found.keys() == expected.keys()
    assert all(same(found[leaf], expected[leaf]) for leaf in expected)


# --- pickles that want more


class Exploit:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A file that only code in a pickle would make."""
    return tmp_path / "code-ran"


def test_the_exploit_works_on_plain_pickle(trap: Path) -> None:
    pickle.loads(pickle.dumps(Exploit(os.mkdir, str(trap))))
    assert trap.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\x1b[31m" + b"x" * 5000 + b"\n.",
        b"ctorch\n" + b"float8" + b"x" * 5000 + b"\n.",
        b"\x80\x02}X\x88\x13\x00\x00" + b"\x1b" * 5000 + b"K\x01s.",
        b"\x80\x02}X\x88\x13\x00\x00" + b"\x1b" * 5000 + b"}s.",
        b"\x80\x02}(" + (b"X\x88\x13\x00\x00" + b"\x1b" * 5000 + b"K\x01") * 2 + b"u.",
    ],
)
def test_names_in_messages_are_short_and_escaped(code: bytes) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_state_dict(code, "file")
    message = str(caught.value)
    assert len(message) < 1200 and message.isprintable()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("where", ["top", "value", "nested", "key"])
def test_code_in_a_pickle_never_runs(path: Path, trap: Path, where: str, protocol: int) -> None:
    for function, argument in (
        (os.system, f"touch {trap}"),
        (builtins.eval, f"open({str(trap)!r}, 'w')"),
        (builtins.exec, f"open({str(trap)!r}, 'w')"),
        (os.mkdir, str(trap)),
    ):
        bad = Exploit(function, argument)
        value = {"top": bad, "value": {"w": bad}, "nested": {"a": [({"b": bad},)]}}.get(where)
        if where == "key":
            value = OrderedDict([("w", 1), (bad, 2)]) if protocol > 1 else {(bad,): 1}
        message = refused_pickle(path, pickle.dumps(value, protocol), "Nothing was run")
        # Old protocols are refused for their instructions, before any name.
        if protocol >= 2:
            assert function.__name__ in message and "would have run code" in message
        assert not trap.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(X\x04\x00\x00\x00truetR.",
        b"\x8c\x02os\x8c\x06system\x93(X\x04\x00\x00\x00truetR.",
        b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"c__builtin__\neval\n(X\x01\x00\x00\x001tR.",
        b"cposix\nsystem\n.",
        b"ctorch.hub\nload\n.",
        b"ctorch._utils\n_rebuild_sparse_tensor\n.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n.",
        b"ccollections\nOrderedDict.__init__\n.",
        b"ctorch._utils _rebuild_tensor_v2.__globals__\nx\n.",
    ],
)
def test_names_outside_the_list(path: Path, code: bytes) -> None:
    refused_pickle(path, b"\x80\x04" + code, "not part of a plain state dict", "Nothing was run")


@pytest.mark.parametrize(
    "code",
    [
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ, the name comes first
        b"\x82\x01.",  # EXT1
        b"ccollections\nOrderedDict\n)\x81.",  # NEWOBJ
        b"ccollections\nOrderedDict\n)}\x92.",  # NEWOBJ_EX
        b"Pstorage\n.",  # PERSID
        b"\x96\x01\x00\x00\x00\x00\x00\x00\x00a.",  # BYTEARRAY8
        b"\x97.",  # NEXT_BUFFER
        b"I01\n.",
        b"N0N.",  # POP
    ],
)
def test_instructions_that_no_state_dict_needs(path: Path, code: bytes) -> None:
    refused_pickle(path, b"\x80\x05" + code, "Nothing was run")


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b"N",
        b"\x80\x02.",
        b"NN.",
        b"(N.",
        b"t.",
        b"\x85.",
        b"h\x05.",
        b"r\xff\xff\xff\xff.",
        b"]]u.",
        b"}(NNu.",
        b"}(XX.",
        b"N}b.",
        b"NNR.",
        b"N)R.",
        b"ccollections\nOrderedDict\n(Ntt.",
        b"ccollections\nOrderedDict\n(NtR.",
        b"NQ.",
        b"(NNNNNtQ.",
        b"K\x01K\x02\x93.",
        b"\xff.",
        b"X\xff\xff\xff\xffa.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffa.",
        b"}(X\x01\x00\x00\x00aNX\x01\x00\x00\x00aNu.",  # a key twice
        b"}()Ns.",
        b"X\x01\x00\x00\x00\xff.",
    ],
)
def test_damaged_pickles(path: Path, code: bytes) -> None:
    refused_pickle(path, b"\x80\x02" + code, "damaged")


def test_a_key_that_takes_for_ever_to_hash_is_refused(path: Path) -> None:
    nested = b")" + b"q\x00h\x00\x86" * 60  # (t, t) of (t, t) of ..., shared
    refused_pickle(path, b"\x80\x02}" + nested + b"Ns.", "as key")


def test_a_large_memo_index_takes_no_memory(path: Path) -> None:
    value = tensor(storage("0", 16), 0, (16,), (1,))
    code = b"}r\xff\xff\xff\xff" + pickled("t") + pickled(value) + b"s."
    write_archive(path, b"\x80\x02" + code, {"0": bytes(64)})
    assert list(read_torch_file(path)) == ["t"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], ["a list"]),
        (None, ["NoneType"]),
        (name("torch", "float32"), ["a name"]),
        ({"epoch": 3}, ["'epoch'", "is a int", "state_dict()"]),
        ({"state_dict": {"w": 1}}, ["'state_dict'", "save that entry alone"]),
        ({"model": ORDERED_DICT}, ["'model'", "training checkpoint"]),
        ({3: tensor(storage("0", 1), 0, (1,), (1,))}, ["entry 3"]),
    ],
)
def test_what_is_no_state_dict(path: Path, value: Any, words: list[str]) -> None:
    refused_pickle(path, program(value), *words)


# --- tensors that cannot be


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (tensor(storage("0", 16), 0, (4, 4), (1, 4)), ["strides [1, 4]", "contiguous()"]),
        (tensor(storage("0", 16), 0, (4, 4), (0, 1)), ["strides [0, 1]"]),
        (tensor(storage("0", 16), 0, (2, 4), (8, 1)), ["strides [8, 1]"]),
        (tensor(storage("0", 16), 1, (16,), (1,)), ["ends at byte 68", "has 64"]),
        (tensor(storage("0", 16), 2**62, (1,), (1,)), ["ends at byte"]),
        (tensor(storage("0", 16), 0, (2**40, 2**40), (2**40, 1)), ["ends at byte"]),
        (tensor(storage("0", 17), 0, (1,), (1,)), ["68 bytes", "has 64"]),
        (tensor(storage("0", 10**30), 0, (1,), (1,)), ["has 64"]),
        (tensor(storage("1", 16), 0, (1,), (1,)), ["archive/data/1", "not in the archive"]),
        (tensor(storage("../data/0", 16), 0, (1,), (1,)), ["not in the archive"]),
    ],
)
def test_tensors_that_do_not_lie_in_their_storage(path: Path, value: Any, words: list[str]) -> None:
    refused_tensor(path, value, "'layer.weight'", *words)


UNTYPED = name("torch.storage", "UntypedStorage")


@pytest.mark.parametrize(
    "value",
    [
        tensor(storage("0", -1), 0, (1,), (1,)),
        tensor(storage("0", True), 0, (1,), (1,)),
        tensor(storage(0, 16), 0, (1,), (1,)),
        tensor(storage("0", 16, UNTYPED), 0, (1,), (1,)),
        tensor(storage("0", 16, name("torch", "float32")), 0, (1,), (1,)),
        tensor(storage("0", 16), -1, (1,), (1,)),
        tensor(storage("0", 16), 0, (-1,), (1,)),
        tensor(storage("0", 16), 0, (1.0,), (1,)),
        tensor(storage("0", 16), 0, [1], [1]),
        tensor(storage("0", 16), 0, (1,), ()),
        tensor(storage("0", 16), 0, (1,) * 65, (1,) * 65),
        tensor(Raw(b"N"), 0, (1,), (1,)),
        tensor_3(storage("0", 16, UNTYPED), 0, (1,), (1,), None),
        tensor_3(storage("0", 16, UNTYPED), 0, (1,), (1,), name("torch", "FloatStorage")),
        call(name("torch._utils", "_rebuild_parameter"), 5, True, ORDERED_DICT),
        call(name("torch._utils", "_rebuild_tensor_v2")),
        call(name("torch", "FloatStorage"), 5),
    ],
)
def test_impossible_tensors(path: Path, value: Any) -> None:
    refused_tensor(path, value, "damaged")


@pytest.mark.parametrize("kind", ["ComplexFloatStorage", "QInt8Storage", "complex64", "quint4x2"])
def test_types_that_weights_do_not_have(path: Path, kind: str) -> None:
    message = refused_tensor(path, name("torch", kind), f"torch.{kind}", "convert")
    assert "code" not in message


# --- archives


def test_big_endian(path: Path) -> None:
    write_torch(path, tiny_tensors(), order=b"big")
    refused(path, "byte order", "save it again")


def test_compressed_entries(path: Path) -> None:
    write_torch(path, tiny_tensors(), compression=zipfile.ZIP_DEFLATED)
    refused(path, "compressed")


def test_the_format_before_the_archive(path: Path) -> None:
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + b"rest")
    refused(path, "before 1.6", "save it again")


@pytest.mark.parametrize("content", [b"", b"PK", b"hello world" * 9, b"\x80\x02}."])
def test_files_that_are_no_archive(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    refused(path, "no weights file of PyTorch")


def test_missing_file(path: Path) -> None:
    refused(path, "cannot be read: No such file")


def test_archives_of_something_else(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "b")
    refused(path, "0 entries NAME/data.pkl")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", "b")
        archive.writestr("b/data.pkl", "b")
    refused(path, "2 entries NAME/data.pkl")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", "b")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a/data.pkl", "b")
    refused(path, "two entries of one name")


@pytest.mark.parametrize("left", [4, 30, 200, 5000, -1, -22])
def test_truncated_archives(path: Path, left: int) -> None:
    write_torch(path, tiny_tensors())
    path.write_bytes(path.read_bytes()[:left])
    refused(path, "truncated or damaged")


def test_absurd_sizes_in_the_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_file, "MAX_HEADER_BYTES", 1000)
    write_torch(path, tiny_tensors())
    refused(path, "it is damaged")
    monkeypatch.undo()
    write_torch(path, {"t": np.ones(4, np.float32)})
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    struct.pack_into("<II", content, at + 20, 2**31, 2**31)  # both sizes of the first entry
    path.write_bytes(content)
    refused(path, "truncated", "data.pkl")


def test_file_that_shrinks_after_opening(path: Path) -> None:
    write_torch(path, {"t": np.ones((40, 40), np.float32)})
    source = CheckpointSource.open(path.parent)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="truncated"):
        source.read("t")


@hypothesis.given(data=st.data())
def test_damaged_bytes_never_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / SINGLE
    tensors = {"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float16)}
    content = bytearray(write_torch(path, tensors).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        specs = read_torch_file(path)
    except CheckpointError:
        return
    assert all(spec.end <= path.stat().st_size for spec in specs.values())


@hypothesis.given(code=st.binary(max_size=60))
def test_any_pickle_is_a_state_dict_or_refused(
    tmp_path_factory: pytest.TempPathFactory, code: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / SINGLE
    write_archive(path, b"\x80\x02" + code, {"0": bytes(64)})
    try:
        assert isinstance(read_torch_file(path), dict)
    except CheckpointError:
        return


def test_strides_helper() -> None:
    assert c_strides((4, 3, 2)) == (6, 2, 1)


# --- files that PyTorch wrote


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_files_of_torch(path: Path, protocol: int) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(
        torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Embedding(7, 2)
    )
    state = module.state_dict()  # an OrderedDict with _metadata
    state["tied"] = state["0.weight"]
    state["parameter"] = torch.nn.Parameter(torch.randn(2, 3))
    state["scalar"] = torch.tensor(3.5)
    state["none"] = torch.zeros(0, 4)
    state["rows"] = torch.arange(20.0).reshape(5, 4)[2:]
    for kind in ("float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        state[kind] = torch.randn(3, 4).to(getattr(torch, kind))
    for kind in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool"):
        state[kind] = torch.arange(6).reshape(2, 3).to(getattr(torch, kind))
    torch.save(state, path, pickle_protocol=protocol)
    source = CheckpointSource.open(path.parent)
    assert set(source.names()) == set(state)
    for key, value in state.items():
        found = source.read(key)
        assert found.shape == tuple(value.shape)
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        assert found.tobytes() == raw.tobytes(), key


@pytest.mark.slow
def test_what_torch_writes_and_is_refused(path: Path) -> None:
    torch = pytest.importorskip("torch")
    cases: dict[str, Any] = {
        "contiguous()": {"w": torch.ones(3, 4).t()},
        "strides": {"w": torch.ones(1, 4).expand(3, 4)},
        "save that entry alone": {"state_dict": {"w": torch.ones(2)}},
        "'step'": {"w": torch.ones(2), "step": 5},
        "_rebuild_sparse_tensor": {"w": torch.ones(2, 2).to_sparse()},
        "Linear": torch.nn.Linear(2, 2),
        "ComplexFloatStorage": {"w": torch.ones(2, dtype=torch.complex64)},
    }
    for word, value in cases.items():
        torch.save(value, path)
        refused(path, word)
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    refused(path, "before 1.6")
