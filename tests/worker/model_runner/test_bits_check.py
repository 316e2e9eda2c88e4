"""A device on which the bits of a row depend on other rows is found before serving, and still serves."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import Checkpoints
from tests.worker.model_runner.test_kernel_check import LENGTH, worker
from tests.worker.models.harness import decoder_of
from worker.model_runner.check_bits import find_differing_steps, keeps_bits
from worker.models.decoder import Decoder
from worker.operations import FAST, TORCH

Change = Callable[..., Any]


@pytest.fixture(scope="module")
def decoder(checkpoints: Checkpoints) -> Decoder:
    return decoder_of(checkpoints("qwen3_5"), positions=LENGTH)  # a model with attention and with recurrent layers


def changed(decoder: Decoder, **changes: Change) -> Decoder:
    """Returns a decoder with changed operations. A change is called with the sound operation and its arguments."""

    def bound(name: str, change: Change) -> Change:
        return lambda *args, **options: change(getattr(FAST, name), *args, **options)

    return decoder.with_operations(replace(FAST, **{name: bound(name, change) for name, change in changes.items()}))


def last_bit(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, torch.inf))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3-moe", "qwen3_5"])
def test_kernels_of_the_cpu_keep_bits(checkpoints: Checkpoints, kind: str) -> None:
    sound = decoder_of(checkpoints(kind), positions=LENGTH)
    assert find_differing_steps(sound, worker(max_batch_size=64), LENGTH) == []


@pytest.mark.parametrize("settings", [{"max_step_tokens": 1, "prefill_chunk_size": 1}, {"page_size": 1}], ids=str)
@pytest.mark.parametrize("length", [1, 2, 40])
def test_check_fits_any_settings(decoder: Decoder, settings: dict[str, Any], length: int) -> None:
    assert find_differing_steps(decoder, worker(max_batch_size=1, **settings), length) == []


def another_tile(sound: Change, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """In steps of 65 rows or more, a bit of the last row is wrong."""
    y = sound(x, *args, **options)
    if len(x) >= 65:
        y[..., 0, :] = last_bit(y[..., 0, :])
    return y


def chunks_unlike_decodes(sound: Change, q: Tensor, *args: Any, **options: Any) -> Tensor:
    y: Tensor = sound(q, *args, **options)
    return last_bit(y) if len(q) == 1 else y


def keys_by_rows(sound: Change, qkv: Tensor, *args: Any, **options: Any) -> Tensor:
    """In a step of 16 rows, keys have other bits than in a step of one row, which the step's logits do not show."""
    q: Tensor = sound(qkv, *args, **options)
    if len(qkv) == 16:
        cache, slots = args[0].flatten(0, 1), args[5]
        cache[slots] = cache[slots] * 1.0001
    return q


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("linear", another_tile, "as a decode beside 64 tokens of a prompt"),
        ("attention", chunks_unlike_decodes, "as a decode"),
        ("qkv_rope_write", keys_by_rows, "as a decode beside 15 others"),
    ],
)
def test_operation_whose_bits_depend_on_the_step_is_found(
    decoder: Decoder, name: str, change: Change, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = worker(max_batch_size=64)
    assert not keeps_bits(changed(decoder, **{name: change}), settings, LENGTH, "Fake GPU")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("ANSWERS MAY DEPEND ON THE LOAD: on Fake GPU a row has other bits ") and found in warning
    assert ("when it is computed again" in warning) is False


def test_failing_check_promises_nothing(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    def failing(sound: Change, *args: Any, **options: Any) -> Any:
        raise RuntimeError("no such kernel\nhint")

    assert not keeps_bits(changed(decoder, linear=failing), worker(), LENGTH, "Fake GPU")
    assert "cannot check on Fake GPU" in caplog.text and "(RuntimeError: no such kernel)" in caplog.text


def test_plain_operations_and_the_flag_promise_nothing(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    assert not keeps_bits(decoder.with_operations(TORCH), worker(), LENGTH, "Fake GPU")
    assert not keeps_bits(decoder, worker(batch_invariant=False), LENGTH, "Fake GPU")
    assert not caplog.records
