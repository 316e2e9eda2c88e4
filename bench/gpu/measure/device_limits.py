"""What the device does at best, in this run: the figures all others are shares of."""

import time
from collections.abc import Iterator

import torch

from bench.gpu.context import NEEDS_CUDA, Place, Row


def measure(place: Place, argument: str) -> Iterator[Row]:
    place.facts["copy"] = _copy(place)
    yield {"what": "copy, bytes read and written", "value": place.facts["copy"] / 1e9, "unit": "GB/s"}
    place.facts["gemm"] = _gemm(place)
    size = f"{place.sizes.gemm} x {place.sizes.gemm} x {place.sizes.gemm}"
    yield {"what": f"matrix product {size}, {place.dtype}", "value": place.facts["gemm"] / 1e12, "unit": "TFLOP/s"}
    yield {"what": "launch, the host's part", "value": 1e6 * _launch(place), "unit": "µs"}
    if not place.cuda:
        yield {"what": "launch and wait", "note": NEEDS_CUDA}
        return
    yield {"what": "launch and wait", "value": 1e6 * _round_trip(place), "unit": "µs"}
    yield {"what": "a node of a graph, one after another", "value": 1e6 * _node(place), "unit": "µs"}


def _copy(place: Place) -> float:
    """Bytes a second."""
    source = torch.empty(place.sizes.copy_bytes, dtype=torch.uint8, device=place.device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.nbytes / place.clock.seconds(lambda: target.copy_(source))


def _gemm(place: Place) -> float:
    """Operations a second, on random data: zeros would take less power and run faster."""
    n, generator = place.sizes.gemm, place.generator()
    a, b = (torch.randn(n, n, generator=generator, device=place.device).to(place.dtype) for _ in range(2))
    return 2.0 * n**3 / place.clock.seconds(lambda: torch.mm(a, b))


def _launch(place: Place, count: int = 500) -> float:
    one = torch.zeros(1, device=place.device)
    for _ in range(10):
        one.add_(1)
    place.clock.wait()
    begun = time.perf_counter()
    for _ in range(count):
        one.add_(1)
    seconds = time.perf_counter() - begun
    place.clock.wait()
    return seconds / count


def _round_trip(place: Place, count: int = 200) -> float:
    one = torch.zeros(1, device=place.device)
    begun = time.perf_counter()
    for _ in range(count):
        one.add_(1)
        place.clock.wait()
    return (time.perf_counter() - begun) / count


def _node(place: Place, count: int = 200) -> float:
    one = torch.zeros(1, device=place.device)
    one.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            one.add_(1)
    return place.clock.seconds(graph.replay) / count
