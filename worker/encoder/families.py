"""The families of encoders, each a row of data, and the spec of an encoder from its config.

A row of ENCODERS has the properties of the layers (`Family`, as for decoders), the names that its checkpoints use, and
its classification head. Decoders that are trained to attend in both directions need no row: their config says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shared.checkpoint import Dense, Task, is_bidirectional
from shared.messages import PoolingKind
from worker.checkpoint.checkpoint import UnsupportedModel
from worker.models.config import spec_from_config, spec_of_family
from worker.models.config_values import check_outline
from worker.models.families import COMMON
from worker.models.family import FULL, SLIDING, Config, Family
from worker.spec import ATTENTION, ModelSpec

# Describes an encoder as data: a ModelSpec for the layers, and what encoders have beside it.
#
# The layers of an encoder are those of a decoder, with other places for the norms: its spec and its weights are
# therefore those of worker/models. The spec contains no file names and no tensors.


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


ACTIVATIONS = ("tanh", "relu", "gelu", "identity")
MOST_TYPES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How checkpoints of a family name modules. Common names: see worker/models/layer_kinds.py and weights.py.

    prefixes: what may stand before all names, the longest first
    whole: common name of each module outside the layers, by its name in the checkpoint
    layers: what stands before a layer's number
    layer: common name of each module inside a layer, by its name in the checkpoint
    unread: prefixes of tensors that an encoder may have and vectors do not need, such as a pooler
    """

    prefixes: tuple[str, ...]
    whole: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """The properties of a family that its configs do not state. Other fields: see EncoderSpec."""

    family: Family
    names: Sequence[Names]  # the ways in which checkpoints of the family are written; the first one that fits is used
    settings: Mapping[str, str] = field(default_factory=dict)  # common name of a setting → its name in this family
    read: Callable[[Config], Config] = lambda config: config  # translates another way of writing configs
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the values that a setting may have
    learned_positions: bool = False
    positions_after_padding: bool = False  # the first token has the position after the id of the padding token
    types: bool = False
    embed_norm: bool = True
    norms_after_sums: bool = False
    first_norm: bool = True
    last_norm: bool = False
    reach: Callable[[Config], int] = lambda config: 0  # how far a token attends in a layer with a window
    head: HeadSpec | None = None
    head_pooling: str = ""  # the setting that says how the head pools; "": the head's own kind


def never_rotates(config: Config) -> list[bool]:
    return [False] * config["num_hidden_layers"]


def all_biased(config: Config) -> tuple[bool, bool]:
    return True, True


def nothing_biased(config: Config) -> tuple[bool, bool]:
    return False, False


def listed_or_every_third(config: Config) -> list[str]:
    """Every `global_attn_every_n_layers`-th layer, from the first on, attends to all tokens (ModernBERT)."""
    nth = config["global_attn_every_n_layers"]
    if type(nth) is not int or nth < 1:
        raise UnsupportedModel(f"global_attn_every_n_layers {nth!r} is not supported; supported are numbers from 1 on")
    return [SLIDING if i % nth else FULL for i in range(config["num_hidden_layers"])]


def _modern_bert(config: Config) -> Config:
    """Returns ModernBERT's config with its rotary settings and windows as decoders state them."""
    stated = dict(config)
    local = config.get("local_attention", 128)
    stated["sliding_window"] = local
    if not isinstance(config.get("rope_parameters"), dict):
        stated["rope_theta"] = config.get("global_rope_theta", 160_000.0)
        stated["rope_local_base_freq"] = config.get("local_rope_theta", 10_000.0)
    return stated


def _nomic(config: Config) -> Config:
    """Returns the config of Nomic's own files with the names that transformers uses."""
    if "n_embd" not in config:
        return config
    names = {
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base",
    }  # fmt: skip
    stated = {**config, **{common: config[own] for common, own in names.items() if own in config}}
    trained = config.get("max_trained_positions") or config.get("n_positions") or 2048
    gates = {"swiglu": "silu", "geglu": "gelu"}
    act = str(config.get("activation_function", "swiglu"))
    if act not in gates:
        raise UnsupportedModel(f"activation_function {act!r} is not supported; supported are {', '.join(gates)}")
    return {**stated, "max_position_embeddings": trained, "hidden_act": gates[act]}


