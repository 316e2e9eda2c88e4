"""The MTP head of a checkpoint (multi-token prediction): one decoder layer that predicts the token after the next one.

A linear layer makes its input from two vectors side by side: the embedding of the next token, and the served model's
hidden state of the token before it, each after its own norm. The MTP head uses the embedding and the output head of the
served model, even if the checkpoint copies both for the MTP head (GLM-4.5). For a large output head, drafts use an
additional 4-bit copy (head_drafter.py).

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), which introduced these heads, and the checkpoints' tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.staging import Staging
from worker.checkpoint.stored_weight import (
    DRAFTER,
    EMBED,
    PlainWeight,
    StackedLinear,
    StoredTensors,
    StoredWeight,
    WeightSource,
    check_tensors,
    find_embedding,
)
from worker.models.decoder import Decoder, Weights
from worker.models.forward_inputs import ForwardInputs
from worker.models.layer_kinds import LayerNames, norm_weights
from worker.models.load import Keeper, Kept, Loader, open_source
from worker.ops.linear.packed import PackedLinear
from worker.quantization.methods import InMemory
from worker.spec import LayerSpec, ModelSpec
from worker.spec_decode import head_drafter
from worker.spec_decode.model_drafter import Device


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The names of a head's tensors in a checkpoint.

    outer: the prefix of names outside of the head's layer. layer: the prefix of names in its layer. In both, `{model}`
    stands for the served model's prefix, and `{count}` for its number of layers.
    copies: modules that are copies of modules of the served model.
    """

    outer: str
    layer: str
    join: str  # the linear layer that joins both vectors, 2 H → H
    embedding_norm: str
    hidden_norm: str
    last_norm: str
    copies: tuple[str, ...] = ()

    def of(self, model: str, count: int) -> "HeadNames":
        """Returns the names with the placeholders replaced."""
        outer, layer = (text.format(model=model, count=count) for text in (self.outer, self.layer))
        return replace(self, outer=outer, layer=layer)


