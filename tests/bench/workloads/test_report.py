import base64
import re

from bench.workloads.report import page
from tests.bench.results import picture_size, records, result


def test_html_report_is_one_self_contained_file() -> None:
    both = [result("a<b", mode, records(5, wait)) for mode, wait in (("one", 0.01), ("two", 0.03))]
    text = page(both, "sluice bench workloads --serve x&y", ["one failed: <oops>"])
    [picture] = re.findall(r"data:image/png;base64,([^\"]+)", text)
    assert min(picture_size(base64.b64decode(picture))) > 500
    assert "a&lt;b" in text and "x&amp;y" in text and "&lt;oops&gt;" in text
    assert "<th>two</th><th>ratio</th>" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)
