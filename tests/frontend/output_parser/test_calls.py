"""The calls of an output are numbered, however their arguments are cut into pieces."""

from frontend.output_parser.events import CallArguments, CallEnd, CallStart
from frontend.output_parser.tool_calls import Calls


def test_calls_are_counted_and_complete_with_their_arguments() -> None:
    calls = Calls()
    assert calls.begin("a") == CallStart(0, "a") and calls.open and not calls.called
    assert calls.feed('{"x": 1') == ([CallArguments(0, '{"x": ')], "") and calls.held() == [CallArguments(0, "1")]
    assert calls.feed("} b") == ([CallArguments(0, "1}"), CallEnd(0)], " b")
    assert calls.called and not calls.open and not calls.broke and calls.feed("c") == ([], "c")
    assert calls.begin("b") == CallStart(1, "b") and not calls.called and (calls.begun, calls.completed) == (2, 1)


def test_call_whose_arguments_break_is_not_complete() -> None:
    calls = Calls()
    calls.begin("a")
    assert calls.feed("{a") == ([CallArguments(0, "{")], "a")
    assert calls.broke and not calls.open and not calls.called and not calls.held()


def test_dropped_call_is_neither_open_nor_complete() -> None:
    calls = Calls()
    calls.begin("a")
    calls.drop()
    assert not calls.open and not calls.called
