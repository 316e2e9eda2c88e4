"""Writes random weights of a large shape as a GGUF file in few bits, tensor by tensor, without a copy in more bits.

    python -m bench.peers.random_gguf [--weights q4_k_m] FOLDER OUT.gguf

FOLDER has a Llama config.json and a tokenizer (LARGE in bench/checkpoints.py). The blocks are random bytes with scales
that give every weight a standard deviation of about 0.02. q4_k_m mixes formats as llama.cpp does: values, feed-forward
outputs of half of the layers, and the head are Q6_K.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from bench.peers.gguf_file import write_metadata

Rows = np.ndarray  # of bytes
Random = np.random.Generator

DEVIATION = 0.02
BLOCK = 256  # weights of a block
FILE_TYPES = {"q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M, "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0}


def q4_k(random: Random, blocks: int) -> Rows:
    """Returns blocks [blocks, 144]: two fp16 factors, eight scales and minimums of six bits, 256 codes of four bits.

    Minimums equal scales, and the factor of minimums is 7.5 times that of scales, so that the mean is zero.
    """
    scales = random.integers(30, 50, (blocks, 8), dtype=np.uint8)
    low, high = scales[:, :4], scales[:, 4:]
    both = low | high >> 4 << 6
    factor = DEVIATION / (4.6 * 40)  # 4.6: the deviation of numbers from 0 to 15
    return np.concatenate(
        [
            _halves(blocks, factor, 7.5 * factor), both, both, high & 15 | (high & 15) << 4,
            random.integers(0, 256, (blocks, 128), dtype=np.uint8),
        ],
        axis=1,
    )  # fmt: skip


def q6_k(random: Random, blocks: int) -> Rows:
    """Returns blocks [blocks, 210]: 256 codes of six bits, sixteen signed scales, an fp16 factor."""
    codes = random.integers(0, 256, (blocks, 192), dtype=np.uint8)
    scales = random.integers(4, 12, (blocks, 16), dtype=np.uint8)
    return np.concatenate([codes, scales, _halves(blocks, DEVIATION / (18.5 * 8))], axis=1)


def q4_0(random: Random, blocks: int) -> Rows:
    """Returns blocks [blocks, 144], eight times an fp16 scale and 32 codes of four bits."""
    codes = random.integers(0, 256, (blocks * 8, 16), dtype=np.uint8)
    return np.concatenate([_halves(blocks * 8, DEVIATION / 4.6), codes], axis=1).reshape(blocks, 144)


def _halves(blocks: int, *values: float) -> Rows:
    return np.tile(np.array(values, np.float16).view(np.uint8), (blocks, 1))


BLOCKS: dict[Type, Callable[[Random, int], Rows]] = {Type.Q4_K: q4_k, Type.Q6_K: q6_k, Type.Q4_0: q4_0}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", choices=FILE_TYPES, default="q4_k_m")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(args.out), config["model_type"])
    write_metadata(writer, args.folder, config, FILE_TYPES[args.weights])
    listed = list(tensors(config, args.weights))
    for name, shape, kind in listed:
        if kind == Type.F32:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            rows, row_bytes = shape[0], shape[1] // BLOCK * _block_bytes(kind)
            writer.add_tensor_info(name, (rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for _, shape, kind in listed:
        if kind == Type.F32:
            writer.write_tensor_data(np.ones(shape, np.float32))
        else:
            blocks = BLOCKS[kind](random, shape[0] * shape[1] // BLOCK)
            writer.write_tensor_data(np.ascontiguousarray(blocks).reshape(shape[0], -1))
    writer.close()


def tensors(config: dict[str, int], weights: str) -> Iterator[tuple[str, tuple[int, ...], Type]]:
    """Yields name, shape and format of every tensor of a Llama."""
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    few = Type.Q4_K if weights == "q4_k_m" else Type.Q4_0
    yield "token_embd.weight", (config["vocab_size"], hidden), few
    for i in range(layers):
        eighth = layers // 8
        finer = i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2
        more = Type.Q6_K if finer and weights == "q4_k_m" else few
        names = {
            "attn_q": ((q, hidden), few), "attn_k": ((kv, hidden), few), "attn_v": ((kv, hidden), more),
            "attn_output": ((hidden, q), few), "ffn_gate": ((inner, hidden), few), "ffn_up": ((inner, hidden), few),
            "ffn_down": ((hidden, inner), more),
        }  # fmt: skip
        for name, (shape, kind) in names.items():
            yield f"blk.{i}.{name}.weight", shape, kind
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{i}.{name}.weight", (hidden,), Type.F32
    yield "output_norm.weight", (hidden,), Type.F32
    yield "output.weight", (config["vocab_size"], hidden), Type.Q6_K


def _block_bytes(kind: Type) -> int:
    """Returns the bytes of 256 weights."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return int(BLOCK // size * nbytes)


if __name__ == "__main__":
    main()
