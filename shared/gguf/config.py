"""Makes config.json of a Hugging Face checkpoint from the metadata of a GGUF file, for the families that are served."""

from shared.gguf.config.architectures import ARCHITECTURES
from shared.gguf.config.hyperparameters import Config, Hyperparameters
from shared.gguf.container import Container
from shared.gguf.errors import GgufError


def config_of(container: Container) -> Config:
    """Returns config.json. Raises GgufError when the architecture or one of its values is not supported."""
    if (kind := container.text("general.type", "model")) != "model":
        raise GgufError(f"{container.name} is of type {kind!r}, not a model")
    name = container.text("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        supported = ", ".join(ARCHITECTURES)
        raise GgufError(f"{container.name}: architecture {name!r} is not supported; supported are {supported}")
    values = Hyperparameters(container, name)
    norm = "attention.layer_norm_epsilon" if architecture.layer_norm else "attention.layer_norm_rms_epsilon"
    config = _common(values) | {architecture.eps: values.number(norm)} | architecture.shared(values)
    config |= {"model_type": architecture.model_type, "architectures": [architecture.generator]}
    config |= architecture.extra(values, config)
    values.check_all_seen()
    return config


def _common(values: Hyperparameters) -> Config:
    container = values.container
    values.expect("attention.causal", True)
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
