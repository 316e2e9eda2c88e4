"""An engine with a tower serves requests with images in its loop: answers, refusals, failures, receipts, metrics."""

import json
import shutil
from collections.abc import Generator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from safetensors.torch import load_file, save_file

from shared import messages as m
from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.machine import Memory
from shared.wire import decode_request, encode, pack_u32
from tests.checkpoints import Checkpoints
from tests.worker.engine.harness import ME, Bench
from tests.worker.vision.harness import PLACEHOLDER, Asked, prompt_with, served
from tests.worker.vision.harness import Bench as Alone
from worker.checkpoint.checkpoint import CheckpointError
from worker.engine import load_model
from worker.engine.build import Engine, load_engine
from worker.vision import encoder
from worker.vision.vision import BetweenSteps, ImageAdmission, VisionCollector
from worker.vision.weights import bytes_of_tower

NEW = 10


def engine_of(folder: Path) -> Engine:
    worker = WorkerConfig(device="cpu", dtype="float32", kv_cache_gb=0.02, page_size=16, prefill_chunk_size=16)
    return load_engine(ModelConfig(model=str(folder), max_seq_len=256), worker)


def bench_of(engine: Engine, cost: int = 1 << 20) -> Bench:
    """cost: multiplications of the text model per token; 0: each iteration encodes only one piece of an image"""
    assert engine.tower is not None
    bench = Bench(
        runner=engine.runner, config=engine.scheduler.config, pools=engine.pools, vocab_size=engine.spec.vocab_size
    )
    vision = engine.runner.vision
    bench.request_table._give_images = ImageAdmission(engine.tower, bench.scheduler.sequences, vision)
    if vision is not None:
        bench.loop.between_steps = BetweenSteps(
            vision, bench.scheduler, cost, bench.request_table.crash_journal.record_step,
            lambda: bench.request_table.publish(bench.server, 0.0),  # type: ignore[arg-type]
            engine.runner.check_device, bench.loop.fail,
        )  # fmt: skip
    return bench


def submit(id: int, prompt: list[int], images: list[m.PromptImage] | None, **more: Any) -> m.Submit:
    sampling = m.Sampling(NEW, temperature=0.0, ignore_eos=True, logit_bias=((PLACEHOLDER, -100.0),))
    sent = decode_request(encode(m.Submit(id, pack_u32(prompt), sampling, images=images, **more)))
    assert isinstance(sent, m.Submit)
    return sent


def rejections(bench: Bench) -> dict[int, str]:
    return {one.id: one.message for _, step in bench.server.sent for one in step.rejected}


def test_requests_with_images_are_served_beside_others_and_their_answers_checked(towers: dict[str, Path]) -> None:
    engine, one = engine_of(towers["smolvlm"]), served(towers["smolvlm"])
    prompt, images = prompt_with(2, one.vision.spec)
    [(expected, _)] = Alone(one).answers(Asked(prompt, images, NEW))
    bench = bench_of(engine)
    text = list(range(20, 50))
    bench.send(submit(1, text, None), submit(2, prompt, images), submit(3, prompt, images[:1]), submit(4, text, []))
    bench.iterate(30)
    outputs, ends = bench.received()
    assert outputs[2] == expected and outputs[1] == outputs[4] and len(outputs[1]) == NEW
    assert outputs[3] != expected, "the second image's tokens are its placeholders"
    assert {end.outcome for end in ends.values()} == {m.Outcome.LENGTH} and not rejections(bench)
    bench.send(submit(5, prompt, images, answer=pack_u32(expected)))
    wrong = [*expected[:4], (expected[4] + 1) % 500, *expected[5:]]
    bench.send(submit(6, prompt, images, answer=pack_u32(wrong)))
    bench.iterate(30)
    outputs, ends = bench.received()
    assert outputs[5] == expected and outputs[6] == expected[:5]
    bench.send(submit(7, prompt, images, generated=pack_u32(expected[:5]), crashes=1, original_id=2))
    bench.iterate(30)
    resumed = bench.request_table._records[ME, 7].sequence
    assert resumed.tokens[len(prompt) :] == expected, "as if the worker had not been lost"
    bench.scheduler.check()