BERT_LAYER = {
    "attention.self.query": "self_attn.q_proj", "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj", "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm", "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj", "output.LayerNorm": "post_feedforward_layernorm",
}  # fmt: skip
BERT_WHOLE = {
    "embeddings.word_embeddings": "embed_tokens", "embeddings.position_embeddings": "embed_positions",
    "embeddings.token_type_embeddings": "embed_types", "embeddings.LayerNorm": "embed_norm",
}  # fmt: skip
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.")
BERT = Family(
    {
        "max_position_embeddings": 512, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "vocab_size": 30_522,
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "mlp_bias": True, "type_vocab_size": 2, "pad_token_id": 0,
    },
    layer_norm=True, norm_bias=True, pre_norms=False, post_norms=True, gated=False, biases=all_biased,
    rotates=never_rotates, names={"rms_norm_eps": "layer_norm_eps"},
)  # fmt: skip
ABSOLUTE: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", None), "is_decoder": (False, None), "add_cross_attention": (False, None),
}  # fmt: skip
TANH_HEAD = HeadSpec(0, PoolingKind.FIRST, "classifier.out_proj", dense="classifier.dense", activation="tanh")


def _bert(prefix: str) -> Names:
    return Names(prefixes=(f"{prefix}.",), whole=BERT_WHOLE, layers="encoder.layer.", layer=BERT_LAYER, unread=BUFFERS)


def _roberta(prefix: str) -> EncoderFamily:
    family = replace(BERT, defaults={**BERT.defaults, "vocab_size": 50_265, "type_vocab_size": 2, "pad_token_id": 1})
    return EncoderFamily(
        family=family, names=(_bert(prefix),), must=ABSOLUTE, learned_positions=True, positions_after_padding=True,
        types=True, norms_after_sums=True, head=TANH_HEAD,
    )  # fmt: skip


NOMIC_WHOLE = {
    "embeddings.word_embeddings": "embed_tokens", "embeddings.token_type_embeddings": "embed_types",
    "embeddings.LayerNorm": "embed_norm", "emb_ln": "embed_norm",
}  # fmt: skip
NOMIC_LAYER = {
    "attn.Wqkv": "self_attn.qkv_proj", "attn.out_proj": "self_attn.o_proj", "norm1": "post_attention_layernorm",
    "norm2": "post_feedforward_layernorm", "mlp.fc11": "mlp.up_proj", "mlp.fc12": "mlp.gate_proj",
    "mlp.fc2": "mlp.down_proj", "post_mlp_layernorm": "post_feedforward_layernorm",
    **{name: name for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj",
        "mlp.gate_proj", "mlp.down_proj", "post_attention_layernorm",
    )},
}  # fmt: skip
MODERN_WHOLE = {"embeddings.tok_embeddings": "embed_tokens", "embeddings.norm": "embed_norm", "final_norm": "norm"}
MODERN_LAYER = {
    "attn_norm": "input_layernorm", "attn.Wqkv": "self_attn.qkv_proj", "attn.Wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm", "mlp.Wi": "mlp.gate_up_proj", "mlp.Wo": "mlp.down_proj",
}  # fmt: skip
DISTIL_LAYER = {
    "attention.q_lin": "self_attn.q_proj", "attention.k_lin": "self_attn.k_proj", "attention.v_lin": "self_attn.v_proj",
    "attention.out_lin": "self_attn.o_proj", "sa_layer_norm": "post_attention_layernorm", "ffn.lin1": "mlp.up_proj",
    "ffn.lin2": "mlp.down_proj", "output_layer_norm": "post_feedforward_layernorm",
}  # fmt: skip

