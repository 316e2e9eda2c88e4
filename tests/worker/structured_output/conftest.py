"""The fixture with the Bench of the grammar tests."""

from collections.abc import Iterator

import pytest

from tests.checkpoints import Checkpoints
from tests.worker.structured_output.harness import Bench, engine_of


@pytest.fixture
def bench(checkpoints: Checkpoints) -> Iterator[Bench]:
    bench = Bench(engine_of(checkpoints("llama")))
    yield bench
    assert not bench.scheduler.has_work