def test_pixels_are_freed_when_a_request_ends(towers: dict[str, Path]) -> None:
    engine, one = engine_of(towers["smolvlm"]), served(towers["smolvlm"])
    bench = bench_of(engine)
    prompt, images = prompt_with(1, one.vision.spec)
    bench.send(submit(1, prompt, images), submit(2, prompt, images))
    bench.iterate(2)
    bench.send(m.Abort((2,)))
    bench.iterate(20)
    records = bench.request_table._records.values()
    assert len(records) == 2 and all(record.sequence.images is None for record in records)


def test_failing_encoder_fails_its_request_alone(towers: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, one = engine_of(towers["smolvlm"]), served(towers["smolvlm"])
    bench = bench_of(engine)
    (prompt, good), (other, bad) = prompt_with(1, one.vision.spec), prompt_with(1, one.vision.spec, seed=4)
    vision: Any = engine.runner.vision
    pieces_of = vision._encoder.pieces

    def pieces_but(image: m.PromptImage) -> Generator[int, None, torch.Tensor]:
        if image.pixels == bad[0].pixels:
            yield 1
            raise RuntimeError("no kernel for it")
        found: torch.Tensor = yield from pieces_of(image)
        return found

    monkeypatch.setattr(vision._encoder, "pieces", pieces_but)
    bench.send(submit(1, prompt, good), submit(2, other, bad), submit(3, list(range(20, 50)), None))
    bench.iterate(30)
    _, ends = bench.received()
    assert {id: end.outcome for id, end in ends.items()} == {
        1: m.Outcome.LENGTH, 2: m.Outcome.ERROR, 3: m.Outcome.LENGTH
    }  # fmt: skip
    assert "no kernel for it" in ends[2].error


def test_streams_go_on_while_an_image_is_encoded(towers: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, one = engine_of(towers["gemma3"]), served(towers["gemma3"])
    monkeypatch.setattr(encoder, "ROWS", 64)  # an image's 256 patches are encoded in four pieces
    prompt, images = prompt_with(2, one.vision.spec)
    [(expected, _)] = Alone(one).answers(Asked(prompt, images, NEW))
    bench, text = bench_of(engine, cost=0), list(range(20, 30))
    sampling = m.Sampling(150, temperature=0.0, ignore_eos=True)
    bench.send(m.Submit(1, pack_u32(text), sampling))
    bench.iterate(3)
    bench.send(submit(2, prompt, images))
    spans = []  # (tokens of the stream, layers of the tower) after each iteration
    while 2 not in (received := bench.received())[1]:
        spans.append((len(received[0][1]), engine.runner.layers_started))
        bench.iterate()
    outputs, _ = received
    assert outputs[2] == expected
    assert all(after[0] == before[0] + 1 for before, after in pairwise(spans)), "a token in every iteration"
    most = len(engine.spec.layers) + 1  # layers of the tower that take as long as a step, and a part of one more
    assert all(after[1] - before[1] <= most for before, after in pairwise(spans))
    # pieces of an image: one for its patches, and in each layer two for each of four parts
    pieces = 1 + one.vision.spec.layers * 2 * 4
    assert len(spans) > 2 * pieces


def test_image_of_a_request_that_ends_is_not_encoded_further(towers: dict[str, Path]) -> None:
    engine, one = engine_of(towers["smolvlm"]), served(towers["smolvlm"])
    vision, bench = engine.runner.vision, bench_of(engine, cost=0)
    assert vision is not None
    (prompt, shown), (other, kept) = prompt_with(1, one.vision.spec), prompt_with(1, one.vision.spec, seed=4)
    bench.send(submit(1, prompt, shown), submit(2, other, kept))
    bench.iterate(4)
    assert vision.encoded == 0
    bench.send(m.Abort((1,)))
    bench.iterate(30)
    assert vision.encoded == 1 and kept[0].digest in vision and shown[0].digest not in vision
    assert not vision._unread and bench.received()[1][2].outcome is m.Outcome.LENGTH


def test_worker_without_a_tower_refuses_images(towers: dict[str, Path]) -> None:
    bench = Bench()
    _, images = prompt_with(1, served(towers["smolvlm"]).vision.spec)
    bench.send(submit(1, [5, 6], images), submit(2, [5, 6], None))
    bench.iterate(2)
    assert rejections(bench) == {1: "`prompt` has images, and this model sees no images"}


def test_tower_that_is_not_served_leaves_the_text(towers: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(towers["smolvlm"], tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "quick_gelu"
    (folder / "config.json").write_text(json.dumps(config))
    engine, whole = engine_of(folder), engine_of(towers["smolvlm"])
    assert engine.tower is not None and engine.runner.vision is None
    assert "'quick_gelu' is not supported" in engine.tower.missing
    answers = []
    for each in (engine, whole):
        bench = bench_of(each)
        prompt, images = prompt_with(1, served(towers["smolvlm"]).vision.spec)
        bench.send(submit(1, list(range(20, 50)), None), submit(2, prompt, images))
        bench.iterate(20)
        answers.append(bench.received()[0][1])
        assert rejections(bench) == ({2: f"`prompt`: {engine.tower.missing}"} if each is engine else {})
    assert answers[0] == answers[1]
    assert engine.fingerprint != whole.fingerprint


def test_fingerprint_names_the_processor(towers: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(towers["smolvlm"], tmp_path / "other"))
    same = engine_of(folder).fingerprint
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3]}')
    assert engine_of(towers["smolvlm"]).fingerprint == same != engine_of(folder).fingerprint


def test_tower_that_does_not_fit_beside_the_text_model_is_refused(
    towers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load_file(towers["gemma3"] / "model.safetensors").items()
    read = [tensor for name, tensor in stored if ("vision" in name or "multi_modal" in name) and ".head." not in name]
    tower = bytes_of_tower(towers["gemma3"], 64, torch.float32)
    assert tower == sum(tensor.numel() * 4 for tensor in read) > 0
    sizes: list[int] = []
    monkeypatch.setattr(load_model, "check_host_memory", lambda weights, *_: sizes.append(weights.nbytes))
    engine_of(towers["gemma3"])
    monkeypatch.undo()
    for room in (sizes[0], sizes[0] - tower // 2):  # the text model alone fits into both sizes of memory
        monkeypatch.setattr(load_model, "memory", lambda room=room: Memory(room, 1 << 40, 0))
        with nullcontext() if room == sizes[0] else pytest.raises(ConfigError, match="GiB for its weights"):
            engine_of(towers["gemma3"])


def test_tower_that_lacks_a_tensor_is_named(towers: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(towers["smolvlm"], tmp_path / "other"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("encoder.layers.1.mlp.fc1.bias"))
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        engine_of(folder)


def test_model_without_a_tower_loads_none(checkpoints: Checkpoints) -> None:
    engine = engine_of(checkpoints("llama"))
    assert engine.tower is None and engine.runner.vision is None


def test_metrics_count_images_seconds_and_hits(towers: dict[str, Path]) -> None:
    vision: Any = engine_of(towers["smolvlm"]).runner.vision
    _, (first, second) = prompt_with(2, vision.spec)
    for each in (first, second, first):
        vision.rows(each)
    registry = CollectorRegistry()
    registry.register(VisionCollector("x_", vision))
    lines = dict(
        line.split(" ") for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")
    )
    assert (lines["x_pictures_encoded_total"], lines["x_encoder_cache_hits_total"]) == ("2.0", "1.0")
    assert float(lines["x_picture_encode_seconds_total"]) > 0 and float(lines["x_encoder_cache_bytes"]) > 0


def test_tenants_take_turns_in_having_their_images_encoded(
    towers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, one = engine_of(towers["smolvlm"]), served(towers["smolvlm"])
    bench, order = bench_of(engine, cost=0), list[bytes]()
    vision: Any = engine.runner.vision
    pieces_of = vision._encoder.pieces

    def noted(image: m.PromptImage) -> Generator[int, None, torch.Tensor]:
        order.append(image.pixels)
        yield 1
        found: torch.Tensor = yield from pieces_of(image)
        return found

    monkeypatch.setattr(vision._encoder, "pieces", noted)
    asked = [prompt_with(1, one.vision.spec, seed=seed) for seed in range(6)]
    tenants = ["many", "many", "many", "many", "few", "few"]
    for id, ((prompt, images), tenant) in enumerate(zip(asked, tenants, strict=True), 1):
        bench.send(submit(id, prompt, images, tenant=tenant))
    bench.iterate(120)
    _, ends = bench.received()
    assert len(ends) == 6 and {end.outcome for end in ends.values()} == {m.Outcome.LENGTH}
    assert order == [asked[place][1][0].pixels for place in (4, 0, 5, 1, 2, 3)], (
        "each image is encoded once, in turns, and the tenant with the fewest tokens begins"
    )
