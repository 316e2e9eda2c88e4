"""Repeated stop signals, and second requests to stop."""

from shared.heartbeat import REPEAT_S, StopRequests


def test_is_second_within_a_second_of_the_first_is_false_and_later_true() -> None:
    now = [100.0]
    requests = StopRequests(lambda: now[0])
    seen = []
    for after in (0.0, 0.001, 0.6, 0.99 * REPEAT_S, 1.01 * REPEAT_S):
        now[0] = 100.0 + after
        seen.append(requests.is_second())
    assert seen == [False, False, False, False, True]
