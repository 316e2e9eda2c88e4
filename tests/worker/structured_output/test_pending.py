"""Requests wait while their grammars are compiled, and may be aborted or rejected meanwhile."""

from concurrent.futures import Future

import pytest

from shared import messages as m
from tests.worker.engine.harness import YOU
from tests.worker.structured_output.harness import NAMED, Bench, submit
from worker.engine.transport import FrontendGone
from worker.structured_output.compiler import Grammar, GrammarCompiler
from worker.structured_output.pending import MAX_PREPARING


class ManualCompiler(GrammarCompiler):
    """A fake compiler: compiles a grammar when the test calls release()."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[Grammar]] = {}

    def compile(self, text: str, tenant: str = "") -> "Future[Grammar]":
        return self.futures.setdefault(text, Future())


@pytest.fixture
def manual(bench: Bench) -> ManualCompiler:
    bench.request_table._compiler = ManualCompiler()
    return bench.request_table._compiler


def release(bench: Bench, manual: ManualCompiler, text: str = NAMED) -> None:
    manual.futures[text].set_result(bench.compiler.compile(text).result())
    bench.iterate(3)
    bench.iterate_until(lambda: not bench.busy)


def test_pending_request_is_admitted_once_its_grammar_is_compiled(bench: Bench, manual: ManualCompiler) -> None:
    bench.send(submit(1, NAMED), submit(1, NAMED), submit(2, "", 3), m.Resync(1, 0))
    bench.iterate(5)
    bench.send(submit(1, NAMED))
    bench.iterate()
    assert bench.received()[1].keys() == {2}, "others do not wait for it, and it is not mentioned"
    release(bench, manual)
    assert bench.received()[1][1].outcome is m.Outcome.EOS
    assert [one.id for _, step in bench.server.sent for one in step.admitted] == [2, 1]


def test_pending_request_that_leaves_generates_nothing(bench: Bench, manual: ManualCompiler) -> None:
    bench.send(submit(1, NAMED), submit(2, NAMED, deadline_ms=3500))
    bench.send(submit(1, NAMED), submit(2, NAMED), who=YOU)
    bench.iterate()
    bench.send(m.Abort((1, 1, 77)))
    bench.send(FrontendGone(), who=YOU)
    bench.iterate(5)
    release(bench, manual)
    assert {id: end.outcome for id, end in bench.received()[1].items()} == {1: m.Outcome.ABORTED, 2: m.Outcome.DEADLINE}
    assert not bench.received()[0] and not bench.received(YOU)[0], "nothing was generated"


def test_pending_requests_beyond_the_limit_or_while_draining_are_rejected(bench: Bench, manual: ManualCompiler) -> None:
    bench.send(*(submit(i, NAMED, 3) for i in range(MAX_PREPARING + 1)))
    bench.iterate()
    assert bench.rejected()[MAX_PREPARING].reason is m.Refusal.QUEUE_FULL
    bench.request_table.draining = True
    release(bench, manual)
    bench.send(submit(1000, NAMED))
    bench.iterate()
    assert {one.reason for id, one in bench.rejected().items() if id != MAX_PREPARING} == {m.Refusal.DRAINING}
    assert len(bench.rejected()) == MAX_PREPARING + 2 and not bench.received()[1]


def test_pending_request_at_shutdown_is_rejected(bench: Bench, manual: ManualCompiler) -> None:
    bench.send(submit(1, NAMED))
    bench.iterate()
    bench.request_table.end_all(m.Outcome.SHUTDOWN, bench.now, "bye")
    bench.request_table.publish(bench.server, bench.now)  # type: ignore[arg-type]
    assert bench.rejected()[1].reason is m.Refusal.DRAINING
