"""Describes an encoder as data: a ModelSpec for the layers, and what only encoders have.

The layers of an encoder are those of a decoder, with other places for the norms: its spec and its weights are therefore
those of worker/models. The spec contains no file names and no tensors.
"""

from dataclasses import dataclass

from shared.messages import PoolingKind
from worker.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A classification head: a text's pooled row, then (if stated) a linear, an activation and a norm, then a linear.

    The fields are the names of modules in the checkpoint; "": the head has no such module.
    """

    labels: int
    pooling: PoolingKind  # how the rows of a text become one
    out: str  # the last linear
    out_bias: bool = True
    dense: str = ""
    dense_bias: bool = True
    activation: str = ""  # tanh, relu or gelu
    norm: str = ""


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear that is applied to pooled vectors: a module `Dense` of sentence-transformers."""

    folder: str  # the module's folder in the checkpoint, or the name of the linear in a GGUF file
    inputs: int
    outputs: int
    bias: bool
    activation: str  # identity, tanh, relu or gelu
    weight: str = "linear.weight"  # the name of its weight; that of its bias has `bias` instead of `weight`


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """Describes an encoder."""

    model: ModelSpec  # the layers; a layer's `window` is not used
    # for each layer, how many tokens before and after itself a token attends to; 0: all of its text
    reaches: tuple[int, ...]
    positions: int = 0  # rows of the table of position embeddings; 0: there is none
    first_position: int = 0  # the row for a text's first token
    token_types: int = 0  # rows of the table of token types; 0: there is none
    embed_norm: bool = False  # a norm of the embeddings
    norms_after_sums: bool = False  # the norms after attention and MLP follow the residual sum, as in BERT
    first_norm: bool = True  # whether the first layer has a norm before attention
    last_norm: bool = True  # whether there is a norm after the last layer
    most_tokens: int  # the longest text
    head: HeadSpec | None = None
    dense: tuple[DenseSpec, ...] = ()

    @property
    def vector_size(self) -> int:
        """The length of a text's vector."""
        return self.dense[-1].outputs if self.dense else self.model.hidden_size
