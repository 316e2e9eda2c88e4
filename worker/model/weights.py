"""Fills a decoder's weights from a checkpoint: what it must hold is a table made from the spec, checked before
anything is read; projections that read the same input are stacked into one linear.

Layer by layer, so that never more than one linear exists twice.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from worker.kernels.linear import PackedLinear, pack
from worker.model.checkpoint import Checkpoint, CheckpointError
from worker.model.decoder import Layer, Weights
from worker.model.spec import ModelSpec
from worker.model.staging import Staging

EMBED, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
IGNORED = ("rotary_emb.inv_freq",)  # tables that old checkpoints carry along

Shape = tuple[int, ...]
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True, slots=True)
class Stack:
    """Linears of the checkpoint that become one: their rows one below the other."""

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool

    def tensors(self, prefix: str, kind: str) -> list[tuple[str, Shape]]:
        columns = (self.columns,) if kind == "weight" else ()
        parts = zip(self.modules, self.rows, strict=True)
        return [(f"{prefix}{module}.{kind}", (rows, *columns)) for module, rows in parts]


def load(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
    on_progress: Progress = lambda done, total: None,
    on_size: Callable[[int], None] = lambda needed: None,
) -> Weights:
    """All weights on `device` as `dtype`, linears packed (`invariant`: see kernels/linear.py).

    `on_progress(done, total)` is called with bytes of the checkpoint, from (0, total) to (total, total), and before
    that `on_size(needed)` with the bytes that the device must hold; it may raise what ends the load.
    Raises CheckpointError when a tensor is missing, superfluous or misshaped, or a file is broken.
    """
    staging = Staging(device) if device.type == "cuda" else None
    with closing(Checkpoint(folder, staging)) as checkpoint:
        return _Loader(checkpoint, spec, dtype, device, invariant, on_progress, on_size).load()


class _Loader:
    """One load: the checkpoint, where its names begin, and how far it has come."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        invariant: bool,
        on_progress: Progress,
        on_size: Callable[[int], None],
    ) -> None:
        self.checkpoint, self.spec, self.dtype, self.device = checkpoint, spec, dtype, device
        self.invariant, self.on_progress, self.on_size = invariant, on_progress, on_size
        self.prefix = _prefix(checkpoint)
        self.head = _named(checkpoint, HEAD)
        self.done, self.total = 0, 0

    def load(self) -> Weights:
        self._check()
        self.on_size(sum(torch.Size(shape).numel() for _, shape in self._wanted()) * self.dtype.itemsize)
        self.checkpoint.expect(name for name, _ in self._wanted())
        self.on_progress(0, self.total)
        hidden, vocab = self.spec.hidden_size, self.spec.vocab_size
        embed = self._read([(self.prefix + EMBED, (vocab, hidden))])
        return Weights(
            embed=embed,
            layers=[self._layer(f"{self.prefix}layers.{i}.") for i in range(len(self.spec.layers))],
            norm=self._read([(self.prefix + NORM, (hidden,))]),
            head=pack(self._head_weight(embed), invariant=self.invariant),
        )

    def _layer(self, prefix: str) -> Layer:
        linears = {name: self._linear(stack, prefix) for name, stack in _stacks(self.spec).items()}
        norms = {
            name: self._read([(f"{prefix}{module}.weight", (size,))])
            for name, (module, size) in _norms(self.spec).items()
        }
        return Layer(**linears, **norms)  # type: ignore[arg-type]  # the tables' keys are its fields

    def _linear(self, stack: Stack, prefix: str) -> PackedLinear:
        weight = self._read(stack.tensors(prefix, "weight"))
        bias = self._read(stack.tensors(prefix, "bias")) if stack.bias else None
        return pack(weight, bias, invariant=self.invariant)

    def _head_weight(self, embed: Tensor) -> Tensor:
        """A tied checkpoint may hold a head all the same: a copy of the embedding, or else it is what counts."""
        if not self.head:
            return embed
        head = self._read([(self.head, (self.spec.vocab_size, self.spec.hidden_size))])
        return embed if self.spec.tied and torch.equal(head, embed) else head

    def _read(self, tensors: list[tuple[str, Shape]]) -> Tensor:
        rows = [shape[0] for _, shape in tensors]
        whole = torch.empty((sum(rows), *tensors[0][1][1:]), dtype=self.dtype, device=self.device)
        for (name, _), part in zip(tensors, whole.split_with_sizes(rows), strict=True):
            self.checkpoint.copy(name, part)
            self.done += self.checkpoint.nbytes(name)
            self.on_progress(self.done, self.total)
        return whole

    def _check(self) -> None:
        """Everything that can be known without reading a weight."""
        checkpoint, wanted = self.checkpoint, dict(self._wanted())
        held = set(checkpoint.names())
        for name, shape in wanted.items():
            if name not in held:
                raise CheckpointError(f"{checkpoint.folder}: tensor {name} is missing")
            if checkpoint.shape(name) != shape:
                raise CheckpointError(
                    f"{checkpoint.where(name)}: tensor {name} has shape {list(checkpoint.shape(name))}; "
                    f"config.json makes it {list(shape)}"
                )
        for name in sorted(held - wanted.keys()):
            if name.startswith(self.prefix) and not name.endswith(IGNORED):
                raise CheckpointError(f"{checkpoint.where(name)}: tensor {name} has no place in this model")
        self.total = sum(checkpoint.nbytes(name) for name in wanted)

    def _wanted(self) -> Iterator[tuple[str, Shape]]:
        """In the order in which they are read."""
        hidden, vocab = self.spec.hidden_size, self.spec.vocab_size
        yield self.prefix + EMBED, (vocab, hidden)
        for i in range(len(self.spec.layers)):
            yield from _layer_tensors(self.spec, f"{self.prefix}layers.{i}.")
        yield self.prefix + NORM, (hidden,)
        if self.head or not self.spec.tied:
            yield self.head or HEAD, (vocab, hidden)


