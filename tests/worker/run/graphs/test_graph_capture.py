"""The stand-in for graphs on devices without them; StaticDecode is tested in test_graphs.py with whole models."""

from worker.run.graphs.graph_capture import EagerGraph


def test_eager_graph_computes_again_at_each_replay() -> None:
    calls: list[int] = []
    graph = EagerGraph(lambda: calls.append(1))
    assert not calls
    graph.replay()
    graph.replay()
    assert len(calls) == 2
