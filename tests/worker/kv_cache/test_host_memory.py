"""A model that does not fit into memory is refused in one sentence; a model that may fit is loaded."""

import logging

import pytest

from shared.config.declaration import ConfigError
from shared.machine import Memory
from worker.kv_cache.sizing import GIB, WeightsSize, check_host_memory, check_host_of_several

MACHINE = Memory(total=32 * GIB, available=20 * GIB, swap=0)


def refusal(weights: WeightsSize, pool: int = 0, memory: Memory = MACHINE) -> str:
    with pytest.raises(ConfigError) as caught:
        check_host_memory(weights, pool, memory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_that_exceed_the_machine_say_by_how_much_and_what_would_fit() -> None:
    assert refusal(WeightsSize(60 * GIB, int4=17 * GIB)) == (
        "the model needs 60.0 GiB for its weights, but 20.0 GiB of 32.0 GiB are available: serve it with "
        "--quantization int4, which needs 17.0 GiB for its weights, or serve a smaller model"
    )
    assert refusal(WeightsSize(60 * GIB)).endswith("are available: serve a smaller model")
    assert "int4" not in refusal(WeightsSize(90 * GIB, int4=26 * GIB)), "it would not fit either"


def test_a_pool_that_is_too_large_is_told_its_size() -> None:
    message = refusal(WeightsSize(17 * GIB), pool=8 * GIB)
    assert "17.0 GiB for its weights and 8.0 GiB for the K/V pool, but 20.0 GiB of 32.0 GiB" in message
    assert message.endswith("lower --kv-cache-gb to 3.0, or end other processes, or serve a smaller model")
    check_host_memory(WeightsSize(17 * GIB), 3 * GIB, MACHINE)
    assert "--kv-cache-gb" not in refusal(WeightsSize(23 * GIB), pool=GIB), "no pool would fit"
    assert "int4" not in refusal(WeightsSize(17 * GIB, int4=5 * GIB), pool=18 * GIB), "int4 alone would not help"
    assert "--quantization int4, which needs 5.0 GiB" in refusal(WeightsSize(17 * GIB, int4=5 * GIB), pool=8 * GIB)
    assert "needs 18.5 GiB for its weights, with --kv-cache-gb 1.5" in refusal(
        WeightsSize(60 * GIB, int4=37 * GIB // 2), pool=8 * GIB
    )


def test_drafter_that_does_not_fit_beside_the_model_is_named() -> None:
    size = WeightsSize(18 * GIB, int4=7 * GIB).with_others(GIB, drafter=6 * GIB)
    assert (size.nbytes, size.int4) == (25 * GIB, 14 * GIB)
    assert "drafts of a model need 6.0 GiB of it" in refusal(size)
    assert "--speculative-config" not in refusal(size, pool=2 * GIB), "the model would not fit without it either"


def test_model_that_is_too_large_for_one_host_fits_on_several() -> None:
    size = WeightsSize(61 * GIB)
    check_host_of_several(size, 18 * GIB, 4, MACHINE)
    with pytest.raises(ConfigError, match=r"each of 2 hosts needs 39\.5 GiB for its part of the model, but 20\.0"):
        check_host_of_several(size, 18 * GIB, 2, MACHINE)


@pytest.mark.parametrize(("weights", "pool"), [(20, 0), (15, 5), (1, 0)])
def test_what_fits_is_not_even_warned_of(weights: int, pool: int, caplog: pytest.LogCaptureFixture) -> None:
    check_host_memory(WeightsSize(weights * GIB), pool * GIB, MACHINE)
    assert not caplog.records


@pytest.mark.parametrize(("weights", "pool"), [(21, 0), (16, 5)])
def test_what_may_fit_is_warned_of(weights: int, pool: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_host_memory(WeightsSize(weights * GIB), pool * GIB, MACHINE)
    assert f"needs {weights}.0 GiB" in caplog.text and "20.0 GiB of 32.0 GiB are available" in caplog.text


def test_swap_is_room() -> None:
    check_host_memory(WeightsSize(40 * GIB), 0, Memory(32 * GIB, 20 * GIB, swap=24 * GIB))
