"""Writes random few-bit weights of a large shape as a GGUF file, tensor by tensor, without 16-bit weights.

    python -m bench.peers.random_gguf [--weights q4_k_m] FOLDER OUT.gguf

FOLDER has a config.json and a tokenizer (LARGE in bench/checkpoints.py). The blocks are random bytes with scales that
give every weight a standard deviation of about 0.02. The embedding's standard deviation is 1, so that the tokens of a
batch differ in all layers and choose different experts. Formats are mixed as llama.cpp does:

    q4_k_m  the head is Q6_K, as are the values and the feed-forward outputs in half of the layers; the rest is Q4_K;
            weights whose rows are no multiple of 256 are Q8_0 and Q5_0 instead
    q4_0    the head is Q6_K
    mxfp4   experts are MXFP4, the rest Q8_0, as gpt-oss is published
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from bench.peers.gguf_file import architecture, write_metadata

Rows = npt.NDArray[np.uint8]
Random = np.random.Generator
Shape = tuple[int, ...]

DEVIATION = 0.02
FILE_TYPES = {
    "q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M, "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "mxfp4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
}  # fmt: skip


def q4_k(random: Random, blocks: int, deviation: float = DEVIATION) -> Rows:
    """Returns blocks [blocks, 144]: two fp16 factors, eight scales and minimums of six bits, 256 codes of four bits.

    Minimums equal scales, and their factor is 7.5 times the factor of scales, so that the mean is zero.
    """
    scales = random.integers(30, 50, (blocks, 8), dtype=np.uint8)
    low, high = scales[:, :4], scales[:, 4:]
    both = low | high >> 4 << 6
    factor = deviation / (4.6 * 40)  # 4.6: the standard deviation of uniform codes from 0 to 15
    return np.concatenate(
        [_halves(blocks, factor, 7.5 * factor), both, both, high & 15 | (high & 15) << 4, _codes(random, blocks, 128)],
        axis=1,
    )


def q6_k(random: Random, blocks: int, deviation: float = DEVIATION) -> Rows:
    """Returns blocks [blocks, 210]: 256 codes of six bits, sixteen signed scales, an fp16 factor."""
    scales = random.integers(4, 12, (blocks, 16), dtype=np.uint8)
    return np.concatenate([_codes(random, blocks, 192), scales, _halves(blocks, deviation / (18.5 * 8))], axis=1)


def q4_0(random: Random, blocks: int, deviation: float = DEVIATION) -> Rows:
    """Returns blocks [blocks, 18]: an fp16 scale and 32 codes of four bits."""
    return np.concatenate([_halves(blocks, deviation / 4.6), _codes(random, blocks, 16)], axis=1)


def q5_0(random: Random, blocks: int, deviation: float = DEVIATION) -> Rows:
    """Returns blocks [blocks, 22]: an fp16 scale, 32 fifth bits and 32 codes of four bits."""
    return np.concatenate([_halves(blocks, deviation / 9.2), _codes(random, blocks, 20)], axis=1)


def q8_0(random: Random, blocks: int, deviation: float = DEVIATION) -> Rows:
    """Returns blocks [blocks, 34]: an fp16 scale and 32 codes of eight bits."""
    return np.concatenate([_halves(blocks, deviation / 74), _codes(random, blocks, 32)], axis=1)


def mxfp4(random: Random, blocks: int, deviation: float = DEVIATION) -> Rows:
    """Returns blocks [blocks, 17]: the exponent of a power of two, and 32 codes of four bits.

    Two exponents alternate at random, so that the deviation is not a power of two.
    """
    wanted = deviation / 2.93  # 2.93: the standard deviation of the 16 values of E2M1
    below = int(np.floor(np.log2(wanted)))
    share = ((wanted / 2.0**below) ** 2 - 1) / 3  # share of blocks with twice the scale
    exponents = 127 + below + (random.random((blocks, 1)) < share)
    return np.concatenate([exponents.astype(np.uint8), _codes(random, blocks, 16)], axis=1)


def _codes(random: Random, blocks: int, nbytes: int) -> Rows:
    return random.integers(0, 256, (blocks, nbytes), dtype=np.uint8)


def _halves(blocks: int, *values: float) -> Rows:
    return np.tile(np.array(values, np.float16).view(np.uint8), (blocks, 1))


BLOCKS: Mapping[Type, Callable[[Random, int, float], Rows]] = {
    Type.Q4_K: q4_k, Type.Q6_K: q6_k, Type.Q4_0: q4_0, Type.Q5_0: q5_0, Type.Q8_0: q8_0, Type.MXFP4: mxfp4,
}  # fmt: skip
DENSE = ("ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # fields of the number of experts
INSTEAD = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}  # where rows are no multiple of 256


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", choices=FILE_TYPES, default="q4_k_m")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text())
    listed = list(tensors(config, args.weights))
    for name, shape, kind in listed:
        if kind != Type.F32 and shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            parser.error(f"{args.weights} does not fit this shape: {name} has rows of {shape[-1]} numbers")
    partial = args.out.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), architecture(config))
    write_metadata(writer, args.folder, config, FILE_TYPES[args.weights])
    _write_tensors(writer, listed)
    writer.close()
    partial.rename(args.out)


def _write_tensors(writer: gguf.GGUFWriter, listed: list[tuple[str, Shape, Type]]) -> None:
    for name, shape, kind in listed:
        stored = _stored_shape(shape, kind)
        dtype, nbytes = (np.float32, 4) if kind == Type.F32 else (np.uint8, 1)
        writer.add_tensor_info(name, stored, np.dtype(dtype), nbytes * int(np.prod(stored)), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for name, shape, kind in listed:
        if kind == Type.F32:
            mean, deviation = (1.0, 0.0) if "norm" in name else (0.0, DEVIATION)
            writer.write_tensor_data(random.normal(mean, deviation, shape).astype(np.float32))
        else:
            numbers, _ = gguf.GGML_QUANT_SIZES[kind]
            deviation = 1.0 if name.startswith("token_embd") else DEVIATION
            blocks = BLOCKS[kind](random, int(np.prod(shape)) // numbers, deviation)
            writer.write_tensor_data(np.ascontiguousarray(blocks).reshape(_stored_shape(shape, kind)))


def _stored_shape(shape: Shape, kind: Type) -> Shape:
    """Returns the shape of a tensor's stored array: in bytes for quantized formats, in values for F32."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return shape if kind == Type.F32 else (*shape[:-1], shape[-1] // numbers * nbytes)


