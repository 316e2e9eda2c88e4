"""Sizes and summaries that follow from a spec."""

import pytest

from worker.spec import StoredQuantization

ROW, GROUP = StoredQuantization("int8", "a row", True, "dynamic"), StoredQuantization("int4", "1 x 128 values")


@pytest.mark.parametrize(
    ("parts", "whole", "words"),
    [
        ([ROW, ROW], ROW, "int8, one scale for a row"),
        (
            [ROW, GROUP, GROUP],
            StoredQuantization("int8 and int4", "a row or 1 x 128 values", False, "other"),
            "int8 and int4, one scale for a row or 1 x 128 values",
        ),
        ([StoredQuantization("Q4_K_M")], StoredQuantization("Q4_K_M"), "Q4_K_M"),
    ],
)
def test_stored_quantization_summarizes_its_parts(
    parts: list[StoredQuantization], whole: StoredQuantization, words: str
) -> None:
    assert StoredQuantization.of_all(parts) == whole and str(whole) == words
