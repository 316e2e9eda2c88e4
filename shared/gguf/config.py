"""Makes config.json of a Hugging Face checkpoint from the metadata of a GGUF file, for the families that are served."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import PoolingType

from shared.gguf import config_dense, config_encoder, config_moe
from shared.gguf.config_values import Config, Hyperparameters
from shared.gguf.container import Container
from shared.gguf.index import Entry
from shared.gguf.naming import NUMBERS, GgufError


def config_of(container: Container) -> Config:
    """Returns config.json. Raises GgufError when the architecture or one of its values is not supported."""
    if (kind := container.text("general.type", "model")) != "model":
        raise GgufError(f"{container.name} is of type {kind!r:.80}, not a model")
    name = container.text("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        supported = ", ".join(ARCHITECTURES)
        raise GgufError(f"{container.name}: architecture {name!r:.80} is not supported; supported are {supported}")
    values = Hyperparameters(container, name)
    norm = "attention.layer_norm_epsilon" if architecture.layer_norm else "attention.layer_norm_rms_epsilon"
    config = (
        _common(values, causal=architecture.causal)
        | {architecture.eps: values.number(norm)}
        | architecture.shared(values)
    )
    config |= {"model_type": architecture.model_type, "architectures": [architecture.generator]}
    config |= architecture.extra(values, config)
    values.check_all_seen()
    return config


def outline_of(container: Container) -> Config:
    """Returns the part of config.json that tells an encoder, from the metadata alone; nothing for a decoder."""
    architecture = ARCHITECTURES.get(container.text("general.architecture"))
    if architecture is None or architecture.causal:
        return {}
    both_ways = {} if architecture.layer_norm else {"use_bidirectional_attention": True}
    return {"model_type": architecture.model_type, "architectures": [architecture.generator], **both_ways}


def _common(values: Hyperparameters, *, causal: bool) -> Config:
    container = values.container
    values.expect("attention.causal", causal)
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    layers = values.integer("block_count") - values.integer("nextn_predict_layers", 0)
    if hidden < 1 or heads < 1 or layers < 1:
        raise GgufError(f"{container.name} describes a model without layers, heads or hidden size")
    return {
        "vocab_size": _vocabulary_size(container),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": values.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in container.tensors,
        "dtype": dtype_of(container),
        "rope_theta": values.number("rope.freq_base", 10_000.0),
    }


def _vocabulary_size(container: Container) -> int:
    """Returns the number of rows of the embedding. Raises GgufError when the tokenizer has another number of tokens."""
    embedding = container.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError(f"{container.name}: tensor token_embd.weight is missing")
    tokens = len(container.entries("tokenizer.ggml.tokens", str))
    if embedding.shape[0] != tokens:
        raise GgufError(
            f"{container.name}: the tokenizer has {tokens} tokens, but token_embd.weight has {embedding.shape[0]} rows"
        )
    return tokens


def dtype_of(container: Container) -> str:
    """Returns the dtype to compute in: the dtype of the matrices, or bfloat16 if they are quantized or mixed."""
    types = {tensor.type for tensor in container.tensors.values() if len(tensor.shape) > 1}
    if types == {"F32"}:
        return "float32"
    return "float16" if "F16" in types and types <= {"F16", "F32"} else "bfloat16"


# The supported architectures. An architecture is a row, with a function for values that only it has in config.json.
#
# The functions are in config_dense.py and config_moe.py. Where GGUF files do not store a value,
# the row has the value that llama.cpp builds into the architecture.


@dataclass(frozen=True, slots=True)
class Architecture:
    """model_type: the name in Hugging Face. extra: returns the values that only this family has in config.json.

    shared: returns the values that most families state once for all layers.
    eps: the name of the norms' epsilon in config.json. layer_norm: whether norms subtract the mean.
    causal: whether tokens see only those before them; encoders see all.
    """

    model_type: str
    generator: str
    extra: Callable[[Hyperparameters, Config], Config]
    shared: Callable[[Hyperparameters], Config] = config_dense.same_in_all_layers
    eps: str = "rms_norm_eps"
    layer_norm: bool = False
    causal: bool = True


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", config_moe.llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", config_dense.whole_heads),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", config_dense.whole_heads),
    "qwen2vl": Architecture("qwen2_5_vl_text", "Qwen2_5_VLForConditionalGeneration", config_dense.qwen_vl),
    "qwen3vl": Architecture("qwen3_vl_text", "Qwen3VLForConditionalGeneration", config_dense.qwen_vl),
    "qwen3vlmoe": Architecture("qwen3_vl_moe_text", "Qwen3VLMoeForConditionalGeneration", config_moe.qwen3_vl_moe),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", config_moe.qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", config_moe.qwen3_moe),
    "qwen3next": Architecture("qwen3_next", "Qwen3NextForCausalLM", config_moe.qwen3_next),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", config_moe.qwen3_5),
    "qwen35moe": Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", config_moe.qwen3_5_moe),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", config_moe.gpt_oss),
    "gemma": Architecture("gemma", "GemmaForCausalLM", config_dense.whole_heads),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", config_dense.gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", config_dense.gemma3),
    "gemma4": Architecture("gemma4_text", "Gemma4ForCausalLM", config_moe.extra, config_moe.sizes),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", config_dense.phi3),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", config_dense.smollm3),
    "mistral3": Architecture("mistral", "MistralForCausalLM", config_dense.mistral3),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", config_dense.olmo2),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", config_moe.olmoe),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", config_dense.glm4),
    "glm4moe": Architecture("glm4_moe", "Glm4MoeForCausalLM", config_moe.glm4_moe),
    "deepseek2": Architecture("deepseek_v2", "DeepseekV2ForCausalLM", config_moe.deepseek2, config_moe.latent_sizes),
    "granite": Architecture("granite", "GraniteForCausalLM", config_dense.granite),
    "granitemoe": Architecture("granitemoe", "GraniteMoeForCausalLM", config_moe.granite_moe),
    "granitehybrid": Architecture(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", config_moe.granite_hybrid, config_moe.sizes_of_granite
    ),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", config_dense.ernie4_5),
    "ernie4_5-moe": Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", config_moe.ernie_moe),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", config_dense.exaone4),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", config_dense.seed_oss),
    "command-r": Architecture(
        "cohere", "CohereForCausalLM", config_dense.command_r, eps="layer_norm_eps", layer_norm=True
    ),
    "cohere2": Architecture(
        "cohere2", "Cohere2ForCausalLM", config_dense.cohere2, eps="layer_norm_eps", layer_norm=True
    ),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", config_dense.starcoder2, eps="norm_epsilon", layer_norm=True
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", config_dense.hunyuan),
    "apertus": Architecture("apertus", "ApertusForCausalLM", config_dense.apertus),
    "nemotron": Architecture("nemotron", "NemotronForCausalLM", config_dense.nemotron, eps="norm_eps", layer_norm=True),
    "arcee": Architecture("arcee", "ArceeForCausalLM", config_dense.arcee),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", config_moe.lfm2, config_moe.sizes_of_lfm2, eps="norm_eps"),
    "bert": Architecture("bert", "BertModel", config_encoder.bert, eps="layer_norm_eps", layer_norm=True, causal=False),
    "nomic-bert": Architecture(
        "nomic_bert", "NomicBertModel", config_encoder.nomic_bert, eps="layer_norm_eps", layer_norm=True, causal=False
    ),
    "modern-bert": Architecture(
        "modernbert", "ModernBertModel", config_encoder.modern_bert, eps="norm_eps", layer_norm=True, causal=False
    ),
    "gemma-embedding": Architecture("gemma3_text", "Gemma3TextModel", config_encoder.gemma_embedding, causal=False),
}


# Translates the pooling that a GGUF file states for embeddings into the files of sentence-transformers.

MODES = {PoolingType.MEAN: "mean", PoolingType.CLS: "cls", PoolingType.LAST: "lasttoken"}
PREFIX = "sentence_transformers.models."


def pooling_files(container: Container) -> dict[str, Any]:
    """Returns the contents of modules.json and of the files named there; nothing for a model that generates text.

    llama.cpp normalizes every vector. Raises GgufError for a pooling that is not supported.
    """
    key = f"{container.text('general.architecture')}.pooling_type"
    pooling = container.integer(key, PoolingType.NONE)
    if pooling == PoolingType.NONE:
        return {}
    if pooling not in MODES:
        shown = ", ".join(f"{int(kind)} ({mode})" for kind, mode in MODES.items())
        raise GgufError(f"{container.name}: {key} is {pooling}; supported are {shown}")
    dense = config_encoder.dense_files(container)
    linears = [("Dense", path.removesuffix("/config.json")) for path in dense]
    paths = [("Transformer", ""), ("Pooling", "1_Pooling"), *linears, ("Normalize", "2_Normalize")]
    return {
        "modules.json": [{"path": path, "type": PREFIX + name} for name, path in paths],
        "1_Pooling/config.json": {"pooling_mode": MODES[PoolingType(pooling)]},
        **dense,
    }


# Writes small tensors that GGUF files state as numbers in their metadata to a file in the folder of the index.
#
# For example, Apertus states the parameters of its activation: one list per parameter, with an entry for each layer.

PARAMETERS: dict[str, tuple[int, ...]] = {  # a tensor's name in the metadata and in a layer → shape in Hugging Face
    "xielu.alpha_p": (1,), "xielu.alpha_n": (1,), "xielu.beta": (), "xielu.eps": (),
}  # fmt: skip


def write_numbers(container: Container, layers: int, folder: Path, file: int) -> dict[str, Entry]:
    """Writes the stated numbers into the folder as float32. Returns their places. file: index in Index.files."""
    found, numbers = {}, list[float]()
    for key, shape in PARAMETERS.items():
        if key not in container.metadata:
            continue
        for layer, number in enumerate(_by_layer(container, key, layers)):
            found[f"blk.{layer}.{key}"] = Entry(file, "F32", shape, 4 * len(numbers), 4)
            numbers.append(number)
    if numbers:
        (folder / NUMBERS).write_bytes(struct.pack(f"<{len(numbers)}f", *numbers))
    return found


def _by_layer(container: Container, key: str, layers: int) -> list[float]:
    if not isinstance(container.metadata[key], list):
        return [container.number(key)] * layers
    stated: list[float] = container.entries(key, int | float)
    if len(stated) != layers:
        raise GgufError(f"{container.name}: {key} has {len(stated)} numbers for {layers} layers")
    return stated
