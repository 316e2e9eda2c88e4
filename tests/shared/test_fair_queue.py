"""Tenants take turns, and a tenant has at most one place."""

from functools import partial

from shared.sandbox import TurnQueue


def started(queue: TurnQueue, *tenants: str) -> list[str]:
    order: list[str] = []
    for tenant in tenants:
        queue.enter(tenant, partial(order.append, tenant))
    return order


def test_enter_starts_one_piece_of_work_for_each_tenant_within_the_places() -> None:
    queue = TurnQueue(2)
    order = started(queue, "a", "a", "a", "b", "c")
    assert order == ["a", "b"] and queue.waiting("a") == 2


def test_leave_gives_the_place_to_the_tenant_that_waits_longest() -> None:
    queue = TurnQueue(1)
    order = started(queue, "a", "a", "a", "b", "c")
    while len(order) < 5:
        queue.leave(order[-1])
    assert order == ["a", "a", "b", "c", "a"]


def test_leave_of_a_tenant_without_more_work_frees_the_place() -> None:
    queue = TurnQueue(1)
    assert started(queue, "a") == ["a"]
    queue.leave("a")
    assert started(queue, "b", "b") == ["b"] and queue.waiting("b") == 1
