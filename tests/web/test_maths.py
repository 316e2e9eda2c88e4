"""The page reads formulas in linear time, whatever an answer is made of. Needs Playwright's Node.js, and no browser."""

import json
import subprocess
from pathlib import Path

import playwright
import pytest

from tests.patience import PATIENCE_S

NODE = Path(playwright.__file__).parent / "driver" / "node"
WEB = Path(__file__).parents[2] / "frontend" / "web"
# Counts the characters that the reader of formulas searches, so that no clock decides.
SCRIPT = """
let searched = 0;
const indexOf = String.prototype.indexOf;
String.prototype.indexOf = function (sought, from = 0) {
  const found = indexOf.call(this, sought, from);
  if (sought.length === 2) searched += 1 + (found < 0 ? this.length - from : found - from);
  return found;
};
const [web, text] = JSON.parse(process.argv[1]);
const MarkdownIt = (await import(`file://${web}/vendor/markdown-it.esm.min.mjs`)).default;
const { readMaths } = await import(`file://${web}/maths.js`);
const parser = new MarkdownIt({ html: false });
readMaths(parser);
const tokens = parser.parse(text.unit.repeat(text.times) + text.end, {});
const formulas = tokens.flatMap((token) => [token, ...(token.children ?? [])])
  .filter(({ type }) => type.startsWith("maths_")).map(({ content }) => content);
console.log(JSON.stringify({ searched, formulas }));
"""


def read(unit: str, times: int = 1, end: str = "") -> tuple[int, list[str]]:
    """Returns how many characters were searched, and the formulas that were found."""
    asked = json.dumps([str(WEB), {"unit": unit, "times": times, "end": end}])
    command = [str(NODE), "--no-warnings", "--input-type=module", "-e", SCRIPT, asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["searched"], found["formulas"]


def test_formulas_are_found() -> None:
    text = "It is \\(a\\), $b$, $$c$$ and \\[d\\], costs $5 or $6, \\( \\) \\(e\n\n\\[\nf\ng\n\\]\n\n$$h$$\n\n"
    text += "\\[ i \\] no\n"
    assert read(text)[1] == ["a", "b", "c", "d", "f\ng", "h", "i"]


@pytest.mark.parametrize(
    ("unit", "end"),
    [
        ("\\(", ""),
        ("\\(", "\\)"),
        ("\\(a ", "\\) \\(b\\)"),
        ("\\[\n", ""),
        ("\\[\n", "\\] x\n"),
        ("$$a\n", "x"),
        ("$a ", ""),
    ],
)
def test_text_of_nothing_but_openings_is_read_once(unit: str, end: str) -> None:
    times = 20_000
    assert read(unit, times, end)[0] < 8 * times * len(unit) + 1000
