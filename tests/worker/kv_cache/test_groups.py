"""Layers that keep K/V of the same positions form a group, which has its own pages."""

from dataclasses import replace

from tests.worker.kv_cache.harness import SPEC
from worker.kv_cache.tensors import CacheGroup, cache_groups, one_group
from worker.ops.recurrent_state import ShortConvShape
from worker.spec import LayerSpec, ModelSpec


def spec(*windows: int) -> ModelSpec:
    return replace(SPEC, layers=tuple(LayerSpec(window, 0) for window in windows))


def test_layers_with_the_same_window_are_a_group_and_those_without_come_first() -> None:
    groups = cache_groups(spec(8, 8, 0, 8, 16, 0), 64, paged=True)
    assert groups == (CacheGroup(0, (2, 5)), CacheGroup(8, (0, 1, 3)), CacheGroup(16, (4,)))
    assert [group.name for group in groups] == ["full", "window", "window"]


def test_window_that_no_sequence_exceeds_is_no_group() -> None:
    assert cache_groups(spec(64, 0, 64), 64, paged=True) == one_group(spec(0, 0, 0))
    assert cache_groups(spec(63, 0, 64), 64, paged=True) == (CacheGroup(0, (1, 2)), CacheGroup(63, (0,)))


def test_contiguous_sequences_have_one_group() -> None:
    assert cache_groups(spec(8, 0), 64, paged=False) == one_group(spec(0, 0))


def test_model_of_one_kind_has_one_group() -> None:
    assert cache_groups(spec(0, 0), 64, paged=True) == one_group(spec(0, 0))
    assert cache_groups(spec(8, 8), 64, paged=True) == (CacheGroup(8, (0, 1)),)


def test_layers_with_a_recurrent_state_are_in_no_group() -> None:
    recurrent = LayerSpec(0, 0, mixer="short_conv", state=ShortConvShape(8, 3))
    hybrid = replace(SPEC, layers=(recurrent, LayerSpec(0, 0), LayerSpec(8, 0)))
    assert one_group(hybrid) == (CacheGroup(0, (1, 2)),)
    assert cache_groups(hybrid, 64, paged=True) == (CacheGroup(0, (1,)), CacheGroup(8, (2,)))
