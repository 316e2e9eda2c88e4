"""LoRA adapters of a model that several ranks compute, each in a thread: the bits of the whole model."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shared.lora import AdapterError, read_files
from shared.messages import Sampling
from tests.adapters import draw_adapter
from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from tests.worker.distributed.staged import decoder_of, exchanges, parts_for, spec_of, staged
from tests.worker.distributed.threads import together
from tests.worker.lora.harness import use
from tests.worker.lora.test_loaded import rewritten
from tests.worker.models.harness import CPU, Row, advance, cache_for, pack, prompts_of, rows_for
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.distributed.lora import PIECE_BYTES, AdaptersOfRanks, OwnAdapters
from worker.distributed.messages import AdapterFrame, Order, adapters_of, order, receive, send
from worker.lora.loaded import LoadedAdapter, load_adapter
from worker.lora.ops import operations_with_adapters, rows_of_adapters
from worker.lora.target_modules import sites_of
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.load import load
from worker.models.sharding import Part
from worker.ops.exchange import RankLost
from worker.quantization.methods import AS_STORED, InMemory, in_memory
from worker.scheduler.sequence import Chunk, Sequence

pytestmark = needs_library
LENGTHS = [35, 5, 36, 50, 40, 70]
OWNERS = (0, None, 1, 0, 1, None)  # which adapter each sequence has: their rows are not neighbours
SCALES = (1.0, 1.0, 1.0, 0.5, 1.0, 1.0)
FEW = ("v_proj", "down_proj", "out_proj")  # so that some columns and some linears stay as they are


def loaded(folder: Path, weights: Any, files: list[Path], part: Part | None = None) -> list[LoadedAdapter]:
    sites = sites_of(folder, spec_of(folder), weights, part)
    return [load_adapter(read_files(str(one)), sites, weights.embed.dtype, CPU, 64) for one in files]


def check_bits(
    folder: Path, parts: tuple[Part, ...], files: list[Path], dtype: torch.dtype, memory: InMemory = AS_STORED
) -> None:
    """Checks steps of prompts, of decodes and of both, in which rows have one of two adapters or none."""
    spec = spec_of(folder)
    whole = Decoder(spec, load(folder, spec, dtype, CPU, invariant=True, memory=memory), 512)
    cache = cache_for(whole, tokens=512)
    model, adapters = fastest_decoder(whole, cache), loaded(folder, whole.weights, files)
    rows = rows_for(cache, prompts_of(LENGTHS), 0)
    changed = False
    with (staged_ranks if parts[0].stage.count > 1 else sharing_ranks)(folder, parts, dtype, memory, files) as compute:
        for number, chunk in enumerate([33, 1, 1, 15]):
            steps = advance(rows, chunk)
            inputs = pack(steps, cache.page_size, all_rows=number == 2)
            owners = [rows.index(row) for row, _ in steps]

            def chunks(own: list[LoadedAdapter], steps: Any = steps, owners: Any = owners) -> list[Chunk]:
                return [_chunk(own, *one) for one in zip(steps, owners, strict=True)]

            with torch.inference_mode():
                plain = model.forward(inputs, cache)
                operations = operations_with_adapters(model.operations, chunks(adapters), inputs)
                expected = model.with_operations(operations).forward(inputs, cache)
            changed |= not torch.equal(plain, expected)
            assert torch.equal(compute(inputs, chunks), expected)
            for row, length in steps:
                row.advance(length)
    assert changed


def _chunk(adapters: list[LoadedAdapter], step: tuple[Row, int], index: int) -> Chunk:
    (row, length), owner = step, OWNERS[index]
    sequence = Sequence((b"f", index), row.tokens, len(row.tokens), Sampling(1), 0)
    sequence.adapter = None if owner is None else use(adapters[owner], SCALES[index])
    return Chunk(sequence, row.computed, length, True)


Compute = Callable[[ForwardInputs, Callable[[list[LoadedAdapter]], list[Chunk]]], Tensor]


@contextmanager
def sharing_ranks(
    folder: Path, parts: tuple[Part, ...], dtype: torch.dtype, memory: InMemory, files: list[Path]
) -> Iterator[Compute]:
    """A function that computes a step by ranks that share every layer. Its second argument makes the step's chunks."""
    with exchanges(parts) as found:
        ranks = [decoder_of(folder, one, dtype, memory) for one in found]
        adapters = [
            loaded(folder, decoder.weights, files, part) for (decoder, _), part in zip(ranks, parts, strict=True)
        ]

        def forward(index: int, inputs: ForwardInputs, chunks: Callable[[list[LoadedAdapter]], list[Chunk]]) -> Tensor:
            decoder = ranks[index][1].with_adapters(rows_of_adapters(chunks(adapters[index]), CPU))
            with torch.inference_mode():
                return decoder.logits(decoder.hidden(inputs))

        def compute(inputs: ForwardInputs, chunks: Callable[[list[LoadedAdapter]], list[Chunk]]) -> Tensor:
            first, *others = together([partial(forward, index, inputs, chunks) for index in range(len(parts))])
            assert all(torch.is_tensor(other) and torch.equal(first, other) for other in others), (first, others)
            assert isinstance(first, Tensor)
            return first

        yield compute


