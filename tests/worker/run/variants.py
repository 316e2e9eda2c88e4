"""Which variants of which Triton kernels a worker would compile: in its warm-up, and afterwards while it serves.

No GPU is needed, as nothing is compiled or launched: a kernel is asked for a variant, and that is written down. What
kernels would have computed is zero, or any numbers. Run in a process of its own, because the tests' process has Triton
in interpreter mode, and because tensors here say that they are on a GPU. Prints what only serving asked for, or the
comparison with plain PyTorch.
"""

import random
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from shared.config import WorkerConfig
from shared.messages import Sampling
from worker.kernels import linear, tiles
from worker.memory.cache import Cache
from worker.model.decoder import Decoder, Layer, Weights
from worker.model.spec import LayerSpec, ModelSpec, RopeSpec
from worker.run.flight import ToHost
from worker.run.runner import Runner
from worker.run.verify import Both, disagreement
from worker.run.warmup import Bounds, commonest, steps, warm_up
from worker.schedule.plan import Chunk, Plan

CPU = torch.device("cpu")
SPEC = ModelSpec(
    model_type="gemma3_text", vocab_size=3000, hidden_size=640, intermediate_size=1000, heads=4, kv_heads=1,
    head_dim=256, layers=(LayerSpec(512, 0), LayerSpec(0, 0)), ropes=(RopeSpec("default", 1e4),), max_positions=3000,
    norm_eps=1e-6, attention_scale=0.0625, activation="gelu_tanh", tied=True, eos_ids=(2,), dtype="bfloat16",
    qk_norm=True, sandwich_norms=True, norm_offset=True,
)  # fmt: skip


class Driver:
    """What Triton asks before it knows a variant."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232_448, "multiprocessor_count": 132}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def keep(self: ToHost, values: torch.Tensor) -> None:
    """It is on the host already."""
    self._event, self._host = None, values


def pretend(asked: list[tuple[str, str]]) -> None:
    """From now on tensors are on a GPU, and kernels write down what they would be compiled for."""

    def write_down(kernel: Any, key: str, *_: Any, **__: Any) -> None:
        asked.append((kernel.fn.__name__, str(key)))

    triton.runtime.driver.set_active(Driver())
    JITFunction._do_compile = write_down
    tiles._shared_memory = lambda device: 232_448
    for make, zero in (("empty", torch.zeros), ("empty_like", torch.zeros_like)):
        setattr(torch, make, zeroed(getattr(torch, make), zero))
    ToHost.__init__ = keep  # type: ignore[method-assign]
    torch.Tensor.is_cuda = True  # type: ignore[assignment,misc]


def zeroed(make: Callable[..., torch.Tensor], zero: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Ids must be some that can be looked up, and logits equal to themselves; other numbers may be any."""

    def made(*args: Any, **how: Any) -> torch.Tensor:
        tensor = make(*args, **how)
        return tensor if tensor.dtype == torch.bfloat16 else zero(*args, **how)

    return made


def decoder(spec: ModelSpec) -> Decoder:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def weight(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    def product(rows: int, columns: int) -> linear.PackedLinear:
        return linear.pack(weight(rows, columns), None, invariant=True)

    layers = [
        Layer(
            before_attention=weight(hidden), before_mlp=weight(hidden),
            qkv=product(q + 2 * kv, hidden), o=product(hidden, q),
            gate_up=product(2 * inner, hidden), down=product(hidden, inner),
            q_norm=weight(spec.head_dim),
            k_norm=weight(spec.head_dim),
            after_attention=weight(hidden),
            after_mlp=weight(hidden),
        )
        for _ in spec.layers
    ]  # fmt: skip
    embed = weight(spec.vocab_size, hidden)
    return Decoder(spec, Weights(embed, layers, weight(hidden), linear.pack(embed, invariant=True)), spec.max_positions)


def requests(bounds: Bounds, dice: random.Random, count: int) -> list[Plan]:
    """Steps as they come: decodes of any length beside prompts of any length, each sampled as its request says."""
    plans = []
    for _ in range(count):
        chunks: list[Chunk] = []
        for _ in range(dice.choice((0, 1, 2, 5, 16, dice.randint(0, bounds.sequences - 2)))):
            start = dice.choice((0, 15, 16, 511, 512, dice.randrange(bounds.length)))
            chunks += bounds.decodes(1, start, wish(dice)).chunks
        for _ in range(dice.randint(0 if chunks else 1, 2)):
            tokens = dice.randint(1, (bounds.tokens - len(chunks)) // 2)
            chunks += bounds.chunk(tokens, dice.choice((0, 16, dice.randrange(bounds.length))), wish(dice)).chunks
        plans.append(Plan(chunks))
    return plans


def wish(dice: random.Random) -> Sampling:
    return Sampling(
        1,
        temperature=dice.choice((0.0, 1.0)),
        top_p=dice.choice((1.0, 0.5)),
        top_k=dice.choice((0, 10)),
        min_p=dice.choice((0.0, 0.1)),
        presence_penalty=dice.choice((0.0, 0.0, 0.5)),
        logprobs=dice.choice((None, None, 3)),
    )


def agree(model: Decoder, worker: WorkerConfig) -> None:
    """What is asked at start whether kernels compute rightly, and answered with yes."""
    with patch.object(Both, "_difference", lambda *_: ""):
        assert not disagreement(model, worker, SPEC.max_positions)


def main() -> None:
    asked: list[tuple[str, str]] = []
    pretend(asked)
    worker = WorkerConfig(max_batch_size=70, max_step_tokens=600)
    bounds = Bounds.of(worker, SPEC.max_positions)
    model, cache = decoder(SPEC), Cache(SPEC, 1, bounds.page_size, torch.bfloat16, CPU)
    serving = Runner(model, cache, graphs=True, max_batch_size=worker.max_batch_size)
    warm_up(Runner(model, cache), steps(bounds), lambda: None)
    warm_up(serving, commonest(bounds), lambda: None)
    known = set(asked)
    agree(model, worker)
    warm_up(serving, requests(bounds, random.Random(0), 80), lambda: None)
    print(f"{len(known)} variants of {len({name for name, _ in known})} kernels", file=sys.stderr)
    for name, key in sorted(set(asked) - known):
        print(name, key)


if __name__ == "__main__":
    main()
