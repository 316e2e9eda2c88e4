"""Steps with adapters are replayed as graphs: the same bits as without graphs, whatever adapters come and go.

The kernels that add products are replaced by a loop that reads the same tiles and tables from the same addresses, row
by row; tests/worker/ops/gpu/products compares Triton's own. The loop over the layers is Python's, as on GPUs.
"""

import ctypes
import gc
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.messages import Sampling
from tests.adapters import draw_adapter
from tests.checkpoints import EOS, VOCAB, Checkpoints
from tests.worker.lora.harness import CPU, LONGEST, decoder_of, loaded, use
from tests.worker.scheduler.harness import commit
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache, cache_groups
from worker.lora import loaded as loading
from worker.lora import ops
from worker.lora.loaded import LoadedAdapter, ProductPart
from worker.model_runner.cuda_graph_capture import EagerGraph, Graph
from worker.model_runner.cuda_graphs import StepGraphs
from worker.model_runner.hidden_states import CapturedStates, HiddenStates, ReadStep, read_step
from worker.model_runner.runner import Runner
from worker.models.decoder import Decoder
from worker.models.forward_inputs import Forward, ForwardInputs
from worker.ops.linear.packed import PackedLinear
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Plan, PrefixState, Sequence

if TYPE_CHECKING:  # importing them reads how Triton runs, which tests of kernels change
    from worker.lora.triton import AdapterTiles

PROMPTS = [[(11 * i + 5 * n) % (VOCAB - 3) + 3 for i in range(5 + 9 * n)] for n in range(4)]
NARROW = ("q_proj", "v_proj")


@pytest.fixture(autouse=True)
def products_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.lora import triton as adapter_products
    from worker.lora.triton import ProductsOnGpu, part_table
    from worker.model_runner import cuda_graph_adapters

    def packed(matrix: Tensor, dtype: torch.dtype, *_: object) -> PackedLinear:
        return PackedLinear(matrix.to(dtype).contiguous(), None, True)

    def table(a: PackedLinear, factors: Tensor, parts: Seq[ProductPart], device: torch.device) -> Tensor:
        return part_table(a.weight, factors, [(p.b.weight, p.first_rank, p.ranks, p.column) for p in parts])

    for module in (adapter_products, cuda_graph_adapters):
        monkeypatch.setattr(module, "launch_products", launched)
    monkeypatch.setattr(loading, "_packed", packed)
    monkeypatch.setattr(loading, "_table", table)
    monkeypatch.setattr(loading, "_in_c", lambda linears: None)
    monkeypatch.setattr(ops, "_on_gpu", lambda plain, positions: ProductsOnGpu())


def matrix(address: int, rows: int, columns: int) -> Tensor:
    held = (ctypes.c_float * (rows * columns)).from_address(address)
    return torch.frombuffer(held, dtype=torch.float32).view(rows, columns)


