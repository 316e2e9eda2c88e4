"""Prints digests of the results of whole decoders, to compare processors that should compute the same bits.

    python -m tests.worker.models.decoder_bits write FOLDER    makes small checkpoints
    python -m tests.worker.models.decoder_bits read FOLDER     prints a line for each of them and each dtype

`SLUICE_ISA=avx2` on x86 and `neon` or `dotprod` on ARM should give the same lines, except for recurrent layers
(qwen3_5, granite-hybrid) in float32: these use the C library's exponential function, which may differ in the last bit.
Torch's random numbers, sines and cosines differ in the same way. So the checkpoints are written once, on one machine,
and rotations are rounded to bfloat16 here, which hides a difference in the last bit.
"""

import argparse
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.checkpoints import Checkpoints
from tests.worker.models.harness import all_logits, cache_for, decoder_of, prompts_of
from worker.models.cpu_decoder import CpuDecoder, fastest_decoder
from worker.ops import native as c_library

PLAIN = ("llama", "gemma3", "qwen3_5", "granite-hybrid", "lfm2", "gpt-oss")
QUANTIZED = ("llama-biased", "qwen2-moe")  # checkpoints quantized to four bits, in GPTQ's format
LENGTHS, CHUNK = [1, 17, 40, 70], 16


def write(folder: Path, plain: Sequence[str] = PLAIN, quantized: Sequence[str] = QUANTIZED) -> None:
    from tests.worker.models.quantized_checkpoints import gptq, rewrite  # needs packages that `read` does not need

    checkpoints = Checkpoints(folder)
    for kind in (*plain, *quantized):
        checkpoints(kind)
    for kind in quantized:
        rewrite(folder / kind, gptq())


def read(folder: Path) -> Iterator[str]:
    """Yields a line for each checkpoint and dtype: digests of all logits, and of the K/V cache."""
    for kind in sorted(checkpoint.name for checkpoint in folder.iterdir()):
        for dtype in (torch.float32, torch.bfloat16):
            decoder = decoder_of(folder / kind, dtype=dtype)
            decoder.ropes = [(cos.bfloat16().float(), sin.bfloat16().float()) for cos, sin in decoder.ropes]
            cache = cache_for(decoder, tokens=512)
            with torch.inference_mode():
                model = fastest_decoder(decoder, cache)
                assert isinstance(model, CpuDecoder), kind
                logits = all_logits(model, cache, prompts_of(LENGTHS), CHUNK)
            yield f"{kind} {dtype} {_digest(logits)} {_digest((*cache.k, *cache.v))}"


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "read"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.what == "write":
        write(args.folder)
        return
    print(f"instruction set: {c_library.tier()}")
    for line in read(args.folder):
        print(line, flush=True)


if __name__ == "__main__":
    main()
