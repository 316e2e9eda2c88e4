"""Long arrays are encoded as they grow, and other tasks get a turn meanwhile."""

import asyncio
import json
import threading
import time

from frontend.schema.base import FEW_ENTRIES, SLICE_S, JsonArray, in_slices, made, to_json


def test_array_is_that_of_a_list_at_any_length() -> None:
    for count in (0, 1, 2, 3, 7, 300):
        values, array = [[n, "\u2028"] if n % 2 else None for n in range(count)], JsonArray(each=3)
        array.extend(values)
        assert to_json({"a": array.raw}) == to_json({"a": values})
        array.append(1)
        assert json.loads(to_json(array.raw)) == [*values, 1], "and it may still grow"


async def test_other_tasks_get_a_turn_between_slices() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task, used = asyncio.create_task(other()), list[int]()

    def use(value: int) -> None:
        used.append(value)
        time.sleep(SLICE_S)

    await in_slices(range(5), use)
    task.cancel()
    assert used == [0, 1, 2, 3, 4] and turns >= 4


async def test_long_work_is_done_in_a_thread() -> None:
    here = threading.current_thread().name
    assert await made(lambda: threading.current_thread().name, FEW_ENTRIES) == here
    assert await made(lambda: threading.current_thread().name, FEW_ENTRIES + 1) != here
