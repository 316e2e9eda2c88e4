"""Draws docs/pictures/folders.svg: the floors of the tree, from which each folder imports only lower ones.

    python -m tests.docs.folder_picture

A box states how many files and lines a folder with its subfolders had when the picture was drawn. Files that lie
beside the folders, such as frontend/request.py, have boxes of their own.
"""

from pathlib import Path

from tests.test_house import FLOORS, ROOT

PICTURE = ROOT / "docs/pictures/folders.svg"
WIDTH, HEIGHT, GAP, LEFT = 190, 44, 10, 40
COLOURS = {"frontend": "#dbeafe", "worker": "#dcfce7", "shared": "#f3f4f6", "deploy": "#fef3c7"}
STYLE = "font: 12px sans-serif; fill: #111827"


def levels() -> list[list[str]]:
    """Returns the names of the boxes by floor, the lowest first."""
    return [sorted(names) for names in FLOORS]


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
