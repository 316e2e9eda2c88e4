"""The replacement of CUDA graphs on devices without graphs. test_graphs.py tests StaticDecode with whole models."""

from worker.model_runner.cuda_graph_capture import EagerGraph


def test_eager_graph_computes_again_at_each_replay() -> None:
    calls: list[int] = []
    graph = EagerGraph(lambda: calls.append(1))
    assert not calls
    graph.replay()
    graph.replay()
    assert len(calls) == 2
