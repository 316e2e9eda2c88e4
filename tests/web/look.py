"""Uses the playground in a real browser against a running server, checks what it does, and takes pictures to look at.

    python -m tests.web.look http://127.0.0.1:8000 pictures/ [chromium]

Run by hand: the test suite does not need a browser.
"""

import json
import sys
from pathlib import Path

from tests.web.chromium import Chromium

READY = "document.getElementById('state').textContent == 'ready'"
ANSWERED = "document.querySelector('.panel:not([hidden]) .turn:last-child:not([data-state=running])')"
LAST = "document.querySelector('.panel:not([hidden]) .turn:last-child')"
SIZES = {"desk": (1280, 900), "phone": (390, 844)}
STORY = "prompt=Tell+me+a+story+about+a+fox&send=1"

# A server that is too full, one that fails after a few words, one that hangs up: each answers all generation requests.
LIES = {
    "full": "new Response(JSON.stringify({error: {message: 'the queue is full'}}), "
    "{status: 503, headers: {'Retry-After': '7'}})",
    "failing": 'new Response(\'data: {"choices":[{"delta":{"content":"half"}}]}\\n\\n'
    'data: {"error":{"message":"the worker is gone"}}\\n\\n\')',
    "short": 'new Response(\'data: {"choices":[{"delta":{"content":"half"},"finish_reason":"stop"}]}\\n\\n\')',
}


def fill(page: Chromium, selector: str, text: str) -> None:
    page.js(
        f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.value = {json.dumps(text)};"
        "field.dispatchEvent(new Event('input', {bubbles: true})); field.focus() })()"
    )


def say(page: Chromium, text: str, *, until: str = ANSWERED) -> None:
    turns = page.js("document.querySelectorAll('#chat .turn').length")
    fill(page, "#chat .composer textarea", text)
    page.press("Enter")
    page.wait(f"document.querySelectorAll('#chat .turn').length > {turns} && {until}")


def part(page: Chromium, name: str) -> str:
    return str(page.js(f"{LAST}.querySelector('.{name}').textContent"))


def state(page: Chromium) -> str:
    return str(page.js(f"{LAST}.dataset.state"))


def pictures(page: Chromium, url: str, folder: Path) -> None:
    for name, (width, height) in SIZES.items():
        for theme in ("light", "dark"):
            page.look_like(width, height, theme)
            page.open(url)
            page.wait(READY)
            page.shoot(folder / f"{name}-{theme}-idle.png")
            page.open(f"{url}/?{STORY}&probabilities=1")
            page.wait(ANSWERED)
            assert state(page) == "done" and "tokens/s" in part(page, "timing")
            page.shoot(folder / f"{name}-{theme}-chat.png")
            assert page.js("document.documentElement.scrollWidth") <= width


def probabilities(page: Chromium, url: str) -> None:
    """The spans joined are the answer; keys alone lead to a token's rivals and back."""
    page.open(f"{url}/?tab=completion&{STORY}&probabilities=1")
    page.wait(ANSWERED)
    assert page.js(f"[...{LAST}.querySelectorAll('.token')].map((t) => t.textContent).join('')") == part(page, "answer")
    page.js(f"{LAST}.querySelector('.token').focus()")
    page.press("ArrowRight")
    page.press("Enter")
    assert page.js("document.querySelectorAll('#rivals:popover-open .rival').length") >= 5
    assert page.js("document.querySelectorAll('#rivals .chosen').length") == 1
    page.press("Escape")
    assert not page.js("document.querySelector('#rivals:popover-open')")


def conversation(page: Chromium, url: str) -> None:
    page.open(url)
    page.wait(READY)
    fill(page, "[name=top_p]", "5")
    say(page, "<img src=x onerror=alert(1)>")
    assert (
        state(page) == "failed" and "`top_p` must be" in part(page, "error") and part(page, "error").startswith("422")
    )
    assert page.js("knobs.top_p.getAttribute('aria-invalid')") == "true" and not page.js("document.images.length")
    fill(page, "[name=top_p]", "")
    fill(page, "[name=seed]", "18446744073709551615")  # more than a JavaScript number can hold
    say(page, "Hello")
    first = part(page, "answer")
    assert state(page) == "done" and "seed 18446744073709551615" in part(page, "timing")
    page.js("document.querySelector('#chat .again').click()")
    page.wait(ANSWERED)
    assert part(page, "answer") == first and page.js("document.querySelectorAll('#chat .turn').length") == 2
    fill(page, "[name=max_tokens]", "1200")
    say(page, "Tell me a long story", until=f"{LAST}.querySelector('.answer').textContent.length > 20")
    page.press("Escape")
    page.wait(ANSWERED)
    assert state(page) in ("stopped", "done")  # a short story may be over first


def failures(page: Chromium, url: str) -> None:
    """Nothing that went wrong looks finished."""
    page.open(url)
    page.wait(READY)
    page.js("window.true_fetch = window.fetch")
    for lie in LIES.values():
        page.js(f"window.fetch = async (path, options) => options.body ? {lie} : true_fetch(path, options); 0")
        say(page, "Hello")
        assert state(page) == "failed" and "finished: " not in part(page, "timing")
    assert "before its end" in part(page, "error")
    page.js(
        "window.fetch = async (path, options) =>"
        " { window.sent = options.body ?? window.sent; return true_fetch(path, options) }; 0"
    )
    say(page, "Good day")
    sent = json.loads(page.js("window.sent"))
    assert state(page) == "done" and [m["content"] for m in sent["messages"]] == ["Good day"]


def main(url: str, folder: str, program: str = "chromium") -> None:
    url = url.rstrip("/")
    Path(folder).mkdir(parents=True, exist_ok=True)
    with Chromium(program) as page:
        pictures(page, url, Path(folder))
        for check in (probabilities, conversation, failures):
            check(page, url)
            print(f"{check.__name__}: good")
        assert not page.exceptions(), page.exceptions()
        assert all(asked.startswith(url + "/") for asked in page.requested()), page.requested()
    print(f"look at {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
