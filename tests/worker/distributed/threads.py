"""Runs the tasks of several ranks at once, in threads of one process."""

import threading
from collections.abc import Callable
from typing import Any

from tests.patience import PATIENCE_S


def together(tasks: list[Callable[[], Any]]) -> list[Any]:
    """Runs each task in a thread. Returns their results or exceptions; None for a task that does not end."""
    found: list[Any] = [None] * len(tasks)

    def run(index: int) -> None:
        try:
            found[index] = tasks[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found
