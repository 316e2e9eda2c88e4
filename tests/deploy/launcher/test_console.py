"""The launcher's output."""

import io
import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.launcher.console import Console, LineSplitter
from shared.log import json_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\r\n"))), st.lists(st.integers(0, 200)))
def test_line_splitter_gives_whole_lines_of_any_chunks(texts: list[str], cuts: list[int]) -> None:
    data = "".join(text + "\n" for text in texts).encode("utf-8", "surrogatepass")
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    lines = LineSplitter()
    found = [line for a, b in itertools.pairwise(places) for line in lines.feed(data[a:b])]
    assert found == [text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for text in texts]
    assert lines.close() == []


def test_line_splitter_handles_redrawn_invalid_and_long_lines() -> None:
    lines = LineSplitter(limit=8)
    assert lines.feed(b"10 %\r50 %\r\n\xff\nlast") == ["50 %", "\N{REPLACEMENT CHARACTER}"]
    assert lines.close() == ["last"]
    assert lines.feed(b"longer than that") == ["longer than that"]


def test_console_in_a_file_aligns_names_without_colours() -> None:
    output = io.StringIO()
    console = Console(output, ("worker", "frontend 0"))
    console.line("worker", "a")
    console.line("frontend 0", "b")
    assert output.getvalue() == "worker     | a\nfrontend 0 | b\n"


def test_json_object_is_written_unlabelled_to_the_data_stream() -> None:
    stderr, stdout = io.StringIO(), io.StringIO()
    console = Console(stderr, ("frontend",), stdout)
    console.line("frontend", '{"path":"/x"}')
    console.line("frontend", "{ braces")
    assert stdout.getvalue() == '{"path":"/x"}\n' and stderr.getvalue() == "frontend | { braces\n"


def test_console_in_json_labels_log_lines_and_makes_one_of_everything_else() -> None:
    log, data = io.StringIO(), io.StringIO()
    console = Console(log, ("worker",), data, as_json=True)
    console.line("worker", json_line("info", "ready"))
    console.line("worker", '{"time":"now","path":"/v1/completions"}')
    console.line("worker", "a library's print")
    console.print("\ndemo is ready\n")
    console.progress(0.5, "loading 50 %")
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [(line["process"], line["level"], line["message"]) for line in lines] == [
        ("worker", "info", "ready"), ("worker", "info", "a library's print"), ("launcher", "info", "demo is ready"),
        ("launcher", "info", "loading: 50 %"),
    ]  # fmt: skip
    assert data.getvalue() == '{"time":"now","path":"/v1/completions"}\n', "the access log stays as it is"


def test_console_on_a_terminal_has_colours_and_a_bar_below_the_lines() -> None:
    output = Terminal()
    console = Console(output, ("worker",))
    console.progress(0.5, "loading")
    console.line("worker", "a")
    console.clear_progress()
    console.print("b")
    text = output.getvalue()
    assert text.index("50 %  loading") < text.index("worker |") < text.rindex("50 %  loading")
    assert "\x1b[36mworker |" in text
    assert text.endswith("\r\x1b[Kb\n")


def test_progress_in_a_file_is_one_line_per_tenth() -> None:
    output = io.StringIO()
    console = Console(output)
    for percent in range(0, 101, 2):
        console.progress(percent / 100, f"loading {percent}%")
    assert output.getvalue().splitlines() == ["loading", *(f"loading: {tenth} %" for tenth in range(0, 101, 10))]


def test_closed_stream_raises_nothing() -> None:
    output = io.StringIO()
    console = Console(output)
    output.close()
    console.print("dropped")
