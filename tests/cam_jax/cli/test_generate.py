"""`cam-jax generate`: one command line for one device, a mesh, and several processes."""

import json

import numpy as np
import pytest

import cam_jax
from cam_jax import CapacityPolicy
from cam_jax.cli import main as cli
from cam_jax.cli.choices import MeshOptions, PolicyOptions
from cam_jax.errors import InputError, MeshError, PolicyError
from tests.cam_jax.demo import checkpoint
from tests.processes import free_port, report, run_processes

PROMPTS = ["The quick", "lazy dog", "1, 2", "Ünïc"]
CEILING = ["--capacity-factor", "0.75", "--expand", "local", "--decode", "capped"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(checkpoint.write(tmp_path_factory.mktemp("generate")))


def test_texts_tokens_and_routing_as_json(model, capsys, tmp_path):
    more = tmp_path / "prompts.txt"
    more.write_text("\n".join(["", *PROMPTS[2:]]), encoding="utf-8")
    command = ["generate", model, "--prompt", *PROMPTS[:2], "--prompts", str(more), "--json"]
    options = ["--max-new-tokens", "5", "--virtual-devices", "2", *CEILING]
    assert cli.main([*command, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    policy = CapacityPolicy(capacity_factor=0.75, expand="local", decode="capped")
    lm = cam_jax.load(model, policy=policy, virtual_devices=2)
    expected = lm.generate(PROMPTS, max_new_tokens=5)
    assert found["prompts"] == PROMPTS
    assert found["texts"] == expected.texts
    np.testing.assert_array_equal(found["tokens"], expected.tokens)
    tokens = sum(len(lm.tokenizer.encode(prompt).ids) for prompt in PROMPTS)
    assert found["routing"]["tokens"] == tokens
    assert np.sum(found["routing"]["demand"][0]) == tokens * lm.config.moe.router.top_k


def test_what_cannot_be_is_refused_before_the_model_is_read(capsys, tmp_path):
    absent = str(tmp_path / "absent")
    assert cli.main(["generate", absent]) == 2
    assert "no prompt: give --prompt" in capsys.readouterr().err
    assert cli.main(["generate", absent, "--prompts", absent]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert cli.main(["generate", absent, "--prompt", "a", "--expand", "local"]) == 2
    assert "there is no ceiling: add --capacity-factor" in capsys.readouterr().err
    assert cli.main(["generate", absent, "--prompt", "a", "--expert", "8"]) == 2
    assert "a batch of 1 for data=1 x expert=8" in capsys.readouterr().err
    assert cli.main(["generate", absent, "--prompt", "a", "--process-id", "0"]) == 2
    assert "--coordinator, --num-processes missing" in capsys.readouterr().err
    assert cli.main(["generate", absent, "--prompt", "a"]) == 2
    assert "absent is neither an existing directory" in capsys.readouterr().err


def test_options_make_policy_and_mesh(devices):
    assert PolicyOptions().policy() is None
    assert PolicyOptions(capacity=3, expand="2").policy() == CapacityPolicy(capacity=3, expand=2)
    with pytest.raises(InputError, match="--expand 'all': expected 'local' or a number"):
        PolicyOptions(capacity=3, expand="all").policy()
    with pytest.raises(PolicyError, match="capacity_factor"):
        PolicyOptions(capacity_factor=-1.0).policy()
    assert MeshOptions().mesh() is None
    mesh = MeshOptions(data=2, tensor=2).mesh()
    assert dict(mesh.shape) == {"data": 2, "expert": len(devices) // 4, "tensor": 2}
    with pytest.raises(MeshError, match="needs 16 devices"):
        MeshOptions(expert=16).mesh()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "each", "tensor"), [(2, 2, 1), (2, 4, 2), (4, 1, 1)])
def test_processes_say_what_one_device_says(model, number, each, tensor, capsys):
    """One command line, told which process it is; the first one prints, and only the result."""
    base = ["generate", model, "--prompt", *PROMPTS, "--max-new-tokens", "6", "--json", *CEILING]
    port = free_port()
    commands = [
        [
            *("-m", "cam_jax", *base, "--tensor", str(tensor)),
            *("--coordinator", f"localhost:{port}", "--num-processes", str(number)),
            *("--process-id", str(i), "--cpu-devices", str(each)),
        ]
        for i in range(number)
    ]
    results = run_processes(commands, timeout=300, separate_errors=True)
    assert [result.code for result in results] == [0] * number, report(results)
    assert cli.main([*base, "--virtual-devices", str(number * each // tensor)]) == 0
    assert json.loads(results[0].output) == json.loads(capsys.readouterr().out)
    assert [result.output for result in results[1:]] == [""] * (number - 1)


@pytest.mark.slow
def test_processes_that_are_told_different_things_say_so(model):
    port = free_port()
    commands = [
        [
            *("-m", "cam_jax", "generate", model, "--prompt", *PROMPTS[: 2 + i], "--json"),
            *("--coordinator", f"localhost:{port}", "--num-processes", "2"),
            *("--process-id", str(i), "--cpu-devices", "1"),
        ]
        for i in range(2)
    ]
    results = run_processes(commands, timeout=120)
    assert [result.code for result in results] == [2, 2], report(results)
    assert all("the command line" in result.output for result in results)
