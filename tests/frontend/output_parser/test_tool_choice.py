"""Which functions may be called."""

import pytest

from frontend.output_parser.model_format import Function, Mode, ToolChoice

ADD, SUB = (Function(name, {}, False, "tools", {}) for name in ("add", "sub"))


@pytest.mark.parametrize(("mode", "names"), [(Mode.AUTO, ["sub"]), (Mode.REQUIRED, ["sub"]), (Mode.NONE, [])])
def test_callable_functions_are_the_named_ones_unless_the_mode_forbids_calls(mode: Mode, names: list[str]) -> None:
    tool_choice = ToolChoice((ADD, SUB), mode, frozenset({"sub"}))
    assert [function.name for function in tool_choice.callable_functions] == names
