"""The pages that a window needs agree with the definition of attention, and with a simulation token by token."""

import pytest

from shared.config.worker import WorkerConfig, with_default_sizes
from worker.kv_cache.pages import KEY_BLOCK, chunk_pages, chunk_tokens, first_kept, window_pages


@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 512])
def test_first_kept_is_the_block_of_the_first_visible_key(window: int) -> None:
    for position in range(1500):
        first = first_kept(window, position)
        visible = max(0, position - window + 1)
        assert first % KEY_BLOCK == 0 and first <= visible < first + KEY_BLOCK


def test_first_kept_without_a_window_is_the_beginning() -> None:
    assert first_kept(0, 0) == first_kept(0, 10**6) == 0


@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 200])
@pytest.mark.parametrize("window", [1, 100, 512])
@pytest.mark.parametrize("chunk", [1, 7, 300])
def test_window_and_chunk_pages_are_enough(window: int, page_size: int, chunk: int) -> None:
    """Counts, step by step, the pages that a sequence holds while one chunk is computed and another is in flight."""
    enough = window_pages(window, page_size) + chunk_pages(chunk, page_size)
    returned = most = 0
    for computed in range(0, 3000, chunk):
        if computed // page_size != max(0, computed - chunk) // page_size:
            returned = first_kept(window, computed) // page_size
        most = max(most, -(-(computed + 2 * chunk) // page_size) - returned)
    assert most <= enough <= most + 3 + -(-KEY_BLOCK // page_size)


def test_chunk_tokens_are_limited_by_the_settings() -> None:
    def most(**settings: int | bool) -> int:
        return chunk_tokens(with_default_sizes(WorkerConfig(**settings), on_gpu=False), 5000)  # type: ignore[arg-type]

    assert most(prefill_chunk_size=64) == 64 and most(prefill_chunk_size=900, max_step_tokens=100) == 100
    assert most(use_chunked_prefill=False) == 5000
