"""Measures the limits of the device in this run. Other sections report their results as shares of these limits."""

import time
from collections.abc import Iterator

import torch

from bench.gpu.environment import NEEDS_CUDA, Environment, Row


def measure(env: Environment, argument: str) -> Iterator[Row]:
    env.limits["copy"] = _copy(env)
    yield {"what": "copy, bytes read and written", "value": env.limits["copy"] / 1e9, "unit": "GB/s"}
    env.limits["gemm"] = _gemm(env)
    size = f"{env.sizes.gemm} x {env.sizes.gemm} x {env.sizes.gemm}"
    yield {"what": f"matrix product {size}, {env.dtype}", "value": env.limits["gemm"] / 1e12, "unit": "TFLOP/s"}
    yield {"what": "launch, the host's part", "value": 1e6 * _launch(env), "unit": "µs"}
    if not env.cuda:
        yield {"what": "launch and wait", "note": NEEDS_CUDA}
        return
    yield {"what": "launch and wait", "value": 1e6 * _round_trip(env), "unit": "µs"}
    yield {"what": "a node of a graph, one after another", "value": 1e6 * _node(env), "unit": "µs"}


def _copy(env: Environment) -> float:
    """Returns the bytes per second of a copy: bytes read plus bytes written."""
    source = torch.empty(env.sizes.copy_bytes, dtype=torch.uint8, device=env.device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.nbytes / env.clock.seconds(lambda: target.copy_(source))


def _gemm(env: Environment) -> float:
    """Returns the operations per second of a matrix product. It uses random data, because zeros take less power and
    time."""
    n, generator = env.sizes.gemm, env.generator()
    a, b = (torch.randn(n, n, generator=generator, device=env.device).to(env.dtype) for _ in range(2))
    return 2.0 * n**3 / env.clock.seconds(lambda: torch.mm(a, b))


def _launch(env: Environment, count: int = 500) -> float:
    one = torch.zeros(1, device=env.device)
    for _ in range(10):
        one.add_(1)
    env.clock.wait()
    begun = time.perf_counter()
    for _ in range(count):
        one.add_(1)
    seconds = time.perf_counter() - begun
    env.clock.wait()
    return seconds / count


def _round_trip(env: Environment, count: int = 200) -> float:
    one = torch.zeros(1, device=env.device)
    begun = time.perf_counter()
    for _ in range(count):
        one.add_(1)
        env.clock.wait()
    return (time.perf_counter() - begun) / count


def _node(env: Environment, count: int = 200) -> float:
    one = torch.zeros(1, device=env.device)
    one.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            one.add_(1)
    return env.clock.seconds(graph.replay) / count