NAMES = (
    HeadNames(DRAFTER, f"{DRAFTER}layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),  # Qwen
    HeadNames(
        "{model}layers.{count}.", "{model}layers.{count}.", "eh_proj", "enorm", "hnorm", "shared_head.norm",
        ("embed_tokens", "shared_head.head"),
    ),  # GLM-4.5
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MtpHead:
    """The weights of an MTP head. For the fields, see Head."""

    name: ClassVar[str] = "the MTP head"
    layers: ClassVar[tuple[int, ...]] = ()
    normed: ClassVar[bool] = True
    target_ids: ClassVar[None] = None
    decoder: Decoder
    join: PackedLinear
    embedding_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]

    def with_decoder(self, decoder: Decoder) -> "MtpHead":
        return replace(self, decoder=decoder)

    def features(self, hidden: Tensor) -> Tensor:
        return hidden

    def inputs(self, inputs: ForwardInputs, features: Tensor) -> ForwardInputs:
        decoder = self.decoder
        do, eps, offset = decoder.operations, decoder.spec.norm_eps, decoder.spec.norm_offset
        embedded = decoder.weights.embed.rows(inputs.token_ids)
        embedded = do.rms_norm(embedded, self.embedding_norm, eps, offset=offset)
        normed = do.rms_norm(features, self.hidden_norm, eps, offset=offset)
        joined = do.linear(torch.cat((embedded, normed), dim=-1), self.join)
        return replace(inputs, replaced=(torch.arange(len(joined), device=joined.device), joined))


def has_head(folder: Path, spec: ModelSpec) -> bool:
    """Whether a checkpoint has tensors of an MTP head. spec: the served model's spec. Raises CheckpointError."""
    with closing(open_source(folder, None)) as source:
        embed = find_embedding(source.tensors) or EMBED
        return bool(_found(source.tensors, embed.removesuffix(EMBED), spec))


def check_head(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, memory: InMemory, output_head: int = 0, device: Device = "cpu"
) -> tuple[ModelSpec, int]:
    """Returns the spec of a model with only the head's layer, and how many bytes the head takes. Reads no weights.

    spec, memory, device: the served model's spec, format and device. output_head: bytes of the served model's output
    head, if it must be loaded again for drafts. Raises CheckpointError unless the checkpoint has a head with all its
    tensors.
    """
    with closing(open_source(folder, None)) as source:
        return _Head(source, spec, dtype, memory, torch.device(device)).check(output_head)


def load_head(
    folder: Path,
    spec: ModelSpec,
    served: Weights,
    memory: InMemory,
    max_positions: int,
    output_head: Callable[[], PackedLinear] | None = None,
) -> MtpHead:
    """Loads the head of a checkpoint to the device of the served model.

    spec, served, memory: the spec, weights and format of the served model. output_head: loads the served model's output
    head if `served` has only a part of it. max_positions: see Decoder. Raises the same errors as check_head.
    """
    with closing(open_source(folder, Staging(served.embed.device))) as source:
        head = _Head(source, spec, served.embed.dtype, memory, served.embed.device)
        return head.load(served, max_positions, output_head or (lambda: served.head))


class _Head:
    """The tensors of an MTP head in a checkpoint; checks and loads them."""

    def __init__(
        self, source: WeightSource, served: ModelSpec, dtype: torch.dtype, memory: InMemory, device: torch.device
    ) -> None:
        self._source, self._spec = source, replace(served, layers=(_layer_of(served),), draft_layers=0)
        self._loader = Loader(source, self._spec, dtype, device, True, memory)
        self._names = _find(source.tensors, self._loader.prefix, served)
        own = [name for name in source.tensors.names() if name.startswith(self._names.layer)]
        of_layers = self._names.layer.partition("layers.")[0]
        self._loader.names = LayerNames.of(self._spec, own, of_layers)
        hidden = self._spec.hidden_size
        self._join = StackedLinear((self._names.join,), (hidden,), 2 * hidden, bias=False)

    def check(self, output_head: int = 0) -> tuple[ModelSpec, int]:
        copies = tuple(f"{self._names.outer}{module}." for module in self._names.copies)
        names = self._names
        outer = (names.join, names.embedding_norm, names.hidden_norm, names.last_norm)
        modules = tuple(f"{names.outer}{module}." for module in outer)
        kept = [*self._weights()]
        check_tensors(self._source, [weight for weight, _ in kept], names.layer, (*copies, *modules))
        keeper, stored = Keeper(self._loader.dtype, self._loader.device), self._stored_head
        copy = keeper.nbytes_as(stored.shape, head_drafter.LAYOUT) if self._copies_head else output_head
        return self._spec, keeper.nbytes(kept) + copy

    def load(self, served: Weights, max_positions: int, output_head: Callable[[], PackedLinear]) -> MtpHead:
        self.check()
        names, loader = self._names, self._loader
        self._source.tensors.expect(tensor.name for weight, _ in self._weights() for tensor in weight.tensors())
        layer = loader.layer(names.layer, self._spec.layers[0])
        head = self._copied_head(served) if self._copies_head else output_head()
        weights = Weights(served.embed, [layer], loader.norm(self._norm(names.last_norm)), head)
        join = loader.linear(self._join, names.outer)
        embedding_norm, hidden_norm = (
            loader.norm(self._norm(name)) for name in (names.embedding_norm, names.hidden_norm)
        )
        return MtpHead(Decoder(self._spec, weights, max_positions), join, embedding_norm, hidden_norm)

    @property
    def _stored_head(self) -> StoredWeight:
        """The served model's output head in the checkpoint; the embedding, if both are tied."""
        return self._loader.head or self._loader.embed

    @property
    def _copies_head(self) -> bool:
        """Whether drafts use a 4-bit copy of the served model's output head."""
        layout = None if self._loader.memory.widen else self._stored_head.layout
        return head_drafter.pays(self._stored_head.shape, layout, self._loader.dtype, self._loader.device)

    def _copied_head(self, served: Weights) -> PackedLinear:
        loader = self._loader
        whole = served.embed.table() if loader.head is None else loader.read(loader.head)
        return head_drafter.pack(whole, loader.dtype)

    def _norm(self, name: str) -> list[PlainWeight]:
        return [*norm_weights(self._spec, self._names.outer + name, self._spec.hidden_size)]

    def _weights(self) -> Iterator[Kept]:
        """Yields all weights of the head, in the order in which they are read."""
        names, loader = self._names, self._loader
        yield from loader.weights_of_layer(names.layer, self._spec.layers[0])
        yield from ((part, None) for part in self._norm(names.last_norm))
        yield from loader.weights_of(self._join, names.outer)
        yield from ((part, None) for name in (names.embedding_norm, names.hidden_norm) for part in self._norm(name))


def _layer_of(served: ModelSpec) -> LayerSpec:
    """Returns the spec of the head's layer: it has attention, and experts if the served model has experts."""
    attention = [layer for layer in served.layers if not layer.recurrent]
    if not attention:
        raise CheckpointError(f"models of the family {served.model_type} have no MTP head that can be used")
    return replace(attention[-1], sparse=any(layer.sparse for layer in served.layers), shares=None)


def _found(tensors: StoredTensors, prefix: str, served: ModelSpec) -> list[HeadNames]:
    """Returns those of NAMES that match tensors of the checkpoint, with the placeholders replaced."""
    every = [each.of(prefix, len(served.layers)) for each in NAMES]
    return [each for each in every if any(name.startswith(each.layer) for name in tensors.names())]


def _find(tensors: StoredTensors, prefix: str, served: ModelSpec) -> HeadNames:
    found = _found(tensors, prefix, served)
    if not found:
        beginnings = " or ".join(each.of(prefix, len(served.layers)).layer for each in NAMES)
        raise CheckpointError(f"{tensors.folder} has no MTP head: no tensor's name begins with {beginnings}")
    return found[0]
