"""Ranks exchange rows over TCP with the same results as over memory. A rank that is lost or out of step is an error."""

import mmap
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from tests.worker.distributed.test_ranks_part import LENGTHS, SMALL_ROUND, forward, together
from tests.worker.models.harness import CPU, cache_for, pack, prompts_of, rows_for
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.checkpoint.checkpoint import read_config
from worker.distributed.exchange import PartDecoder
from worker.models.config import spec_from_config
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.load import load
from worker.models.sharding import Share
from worker.ops.exchange import RankLost, RanksC, shared_bytes

pytestmark = needs_library


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextmanager
def linked(count: int, capacity: int = SMALL_ROUND) -> Iterator[list[RanksC]]:
    """Yields ranks with a connection between every two ranks."""
    links: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one in range(count):
        for other in range(one):
            links[one][other], links[other][one] = tcp_pair()
    try:
        yield [RanksC(mmap.mmap(-1, shared_bytes(capacity)), rank, count, links[rank]) for rank in range(count)]
    finally:
        for link in (link for each in links for link in each.values()):
            link.close()


def gather_all(ranks: RanksC, rounds: list[Tensor]) -> list[Tensor]:
    return [ranks.gather(whole.chunk(ranks.count, dim=1)[ranks.rank]) for whole in rounds]


@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_gets_the_columns_of_all(count: int) -> None:
    """The columns are single numbers, rows for several rounds, and more bytes than a socket accepts at once."""
    shapes = [(1, 1), (7, 5), (70, 16), (1, 1), (300, 4096)]
    rounds = [torch.randn(rows, columns * count) for rows, columns in shapes]
    with linked(count, capacity=1 << 20) as ranks:
        for found in together([partial(gather_all, one, rounds) for one in ranks]):
            assert all(torch.equal(got, whole) for got, whole in zip(found, rounds, strict=True))


def test_parts_on_hosts_give_the_bits_of_the_whole_model(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen2-moe")
    spec = spec_from_config(read_config(folder))
    whole = Decoder(spec, load(folder, spec, torch.bfloat16, CPU, invariant=True), 512)
    cache = cache_for(whole, tokens=512)
    rows = rows_for(cache, prompts_of(LENGTHS), 0)
    inputs = pack([(row, len(row.tokens)) for row in rows], cache.page_size)
    with linked(2) as ranks:
        parts = []
        for one in ranks:
            share = Share(one.rank, 2)
            decoder = Decoder(
                share.spec(spec), load(folder, spec, torch.bfloat16, CPU, invariant=True, share=share), 512
            )
            parts.append(PartDecoder(decoder, cache_for(decoder, tokens=512), one))
        with torch.inference_mode():
            expected = fastest_decoder(whole, cache).forward(inputs, cache)
        assert all(torch.equal(found, expected) for found in together([partial(forward, one, inputs) for one in parts]))


def test_rank_that_closes_ends_the_wait_and_is_named() -> None:
    with linked(3) as ranks:
        threading.Timer(0.3, ranks[2].end).start()
        found = together([partial(one.gather, torch.zeros(1, 1)) for one in ranks[:2]])
        assert any("the connection to rank 2 has broken: it has closed" in str(error) for error in found)
        assert all(isinstance(error, RankLost) for error in found)
        assert ranks[0].lost and ranks[1].lost


def test_end_by_another_thread_ends_the_wait_at_once() -> None:
    with linked(2) as ranks:
        threading.Timer(0.3, ranks[0].end).start()
        begun = time.monotonic()
        with pytest.raises(RankLost):
            ranks[0].gather(torch.zeros(1, 1))
        assert time.monotonic() - begun < PATIENCE_S


@pytest.mark.parametrize("head", [(2, 1, 4), (1, 2, 4), (1, 1, 8)])
def test_rank_at_another_step_is_an_error(head: tuple[int, int, int]) -> None:
    """The other rank is in another round, or has other rows or columns."""
    ours, theirs = tcp_pair()
    with ours, theirs:
        ranks = RanksC(mmap.mmap(-1, shared_bytes(SMALL_ROUND)), 0, 2, {1: ours})
        theirs.sendall(struct.pack("<QII", *head) + bytes(16))
        with pytest.raises(RankLost, match="rank 1 has sent rows of another step"):
            ranks.gather(torch.zeros(1, 1))
