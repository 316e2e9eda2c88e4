"""Options of GPU kernels that change bits on a device are found and switched off before serving."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.models.harness import decoder_of
from worker.model_runner.check_bits import REPLAYS, with_sound_options
from worker.models.decoder import Decoder
from worker.operations import FAST
from worker.ops.launch_options import NO_OPTIONS, GpuOptions

LENGTH = 800
Wrong = Callable[[GpuOptions, int], bool]  # whether a result is wrong: (options, number of calls with an option so far)


def worker(options: str, **settings: Any) -> WorkerConfig:
    return WorkerConfig(gpu_options=options, **({"max_step_tokens": 512} | settings))


def on_device(checkpoints: Checkpoints, wrong: Wrong, kind: str = "llama") -> Decoder:
    """Returns a decoder whose linears have one wrong number if `wrong` says so."""
    calls = 0

    def linear(*args: Any, options: GpuOptions = NO_OPTIONS, **how: Any) -> Tensor:
        nonlocal calls
        result = FAST.linear(*args, **how)
        calls += options != NO_OPTIONS
        if wrong(options, calls):
            result[-1, -1] += 1
        return result

    return decoder_of(checkpoints(kind), positions=LENGTH).with_operations(replace(FAST, linear=linear))


def options_of(decoder: Decoder) -> GpuOptions:
    keywords: dict[str, GpuOptions] = getattr(decoder.operations.linear, "keywords", {})
    return keywords.get("options", NO_OPTIONS)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what was said while loading. Threads that an earlier test has left behind may say something else."""
    return [one.getMessage() for one in caplog.records if one.name == "sluice.load"]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_options_that_change_no_bit_are_used(
    checkpoints: Checkpoints, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    decoder = on_device(checkpoints, lambda options, calls: False, kind)
    served = with_sound_options(decoder, worker("pdl weight_prefetch"), LENGTH)
    assert options_of(served) == GpuOptions(pdl=True, weight_prefetch=True) and not warnings(caplog)
    assert served.weights is decoder.weights


def test_option_that_changes_bits_is_off_with_one_warning(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    decoder = on_device(checkpoints, lambda options, calls: options.pdl)
    served = with_sound_options(decoder, worker("pdl,prefetch_branch"), LENGTH)
    assert options_of(served).names == ("prefetch_branch",)
    (warning,) = warnings(caplog)
    assert f"pdl ({REPLAYS} of {REPLAYS} replays of a step of 1 rows have other bits)" in warning


def test_option_that_fails_now_and_then_is_off(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    decoder = on_device(checkpoints, lambda options, calls: options.pdl and calls % 89 == 0)
    assert options_of(with_sound_options(decoder, worker("pdl"), LENGTH)) == NO_OPTIONS
    assert len(warnings(caplog)) == 1


def test_option_whose_kernels_fail_is_off(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(options: GpuOptions, calls: int) -> bool:
        if options.pdl:
            raise RuntimeError("no such launch attribute")
        return False

    assert options_of(with_sound_options(on_device(checkpoints, wrong), worker("pdl"), LENGTH)) == NO_OPTIONS
    assert "pdl (a step fails: RuntimeError: no such launch attribute)" in caplog.text


def test_option_that_the_device_lacks_is_named(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuOptions, "on", lambda self, device: replace(self, pdl=False))
    decoder = on_device(checkpoints, lambda options, calls: False)
    assert options_of(with_sound_options(decoder, worker("pdl"), LENGTH)) == NO_OPTIONS
    assert "pdl (it needs compute capability 9.0)" in caplog.text


def test_without_options_or_triton_nothing_runs(checkpoints: Checkpoints) -> None:
    def never(options: GpuOptions, calls: int) -> bool:
        raise AssertionError("a step ran")

    decoder = on_device(checkpoints, never)
    assert with_sound_options(decoder, worker(""), LENGTH) is decoder
    assert with_sound_options(decoder, worker("pdl", kernels="torch"), LENGTH) is decoder


def test_softmax_overlap_is_checked_with_a_long_prompt(checkpoints: Checkpoints) -> None:
    """Only long prompts are computed by prefill attention, in which the softmax overlaps."""
    rows = set()

    def linear(x: Tensor, *args: Any, options: GpuOptions = NO_OPTIONS, **how: Any) -> Tensor:
        rows.add((options.softmax_overlap, len(x)))
        return FAST.linear(x, *args, **how)

    decoder = decoder_of(checkpoints("llama"), positions=LENGTH).with_operations(replace(FAST, linear=linear))
    with_sound_options(decoder, worker("softmax_overlap", max_step_tokens=70), LENGTH)
    assert {(False, 70), (True, 70)} <= rows


@pytest.mark.parametrize("length", [1, 17])
def test_short_sequences_have_steps_that_fit(checkpoints: Checkpoints, length: int) -> None:
    decoder = on_device(checkpoints, lambda options, calls: False)
    served = with_sound_options(decoder, worker("pdl", max_step_tokens=7), length)
    assert options_of(served).pdl and torch.is_tensor(served.weights.embed.stored)