def _prefix(checkpoint: Checkpoint) -> str:
    """What stands before the text model's names: `model.`, `language_model.model.`, … or nothing."""
    name = _named(checkpoint, EMBED)
    if not name:
        raise CheckpointError(f"{checkpoint.folder}: tensor model.{EMBED} is missing")
    return name.removesuffix(EMBED)


def _named(checkpoint: Checkpoint, ending: str) -> str:
    names = (name for name in checkpoint.names() if name == ending or name.endswith("." + ending))
    return min(names, key=len, default="")


def _layer_tensors(spec: ModelSpec, prefix: str) -> Iterable[tuple[str, Shape]]:
    for stack in _stacks(spec).values():
        yield from stack.tensors(prefix, "weight")
        if stack.bias:
            yield from stack.tensors(prefix, "bias")
    for module, size in _norms(spec).values():
        yield f"{prefix}{module}.weight", (size,)


def _stacks(spec: ModelSpec) -> dict[str, Stack]:
    """The linears of a Layer."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention, mlp = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    return {
        "qkv": Stack(attention, (q, kv, kv), hidden, spec.qkv_bias),
        "o": Stack(("self_attn.o_proj",), (hidden,), q, spec.o_bias),
        "gate_up": Stack(mlp, (inner, inner), hidden, spec.mlp_bias),
        "down": Stack(("mlp.down_proj",), (hidden,), inner, spec.mlp_bias),
    }


def _norms(spec: ModelSpec) -> dict[str, tuple[str, int]]:
    """The norms of a Layer. `post_attention_layernorm` is two different things: see the two rows that name it."""
    norms = {"before_attention": ("input_layernorm", spec.hidden_size)}
    if spec.sandwich_norms:
        norms["after_attention"] = ("post_attention_layernorm", spec.hidden_size)
        norms["before_mlp"] = ("pre_feedforward_layernorm", spec.hidden_size)
        norms["after_mlp"] = ("post_feedforward_layernorm", spec.hidden_size)
    else:
        norms["before_mlp"] = ("post_attention_layernorm", spec.hidden_size)
    if spec.qk_norm:
        norms["q_norm"] = ("self_attn.q_norm", spec.head_dim)
        norms["k_norm"] = ("self_attn.k_norm", spec.head_dim)
    return norms