def tensors(config: Mapping[str, Any], weights: str) -> Iterator[tuple[str, Shape, Type]]:
    """Yields name, shape and format of every tensor of a model."""
    shapes, layers = _shapes(config), config["num_hidden_layers"]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture(config))
    named = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]]
    biased = bool(config.get("attention_bias"))
    for layer in (None, *range(layers)):
        for name in named:
            module = name.removeprefix("blk.{bid}.")
            if module not in shapes or (module == name) != (layer is None) or not _in_layer(module, layer, config):
                continue
            shape, at = shapes[module], name.format(bid=layer)
            whole = len(shape) == 1 or module == "ffn_gate_inp"
            kind = Type.F32 if whole else _format(weights, module, layer or 0, layers)
            yield f"{at}.weight", shape, INSTEAD.get(kind, kind) if shape[-1] % 256 else kind
            if biased and len(shape) > 1 and layer is not None:
                yield f"{at}.bias", shape[:-1], Type.F32


def _in_layer(module: str, layer: int | None, config: Mapping[str, Any]) -> bool:
    """Whether a layer has a module, where the first layers have a plain MLP and the others have experts."""
    if layer is None or "first_k_dense_replace" not in config or module not in (*DENSE, *_experts(config)):
        return True
    return (module in DENSE) == (layer < int(config["first_k_dense_replace"]))


def _shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Returns the shape of each tensor that a model with these sizes may have, in any served architecture."""
    hidden, inner, head, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size")
    )
    plain = {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, kv = heads * head, kv_heads * head
    shapes: dict[str, Shape] = {
        "token_embd": (vocab, hidden), "output_norm": (hidden,), "output": (vocab, hidden), "attn_norm": (hidden,),
        "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q),
        "attn_q_norm": (head,), "attn_k_norm": (head,), "attn_sinks": (heads,), "ffn_norm": (hidden,),
        "post_attention_norm": (hidden,),
    }  # fmt: skip
    if config.get("kv_lora_rank"):
        usual = {name: shape for name, shape in shapes.items() if name not in ("attn_k", "attn_v")}
        return usual | plain | _latent_attention(config) | _experts(config)
    return shapes | (_experts(config) or plain)


def _experts(config: Mapping[str, Any]) -> dict[str, Shape]:
    experts = next((config[name] for name in EXPERTS if config.get(name)), 0)
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = inner * (config.get("n_shared_experts") or 0)
    found: dict[str, Shape] = {
        "ffn_gate_inp": (experts, hidden), "ffn_gate_exps": (experts, inner, hidden),
        "ffn_up_exps": (experts, inner, hidden), "ffn_down_exps": (experts, hidden, inner),
    }  # fmt: skip
    if shared:
        found |= {"ffn_gate_shexp": (shared, hidden), "ffn_up_shexp": (shared, hidden)}
        found |= {"ffn_down_shexp": (hidden, shared)}
    return found if experts else {}


def _latent_attention(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Returns the shapes of attention whose keys and values are compressed to kv_lora_rank numbers, as in DeepSeek."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotated, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    return {
        "attn_q": (heads * (plain + rotated), hidden), "attn_kv_a_mqa": (rank + rotated, hidden),
        "attn_kv_a_norm": (rank,), "attn_k_b": (heads, rank, plain), "attn_v_b": (heads, value, rank),
        "attn_output": (hidden, heads * value),
    }  # fmt: skip


def _format(weights: str, module: str, layer: int, layers: int) -> Type:
    if weights == "mxfp4":
        return Type.MXFP4 if module.endswith("_exps") else Type.Q8_0
    if module == "output":
        return Type.Q6_K
    eighth = layers // 8
    finer = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    if weights == "q4_k_m":
        return Type.Q6_K if finer and module.startswith(("attn_v", "ffn_down")) else Type.Q4_K
    return Type.Q4_0


if __name__ == "__main__":
    main()