@contextmanager
def staged_ranks(
    folder: Path, parts: tuple[Part, ...], dtype: torch.dtype, memory: InMemory, files: list[Path]
) -> Iterator[Compute]:
    """The same, by ranks in stages that have got the adapters from rank 0."""
    with staged(folder, parts, dtype, memory, adapters=files) as model:
        own: Any = model._part
        weights = own._vectors.decoder.weights
        numbered = [replace(one, number=at) for at, one in enumerate(loaded(folder, weights, files, parts[0]), 1)]

        def compute(inputs: ForwardInputs, chunks: Callable[[list[LoadedAdapter]], list[Chunk]]) -> Tensor:
            operations = operations_with_adapters(model.operations, chunks(numbered), inputs)
            with torch.inference_mode():
                return model.with_operations(operations).begin(inputs).forward(inputs, None)  # type: ignore[arg-type]

        yield compute


def two(base: Path, folder: Path) -> list[Path]:
    return [draw_adapter(base, folder / "a", 1, r=40), draw_adapter(base, folder / "b", 2, r=4, targets=FEW)]


# biases; a gated shared expert; output gates and states; states alone; norms after; one norm for both halves of a layer
KINDS = ("llama-biased", "phi3", "qwen2-moe", "qwen3_5", "qwen3-next", "lfm2", "gemma3", "cohere2", "gemma4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_layers_give_the_bits_of_one_process(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    base = checkpoints(kind)
    check_bits(base, parts_for(spec_of(base), 1, tp_size=2), two(base, tmp_path), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama-biased", "qwen2-moe", "qwen3_5", "gemma3", "cohere2", "granite-hybrid"])
def test_stages_give_the_bits_of_one_process(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    base = checkpoints(kind)
    check_bits(base, parts_for(spec_of(base), 3), two(base, tmp_path), dtype)


@pytest.mark.parametrize(("tp_size", "stages"), [(4, 1), (2, 2)])
def test_more_ranks_give_the_bits_of_one_process(
    checkpoints: Checkpoints, tmp_path: Path, tp_size: int, stages: int
) -> None:
    base = checkpoints("llama-biased")
    check_bits(base, parts_for(spec_of(base), stages, tp_size), two(base, tmp_path), torch.bfloat16)


@pytest.mark.parametrize("bits", ["int8", "int4-g32"])
def test_adapters_of_weights_in_few_bits_give_the_bits_of_one_process(
    checkpoints: Checkpoints, tmp_path: Path, bits: str
) -> None:
    base = checkpoints("llama-biased")
    parts = parts_for(spec_of(base), 2, tp_size=2)
    check_bits(base, parts, two(base, tmp_path), torch.bfloat16, in_memory(None, bits, CPU))


@pytest.mark.parametrize(("stages", "tp_size"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen2-moe", torch.bfloat16), ("lfm2-moe", torch.float32), ("qwen3-moe", torch.bfloat16)]
)
def test_adapters_of_experts_give_the_bits_of_one_process(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, dtype: torch.dtype, stages: int, tp_size: int
) -> None:
    """The loop over the layers is in Python. Some rows have no adapter, and those of one adapter change no expert."""
    base = checkpoints(kind)
    files = [draw_adapter(base, tmp_path / str(n), n, experts=not n) for n in range(2)]
    check_bits(base, parts_for(spec_of(base), stages, tp_size), files, dtype)


def test_stage_without_a_layer_that_an_adapter_changes_computes_it(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("llama")
    files = two(base, tmp_path)
    for stage in (0, 2):
        kept = rewritten(draw_adapter(base, tmp_path / f"layer{stage}", stage), partial(only, f".layers.{stage}."))
        check_bits(base, parts_for(spec_of(base), 3), [kept, files[1]], torch.float32)


def only(words: str, tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if words not in name]:
        del tensors[name]


def rename(old: str, new: str, tensors: dict[str, Tensor]) -> None:
    tensors.update({name.replace(old, new): tensors.pop(name) for name in list(tensors)})


def spoil(words: str, tensors: dict[str, Tensor]) -> None:
    next(one for name, one in tensors.items() if words in name).fill_(torch.nan)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (partial(rename, "layers.2.self_attn.q_proj", "layers.2.self_attn.x_proj"), "x_proj, which the base model lac"),
        (partial(rename, "layers.2.", "layers.3."), r"layers\.3\.mlp\.down_proj, which the base model lacks"),
        (partial(spoil, "layers.0."), "not finite"),
        (partial(spoil, "layers.2."), "not finite"),
    ],
)
def test_all_stages_refuse_what_one_of_them_cannot_use(
    checkpoints: Checkpoints, tmp_path: Path, change: Any, words: str
) -> None:
    base = checkpoints("llama")
    file = rewritten(draw_adapter(base, tmp_path / "a", 0), change)
    spec = spec_of(base)
    for part in parts_for(spec, 3):
        weights = load(base, spec, torch.float32, CPU, invariant=True, share=part.share, stage=part.stage)
        with pytest.raises(AdapterError, match=words):
            loaded(base, weights, [file], part)


# how the other ranks get adapters


class Other:
    """A rank other than 0, which takes frames from a socket."""

    def __init__(self, base: Path, part: Part, source: socket.socket) -> None:
        spec = spec_of(base)
        weights = load(base, spec, torch.float32, CPU, invariant=True, share=part.share, stage=part.stage)
        self.own, self._source = OwnAdapters(base, spec, weights, part, 64), source
        self._decoder = msgspec.msgpack.Decoder(Order | AdapterFrame)

    def take(self) -> Order | AdapterFrame:
        frame = self._decoder.decode(receive(self._source))
        if not isinstance(frame, Order):
            self.own.take(frame)
        return frame


@pytest.fixture
def base(checkpoints: Checkpoints) -> Path:
    return checkpoints("llama")


def test_adapters_come_in_pieces_between_steps_and_go(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.distributed.lora.PIECE_BYTES", PIECE_BYTES >> 4)
    parts = parts_for(spec_of(base), 1, tp_size=2)
    files = [read_files(str(one)) for one in two(base, tmp_path)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        other = Other(base, parts[1], theirs)
        ranks = AdaptersOfRanks(parts[0], partial(send, ours))
        rows = torch.tensor([1, 4])
        row = Row(list(range(5)), [1])
        frame = order("both", pack([(row, 5)], 16), adapters=[(7, 0.5, rows), (8, 1.0, rows[:1])])

        def give() -> None:
            ranks.give(7, files[0])
            ranks.give(8, files[1])
            send(ours, frame)
            ranks.forget(7)

        def take() -> list[Any]:
            taken = list[Any]()
            while len(taken) < 2 or not isinstance(taken[-1], Order):
                taken.append(other.take())
            return taken

        _, taken = together([give, take])
        assert len(taken) > 5, "the files came in pieces"
        found = other.own.rows(adapters_of(taken[-1]))
        assert [one.adapter.sha256 for one in found] == [one.sha256 for one in files]
        assert [(one.scale, one.of_all.tolist()) for one in found] == [(0.5, [1, 4]), (1.0, [1])]
        other.take()
        with pytest.raises(KeyError):
            other.own.rows([(7, 1.0, rows)])
        assert other.own.rows([(8, 1.0, rows)])


def test_an_adapter_that_rank_0_refuses_leaves_nothing_behind(base: Path, tmp_path: Path) -> None:
    """An empty file has no piece, and one that cannot be used fails in all ranks."""
    parts = parts_for(spec_of(base), 1, tp_size=2)
    folder = draw_adapter(base, tmp_path / "a", 0)
    other_layers = partial(rename, "layers.2.", "layers.9.")
    bad = read_files(str(rewritten(draw_adapter(base, tmp_path / "b", 0), other_layers)))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        other = Other(base, parts[1], theirs)
        ranks = AdaptersOfRanks(parts[0], partial(send, ours))
        for number, files in enumerate((read_files(str(folder)), bad)):
            ranks.give(number, files)
            ranks.forget(number)
        for _ in range(5):
            other.take()
    assert not other.own._loaded and not other.own._arriving


def test_lost_ranks_are_left_to_the_next_step(base: Path, tmp_path: Path) -> None:
    def lost(frame: msgspec.Struct) -> None:
        raise RankLost("gone")

    ranks = AdaptersOfRanks(parts_for(spec_of(base), 2)[0], lost)
    began = time.monotonic()
    ranks.give(1, read_files(str(draw_adapter(base, tmp_path / "a", 0))))
    ranks.forget(1)
    assert time.monotonic() - began < PATIENCE_S
