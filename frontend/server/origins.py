"""Restricts the web pages that may send requests to the server's own, and those of `--cors-origins`.

A browser lets any page on the internet send requests to a server on localhost. It only keeps the page from reading the
responses. So this server refuses requests of foreign pages. Browsers state where a request comes from
(`Sec-Fetch-Site`, `Origin`), and no page can change these headers. Other clients send neither.
"""

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from frontend.errors import Forbidden

LOCALHOST = "localhost"  # in --cors-origins: every page of this machine, on any port
OF_THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


class Origins:
    """The pages that may send requests. allowed: origins such as https://example.com; localhost; or * for all"""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        self._allows_machine = LOCALHOST in self._allowed

    def check(self, method: str, headers: Headers) -> None:
        """Raises Forbidden if the request comes from a foreign page that is not allowed."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if (origin is None and site is None) or not self._allowed.isdisjoint(("*", origin)):
            return
        if self._allows_machine and re.fullmatch(OF_THIS_MACHINE, origin or ""):
            return
        if _is_own(origin, site, headers.get("host", "")) or _is_navigation(method, headers):
            return
        page = f"of {origin}" if origin else "of another site"
        raise Forbidden(
            f"a web page {page} sent this request; --cors-origins lists the origins that may", code="origin_not_allowed"
        )


def _is_own(origin: str | None, site: str | None, host: str) -> bool:
    """Whether the request comes from the server's own page or directly from the user.

    Browsers send `Sec-Fetch-Site` only over https and to localhost. Without it, the origin's host must equal the
    request's `Host`. The origin's scheme may differ, because a proxy may have ended TLS.
    """
    if site is not None:
        return site in ("same-origin", "none")
    return origin is not None and urlsplit(origin).netloc.lower() == host.lower() != ""


def _is_navigation(method: str, headers: Headers) -> bool:
    """Whether the user follows a link to this server. The page with the link cannot read the response."""
    return method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
