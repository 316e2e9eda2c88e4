"""An EAGLE-3 draft head: a decoder layer with its own checkpoint that reads outputs of the served model's inner layers.

The linear layer `fc` makes one vector from the outputs of several layers. Attention reads this vector and the embedding
of the next token, each after its own norm. The residual stream begins with the vector alone. The output head may have
only the most frequent tokens. The tensor `d2t` is then the difference between the served model's id and the head's id.

Sources: EAGLE-3 (arXiv 2503.01840), and the tensors of published checkpoints.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import CheckpointError, UnsupportedModel, read_config
from worker.checkpoint.staging import Staging
from worker.checkpoint.stored_weight import (
    BIAS,
    WEIGHT,
    Layout,
    PlainWeight,
    StackedLinear,
    StoredTensors,
    StoredWeight,
    WeightSource,
    check_tensors,
)
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder, Weights
from worker.models.forward_inputs import ForwardInputs
from worker.models.layer_kinds import LayerNames, norm_weights
from worker.models.load import Keeper, Kept, Loader, open_source
from worker.ops.embedding import Embedding, plain
from worker.ops.linear.packed import PackedLinear, pack_stacked
from worker.quantization.methods import InMemory
from worker.spec import ModelSpec
from worker.spec_decode import head_drafter
from worker.spec_decode.model_drafter import Device

# Reads the config of an EAGLE-3 checkpoint: its layer, and which layers of the served model it reads.
#
# There are two formats: a flat config like that of a Llama model with one layer, and the format of the speculators
# library, with the same settings in `transformer_layer_config`. Settings of EAGLE-3 may also be in `eagle_config`.

FAMILIES = ("llama", "qwen3")  # the model types that the head's layer may have
# Some checkpoints have norms [W] or [H] before the linear `fc`: the setting → the names of the norms.
NORMS_BEFORE = {"norm_before_fc": "input_norm", "fc_norm": "fc_norm.{}"}
LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The config of an EAGLE-3 draft head.

    spec: the spec of a model with only the head's layer, whose mixer reads two vectors [H] side by side.
    read: the indices of the layers of the served model whose outputs the head reads.
    draft_vocab_size: how many tokens the head's output has logits for.
    norms_before: the names of the norms before `fc`. Each is applied to an equal part of the hidden states.
    residual_normed: whether the residual stream begins with the normed hidden state. normed: as in Head.
    """

    spec: ModelSpec
    read: tuple[int, ...]
    draft_vocab_size: int
    norms_before: tuple[str, ...]
    residual_normed: bool
    normed: bool


def read_eagle_config(folder: Path, served: ModelSpec) -> EagleConfig:
    """Reads the config of an EAGLE-3 checkpoint that drafts for the model `served`.

    Raises CheckpointError, with the reason, if the config does not fit the model.
    """
    stated = read_config(folder)
    nested, layer = _object(stated, "eagle_config"), _object(stated, "transformer_layer_config")
    config = {**nested, **{name: value for name, value in stated.items() if value is not None}}
    if not _flag({"use_aux_hidden_state": True, **config}, "use_aux_hidden_state"):
        raise UnsupportedModel("use_aux_hidden_state false is not supported: EAGLE-3 reads inner layers")
    spec = _spec(stated, layer, served)
    read = _layers_read(config.get(LAYERS), len(served.layers))
    if (wide := config.get("target_hidden_size")) not in (None, served.hidden_size):
        raise CheckpointError(
            f"it reads hidden states of size {wide!r}, and the served model's have {served.hidden_size}"
        )
    return EagleConfig(
        spec,
        read,
        _draft_vocab_size(config, served),
        _norms_before(config, len(read)),
        _flag(config, "norm_before_residual"),
        _flag(config, "norm_output"),
    )


