"""Markdown, code and maths of answers in Chromium. An answer is hostile input: no part of it is run or fetched.

Every test fails on a console error, a violation of the page's policy or a request to another host.
"""

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.frontend.speaking import Model
from tests.web.scripted_server import served

pytestmark = pytest.mark.browser
OpenPlayground = Callable[..., Any]

ANSWER = """# Growth

Some *stress*, **strength**, `code` and a [link](https://example.com/a?b=c).

1. one
2. two
   - nested

| n | square |
|--:|:--|
| 2 | 4 |

```python
def double(x: int) -> int:
    return 2 * x  # twice
```

It is $e^{i\\pi} = -1$, costs $5 or $6, and

$$\\int_0^1 x\\,dx = \\frac{1}{2}$$
"""
HOSTILE = """<script>window.ran = 1</script><img src=x onerror="window.ran = 2"><svg onload="window.ran = 3"></svg>

![a cat](https://evil.example/cat.png) ![](javascript:window.ran=4)

[script](javascript:window.ran=5) [data](data:text/html,<script>window.ran=6</script>) [file](file:///etc/passwd)
[good](https://example.com "onmouseover=window.ran=7") <https://example.org> <style>body { display: none }</style>

<iframe src="https://evil.example"></iframe><form action="https://evil.example"><input></form>
<link rel="prefetch" href="https://evil.example"><meta http-equiv="refresh" content="0;url=https://evil.example">

$\\href{javascript:window.ran=8}{x}$ $\\includegraphics{https://evil.example/x.png}$ $\\htmlData{a=b}{y}$

```html"><img src=x onerror=window.ran=9>
<script>window.ran = 10</script>
```
"""
FETCHING = "img, script, iframe, link, object, embed, form, input, svg image, style, meta, video, audio"


def test_markdown_is_shown_with_code_and_maths(model: Model, open_playground: OpenPlayground) -> None:
    model.says = [f"<think>\nFirst.\n</think>\n\n{ANSWER}"]
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.send("Show me.")
        answer = ui.turn.locator(".answer")
        expect(answer.locator("h2")).to_have_text("Growth")
        assert [answer.locator(tag).first.text_content() for tag in ("em", "strong", "p code")] == [
            "stress", "strength", "code",
        ]  # fmt: skip
        expect(answer.locator("ol > li")).to_have_count(2)
        assert answer.locator("ol ul > li").text_content() == "nested"
        assert answer.locator("th, td").all_text_contents() == ["n", "square", "2", "4"]
        link = answer.locator("a")
        assert link.get_attribute("href") == "https://example.com/a?b=c"
        assert (link.get_attribute("rel"), link.get_attribute("target")) == ("noopener noreferrer", "_blank")
        assert answer.locator("pre .syntax-keyword").all_text_contents() == ["def", "return"]
        expect(answer.locator(".formula .katex")).to_have_count(2)
        expect(answer.locator(".formula.displayed")).to_have_count(1)
        assert "costs $5 or $6, and" in ui.answer
        ui.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        answer.get_by_role("button", name="Copy the code: python").click()
        expect(answer.get_by_role("button", name="Copied")).to_be_visible()
        copied = ui.page.evaluate("navigator.clipboard.readText()")
        expect(ui.turn.locator(".tools").get_by_role("button", name="Copy")).to_be_visible()
        assert copied == "def double(x: int) -> int:\n    return 2 * x  # twice"


@pytest.mark.parametrize("query", ["", "?probabilities=1"])
def test_hostile_answer_runs_nothing_and_fetches_nothing(
    model: Model, open_playground: OpenPlayground, query: str
) -> None:
    model.says = [f"<think>\n{HOSTILE}\n</think>\n\n{HOSTILE}"]
    with served(model) as url, open_playground(url) as ui:
        ui.open(query)
        ui.send(HOSTILE)
        ui.turn.locator(".thought > summary").click()
        shown = ui.turn.locator(".answer, .question, .thoughts")
        expect(shown).to_have_count(3)
        assert "<script>window.ran = 1</script>" in ui.answer
        assert ui.page.evaluate("window.ran") is None
        assert shown.locator(FETCHING).count() == 0
        links = [link.get_attribute("href") or "" for link in ui.turn.locator("a").all()]
        assert all(link.startswith("https://") for link in links) and bool(links) != bool(query)
        attributes = "nodes => nodes.flatMap(node => [...node.attributes].map(({ name }) => name))"
        assert not [name for name in shown.locator("*").evaluate_all(attributes) if name.startswith("on")]


def test_growing_answer_keeps_its_finished_blocks(model: Model, open_playground: OpenPlayground) -> None:
    model.says = ["\n\n".join(f"Paragraph {i} with some words." for i in range(40))]
    remember = """() => {
      window.removed = 0;
      const count = (changes) => changes.forEach(({ removedNodes }) => (window.removed += removedNodes.length));
      new MutationObserver(count).observe(document.querySelector(".log"), { subtree: true, childList: true });
    }"""
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        ui.page.evaluate(remember)
        ui.send("Go on.")
        expect(ui.turn.locator(".answer > p")).to_have_count(40)
        assert ui.page.evaluate("window.removed") < 5


def test_slow_draws_leave_the_page_most_of_the_time(model: Model, open_playground: OpenPlayground) -> None:
    """Each draw reads a growing block from its beginning, so the draws of a long block are slow."""
    stream = """async () => {
      const { Answer } = await import("/web/answer.js"), { newTurn } = await import("/web/turns.js");
      const { Prose } = await import("/web/prose.js"), { show } = Prose.prototype;
      const turn = newTurn("c", "chat", null, { question: "?" });
      const answer = new Answer(document.querySelector(".log"), turn, true);
      let draws = 0;
      Prose.prototype.show = function (...text) {
        draws++;
        for (const end = performance.now() + 50; performance.now() < end; );
        show.apply(this, text);
      };
      const start = performance.now();
      for (let i = 0; i < 100; i++) {
        turn.text += `- item ${i}\\n`;
        answer.follow();
        await new Promise((go) => setTimeout(go, 10));
      }
      const share = ((draws - 1) * 50) / (performance.now() - start);
      turn.state = "done";
      answer.follow();
      return [draws, share];
    }"""
    with served(model) as url, open_playground(url) as ui:
        ui.open()
        draws, share = ui.page.evaluate(stream)
        assert draws > 1 and share <= 0.2
        expect(ui.turn.locator(".answer li")).to_have_count(100)