ENCODERS: Mapping[str, EncoderFamily] = {
    "bert": EncoderFamily(
        family=BERT, names=(_bert("bert"),), must=ABSOLUTE, learned_positions=True, types=True, norms_after_sums=True,
        head=HeadSpec(0, PoolingKind.FIRST, "classifier", dense="bert.pooler.dense", activation="tanh"),
    ),
    "roberta": _roberta("roberta"),
    "xlm-roberta": _roberta("roberta"),
    "camembert": _roberta("roberta"),
    "distilbert": EncoderFamily(
        family=replace(BERT, defaults={
            **BERT.defaults, "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None,
            "intermediate_size": None, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072,
            "activation": "gelu",
        }),
        settings={
            "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim", "hidden_act": "activation",
        },
        names=(Names(
            prefixes=("distilbert.",), whole=BERT_WHOLE, layers="transformer.layer.", layer=DISTIL_LAYER,
            unread=BUFFERS,
        ),),
        learned_positions=True, norms_after_sums=True,
        head=HeadSpec(0, PoolingKind.FIRST, "classifier", dense="pre_classifier", activation="relu"),
    ),
    "nomic_bert": EncoderFamily(
        family=Family(
            {
                **BERT.defaults, "max_position_embeddings": 2048, "rope_theta": 1000.0, "hidden_act": "silu",
                "mlp_bias": False, "vocab_size": 30_528,
            },
            layer_norm=True, norm_bias=True, pre_norms=False, post_norms=True, biases=nothing_biased,
            names={"rms_norm_eps": "layer_norm_eps"},
        ),
        read=_nomic,
        must={
            "qkv_proj_bias": (False, None), "mlp_fc1_bias": (False, None), "mlp_fc2_bias": (False, None),
            "prenorm": (False, None), "rotary_emb_fraction": (1, 1.0, None), "rotary_emb_interleaved": (False, None),
            "rotary_emb_scale_base": (None,), "use_rms_norm": (False, None), "parallel_block": (False, None),
            "causal": (False, None), "num_experts": (0, None),
        },
        names=(Names(
            prefixes=("nomic_bert.", "bert."), whole=NOMIC_WHOLE, layers="encoder.layers.", layer=NOMIC_LAYER,
            unread=BUFFERS,
        ), Names(
            prefixes=("nomic_bert.", "bert."), whole=NOMIC_WHOLE, layers="layers.", layer=NOMIC_LAYER, unread=BUFFERS,
        )),
        types=True, norms_after_sums=True,
    ),
    "modernbert": EncoderFamily(
        family=Family(
            {
                "vocab_size": 50_368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
                "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192,
                "norm_eps": 1e-5, "norm_bias": False, "global_attn_every_n_layers": 3, "rope_parameters": {},
                "classifier_pooling": "cls", "classifier_bias": False, "classifier_activation": "gelu",
                "rope_theta": 160_000.0, "rope_local_base_freq": 10_000.0,
            },
            layer_types=listed_or_every_third, layer_norm=True, local_rope=True,
            names={"rms_norm_eps": "norm_eps", "hidden_act": "hidden_activation"},
        ),
        read=_modern_bert,
        must={"norm_bias": (False,), "classifier_bias": (False,), "classifier_activation": ("gelu",)},
        names=(Names(prefixes=("model.",), whole=MODERN_WHOLE, layers="layers.", layer=MODERN_LAYER),),
        first_norm=False, last_norm=True, reach=lambda config: config["sliding_window"] // 2,
        head=HeadSpec(
            0, PoolingKind.FIRST, "classifier", dense="head.dense", dense_bias=False, activation="gelu",
            norm="head.norm",
        ),
        head_pooling="classifier_pooling",
    ),
}  # fmt: skip
# Decoders whose config says that they attend in both directions
BOTH_WAYS = ("use_bidirectional_attention", "is_causal")
SCORE = HeadSpec(0, PoolingKind.LAST, "score", out_bias=False)
HEAD_POOLING = {"cls": PoolingKind.FIRST, "mean": PoolingKind.MEAN}


def encoder_spec(config: Config, task: Task) -> EncoderSpec:
    """Returns the spec of an encoder. config: its config.json; task: what it is served for, see shared/checkpoint.py.

    Raises UnsupportedModel for an unsupported family or setting, and CheckpointError for an unsupported quantization.
    """
    check_outline(config)
    name = str(config.get("model_type"))
    row = ENCODERS.get(name)
    if row is None:
        return _both_ways(config, task)
    stated: dict[str, Any] = {**COMMON, **row.family.defaults, **row.read(config)}
    for common, own in row.settings.items():
        stated[common] = stated[own]
    for setting, served in row.must.items():
        if stated.get(setting, served[0]) not in served:
            raise UnsupportedModel(
                f"{setting} {stated[setting]!r:.80} is not supported; supported is {served[0]!r} for {name}"
            )
    model = spec_of_family(name, row.family, stated, replace(task, labels=0, name="embed"))
    reach = row.reach(stated)
    padding = stated.get("pad_token_id") if row.positions_after_padding else None
    if row.positions_after_padding and (type(padding) is not int or not 0 <= padding < model.vocab_size):
        raise UnsupportedModel(f"pad_token_id {padding!r:.80} is not supported; positions begin after it")
    first = padding + 1 if type(padding) is int else 0
    types = stated["type_vocab_size"] if row.types else 0
    if type(types) is not int or not 0 <= types <= MOST_TYPES:
        raise UnsupportedModel(f"type_vocab_size {types!r:.80} is not supported; it is a number up to {MOST_TYPES}")
    most = model.max_positions - (first if row.learned_positions else 0)
    if most < 1:
        raise UnsupportedModel(f"max_position_embeddings {model.max_positions} is not supported: no text would fit")
    return EncoderSpec(
        model=model,
        reaches=tuple(reach if layer.window else 0 for layer in model.layers),
        positions=model.max_positions if row.learned_positions else 0,
        first_position=first,
        token_types=types,
        embed_norm=row.embed_norm,
        norms_after_sums=row.norms_after_sums,
        first_norm=row.first_norm,
        last_norm=row.last_norm,
        most_tokens=most,
        head=_head(row, stated, task.labels, name) if task.labels else None,
        dense=_dense(task.dense, model.hidden_size),
    )


