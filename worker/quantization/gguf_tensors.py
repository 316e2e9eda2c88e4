"""Reads the tensors of a GGUF model by the names and in the layout of a Hugging Face checkpoint.

An index, written by shared/gguf, says where each tensor is. Files are mapped, or read through
worker/checkpoint/staging.py. Tensors in a block format are copied as bytes. A stored tensor of all experts of a layer
is read as one tensor for each expert (see worker/checkpoint/checkpoint.py). This works with blocks, too: a row has only
whole blocks, so every expert begins with a new block.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from shared.gguf.index import Entry, Index, TiledHeads, read_index
from worker.checkpoint.checkpoint import CheckpointError, names_of_experts
from worker.checkpoint.staging import Extent, Staging

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """The tensors of a GGUF model. The files stay open until `close`."""

    def __init__(self, folder: Path, staging: Staging | None = None) -> None:
        """folder: a translated model; staging: reads the tensors, and is closed by close(); None: files are mapped

        Raises CheckpointError when a file is missing or too short.
        """
        index = read_index(folder)
        self._files = [folder / file for file in index.files]
        self._index = index
        self._entries: dict[str, Entry] = {}
        for name, entry in index.tensors.items():
            if tower := tower_name(name, index.projector):
                self._entries[tower] = entry
            elif not NOT_READ.fullmatch(name):
                self._entries |= _parts(hugging_face_name(name, index.architecture), entry)
        self._staging = staging
        self._fds: list[int] = []
        self._maps: list[Tensor] = []
        self._open = ExitStack()
        try:
            for number, path in enumerate(self._files):
                ends = (entry.offset + entry.nbytes for entry in index.tensors.values() if entry.file == number)
                self._add(path, max(ends, default=0))
            if staging is not None:
                self._open.callback(staging.close)  # this callback runs before the staged files are closed
        except BaseException:
            self._open.close()
            raise

    def _add(self, path: Path, needed: int) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open.callback(os.close, fd)
            if os.fstat(fd).st_size < needed:
                raise CheckpointError(f"{path} has become shorter since it was read; fetch it again")
            self._fds.append(fd)
            self._maps.append(torch.from_file(str(path), shared=False, size=needed, dtype=torch.uint8))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

    @property
    def folder(self) -> Path:
        """The path of the first file, for error messages about the whole model."""
        return self._files[0]

    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def where(self, name: str) -> Path:
        """Returns the file that holds a tensor, or the first file if no file holds it."""
        entry = self._entries.get(name)
        return self._files[entry.file if entry else 0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def format(self, name: str) -> str:
        """Returns the type of a tensor: F32, BF16, F16 or the name of a block format."""
        return self._entries[name].type

    def nbytes(self, name: str) -> int:
        return self._entries[name].nbytes

    def expect(self, names: Iterable[str]) -> None:
        """Announces which tensors copy() will be called with next, in this order, so that they can be read ahead."""
        if self._staging is not None:
            self._staging.expect(self._extent(self._entries[name]) for name in names)

    def copy(self, name: str, into: Tensor) -> None:
        """Copies a tensor into contiguous memory: numbers of any dtype, or for a block format the bytes of rows, uint8.

        Undoes the converter's changes, except the order of columns in a block format. Raises CheckpointError when the
        file cannot be read, or a decay is not negative.
        """
        entry, layout = self._entries[name], layout_of(name, into.shape[0] if into.dim() else 1, self._index)
        stored = DTYPES.get(entry.type, torch.uint8)
        if layout is AS_STORED:
            self._copy(entry, stored, into, name)
            return
        dtype = into.dtype if layout.undo is None else torch.float32
        read = torch.empty(into.shape, dtype=dtype, device=into.device)
        self._copy(entry, stored, read, name)
        into.copy_(layout.undone(read))

    def _copy(self, entry: Entry, stored: torch.dtype, into: Tensor, name: str) -> None:
        if self._staging is None:
            part = self._maps[entry.file][entry.offset : entry.offset + entry.nbytes]
            into.copy_(part.view(stored).view(into.shape))
            return
        try:
            self._staging.copy(self._extent(entry), stored, into)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self.where(name)}: tensor {name} cannot be read: {reason}") from error

    def _extent(self, entry: Entry) -> Extent:
        return Extent(self._fds[entry.file], entry.offset, entry.nbytes)

    def close(self) -> None:
        self._maps.clear()
        self._open.close()


def _parts(name: str, entry: Entry) -> dict[str, Entry]:
    """Returns the tensors that a stored tensor stands for: itself, or one tensor for each expert of a layer."""
    names = names_of_experts(name, entry.shape)
    nbytes = entry.nbytes // max(len(names), 1)
    parts = {
        one: replace(entry, shape=entry.shape[1:], offset=entry.offset + expert * nbytes, nbytes=nbytes)
        for expert, one in enumerate(names)
    }
    return parts or {name: replace(entry, shape=hugging_face_shape(name, entry.shape))}


# Undoes what llama.cpp's converter has changed in a tensor besides its name.
#
# paired rows     In query and key heads, the rows of a rotated pair became neighbours: llama.cpp rotates neighbours.
# tiled heads     The value heads of recurrent layers were reordered, and thus all rows and columns of value heads.
# shifted norms   1 was added to the weights of norms that multiply by 1 + weight. decays          A_log became
# -exp(A_log).

PAIRED_ARCHITECTURES = ("llama", "smollm3", "granite", "granitemoe", "mistral3", "arcee", "granitehybrid")
PAIRED = re.compile(r".*\.self_attn\.(q|k|qkv)_proj\.(weight|bias)")
PAIRED_TOWERS = ("pixtral",)
PAIRED_OF_TOWER = re.compile(r".*\.attention\.[qk]_proj\.weight")
SHIFTED_ARCHITECTURES = (
    "gemma", "gemma2", "gemma3", "gemma-embedding", "qwen3next", "qwen35", "qwen35moe", "nemotron"
)  # fmt: skip
SHIFTED = re.compile(r".*(?<!\.linear_attn\.)norm\.weight")
DECAYS = re.compile(r".*\.(linear_attn|mamba)\.A_log")
# The weights of value heads. Value heads are their rows (maybe behind rows of queries and keys), or a value head is one
# row, or value heads are their columns.
OF_VALUES = re.compile(r".*\.linear_attn\.(in_proj_qkv|in_proj_z|conv1d)\.weight")
OF_VALUE_HEADS = re.compile(r".*\.linear_attn\.(A_log|dt_bias|in_proj_[ab]\.weight)")
BY_VALUES = re.compile(r".*\.linear_attn\.out_proj\.weight")
# Tensors that have a dimension of size 1 only in Hugging Face checkpoints: a weight of one row; convolution kernels.
ONE_ROW = re.compile(r".*\.mlp\.shared_expert_gate\.weight")
ONE_INPUT = re.compile(r".*\.(linear_attn\.conv1d|mamba\.conv1d|conv\.conv)\.weight")
# Matrices of all heads, which GGUF files store as one matrix for each head.
OF_HEADS = re.compile(r".*\.self_attn\.[kv]_b_proj\.weight")
# Vectors that GGUF files store as matrices, with a row for each number or for each group.
FLAT = re.compile(r".*\.mamba\.(A_log|D|norm\.weight)")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor in a file differs from the tensor in a Hugging Face checkpoint.

    rows, columns: for each row or column in Hugging Face's order its index in the file; None: the order is the same
    undo: computes Hugging Face's numbers from float32 numbers of the file; None: the numbers are the same
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    undo: Callable[[Tensor], Tensor] | None = None

    def undone(self, stored: Tensor) -> Tensor:
        """Returns the tensor as in a Hugging Face checkpoint.

        stored: the tensor of the file; if its rows are bytes of a block format, its columns are not reordered here
        """
        numbers = stored if self.undo is None else self.undo(stored)
        numbers = numbers if self.rows is None else numbers[self.rows.to(stored.device)]
        if self.columns is None or stored.dtype == torch.uint8:
            return numbers
        return numbers[:, self.columns.to(stored.device)]


AS_STORED = Layout()


def layout_of(name: str, rows: int, index: Index) -> Layout:
    """Returns the layout of a tensor by its Hugging Face name. rows: the size of the tensor's first dimension."""
    # in a vision tower, the converter changes only one norm and the order of rotated rows
    if name.startswith(PREFIXES):
        if index.projector in PAIRED_TOWERS and PAIRED_OF_TOWER.fullmatch(name):
            pairs = torch.arange(rows).view(index.tower_heads, -1, 2)
            return Layout(rows=pairs.transpose(1, 2).flatten())
        return Layout(undo=lambda stored: stored - 1) if name == SOFT_NORM else AS_STORED
    if index.architecture in SHIFTED_ARCHITECTURES and SHIFTED.fullmatch(name):
        return Layout(undo=lambda stored: stored - 1)
    if index.architecture in PAIRED_ARCHITECTURES and PAIRED.fullmatch(name):
        values = index.kv_heads * index.head_dim if ".qkv_proj." in name else 0
        pairs = torch.arange(rows - values).view(-1, index.head_dim // 2, 2)
        return Layout(rows=torch.cat((pairs.transpose(1, 2).flatten(), torch.arange(rows - values, rows))))
    undo = (lambda stored: _log_of_decay(stored, name)) if DECAYS.fullmatch(name) else None
    heads = index.tiled_heads
    if heads is not None and OF_VALUES.fullmatch(name):
        return Layout(rows=_behind_others(_by_key_head(heads, heads.value_dim), rows))
    if heads is not None and OF_VALUE_HEADS.fullmatch(name):
        return Layout(rows=_by_key_head(heads, 1), undo=undo)
    columns = column_order(name, heads)
    return AS_STORED if undo is None and columns is None else Layout(columns=columns, undo=undo)


def column_order(name: str, heads: TiledHeads | None) -> Tensor | None:
    """Returns the index in the file of each column in Hugging Face's order; None if the order is the same."""
    return None if heads is None or not BY_VALUES.fullmatch(name) else _by_key_head(heads, heads.value_dim)


def _by_key_head(heads: TiledHeads, size: int) -> Tensor:
    stored = torch.arange(heads.key_heads * heads.per_key * size).view(heads.per_key, heads.key_heads, size)
    return stored.transpose(0, 1).flatten()


def _behind_others(order: Tensor, rows: int) -> Tensor:
    first = rows - len(order)
    return torch.cat((torch.arange(first), first + order))


def _log_of_decay(stored: Tensor, name: str) -> Tensor:
    if not (stored < 0).all():
        raise CheckpointError(f"tensor {name} is stored as {float(stored.max())}; supported are numbers below 0")
    return (-stored).log()


def hugging_face_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a tensor in a Hugging Face checkpoint. shape: its shape in the GGUF file"""
    if FLAT.fullmatch(name):
        return (math.prod(shape),)
    if OF_HEADS.fullmatch(name) and len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    if ONE_ROW.fullmatch(name) and len(shape) == 1:
        return 1, *shape
    return (shape[0], 1, shape[1]) if ONE_INPUT.fullmatch(name) and len(shape) == 2 else shape


# Translates the names of tensors in GGUF files to the names in Hugging Face checkpoints, by architecture.

WHOLE = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm", "token_embd_norm": "model.embedding_norm",
}  # fmt: skip
# Tensors outside the layers that have other names in some architectures
ENCODER = {"token_embd_norm": "model.embed_norm", "token_types": "model.embed_types"}
SPECIAL_WHOLE: Mapping[str, Mapping[str, str]] = {
    "bert": {**ENCODER, "position_embd": "model.embed_positions"},
    "nomic-bert": ENCODER,
    "modern-bert": ENCODER,
    "gemma-embedding": {"dense_2": "dense_2", "dense_3": "dense_3"},
}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
GEMMA = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
GEMMA4 = {
    **GEMMA, "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2", "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj",
}  # fmt: skip
ONLY_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"
}  # fmt: skip
AFTER_SUMS = {
    "attn_output_norm": "post_attention_layernorm", "layer_output_norm": "post_feedforward_layernorm"
}  # fmt: skip
BEFORE_MLP = {"post_attention_norm": "post_attention_layernorm"}
MTP_HEAD = {
    "nextn.eh_proj": "eh_proj", "nextn.enorm": "enorm", "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm", "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}  # fmt: skip
GLM4_MOE = {
    **BEFORE_MLP, **MTP_HEAD, "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
DELTA_NET = {
    **BEFORE_MLP, **MTP_HEAD, "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",  # old files of Qwen3-Next
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
LATENT = {  # a file has either attn_kv_b, or its rows for keys, transposed, and its rows for values
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
}  # fmt: skip
LFM2 = {
    "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
MAMBA = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj",
}  # fmt: skip
SPECIAL: Mapping[str, Mapping[str, str]] = {
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gemma4": GEMMA4,
    "gemma-embedding": GEMMA,
    "bert": AFTER_SUMS,
    "nomic-bert": AFTER_SUMS,
    "modern-bert": {"ffn_up": "mlp.gate_up_proj"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "glm4moe": GLM4_MOE,
    "deepseek2": LATENT,
    "gpt-oss": BEFORE_MLP,
    "seed_oss": BEFORE_MLP,
    "olmo2": ONLY_POST_NORMS,
    "exaone4": ONLY_POST_NORMS,
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "hunyuan-dense": {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    "apertus": {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "lfm2": LFM2,
    "granitehybrid": MAMBA,
    "qwen3next": DELTA_NET,
    "qwen35": DELTA_NET,
    "qwen35moe": DELTA_NET,
}  # fmt: skip
# Tensors whose names end with `.weight` in GGUF but not in Hugging Face: sinks, and the stacked experts of a layer.
PARAMETERS = {
    "attn_sinks": "self_attn.sinks", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}  # fmt: skip
# Tensors that are parameters and not modules in Hugging Face, by their full name in GGUF.
NO_MODULES = {
    "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias", "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "xielu.alpha_p": "mlp.act_fn.alpha_p", "xielu.alpha_n": "mlp.act_fn.alpha_n", "xielu.beta": "mlp.act_fn.beta",
    "xielu.eps": "mlp.act_fn.eps", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
MAMBA_PARAMETERS = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
BESIDE_MLP = ("gemma4",)  # architectures whose experts are not inside a module `mlp`
ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")  # old files of Mixtral
NOT_READ = re.compile(
    r"rope_freqs\.weight|rope_factors_(short|long)\.weight"  # shared/gguf/config.py reads them
    r"|(v|mm)\..*"  # a vision tower
)


def hugging_face_name(name: str, architecture: str) -> str:
    """Returns the Hugging Face name of a tensor. An unknown tensor gets the prefix `model.`, so that it is refused."""
    module, _, kind = name.rpartition(".")
    whole = SPECIAL_WHOLE.get(architecture, {}).get(module) or WHOLE.get(module)
    if whole:
        return f"{whole}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    found = _in_layer(layer[2], architecture) if layer else None
    return f"model.layers.{layer[1]}.{found}" if layer and found else f"model.{name}"


def _in_layer(name: str, architecture: str) -> str | None:
    parameters = NO_MODULES | (MAMBA_PARAMETERS if SPECIAL.get(architecture) is MAMBA else {})
    if name in parameters:
        return parameters[name]
    module, _, kind = name.rpartition(".")
    if parameter := PARAMETERS.get(module):
        parameter = parameter.removeprefix("mlp.") if architecture in BESIDE_MLP else parameter
        return parameter if kind == "weight" else f"{parameter}_{kind}"
    if expert := ONE_EXPERT.fullmatch(module):
        return f"mlp.experts.{expert[2]}.{expert[1]}_proj.{kind}"
    found = (LAYER | dict(SPECIAL.get(architecture, {}))).get(module)
    return found and f"{found}.{kind}"


# Translates tensor names in the GGUF file of a vision tower ("mmproj") to Hugging Face's names.
#
# The file's kind of projector decides which names its tensors have.

TOWER, QWEN, PROJECTION = "vision_tower.", "visual.", "multi_modal_projector."
CONNECTOR = "connector."
PREFIXES = (TOWER, QWEN, PROJECTION, CONNECTOR)  # no tensor name of a text model begins with one of these
SOFT_NORM = PROJECTION + "mm_soft_emb_norm.weight"


@dataclass(frozen=True, slots=True)
class TowerNames:
    """The names of a tower's modules in Hugging Face checkpoints, by their names in GGUF.

    whole: the names of modules outside the layers; before: the prefix of these names
    layer: the names of modules inside a layer; layers: the prefix of these names
    """

    before: str
    layers: str
    whole: Mapping[str, str]
    layer: Mapping[str, str]
    connector: Mapping[str, str]  # full names of tensors


_SIGLIP = {
    "patch_embd": "embeddings.patch_embedding", "position_embd": "embeddings.position_embedding",
    "post_ln": "post_layernorm",
}  # fmt: skip
_SIGLIP_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}  # fmt: skip
_QWEN = {"patch_embd": "patch_embed.proj", "position_embd": "pos_embed"}
_QWEN_LAYER = {
    "attn_qkv": "attn.qkv", "attn_q": "attn.q", "attn_k": "attn.k", "attn_v": "attn.v", "attn_out": "attn.proj",
    "ln1": "norm1", "ln2": "norm2",
}  # fmt: skip

_PIXTRAL_LAYER = {
    "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj", "ln1": "attention_norm", "ln2": "ffn_norm", "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
}  # fmt: skip


def _projector(norm: str) -> dict[str, str]:
    """Returns the tensor names of a connector that has two linears. norm: the name of the norm before them"""
    names, kinds = {"mm.1": "linear_1", "mm.2": "linear_2", "mm.input_norm": norm}, ("weight", "bias")
    return {f"{stored}.{kind}": f"{PROJECTION}{name}.{kind}" for stored, name in names.items() for kind in kinds}


def _merger(first: str, second: str) -> dict[str, str]:
    names = {"mm.0": f"{QWEN}merger.{first}", "mm.2": f"{QWEN}merger.{second}"}
    return {f"{stored}.{kind}": f"{name}.{kind}" for stored, name in names.items() for kind in ("weight", "bias")}


NAMES: Mapping[str, TowerNames] = {
    "idefics3": TowerNames(
        TOWER, TOWER + "encoder.layers.", _SIGLIP, _SIGLIP_LAYER,
        {"mm.model.fc.weight": CONNECTOR + "modality_projection.proj.weight"},
    ),
    "gemma3": TowerNames(
        TOWER, TOWER + "encoder.layers.", _SIGLIP, _SIGLIP_LAYER,
        {
            "mm.input_projection.weight": PROJECTION + "mm_input_projection_weight",
            "mm.soft_emb_norm.weight": SOFT_NORM,
        },
    ),
    "lfm2": TowerNames(TOWER, TOWER + "encoder.layers.", _SIGLIP, _SIGLIP_LAYER, _projector("layer_norm")),
    "pixtral": TowerNames(
        TOWER, TOWER + "transformer.layers.", {"patch_embd": "patch_conv", "pre_ln": "ln_pre"}, _PIXTRAL_LAYER,
        _projector("norm") | {"mm.patch_merger.weight": PROJECTION + "patch_merger.merging_layer.weight"},
    ),
    "qwen2.5vl_merger": TowerNames(
        QWEN, QWEN + "blocks.", {**_QWEN, "post_ln": "merger.ln_q"},
        {**_QWEN_LAYER, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        _merger("mlp.0", "mlp.2"),
    ),
    "qwen3vl_merger": TowerNames(
        QWEN, QWEN + "blocks.", {**_QWEN, "post_ln": "merger.norm"},
        {**_QWEN_LAYER, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        _merger("linear_fc1", "linear_fc2"),
    ),
}  # fmt: skip
OF_TEXT = ("v.token_embd.img_break",)  # copies of rows of the text model's embedding, which has them anyway
BEHIND_LAYERS = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}  # connectors of Qwen3-VL ("deepstack")
TOWER_LAYER = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(.+)")
STACKED = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(.+)")


def tower_name(name: str, projector: str) -> str:
    """Returns a tensor's Hugging Face name; "" if the tensor belongs to no tower, or to a tower that is not served.

    A tensor with an unknown name gets the tower's prefix, so that it is refused.
    """
    names = NAMES.get(projector)
    if names is None or not name.startswith(("v.", "mm.")) or name in OF_TEXT:
        return ""
    if found := names.connector.get(name):
        return found
    if one := TOWER_LAYER.fullmatch(name):
        return f"{names.layers}{one[1]}.{names.layer.get(one[2], one[2])}.{one[3]}"
    if one := STACKED.fullmatch(name):
        return f"{names.before}deepstack_merger_list.{one[1]}.{BEHIND_LAYERS.get(one[2], one[2])}.{one[3]}"
    module, _, kind = name.removeprefix("v.").partition(".")
    return f"{names.before}{names.whole.get(module, module)}.{kind}"
