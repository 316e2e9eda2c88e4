"""The weights of a model: of each layer a mixer, a feed-forward network and norms, and what is around the layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.kernels.experts import PackedExperts
from worker.kernels.linear import PackedLinear
from worker.model.layer_inputs import LayerInputs, OwnInput


class MixerWeights(Protocol):
    """The weights of a mixer: a record of its kind (mixers/)."""

    @property
    def kind(self) -> str: ...

    @property
    def o(self) -> PackedLinear:
        """The linear that multiplies the mixed rows."""

    @property
    def linears(self) -> Iterator[PackedLinear]: ...


class FeedForwardWeights(Protocol):
    """The weights of a feed-forward network: a record of its kind (feed_forward/)."""

    @property
    def kind(self) -> str: ...

    @property
    def first(self) -> PackedLinear | None:
        """The linear that is read first, if all rows read the same one."""

    @property
    def linears(self) -> Iterator[PackedLinear | PackedExperts]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer. Norms are [H], or [2, H] if they are layer norms; None: the layer has no such norm.

    Each comment begins with the name in Hugging Face checkpoints.
    """

    before_attention: Tensor | None = None  # input_layernorm
    mixer: MixerWeights
    after_attention: Tensor | None = None  # post_attention_layernorm of Gemma, before the residual sum
    before_mlp: Tensor | None = None  # post_attention_layernorm; Gemma: pre_feedforward_layernorm
    feed_forward: FeedForwardWeights
    after_mlp: Tensor | None = None  # post_feedforward_layernorm of Gemma, before the residual sum
    own_input: OwnInput | None = None  # what the layer makes of a vector of its own
    scale: Tensor | None = None  # layer_scalar [1]: of the layer's output

    @property
    def next_weights(self) -> list[Tensor]:
        """The weights that are read after the mixer, in order."""
        first = self.feed_forward.first
        return [self.mixer.o.memory] if first is None else [self.mixer.o.memory, first.memory]

    @property
    def linears(self) -> Iterator[PackedLinear | PackedExperts]:
        """All linears of this layer."""
        yield from self.mixer.linears
        yield from self.feed_forward.linears
        if self.own_input is not None:
            yield from (self.own_input.gate, self.own_input.out)


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights, on one device."""

    embed: Tensor  # embed_tokens [vocab, H]
    layers: list[Layer]
    norm: Tensor  # norm [H]
    head: PackedLinear  # lm_head: H → vocab
    layer_inputs: LayerInputs | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the embeddings and of all linears in memory."""
        linears = (linear for layer in self.layers for linear in layer.linears)
        inputs = 0 if self.layer_inputs is None else self.layer_inputs.nbytes
        return self.embed.nbytes + inputs + sum(linear.nbytes for linear in (*linears, self.head))
