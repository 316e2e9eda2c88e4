"""The agent's world executes calls in one way only, and says what is wrong with others."""

import json
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator

from bench.agent.script import EDITED, EDITED_LINES, REPORT, script
from bench.agent.world import TOOLS, Call, World, problem, prose, source


def call(name: str, **arguments: Any) -> Call:
    return Call(name, json.dumps(arguments))


def world() -> World:
    return World({"src/a.py": "one\ntwo\ntwo\n", "README.md": "A thing.\n"})


def test_twenty_tools_have_valid_schemas() -> None:
    assert len(TOOLS) == 20
    for tool in TOOLS.values():
        Draft202012Validator(tool.declared["function"]["parameters"])


@pytest.mark.parametrize(
    ("asked", "result"),
    [
        (call("read_file", path="src/a.py"), "one\ntwo\ntwo"),
        (call("read_file", path="src/a.py", first_line=2, last_line=2), "two"),
        (call("list_folder", path="."), "README.md\nsrc/a.py"),
        (call("list_folder", path="./src/"), "src/a.py"),
        (call("search_text", pattern="^t.o"), "src/a.py:2: two\nsrc/a.py:3: two"),
        (call("search_text", pattern="x"), "no line matches"),
        (call("replace_text", path="README.md", old_text="thing", new_text="box"), "replaced it 1 times in README.md"),
        (call("git_status"), "nothing has changed"),
        (Call("git_status", ""), "nothing has changed"),
        (call("lint_code", path="src/a.py", rules="all"), "no mistakes"),
        (call("add_todos", items=["a", "b"]), "a\nb"),
    ],
)  # fmt: skip
def test_right_calls_are_executed(asked: Call, result: str) -> None:
    assert world().execute(asked) == (result, True)


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (call("read_files", path="a"), "no tool"),
        (Call("read_file", '{"path": '), "not JSON"),
        (Call("read_file", '["src/a.py"]'), "no object"),
        (call("read_file"), "`path` is missing"),
        (call("read_file", path="src/a.py", line=1), "`line` is no parameter"),
        (call("read_file", path="src/a.py", first_line="1"), "`first_line` must be integer"),
        (call("read_file", path="src/a.py", first_line=True), "`first_line` must be integer"),
        (call("add_todos", items="a"), "`items` must be array"),
        (call("lint_code", path="src/a.py", rules="none"), "`rules` must be"),
        (call("read_file", path="a.py"), "no file"),
        (call("list_folder", path="lib"), "no folder"),
        (call("search_text", pattern="("), "error"),
        (call("replace_text", path="src/a.py", old_text="two", new_text="2"), "2 times"),
        (call("replace_text", path="src/a.py", old_text="", new_text="2"), "does not have"),
    ],
)
def test_wrong_calls_are_errors_and_change_nothing(asked: Call, word: str) -> None:
    project = world()
    result, valid = project.execute(asked)
    assert not valid and word in result and project.files == world().files


def test_changes_are_seen_by_later_calls_until_they_are_committed() -> None:
    project = world()
    project.execute(call("write_file", path="src/b.py", content="new\n"))
    project.execute(call("move_file", path="README.md", to="docs/README.md"))
    project.execute(call("append_text", path="src/a.py", text="three\n"))
    assert project.execute(call("git_status"))[0] == "M README.md\nM docs/README.md\nM src/a.py\nM src/b.py"
    assert project.execute(call("git_diff", path="src/a.py"))[0] == "+three"
    assert project.execute(call("git_commit", message="More."))[1]
    assert project.execute(call("git_log"))[0] == "More." and project.changed() == []
    project.execute(call("delete_file", path="src/b.py"))
    assert project.changed() == ["src/b.py"]


def test_problem_agrees_with_a_validator_on_the_report() -> None:
    validator = Draft202012Validator(REPORT)
    good = {"summary": "s", "changed_files": ["a"], "tests_passed": True, "risk": "low"}
    for change in ({}, {"risk": "big"}, {"tests_passed": 1}, {"changed_files": [1]}, {"more": 1}, {"summary": None}):
        report = good | change
        assert validator.is_valid(report) == (problem(report, REPORT) == ""), change
    assert problem({"summary": "s"}, REPORT)


def test_files_are_the_same_in_every_run_and_as_long_as_asked() -> None:
    assert source("a", 300) == source("a", 300) != source("b", 300)
    assert len(source("a", 300).splitlines()) == 300 and len(prose("a", 500).split()) >= 500
    compile(source("a", 305), "a", "exec")


def test_script_has_twelve_turns_two_edits_and_one_schema_and_scales() -> None:
    told = script()
    assert len(told.turns) == 12
    assert sum(turn.edited is not None for turn in told.turns) == 2
    assert sum("response_format" in turn.more for turn in told.turns) == 1
    files = told.world().files
    assert len(files[EDITED].splitlines()) == EDITED_LINES
    assert all(turn.edited is None or turn.edited(files[EDITED]) != files[EDITED] for turn in told.turns)
    assert all(path in files for turn in told.turns for path in turn.reads)
    long = [tool["function"] for tool in script(long_edits=True).tools]
    (write,) = (tool for tool in long if tool["name"] == "write_file")
    assert write["parameters"]["properties"]["content"]["minLength"] > len(files[EDITED]) / 2
    assert [tool["name"] for tool in long] == [tool["function"]["name"] for tool in told.tools] == [*TOOLS]
    assert told.tools == script().tools, "the tools themselves do not change"
    small = script(0.05)
    assert {tool["function"]["name"] for tool in small.tools} == {turn.tool for turn in small.turns if turn.tool}
    assert len(small.system) < len(told.system) / 5 and len(small.turns) == 12
