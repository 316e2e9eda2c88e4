"""Draws docs/pictures/folders.svg: the folders on levels, such that each folder imports only folders on lower levels.

    python -m tests.docs.folder_picture

A box states how many files and lines a folder with its subfolders had when the picture was drawn. Files that lie
beside folders that import them, such as frontend/request.py, have boxes of their own.
"""

from pathlib import Path

from tests.test_imports import ROOT, folder_imports

PICTURE = ROOT / "docs/pictures/folders.svg"
WIDTH, HEIGHT, GAP, LEFT = 176, 44, 10, 40
LEFT_OUT = (
    "bench",
    "deploy/demo",
    "deploy/monitoring",
    "deploy/generate/release",
    "deploy/generate/docs",
    "deploy/cli",
)
COLOURS = {"frontend": "#dbeafe", "worker": "#dcfce7", "shared": "#f3f4f6", "deploy": "#fef3c7"}
STYLE = "font: 12px sans-serif; fill: #111827"


def box_of(node: str) -> str:
    """Returns the name of the box of a file or folder in the graph of imports; "" if it has no box."""
    top, *inner = node.split("/")
    name = top if top == "shared" or not inner else f"{top}/{inner[0]}"
    return "" if name.startswith(LEFT_OUT) or name.endswith("__init__.py") else name


def levels() -> list[list[str]]:
    """Returns the names of the boxes by level, the lowest first."""
    below: dict[str, set[str]] = {}
    for node, imported in folder_imports().items():
        if box := box_of(node):
            below.setdefault(box, set()).update({box_of(other) for other in imported} - {"", box})
    level: dict[str, int] = {}

    def level_of(box: str) -> int:
        if box not in level:
            level[box] = 1 + max((level_of(other) for other in below.get(box, ())), default=-1)
        return level[box]

    for box in below:
        level_of(box)
    return [sorted(box for box in level if level[box] == one) for one in range(max(level.values()) + 1)]


def size_of(box: str) -> str:
    path = ROOT / box
    files = [path] if path.suffix else [*path.rglob("*.py"), *path.rglob("*.[ch]")]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    return f"{lines:,} lines" if path.suffix else f"{len(files)} files, {lines:,} lines"


def drawn() -> str:
    rows = levels()[::-1]
    width = LEFT + max(map(len, rows)) * (WIDTH + GAP) + GAP
    height = len(rows) * (HEIGHT + GAP) + GAP
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{STYLE}">']
    parts.append(f'<rect width="{width}" height="{height}" fill="#ffffff"/>')
    for at, row in enumerate(rows):
        y = GAP + at * (HEIGHT + GAP)
        parts.append(f'<text x="{GAP}" y="{y + 26}">{len(rows) - at}</text>')
        for column, box in enumerate(row):
            x, colour = LEFT + column * (WIDTH + GAP), COLOURS[box.split("/")[0]]
            parts.append(
                f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{colour}" stroke="#9ca3af"/>'
            )
            parts.append(f'<text x="{x + 8}" y="{y + 18}" font-weight="bold">{box}</text>')
            parts.append(f'<text x="{x + 8}" y="{y + 35}">{size_of(box)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write(picture: Path = PICTURE) -> None:
    picture.write_text(drawn())


if __name__ == "__main__":
    write()
