"""An answer about images has the same bits alone, in company, in chunks, from caches, preempted and restarted."""

from pathlib import Path

import pytest
import torch

from tests.worker.vision.harness import MODELS, Asked, Bench, Served, inverted, prompt_with, served
from worker.model_runner.inputs import LogitsUse
from worker.model_runner.step import InFlightStep
from worker.models.forward_inputs import ForwardInputs
from worker.scheduler.sequence import Plan
from worker.vision import encoder
from worker.vision import encoder as sandwich

NEW, SEED = 16, 5
HYBRID = ("qwen3_5", "lfm2_vl")
Answer = tuple[list[int], list[float]]


def asked(one: Served, images: int = 2) -> Asked:
    prompt, shown = prompt_with(images, one.vision.spec)
    return Asked(prompt, shown, NEW, SEED)


def company(one: Served) -> list[Asked]:
    """Returns other requests: text alone, the same text with other images, and other text with other images."""
    same, other = asked(one), prompt_with(1, one.vision.spec, seed=9)
    return [
        Asked([9 + i for i in range(40)], [], NEW, 3),
        Asked(same.prompt, [inverted(each) for each in same.images], NEW, SEED),
        Asked(*other, NEW, None),
    ]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_depend_on_the_request_alone(
    kind: str, dtype: torch.dtype, towers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = served(towers[kind], dtype)
    target, others = asked(one), company(one)
    [alone] = Bench(one).answers(target)
    assert Bench(one).answers(target, *others)[0] == alone
    assert Bench(one).answers(target, *others)[2] != alone, "other images give another answer"
    assert Bench(one, in_c=False).answers(target, *others)[0] == alone
    for chunk in (1, 7, 16):
        assert Bench(one, chunk=chunk, step_tokens=64).answers(*others, target)[-1] == alone
    assert Bench(one, page=32, prefix_cache=False).answers(target, preempt_at=(2, 9))[0] == alone
    assert Bench(one, chunk=7).answers(target, *others, preempt_at=(1, 3, 12))[0] == alone
    assert Bench(Served.of(towers[kind], dtype, cache_bytes=0), chunk=5).answers(target)[0] == alone, "without a cache"
    piecewise = Bench(Served.of(towers[kind], dtype, cache_bytes=0), between_steps=True)
    for module in (encoder, sandwich):
        monkeypatch.setattr(module, "ROWS", 5)
    assert piecewise.answers(target, *others, preempt_at=(2, 9))[0] == alone, "encoded between steps, in pieces"
    assert piecewise.waited > 10 or kind == "gemma4_unified", "which has no tower: one piece is an image"
    resumed = Asked(target.prompt, target.images, NEW, SEED, generated=alone[0][:6])
    assert Bench(one).answers(resumed)[0] == (alone[0], alone[1][6:]), "after its worker was lost"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_only_steps_with_tokens_of_images_run_without_a_graph(kind: str, towers: dict[str, Path]) -> None:
    """Later steps of sequences with images are replayed, also with M-RoPE, and their bits are the same."""
    one = served(towers[kind])
    target, others = asked(one), company(one)
    bench, eager = Bench(one, chunk=16, graphs=True, step_tokens=64), list[Plan]()
    inputs_of = bench.runner._inputs

    def counted(plan: Plan, before: InFlightStep | None) -> tuple[ForwardInputs, LogitsUse]:
        eager.append(plan)
        return inputs_of(plan, before)

    bench.runner._inputs = counted  # type: ignore[method-assign]
    plain = Bench(one, in_c=False, chunk=16, step_tokens=64)
    assert bench.answers(target, *others) == plain.answers(target, *others)
    graphs = bench.runner._graphs
    assert graphs is not None and graphs.on and eager
    assert {shape.mixed for shape, step in graphs._forwards.items() if step.captured.graph} == {False, True}
    assert all(
        any(chunk.sequence.images is not None and chunk.start < chunk.sequence.images.end for chunk in plan.chunks)
        for plan in eager
    )


@pytest.mark.parametrize("kind", MODELS)
def test_prefixes_are_shared_if_their_images_are_equal(kind: str, towers: dict[str, Path]) -> None:
    one = Served.of(towers[kind])
    target, bench = asked(one), Bench(one)
    first = bench.answers(target)
    assert one.vision.encoded == 2 and bench.scheduler.status.prefix_hits == 0
    assert bench.answers(target) == first
    again = bench.scheduler.status.prefix_hits
    assert again == (len(target.prompt) - 1) // 16 * 16, "all full pages are found"
    others = Asked(target.prompt, [target.images[0], inverted(target.images[1])], NEW, SEED)
    assert bench.answers(others) == Bench(one).answers(others) != first
    shared = target.images[1].start // 16 * 16
    found = bench.scheduler.status.prefix_hits - again
    assert found == shared > 0 or kind in HYBRID, "pages are shared up to the first other image"
    assert found <= shared and one.vision.encoded == 3, "a hybrid shares up to a recurrent state"


@pytest.mark.parametrize("kind", MODELS)
def test_text_alone_has_the_bits_of_a_worker_without_a_tower(kind: str, towers: dict[str, Path]) -> None:
    one = served(towers[kind])
    text, seeing = Asked([20 + i for i in range(50)], [], NEW, SEED), asked(one)
    without = Bench(Served(one.decoder, None)).answers(text)[0]
    assert Bench(one).answers(seeing, text)[1] == without


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_vectors_of_an_image_do_not_depend_on_threads(kind: str, dtype: torch.dtype, towers: dict[str, Path]) -> None:
    one = served(towers[kind], dtype)
    image, threads = asked(one, 1).images[0], torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(one.vision._encoder.encode(image))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_cache_of_encoded_images_is_bounded_and_drops_the_least_recently_used(towers: dict[str, Path]) -> None:
    prompt_of_one = asked(served(towers["smolvlm"]), 3)
    a, b, c = prompt_of_one.images
    size = served(towers["smolvlm"]).vision.rows(a).nbytes
    vision = Served.of(towers["smolvlm"], cache_bytes=2 * size).vision
    for each in (a, b, a, c, a):
        vision.rows(each)
    assert (vision.encoded, vision.hits, vision.cached_bytes) == (3, 2, 2 * size)
    vision.rows(b)
    assert vision.encoded == 4, "b was dropped for c"
    assert vision.cached_bytes <= 2 * size


def test_layers_of_images_count_as_progress(towers: dict[str, Path]) -> None:
    one = Served.of(towers["idefics3"])
    before = one.decoder.layers_started.value
    one.vision.rows(asked(one, 1).images[0])
    assert one.decoder.layers_started.value - before == one.vision.spec.layers
