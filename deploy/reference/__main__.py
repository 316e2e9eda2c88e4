"""`python -m deploy.reference`: regenerates the tables of docs/, in a checkout.

`tables` generates the text between `<!-- made: NAME -->` and `<!-- end -->`; people write the rest.
"""

import re
import sys
from pathlib import Path

from deploy.reference.tables import ROOT, TABLES

DOCS = ROOT / "docs"
MADE = re.compile(r"(?P<begin><!-- made: (?P<name>[a-z ]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def renewed(text: str) -> str:
    """Returns the page with up-to-date tables. Raises KeyError for an unknown marker."""
    return MADE.sub(lambda part: f"{part['begin']}\n{TABLES[part['name']]()}\n\n", text)


def main(docs: Path = DOCS) -> int:
    for page in sorted(docs.glob("*.md")):
        before = page.read_text()
        if (after := renewed(before)) != before:
            page.write_text(after)
            print(f"{page} was renewed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
