"""Results as one self-contained HTML page, with a table and a picture for each workload."""

import base64
import html
from collections import defaultdict
from collections.abc import Sequence

from bench.client.summary import compared
from bench.workloads.measure import Result
from bench.workloads.plots import png

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1400px; padding: 0 1em; color: #222;
       background: #fff }
img { max-width: 100% } code { background: #f3f3f3; padding: .1em .3em }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left } .failed { color: #b00020 }
"""


def page(results: Sequence[Result], command: str, problems: Sequence[str] = ()) -> str:
    """Returns the page. command: the command line. problems: a line for each kind of failure."""
    body = [f"<p><code>{html.escape(command)}</code></p>"]
    body += [f'<p class="failed">{html.escape(problem)}</p>' for problem in problems]
    for workload, group in by_workload(results).items():
        name = html.escape(workload)
        columns = {result.mode: result.summary for result in group}
        picture = base64.b64encode(png({workload: group})).decode()
        body.append(f"<h2>{name}</h2>\n{_table(compared(columns, ratios=len(group) > 1))}")
        body.append(f'<img alt="{name}: latency and throughput" src="data:image/png;base64,{picture}">')
    head = f'<meta charset="utf-8"><title>Sluice: workloads</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}<h1>Sluice: workloads</h1>\n' + "\n".join(body) + "\n</html>\n"


def by_workload(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Groups results by workload; the modes of a workload keep the order in which they ran."""
    found: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        found[result.workload].append(result)
    return dict(found)


def _table(cells: Sequence[Sequence[str]]) -> str:
    head, *rows = cells
    lines = ["<table>", _row("th", head), *(_row("td", row) for row in rows), "</table>"]
    return "\n".join(lines)


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
