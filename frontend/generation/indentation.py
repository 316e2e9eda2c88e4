"""The end of an output before a line that is indented less than wanted (llama.cpp's `n_indent`)."""

from frontend.generation.choice import Choice
from frontend.request import Delta, Finish
from frontend.text.detokenizer import OutputText


class Indentation:
    """Ends a choice before the first line, after its first one, with fewer than `least` blanks at its beginning.

    Such an end counts as a limit, as in llama.cpp.
    """

    def __init__(self, least: int, text: OutputText) -> None:
        self._lines = text.watch_lines(least)

    def __call__(self, choice: Choice, delta: Delta) -> None:
        if delta.finish is Finish.STOP and delta.stop is not None and self._lines.is_line:
            delta.finish, delta.stop = Finish.LENGTH, None
