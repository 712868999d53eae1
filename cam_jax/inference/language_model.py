"""A loaded model with the calls that people make: logits, generate, score, routing."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float32
from tokenizers import Tokenizer

from cam_jax.conversion import save_hf
from cam_jax.conversion.orbax import save_orbax
from cam_jax.conversion.plan import directory_of
from cam_jax.conversion.quantization_report import QuantizationReport
from cam_jax.conversion.together import save_together
from cam_jax.distributed import agree
from cam_jax.errors import InputError
from cam_jax.expert_parallel import check_batch
from cam_jax.inference import generate as generation
from cam_jax.inference.buckets import bucket
from cam_jax.inference.generate import Generation
from cam_jax.inference.origin import Origin
from cam_jax.inference.policies import (
    Policy,
    check_devices,
    check_policy,
    device_sizes,
    group_notes,
    row_devices,
)
from cam_jax.inference.prompts import Batch, read_batch, read_prompts
from cam_jax.inference.report import RoutingReport
from cam_jax.inference.rows import spread_rows
from cam_jax.inference.sampling import check_sampling, is_integer
from cam_jax.inference.score import load_of, logits_of, score_of
from cam_jax.inference.special import SpecialTokens
from cam_jax.models.config import DecoderConfig
from cam_jax.models.params import unstack_params
from cam_jax.models.sharding import shard_params

_WRITERS = {"orbax": save_orbax, "hf": save_hf}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """Weights, tokenizer and the policy they run under; immutable.

    Letters: B rows, S positions, N new tokens, V vocabulary, L MoE layers.

    Lengths are padded to buckets (16, 24, 32, 48, ...), so that a new length rarely compiles.
    Padding changes no result; the number of rows B is not padded, because rows decide which tokens
    share a group.

    Under a policy with ``group="device"`` or ``"batch"`` the tokens of a row compete with those of
    other rows, so a row's result depends on its batch mates; under ``group="sequence"`` (without
    ``expand`` and ``expert_drop``) and without a ceiling it does not.

    Attributes:
        config: the decoder.
        params: its weights, a pytree.
        tokenizer: of the checkpoint; None if it has none.
        special: EOS, BOS and padding ids.
        policy: None, a policy for all MoE layers, or a tuple with one (or None) for each.
        mesh: the device mesh; None = one device. On a mesh a call takes at least one row per data x
            expert device; rows that do not divide are filled up with empty ones. Where it spans
            processes, each makes the same calls with the same arguments and gets whole results.
        virtual_devices: expert-parallel devices that one device emulates, or (data, expert).
        origin: what is needed to save it again; None for a model that was not loaded.
        quantization: how far int8 experts are from the checkpoint's; None if they are as stored.
    """

    config: DecoderConfig
    params: Any = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None = dataclasses.field(default=None, repr=False)
    special: SpecialTokens = dataclasses.field(default_factory=SpecialTokens)
    policy: Policy = None
    mesh: Any = None
    virtual_devices: int | tuple[int, int] = 1
    origin: Origin | None = dataclasses.field(default=None, repr=False)
    quantization: QuantizationReport | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", check_policy(self.policy, self.config.num_moe_layers))
        check_devices(self.config, self.mesh, self.virtual_devices)
        if self.mesh is not None:
            placed = shard_params(self.config, self.params, self.mesh)
            object.__setattr__(self, "params", placed)

    def with_policy(self, policy: Any) -> "LanguageModel":
        """The same weights under another policy; a tuple holds one per MoE layer.

        Raises:
            PolicyError: not a policy, or a tuple whose length is not the number of MoE layers.
        """
        return dataclasses.replace(self, policy=policy)

    def logits(self, input_ids: Any, attention_mask: Any = None) -> Float32[Array, "B S V"]:
        """Logits of every position; finite and meaningless at padding.

        Args:
            input_ids: [B, S] integers; any number where the mask is 0.
            attention_mask: [B, S] of 0 and 1; None = all real. Padding may stand on either side.

        Raises:
            InputError: names the argument and what is wrong with it.
            MeshError: fewer rows than the mesh has devices to give them to.
        """
        batch = self._read(input_ids, attention_mask)
        rows, length = batch.ids.shape
        self._agree("the arguments of logits", batch.arrays)
        batch = self._fill(batch.pad_right(self._bucket(length)))
        return logits_of(self.params, batch.ids, batch.valid, **self._static())[:rows, :length]

    def score(self, input_ids: Any, attention_mask: Any = None) -> Float32[np.ndarray, "B targets"]:
        """Natural log-probability of each next token, log p(token j + 1 | tokens up to j) at j.

        0 where the target, position j + 1, is padding, or is the first real token of its row and so
        has nothing before it. Logits are made for a few positions at a time, so that [B, S, V]
        never exists.

        Args, Raises: as `logits`.
        """
        return self.score_with_routing(input_ids, attention_mask)[0]

    def score_with_routing(
        self, input_ids: Any, attention_mask: Any = None, *, allow_empty_rows: bool = False
    ) -> tuple[Float32[np.ndarray, "B targets"], RoutingReport]:
        """`score` and `routing` of one and the same pass, for evaluations.

        Args:
            input_ids, attention_mask: as in `logits`.
            allow_empty_rows: rows without a real token are accepted, so that the last batch of a
                data set can be filled up to the shape of the others. They change no result: the
                real rows are divided over the (virtual) devices as if they were alone.
        """
        batch = self._read(input_ids, attention_mask, allow_empty_rows=allow_empty_rows)
        self._agree("the arguments of score", batch.arrays)
        aligned = batch.align("left", largest=self.config.max_positions)
        data, expert = device_sizes(self.mesh, self.virtual_devices)
        order = spread_rows(np.asarray(aligned.valid.any(axis=1)), data * expert)
        spare = -len(order) % row_devices(self.mesh)
        order = np.concatenate([order, np.full(spare, -1)])
        # Row -1 of what stands below is an empty one.
        ids = np.pad(aligned.ids, ((0, 1), (0, 0)))[order]
        valid = np.pad(aligned.valid, ((0, 1), (0, 0)))[order]
        logprobs, load = score_of(self.params, ids, valid, **self._static())
        in_order = np.zeros(aligned.ids.shape, np.float32)
        in_order[order[order >= 0]] = np.asarray(logprobs)[order >= 0]
        return batch.unalign(in_order)[:, 1:], self._report(load, batch)

    def routing(self, input_ids: Any, attention_mask: Any = None) -> RoutingReport:
        """Per MoE layer: demand, load, drops by cause, capacity, straggler factors, slot use.

        Args, Raises: as `logits`.
        """
        batch = self._read(input_ids, attention_mask)
        self._agree("the arguments of routing", batch.arrays)
        aligned = self._fill(batch.align("left", largest=self.config.max_positions))
        load = load_of(self.params, aligned.ids, aligned.valid, **self._static())
        return self._report(load, batch)

    def generate(
        self,
        prompts: Any,
        attention_mask: Any = None,
        *,
        max_new_tokens: Any = 64,
        temperature: Any = 0.0,
        top_k: Any = None,
        top_p: Any = None,
        seed: Any = 0,
        stop_at_eos: bool = True,
        priority: Any = None,
        on_token: Any = None,
    ) -> Generation:
        """Continues prompts, greedily or by sampling.

        Args:
            prompts: a text, a list of texts, lists of token ids of any lengths, or an integer array
                [B, S].
            attention_mask: [B, S] of 0 and 1 beside an array; padding may stand on either side.
            max_new_tokens: N, at least 1.
            temperature: 0 takes the most likely token; sampling otherwise.
            top_k: draw among the ``top_k`` most likely tokens; None = all.
            top_p: draw among the most likely tokens that together reach ``top_p``; None = all.
            seed: of sampling, in [0, 2**32). Row i draws from fold_in(seed, i) and the step,
                whatever the batch.
            stop_at_eos: a row ends at any EOS id of config and generation_config.
            priority: [B, S] integers like ``prompts`` (ids only): which prompt tokens keep their
                slots first.
            on_token: called with (step, tokens [B] int32) after each token is drawn; finished rows
                hold the pad id.

        Returns:
            A Generation; ``.tokens`` has exactly ``max_new_tokens`` columns.

        Raises:
            InputError: an empty prompt, ids out of range, a mask that does not fit, prompt and
            continuation longer
                than the model's positions, an option out of its range; before any long work.
        """
        if not is_integer(max_new_tokens) or int(max_new_tokens) < 1:
            raise InputError(f"max_new_tokens must be an integer >= 1, got {max_new_tokens!r}")
        if on_token is not None and not callable(on_token):
            raise InputError("on_token must be callable as on_token(step, tokens), or None")
        new = int(max_new_tokens)
        config = self.config
        sampling = check_sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            vocab_size=config.vocab_size,
        )
        batch = read_prompts(
            prompts,
            attention_mask,
            priority,
            tokenizer=self.tokenizer,
            bos_id=self.special.bos_id,
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
        )
        rows, longest = len(batch.ids), int(batch.lengths.max())
        self._check_rows(rows)
        if longest + new > config.max_positions:
            raise InputError(
                f"prompts: row {int(batch.lengths.argmax())} has {longest} tokens, and "
                f"max_new_tokens={new} more exceed the model's {config.max_positions} positions: "
                "shorten one of them"
            )
        self._agree(
            "the arguments of generate",
            (batch.arrays, sampling, new, stop_at_eos, on_token is None),
        )
        tokens, logprobs, done = generation.run(
            self.params,
            self._fill(batch.align("right", largest=config.max_positions)),
            sampling,
            setting=generation.Setting(pad_id=self.special.pad_id, **self._static()),
            eos_ids=self.special.eos_array(stop_at_eos),
            max_new_tokens=new,
            room=bucket(new, smallest=32, largest=config.max_positions),
            on_token=None if on_token is None else lambda step, row: on_token(step, row[:rows]),
        )
        tokens, logprobs, done = tokens[:rows], logprobs[:rows], done[:rows]
        lengths = self.special.lengths(tokens, stop_at_eos)
        return Generation(
            tokens=tokens,
            logprobs=logprobs,
            lengths=lengths,
            texts=self._texts(tokens, lengths, done),
            notes=self._notes(batch),
        )

    def save(self, path: str | Path, format: str = "orbax", *, overwrite: bool = False) -> Path:
        """Write the model as a checkpoint directory, complete or not at all.

        Where the mesh spans processes each of them calls this, and process 0 writes.

        Args:
            path: the directory to make.
            format: "orbax", which any mesh reads in parts; or "hf", safetensors under the names
                they came from. Config, tokenizer and generation config travel along.
            overwrite: replace a checkpoint directory that is there. Never anything else.

        Returns:
            The directory.

        Raises:
            InputError: an unknown format, int8 experts, or a model that came from no checkpoint.
            CheckpointError: something is at ``path`` already, or it cannot be written.
        """
        if not isinstance(format, str) or format not in _WRITERS:
            raise InputError(f"format={format!r}: expected one of {', '.join(_WRITERS)}")
        if self.config.moe is not None and self.config.moe.quantized:
            raise InputError(
                "save: this model's experts are int8, which the format has no place for; save one "
                "that was loaded without quantize"
            )
        if self.origin is None:
            raise InputError(
                "save needs the config.json of a loaded checkpoint, and this model has none"
            )
        origin = self.origin
        found = save_together(
            lambda leaves: _WRITERS[format](
                path,
                origin.config_json,
                leaves,
                layout=origin.layout,
                companions=origin.companions,
                overwrite=overwrite,
            ),
            unstack_params(self.config, self.params),
        )
        return directory_of(path) if found is None else found

    def _read(
        self, input_ids: Any, attention_mask: Any, *, allow_empty_rows: bool = False
    ) -> Batch:
        batch = read_batch(
            input_ids,
            attention_mask,
            vocab_size=self.config.vocab_size,
            max_positions=self.config.max_positions,
            allow_empty_rows=allow_empty_rows,
        )
        self._check_rows(len(batch.ids))
        return batch

    def _check_rows(self, rows: int) -> None:
        if self.mesh is not None:
            check_batch(rows, self.mesh)

    def _agree(self, what: str, arguments: Any) -> None:
        """Refuses calls that differ between processes, which would wait for each other."""
        if self.mesh is not None and self.mesh.is_multi_process:
            agree((arguments, self.policy, self.special), what)

    def _fill(self, batch: Batch) -> Batch:
        return batch.fill_rows(row_devices(self.mesh))

    def _bucket(self, length: int) -> int:
        return bucket(length, largest=self.config.max_positions)

    def _static(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "policy": self.policy,
            "mesh": self.mesh,
            "virtual_devices": self.virtual_devices,
        }

    def _notes(self, batch: Batch) -> tuple[str, ...]:
        rows = int(batch.valid.any(axis=1).sum())
        return group_notes(rows, self.policy, self.mesh, self.virtual_devices)

    def _report(self, load: Any, batch: Batch) -> RoutingReport:
        if load is None:
            raise InputError("this model has no MoE layer, so there is no routing to report")
        return RoutingReport.of(
            load,
            layers=self.config.moe_layers,
            devices=device_sizes(self.mesh, self.virtual_devices)[1],
            notes=self._notes(batch),
        )

    def _texts(self, tokens: np.ndarray, lengths: np.ndarray, done: np.ndarray) -> list[str] | None:
        if self.tokenizer is None:
            return None
        # A row that is done ends with its EOS, which is no text.
        ends = lengths - done.astype(lengths.dtype)
        return [
            self.tokenizer.decode(row[:end].tolist()) for row, end in zip(tokens, ends, strict=True)
        ]
