"""One long prompt, alone: whole in one step, and in the steps that the server cuts by default on a GPU and on a CPU."""

import statistics
import time
from collections.abc import Iterator

from bench.gpu.context import Place, Row, spec_of
from bench.gpu.setup.harness import Rig, Setup, rig
from bench.gpu.setup.roofline import prefill_operations
from bench.gpu.setup.weights import random_weights
from shared.default_sizes import GPU_TOKENS, TOKENS
from shared.messages import Sampling

ROUNDS = 4  # the first is not counted


def measure(place: Place, model: str) -> Iterator[Row]:
    spec, prompt = spec_of(model), place.sizes.prompt
    weights = random_weights(spec, place.dtype, place.device, seed=place.seed)
    for step_tokens in dict.fromkeys((prompt, min(prompt, GPU_TOKENS), TOKENS)):
        if late := place.short(5):
            yield {"model": model, "tokens a step": step_tokens, "note": late}
            continue
        made = rig(place, spec, Setup(step_tokens=step_tokens), slots=2, longest=prompt + 8, weights=weights)
        seconds = to_first_token(place, made, prompt)
        work = prefill_operations(spec, prompt)
        yield {
            "model": model, "prompt": prompt, "tokens a step": step_tokens, "ms": 1e3 * seconds,
            "tokens/s": prompt / seconds, "TFLOP/s": work / seconds / 1e12,
            "% of GEMM rate": place.share_of_gemm(work, seconds),
        }  # fmt: skip


def to_first_token(place: Place, made: Rig, prompt: int) -> float:
    """Seconds, the median of several prompts."""
    rounds = []
    for _ in range(ROUNDS):
        place.clock.wait()
        made.submit([made.prompt(prompt)], Sampling(1, temperature=0.0, ignore_eos=True))
        begun = time.perf_counter()
        made.drain()
        rounds.append(time.perf_counter() - begun)
    return statistics.median(rounds[1:])