def _spec(stated: Mapping[str, Any], layer: Mapping[str, Any], served: ModelSpec) -> ModelSpec:
    outer = {key: value for key, value in stated.items() if key not in ("architectures", "transformer_layer_config")}
    spec = spec_from_config({**outer, **layer, "tie_word_embeddings": False})
    if spec.model_type not in FAMILIES:
        raise UnsupportedModel(f"an EAGLE-3 layer of model_type {spec.model_type!r} is not supported")
    if len(spec.layers) != 1:
        raise UnsupportedModel(
            f"num_hidden_layers {len(spec.layers)} is not supported: an EAGLE-3 drafter has one layer"
        )
    if spec.vocab_size != served.vocab_size:
        raise CheckpointError(
            f"it has a vocabulary of {spec.vocab_size} tokens, and the served model one of {served.vocab_size}"
        )
    layers = (replace(spec.layers[0], mixes=2 * spec.hidden_size),)
    return replace(spec, layers=layers, eos_ids=served.eos_ids, draft_layers=0)


def _layers_read(stated: Any, count: int) -> tuple[int, ...]:
    """Returns the layers whose outputs are read. count: how many layers the served model has.

    There are two published conventions. A list that begins with 1 has the indices of these layers; any other list has
    these indices plus 1.
    """
    ids = [2, count // 2, count - 3] if stated is None else stated
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise UnsupportedModel(f"{LAYERS} must be a list of whole numbers")
    read = tuple(id if ids[0] == 1 else id - 1 for id in ids)
    if not read or len(set(read)) < len(read) or not all(0 <= layer < count for layer in read):
        raise CheckpointError(f"{LAYERS} {ids} are not different layers of the served model, which has {count}")
    return read


def _draft_vocab_size(config: Mapping[str, Any], served: ModelSpec) -> int:
    size = config.get("draft_vocab_size")
    if size is None:
        return served.vocab_size
    if type(size) is not int or not 1 <= size <= served.vocab_size:
        raise UnsupportedModel(f"draft_vocab_size must be a number from 1 to {served.vocab_size}, and is {size!r}")
    return size


def _norms_before(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    found = [name for setting, name in NORMS_BEFORE.items() if _flag(config, setting)]
    if len(found) > 1:
        raise UnsupportedModel(f"{' and '.join(NORMS_BEFORE)} exclude each other")
    return tuple(dict.fromkeys(name.format(at) for name in found for at in range(layers)))


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value not in (None, False, True):
        raise UnsupportedModel(f"{name} must be true or false, and is {value!r}")
    return bool(value)


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{name} must be an object")
    return value


LAYER_NAMES = ("midlayer.", "layers.0.")  # prefixes of the names of the layer's tensors
EMBED, JOIN, HEAD, LAST_NORM = "embed_tokens", "fc", "lm_head", "norm"
TARGET_IDS = "d2t"
UNREAD = (TARGET_IDS, "t2d", "verifier_norm.", "verifier_lm_head.")  # no weights; _target_ids() reads TARGET_IDS


@dataclass(frozen=True, slots=True)
class EagleHead:
    """The weights of an EAGLE-3 head. For the fields, see Head."""

    name: ClassVar[str] = "the EAGLE-3 head"
    decoder: Decoder
    layers: tuple[int, ...]
    norms_before: tuple[Tensor, ...]  # each normalizes an equal part of the hidden states [W]
    join: PackedLinear  # the checkpoint's `fc`, from the hidden states [W] to one vector [H]
    embedding_norm: Tensor  # midlayer.input_layernorm [H]
    hidden_norm: Tensor  # midlayer.hidden_norm [H]
    target_ids: Tensor | None
    residual_normed: bool
    normed: bool

    def with_decoder(self, decoder: Decoder) -> "EagleHead":
        return replace(self, decoder=decoder)

    def features(self, hidden: Tensor) -> Tensor:
        if self.norms_before:
            parts = hidden.chunk(len(self.norms_before), dim=-1)
            hidden = torch.cat([self._norm(*pair) for pair in zip(parts, self.norms_before, strict=True)], dim=-1)
        joined: Tensor = self.decoder.operations.linear(hidden, self.join)
        return joined

    def inputs(self, inputs: ForwardInputs, features: Tensor) -> ForwardInputs:
        embedded = self._norm(self.decoder.weights.embed.rows(inputs.token_ids), self.embedding_norm)
        normed = self._norm(features, self.hidden_norm)
        residual = normed if self.residual_normed else features
        rows = torch.arange(len(residual), device=residual.device)
        return replace(inputs, replaced=(rows, residual), first=torch.cat((embedded, normed), dim=-1))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = self.decoder.operations.rms_norm(x.contiguous(), weight, self.decoder.spec.norm_eps)
        return normed


def check_eagle(
    folder: Path,
    config: EagleConfig,
    served: ModelSpec,
    dtype: torch.dtype,
    memory: InMemory,
    output_head: int = 0,
    device: Device = "cpu",
) -> int:
    """Returns how many bytes the head takes in memory. Reads no weights.

    device: the served model's. output_head: bytes of the served model's output head, if it must be loaded again for
    drafts.

    Raises CheckpointError if the checkpoint lacks a tensor of the head, or has unknown tensors.
    """
    with closing(open_source(folder, None)) as source:
        return _Stored(source, config, served, dtype, memory, torch.device(device)).check(output_head)


def load_eagle(
    folder: Path,
    config: EagleConfig,
    served: ModelSpec,
    weights: Weights,
    memory: InMemory,
    max_positions: int,
    output_head: Callable[[], PackedLinear] | None = None,
) -> EagleHead:
    """Loads a head to the device of the served model.

    served, weights, memory: the spec, weights and format of the served model. output_head: loads the served model's
    output head if `weights` have only a part of it. max_positions: see Decoder.

    Raises the same errors as check_eagle, and CheckpointError if `d2t` gives invalid ids.
    """
    with closing(open_source(folder, Staging(weights.embed.device))) as source:
        stored = _Stored(source, config, served, weights.embed.dtype, memory, weights.embed.device)
        return stored.load(weights, max_positions, output_head or (lambda: weights.head))


class _Stored:
    """The tensors of a head in its checkpoint; checks and loads them."""

    def __init__(
        self, source: WeightSource, config: EagleConfig, served: ModelSpec, dtype: torch.dtype, memory: InMemory,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._source, self._config, self._served = source, config, served
        self._tensors, self._hidden = source.tensors, config.spec.hidden_size
        self._loader = Loader(source, config.spec, dtype, device, True, memory)
        self._layer = _find_layer(source.tensors)
        own = [name for name in self._tensors.names() if name.startswith(self._layer)]
        names = LayerNames.of(config.spec, [f"layers.0.{name.removeprefix(self._layer)}" for name in own], "")
        # In this head, the input norm of the layer is applied only to the embedding.
        norms = {field: module for field, module in names.norms.items() if field != "before_attention"}
        self._loader.names = replace(names, norms=norms)
        width = len(config.read) * served.hidden_size
        self._join = StackedLinear((JOIN,), (self._hidden,), width, bias=JOIN + BIAS in self._tensors)
        self._norms_before = [(name, width // len(config.norms_before)) for name in config.norms_before]
        self._size = config.draft_vocab_size
        shared = self._size == served.vocab_size and HEAD + WEIGHT not in self._tensors
        self._head = None if shared else source.weight(HEAD + WEIGHT, (self._size, self._hidden))

    def check(self, output_head: int = 0) -> int:
        kept = [*self._weights()]
        if self._embedding is None or self._head is None:
            self._check_size()
        check_tensors(self._source, [weight for weight, _ in kept], "", UNREAD)
        self._target_ids()
        return Keeper(self._loader.dtype, self._loader.device).nbytes(kept) + (output_head if self._head is None else 0)

    def load(self, served: Weights, max_positions: int, output_head: Callable[[], PackedLinear]) -> EagleHead:
        self.check()
        loader, config = self._loader, self._config
        self._tensors.expect(tensor.name for weight, _ in self._weights() for tensor in weight.tensors())
        layer = loader.layer(self._layer, config.spec.layers[0])
        last, embedding_norm, hidden_norm = (loader.norm(parts) for parts in self._norms())
        norms_before = tuple(loader.norm(self._norm(*each)) for each in self._norms_before)
        join = loader.linear(self._join, "")
        head = output_head() if self._head is None else self._own_head(self._head)
        embed = served.embed if self._embedding is None else self._own_embedding(self._embedding, served.embed)
        decoder = Decoder(config.spec, Weights(embed, [layer], last, head), max_positions)
        return EagleHead(
            decoder, config.read, norms_before, join, embedding_norm, hidden_norm, self._target_ids(),
            config.residual_normed, config.normed,
        )  # fmt: skip

    @property
    def _embedding(self) -> PlainWeight | None:
        """The head's own embedding; None if it uses the embedding of the served model."""
        name = EMBED + WEIGHT
        return PlainWeight(name, (self._served.vocab_size, self._hidden)) if name in self._tensors else None

    def _own_embedding(self, stored: PlainWeight, served: Embedding) -> Embedding:
        """Reads the head's embedding. Returns the served model's embedding instead if both embeddings are equal."""
        own = torch.empty(stored.shape, dtype=served.dtype, device=served.device)
        self._tensors.copy(stored.name, own)
        return served if served.equals(own) else plain(own)

    def _layout(self, head: StoredWeight) -> Layout | None:
        """Returns the format in memory of the head's own output head over the vocabulary."""
        loader = self._loader
        pays = head_drafter.pays(head.shape, head.layout, loader.dtype, loader.device)
        return head_drafter.LAYOUT if pays else head.layout

    def _own_head(self, stored: StoredWeight) -> PackedLinear:
        head, dtype = self._loader.read(stored), self._loader.dtype
        few = self._layout(stored) is head_drafter.LAYOUT
        return head_drafter.pack(head, dtype) if few else pack_stacked([head], dtype=dtype, invariant=True)

    def _norm(self, name: str, size: int) -> list[PlainWeight]:
        return [*norm_weights(self._config.spec, name, size)]

    def _norms(self) -> list[list[PlainWeight]]:
        names = (LAST_NORM, f"{self._layer}input_layernorm", f"{self._layer}hidden_norm")
        return [self._norm(name, self._hidden) for name in names]

    def _weights(self) -> Iterator[Kept]:
        """Yields all weights of the head, in the order in which they are read."""
        loader = self._loader
        yield from loader.weights_of_layer(self._layer, self._config.spec.layers[0])
        for parts in (*self._norms(), *(self._norm(*each) for each in self._norms_before)):
            yield from ((part, None) for part in parts)
        yield from loader.weights_of(self._join, "")
        yield from ((bias, None) for bias in self._join.biases(""))
        if self._head is not None:
            yield self._head, self._layout(self._head)
        if self._embedding is not None:
            yield self._embedding, None

    def _check_size(self) -> None:
        if self._hidden != self._served.hidden_size:
            raise CheckpointError(
                f"{self._tensors.folder} has the hidden size {self._hidden}, and the served model has "
                f"{self._served.hidden_size}: then it needs {EMBED}{WEIGHT} and {HEAD}{WEIGHT} of its own"
            )

    def _target_ids(self) -> Tensor | None:
        """Returns the id in the served model for each id of the head; None if both have the same ids.

        Raises CheckpointError if the tensor `d2t` is needed but missing, or gives invalid ids.
        """
        tensors, size, count = self._tensors, self._size, self._served.vocab_size
        if size == count and TARGET_IDS not in tensors:
            return None
        if TARGET_IDS not in tensors:
            raise CheckpointError(f"{tensors.folder}: tensor {TARGET_IDS} is missing")
        where = tensors.where(TARGET_IDS)
        if tensors.shape(TARGET_IDS) != (size,) or tensors.format(TARGET_IDS) not in ("I64", "I32"):
            raise CheckpointError(f"{where}: tensor {TARGET_IDS} must be {size} whole numbers")
        added = torch.empty(size, dtype=torch.int64)
        tensors.copy(TARGET_IDS, added)
        ids = torch.arange(size) + added
        if int(ids.min()) < 0 or int(ids.max()) >= count or len(torch.unique(ids)) < size:
            raise CheckpointError(f"{where}: tensor {TARGET_IDS} does not give {size} different ids below {count}")
        return ids.to(self._loader.device)


def _find_layer(tensors: StoredTensors) -> str:
    """Returns the prefix of the names of the layer's tensors."""
    for beginning in LAYER_NAMES:
        if any(name.startswith(beginning) for name in tensors.names()):
            return beginning
    beginnings = " or ".join(LAYER_NAMES)
    raise CheckpointError(f"{tensors.folder} has no EAGLE-3 head: no tensor's name begins with {beginnings}")
