from math import nan

from bench.client.summary import NOTHING
from bench.peers.engine import COUNTS, table


def test_table_has_the_ratio_and_a_dash_for_what_was_not_measured() -> None:
    text = table([["m, q4_0, avx2", "decode8", 130.0, 100.0, 1.3], ["m, q4_0, avx2", "prefill", 10.0, nan, nan]])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[2] == ["m, q4_0, avx2", "decode8", "130", "100", "1.30"]
    assert rows[3] == ["m, q4_0, avx2", "prefill", "10", NOTHING, NOTHING]


def test_scenarios_are_what_the_measuring_process_understands() -> None:
    from bench.micro.engine import MEASURES

    assert {words.split()[0] for words in COUNTS.values()} == set(MEASURES)