def _head(row: EncoderFamily, stated: Config, labels: int, name: str) -> HeadSpec:
    if row.head is None:
        raise UnsupportedModel(f"a classification head is not supported for {name}")
    pooling = row.head.pooling
    if row.head_pooling:
        wanted = stated[row.head_pooling]
        if wanted not in HEAD_POOLING:
            raise UnsupportedModel(
                f"{row.head_pooling} {wanted!r:.80} is not supported; supported are {', '.join(HEAD_POOLING)}"
            )
        pooling = HEAD_POOLING[wanted]
    return replace(row.head, labels=labels, pooling=pooling)


def _both_ways(config: Config, task: Task) -> EncoderSpec:
    """Returns the spec of a decoder that was trained to attend in both directions (EmbeddingGemma, Qwen, Llama)."""
    if not is_bidirectional(config):
        supported = ", ".join(ENCODERS)
        raise UnsupportedModel(
            f"model_type {config.get('model_type')!r} is not supported as an encoder; supported are {supported}"
        )
    plain = {name: value for name, value in config.items() if name not in BOTH_WAYS}
    model = spec_from_config(plain, replace(task, labels=0, name="embed"))
    check_plain(model)
    # EmbeddingGemma's window counts both sides; a token attends to half of it on each.
    reaches = tuple(layer.window // 2 for layer in model.layers)
    if any(reaches) and not model.model_type.startswith("gemma3"):
        raise UnsupportedModel(f"windows in both directions are not supported for {model.model_type}")
    return EncoderSpec(
        model=model,
        reaches=reaches,
        most_tokens=model.max_positions,
        head=replace(SCORE, labels=task.labels) if task.labels else None,
        dense=_dense(task.dense, model.hidden_size),
    )


def check_plain(model: ModelSpec) -> None:
    """Raises UnsupportedModel if layers have what only decoders compute."""
    others = {
        "layers with a recurrent state": any(layer.mixer != ATTENTION for layer in model.layers),
        "experts": model.experts is not None,
        "layers that share keys and values": any(layer.shares is not None for layer in model.layers),
        "sinks": model.sinks,
        "gates of attention": model.attention_gate,
        "per-layer embeddings": model.per_layer_inputs is not None or model.layer_scales,
        "norms of values": model.value_norm,
        "caps of attention scores": bool(model.attention_softcap),
        "scaled queries": model.query_scaling is not None,
        "parallel attention and MLP": model.parallel,
        "norms after the rotation": model.qk_norm_last,
        "norms without norms before": not model.pre_norms,
    }
    for what, has in others.items():
        if has:
            raise UnsupportedModel(f"{what} are not supported in a model that attends in both directions")


def _dense(stated: Sequence[Dense], hidden: int) -> tuple[DenseSpec, ...]:
    """Returns the linears after pooling. Raises UnsupportedModel if one does not fit to the one before it."""
    specs = []
    for one in stated:
        if one.inputs != hidden:
            raise UnsupportedModel(f"{one.folder}: in_features {one.inputs} is not supported: vectors have {hidden}")
        if one.activation not in ACTIVATIONS:
            raise UnsupportedModel(
                f"{one.folder}: activation {one.activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
            )
        specs.append(DenseSpec(one.folder, one.inputs, one.outputs, one.bias, one.activation))
        hidden = one.outputs
    return tuple(specs)
