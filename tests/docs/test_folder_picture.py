"""The picture of the folders shows the levels of the current imports."""

import re

from tests.docs.folder_picture import PICTURE, levels


def test_picture_has_every_folder_on_its_level() -> None:
    shown: dict[int, list[str]] = {}
    for y, name in re.findall(r'y="(\d+)" font-weight="bold">([^<]+)<', PICTURE.read_text()):
        shown.setdefault(int(y), []).append(name)
    assert [shown[y] for y in sorted(shown)] == levels()[::-1], "draw it: python -m tests.docs.folder_picture"
