"""Shapes of graphs: there are few, each step uses the smallest that fits, and no large step is mostly padding."""

import pytest

from worker.model_runner.cuda_graph_inputs import FREE_PADDING, Shapes, batch_sizes


def test_decodes_are_padded_to_few_sizes() -> None:
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64] and batch_sizes(3) == [1, 2, 3] and batch_sizes(1) == [1]
    assert batch_sizes(600)[-4:] == [256, 384, 512, 600]


@pytest.mark.parametrize("limits", [(1, 1, 1), (4, 8, 600), (64, 100, 5000), (256, 2048, 131072)])
def test_every_shape_is_found_for_a_step_that_fills_it(limits: tuple[int, int, int]) -> None:
    shapes = Shapes(*limits)
    every = list(shapes.all_shapes())
    assert len(set(every)) == len(every) < 100, "each takes time at every start"
    for shape in every:
        assert shape.rows <= shapes.most_rows and shape.max_kv_len <= shapes.longest
        if shape.mixed:
            assert shape.sequences < shape.tokens, "attention must see that a sequence may have several rows"
            sequences = shape.sequences - 1
            assert shapes.mixed(shape.tokens, sequences, sequences, shape.max_kv_len) == shape
        else:
            assert shapes.decode(shape.sequences, min(shape.max_kv_len, limits[2])) == shape


def test_steps_beyond_the_limits_have_no_shape() -> None:
    shapes = Shapes(8, 256, 1000)
    assert shapes.decode(9, 10) is None and shapes.decode(8, 1001) is None
    assert shapes.mixed(257, 1, 1, 300) is None and shapes.mixed(100, 9, 9, 300) is None


def test_padding_of_large_steps_is_bounded() -> None:
    shapes = Shapes(256, 2048, 131072)
    for tokens in range(1, 2049):
        shape = shapes.mixed(tokens, 1, 1, tokens)
        assert shape is not None or tokens > FREE_PADDING
        assert shape is None or shape.tokens <= max(FREE_PADDING, tokens * 4 / 3)
