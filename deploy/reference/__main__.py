"""`python -m deploy.reference`: writes the made parts of docs/ anew, in a checkout.

What stands between `<!-- made: NAME -->` and `<!-- end -->` is made by tables.py; the rest is written by people.
"""

import re
import sys
from pathlib import Path

from deploy.reference.tables import NAMED, ROOT

DOCS = ROOT / "docs"
MADE = re.compile(r"(?P<begin><!-- made: (?P<name>[a-z ]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def renewed(text: str) -> str:
    """A page as it should be. Raises KeyError for a marker that nothing is made for."""
    return MADE.sub(lambda part: f"{part['begin']}\n{NAMED[part['name']]()}\n\n", text)


def main(docs: Path = DOCS) -> int:
    for page in sorted(docs.glob("*.md")):
        before = page.read_text()
        if (after := renewed(before)) != before:
            page.write_text(after)
            print(f"{page} was renewed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
