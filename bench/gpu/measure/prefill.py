"""Measures one long prompt alone: in one step, and in chunks of the server's default sizes for GPUs and for CPUs."""

import statistics
import time
from collections.abc import Iterator

from bench.gpu.environment import Environment, Row, spec_of
from bench.gpu.setup.harness import SERVED, Harness, Setup, build_harness
from bench.gpu.setup.roofline import prefill_operations
from bench.gpu.setup.weights import random_weights
from shared.config.worker import GPU_TOKENS, TOKENS
from shared.messages import Sampling

ROUNDS = 4  # number of prompts; the first one is not counted


def measure(env: Environment, model: str) -> Iterator[Row]:
    spec, prompt = spec_of(model), env.sizes.prompt
    weights = random_weights(spec, env.dtype, env.device, seed=env.seed)
    for step_tokens in dict.fromkeys((prompt, min(prompt, GPU_TOKENS), TOKENS)):
        if late := env.skip_reason(5):
            yield {"model": model, "tokens a step": step_tokens, "note": late}
            continue
        harness = build_harness(
            env, spec, Setup(step_tokens=step_tokens, options=SERVED), slots=2, max_length=prompt + 8, weights=weights
        )
        seconds = to_first_token(env, harness, prompt)
        work = prefill_operations(spec, prompt)
        yield {
            "model": model, "prompt": prompt, "tokens a step": step_tokens, "ms": 1e3 * seconds,
            "tokens/s": prompt / seconds, "TFLOP/s": work / seconds / 1e12,
            "% of GEMM rate": env.share_of_gemm(work, seconds),
        }  # fmt: skip


def to_first_token(env: Environment, harness: Harness, prompt: int) -> float:
    """Returns the median seconds from submitting a prompt of `prompt` tokens to its first output token."""
    rounds = []
    for _ in range(ROUNDS):
        env.clock.wait()
        harness.submit([harness.prompt(prompt)], Sampling(1, temperature=0.0, ignore_eos=True))
        begun = time.perf_counter()
        harness.drain()
        rounds.append(time.perf_counter() - begun)
    return statistics.median(rounds[1:])
