"""Made-up results of workloads."""

from bench.client.load_client import Record
from bench.client.summary import summarize
from bench.workloads.measure import Result

PNG = b"\x89PNG\r\n\x1a\n"


def records(count: int, wait: float = 0.01) -> list[Record]:
    starts = [index * 0.1 for index in range(count)]
    return [Record(at, [at + wait * (i + 1) for i in range(8)], at + 1, 10, 8, 5) for at in starts]


def result(workload: str, mode: str, found: list[Record]) -> Result:
    return Result(workload, mode, found, summarize(found))


def picture_size(picture: bytes) -> tuple[int, int]:
    assert picture.startswith(PNG)
    return int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])
