"""A limit on the time that an output may take (llama.cpp's `t_max_predict_ms`)."""

from frontend.generation.choice import Choice
from frontend.request import Delta, Finish


class TimeLimit:
    """Ends a choice at its time limit, which counts from the first token, but not before its output has a line
    break."""

    def __init__(self, most_ms: int) -> None:
        self._most_ms = most_ms
        self._has_break = False

    def __call__(self, choice: Choice, delta: Delta) -> None:
        if delta.finish is not None or choice.stream.end is not None:
            return
        self._has_break = self._has_break or any("\n" in text for text in delta.texts)
        if self._has_break and 1e3 * (choice.last_at - choice.first_at) > self._most_ms:
            held, rest, _ = choice.text.finish()
            delta.ids, delta.texts, delta.finish = [*delta.ids, *held], [*delta.texts, *rest], Finish.LENGTH