def launched(y: Tensor, x: Tensor, tiles: "AdapterTiles", fields: Tensor, parts: int, ranks: int) -> None:
    for slot, first, count in tiles.tiles.tolist():
        for a, b, factors, first_rank, own, column, columns in fields.view(-1, parts, 7)[slot].tolist():
            for row in tiles.order[first : first + count].tolist() if columns else ():
                assert first_rank + own <= ranks
                low = matrix(a, first_rank + own, x.shape[1])[first_rank:] @ x[row]
                added = matrix(b, columns, -(-own // 32) * 32)[:, :own] @ low
                at = slice(column, column + columns)
                y[row, at] += added * matrix(factors, 1, column + columns)[0, column:] * tiles.scales[slot]


class Served:
    """A runner and a scheduler that answer requests, with or without graphs."""

    def __init__(self, decoder: Decoder, *, graphs: bool, max_loras: int = 8) -> None:
        groups, dtype = cache_groups(decoder.spec, LONGEST, paged=True), decoder.weights.embed.dtype
        cache = KVCache(decoder.spec, [200] * len(groups), 16, dtype, CPU, groups, 1, dtype)
        config = SchedulerConfig(
            max_seq_len=LONGEST, eos_token_ids=frozenset({EOS}), max_step_tokens=128, prefill_chunk_size=16,
            max_loras=99, max_batch_size=16,
        )  # fmt: skip
        self._scheduler = Scheduler(config, [PagePool(200, 16, group.window) for group in groups], None)
        self._runner = Runner(
            decoder, cache, graphs=graphs, max_batch_size=16, max_step_tokens=128, max_loras=max_loras
        )
        self.eager, self._count = list[Plan](), 0
        inputs_of = self._runner._inputs

        def counted(plan: Plan, before: None) -> object:
            self.eager.append(plan)
            return inputs_of(plan, before)

        self._runner._inputs = counted  # type: ignore[assignment, method-assign]

    @property
    def graphs(self) -> StepGraphs:
        assert self._runner._graphs is not None
        return self._runner._graphs

    def answers(self, *asked: tuple[LoadedAdapter | None, float], new: int = 4) -> list[list[int]]:
        """Returns the ids of a request with each pair of an adapter and a scale. The prompts differ."""
        sequences = []
        for index, (adapter, scale) in enumerate(asked):
            prompt, self._count = list(PROMPTS[index % len(PROMPTS)]), self._count + 1
            sampling = Sampling(new, temperature=0.8 * (index % 2), ignore_eos=True)
            sequence = Sequence((b"f", self._count), prompt, len(prompt), sampling, index)
            sequence.adapter = use(adapter, scale)
            salt = "" if sequence.adapter is None else sequence.adapter.adapter.identity
            sequence.prefix = PrefixState(salt)
            sequences.append(sequence)
            self._scheduler.submit(sequence, 0.0)
        step = 0.0
        while self._scheduler.has_work:
            plan = self._scheduler.plan(step)
            commit(self._scheduler, plan, self._runner.step(plan).ids, step)
            step += 1.0
        return [one.tokens[one.prompt_len :] for one in sequences]


def drawn(base: Path, decoder: Decoder, folder: Path, seed: int, **how: object) -> LoadedAdapter:
    return loaded(base, decoder, draw_adapter(base, folder / str(seed), seed, size=1.0, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_replayed_steps_with_adapters_change_no_bit_while_adapters_come_and_go(
    family: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(family)
    decoder = decoder_of(base)
    narrow = [drawn(base, decoder, tmp_path, seed, r=4, targets=NARROW) for seed in (1, 2)]
    wide = drawn(base, decoder, tmp_path, 3, r=40)
    plain, replayed = Served(decoder, graphs=False), Served(decoder, graphs=True, max_loras=3)
    rounds: list[list[tuple[LoadedAdapter | None, float]]] = [
        [(narrow[0], 1.0), (None, 1.0), (narrow[1], 1.0), (narrow[0], 0.5)],
        [(None, 1.0), (narrow[1], 1.0)],
        [(wide, 1.0), (narrow[0], 1.0), (None, 1.0)],  # more modules and ranks: captured again
        [(narrow[1], 2.0), (wide, 2.0)],  # other pairs take the slots
        [(narrow[0], 1.0), (wide, 1.0), (narrow[1], 1.0), (None, 1.0)],
    ]
    found = [replayed.answers(*asked) for asked in rounds]
    assert found == [plain.answers(*asked) for asked in rounds]
    assert len({tuple(ids) for answers in found for ids in answers}) > 10, "adapters change answers"
    graphs = replayed.graphs
    assert graphs.on and graphs._adapted.on and graphs._adapted._generation == 2 and not replayed.eager
    shapes = {shape.mixed for shape, step in graphs._adapted.of_shapes.items() if step.captured.graph}
    assert shapes == {False, True} and all(
        shape.rows < shape.tokens for shape in graphs._adapted.of_shapes if shape.mixed
    )


class Reading:
    """Reads the hidden states of each position, as a draft head does."""

    def __init__(self, layers: tuple[int, ...], decoder: Decoder) -> None:
        self.of = HiddenStates(layers, decoder.spec.hidden_size, decoder.weights.embed.dtype)
        self.of_graphs = CapturedStates(self.of, 128, torch.device(CPU), lambda states: states, self.of.width)
        self.rows: dict[tuple[int, int], Tensor] = {}  # (request, position) → hidden state [W]

    def reads(self, inputs: ForwardInputs, plan: Plan) -> ReadStep:
        return read_step(inputs, plan, self.of, self._keep)

    def captured(self, model: Forward, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        return self.of_graphs.logits(model, inputs, cache)

    def replayed(self, plan: Plan) -> None:
        self.of_graphs.read(plan, self._keep)

    def _keep(self, sequence: Sequence, start: int, states: Tensor) -> None:
        self.rows |= {(sequence.key[1], start + at): row for at, row in enumerate(states)}


@pytest.mark.parametrize(("family", "layers"), [("llama", ()), ("llama", (1, 0)), ("gemma3", (2,))])
def test_replayed_steps_give_a_head_the_hidden_states_of_steps_without_graphs(
    family: str, layers: tuple[int, ...], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(family)
    decoder = decoder_of(base)
    adapter = drawn(base, decoder, tmp_path, 1, r=4, targets=NARROW)
    asked = [(adapter, 1.0), (None, 1.0), (None, 1.0), (adapter, 0.5)]
    expected = Served(decoder, graphs=False).answers(*asked)
    rows = []
    for graphs in (False, True):
        one, reading = Served(decoder, graphs=graphs), Reading(layers, decoder)
        one._runner.hidden_reader = reading
        assert one.answers(*asked) == expected and bool(one.eager) != graphs
        rows.append(reading.rows)
    plain, replayed = rows
    assert plain.keys() == replayed.keys() and len(plain) > sum(map(len, PROMPTS))
    assert all(torch.equal(row, replayed[at]) for at, row in plain.items())


def test_an_adapter_that_is_gone_leaves_its_slot_and_another_at_its_address_gets_new_tables(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints("llama")
    decoder = decoder_of(base)
    plain, replayed = Served(decoder, graphs=False), Served(decoder, graphs=True, max_loras=1)
    for seed in (1, 2, 3):
        adapter = drawn(base, decoder, tmp_path, seed, r=4, targets=NARROW)
        assert replayed.answers((adapter, 1.0), (None, 1.0)) == plain.answers((adapter, 1.0), (None, 1.0))
        adapters = replayed.graphs._adapted._adapters
        [(slot, kept)] = adapters._held.values()  # type: ignore[union-attr, attr-defined]
        assert slot == 0 and kept() is adapter and len(adapters._held) == 1  # type: ignore[union-attr, attr-defined]
        plain.eager.clear()
        del adapter
    gc.collect()
    assert kept() is None, "the tables keep no adapter in memory"
    last = drawn(base, decoder, tmp_path, 4, r=4, targets=NARROW)
    adapters._held = {(id(last), 1.0): (0, kept)}  # type: ignore[union-attr, attr-defined]
    assert replayed.answers((last, 1.0)) == plain.answers((last, 1.0))


def test_steps_that_no_graph_can_replay_run_without_one(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """More pairs than slots; adapters of experts."""
    base = checkpoints("llama")
    decoder = decoder_of(base)
    one, two = [drawn(base, decoder, tmp_path, seed, r=4, targets=NARROW) for seed in (1, 2)]
    plain, replayed = Served(decoder, graphs=False), Served(decoder, graphs=True, max_loras=1)
    asked = [(one, 1.0), (two, 1.0)]
    assert replayed.answers(*asked) == plain.answers(*asked) and replayed.eager and replayed.graphs.on
    replayed.eager.clear()
    assert replayed.answers(asked[0]) == plain.answers(asked[0]) and not replayed.eager

    experts = checkpoints("qwen3-moe")
    decoder = decoder_of(experts)
    adapter = drawn(experts, decoder, tmp_path / "experts", 1, r=4, experts=True)
    replayed = Served(decoder, graphs=True)
    assert replayed.answers((adapter, 1.0), (None, 1.0)) == Served(decoder, graphs=False).answers(
        (adapter, 1.0), (None, 1.0)
    )
    assert replayed.eager and not any(
        chunk.sequence.adapter is None for plan in replayed.eager for chunk in plan.chunks[:1]
    )


def test_steps_without_adapters_have_graphs_of_their_own(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("llama")
    decoder = decoder_of(base)
    replayed = Served(decoder, graphs=True)
    replayed.answers((None, 1.0), (None, 1.0))
    assert replayed.graphs._adapted._adapters is None and not replayed.graphs._adapted.of_shapes
    before = set(replayed.graphs._forwards)
    adapter = drawn(base, decoder, tmp_path, 1, r=4, targets=NARROW)
    replayed.answers((adapter, 1.0))
    assert set(replayed.graphs._forwards) == before and replayed.graphs._adapted.of_shapes
    replayed.answers((None, 1.0))
    assert not replayed.eager


@pytest.mark.parametrize("wrong", ["capture", "bits"])
def test_self_test_that_fails_turns_off_only_the_graphs_of_steps_with_adapters(
    wrong: str, checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = checkpoints("llama")
    decoder = decoder_of(base)
    adapter = drawn(base, decoder, tmp_path, 1, r=4, targets=NARROW)
    plain, replayed = Served(decoder, graphs=False), Served(decoder, graphs=True)
    graphs = replayed.graphs
    replayed.answers((None, 1.0))

    def failing(body: Callable[[], object]) -> Graph:
        step = getattr(body, "__self__", None)
        if getattr(step, "adapters", None) is None:
            return EagerGraph(body)
        if wrong == "capture":
            raise RuntimeError("not permitted when stream is capturing")
        return EagerGraph(lambda: (body(), graphs._memory.logits.add_(1e-3)))

    graphs._capture = failing
    assert replayed.answers((adapter, 1.0), (None, 1.0)) == plain.answers((adapter, 1.0), (None, 1.0))
    assert graphs.on and not graphs._adapted.on and replayed.eager
    (said,) = [record.message for record in caplog.records if record.name == "sluice.graphs"]
    assert "steps with adapters run without CUDA graphs" in said


def test_tiles_are_those_of_a_step_without_a_graph() -> None:
    from worker.lora.triton import tiles_of
    from worker.model_runner.cuda_graph_adapters import NO_SLOT, tiles_of_slots

    draw = np.random.default_rng(1)
    for rows in (1, 15, 16, 17, 70, 300):
        slots = draw.integers(NO_SLOT, 3, rows)
        found = [np.flatnonzero(slots == slot) for slot in range(3) if (slots == slot).any()]
        order, tiles = tiles_of_slots(slots)
        if not found:
            assert not len(order) and not len(tiles)
            continue
        expected = tiles_of([torch.from_numpy(own) for own in found], [1.0] * len(found))
        assert order.tolist() == expected.order.tolist()
        assert tiles[:, 1:].tolist() == expected.tiles[:, 1:].tolist()
        assert len(tiles) <= min(rows, rows // 16 + 3)
