"""Files of transformers itself, both ways and in both expert layouts (extra `parity`)."""

from pathlib import Path

import numpy as np
import pytest

from cam_jax.conversion import CheckpointSource, load_checkpoint, save_hf
from tests.conversion.checkpoints import same

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_files_of_transformers(tmp_path: Path, fused: bool, bias: bool) -> None:
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        attention_bias=bias,
        pad_token_id=0,
        eos_token_id=2,
        dtype="bfloat16",
    )
    model = OlmoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", save_original_format=not fused)

    loaded = load_checkpoint(tmp_path / "theirs")
    assert loaded.layout == ("fused" if fused else "per_expert")
    experts = model.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.detach().float().numpy().reshape(5, 2, 6, 8).swapaxes(0, 1)
    assert np.array_equal(loaded.leaves["layers.1.moe.experts.gate"].astype(np.float32), gate)
    assert np.array_equal(loaded.leaves["layers.1.moe.experts.up"].astype(np.float32), up)

    save_hf(
        tmp_path / "ours",
        loaded.config_json,
        loaded.leaves,
        layout=loaded.layout,
        companions=loaded.opened.companions.values(),
        max_shard_bytes=2000,
    )
    theirs, ours = (CheckpointSource.open(tmp_path / name) for name in ("theirs", "ours"))
    assert set(theirs.names()) == set(ours.names())
    assert all(same(theirs.read(name), ours.read(name)) for name in theirs.names())

    again, info = OlmoeForCausalLM.from_pretrained(
        tmp_path / "ours", dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert again.dtype == torch.bfloat16
    for (name, a), (_, b) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
