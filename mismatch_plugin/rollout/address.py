"""A server's address as users give it: checked before anything is sent, and shown without credentials."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import httpx

_SECRET_HEADER = re.compile(r"auth|cookie|token|key|secret|password|session", re.IGNORECASE)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\t]*")
_SHORTEST_SECRET = 4
HIDDEN = "***"


class Address(NamedTuple):
    """url: http(s)://host:port[/path], without credentials. auth: user and password that stood in it."""

    url: str
    auth: tuple[str, str] | None


def parse_address(url: str) -> Address:
    """Raises ValueError, which shows no credentials, for what is no address of a server."""
    if not isinstance(url, str):
        raise ValueError(f"url is {type(url).__name__}, not a server's address: give it as http://host:port.")

    def refused(reason: str) -> ValueError:
        return ValueError(f"url {shown(url)!r} is not a server's address: {reason}. Give it as http://host:port.")

    if re.search(r"[\x00-\x20\x7f\\]", url):
        raise refused("it holds a space, a backslash or a control character")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # urlsplit's sentences quote the port or the host, which hold credentials where an @ is missing.
        raise refused("its port must be 1 to 65535" if "ort" in str(error) else "its host cannot be read") from None
    if parts.scheme not in ("http", "https"):
        raise refused("it must begin with http:// or https://")
    if not parts.hostname:
        raise refused("it names no host")
    if port == 0:
        raise refused("its port must be 1 to 65535")
    if parts.query or parts.fragment:
        raise refused("a query or fragment means nothing here; send tokens as headers")
    bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
    try:
        parts.hostname.encode("idna")  # as the resolver will
        httpx.URL(bare)
    except (httpx.InvalidURL, UnicodeError):
        raise refused("its host cannot be read") from None
    user = parts.username or parts.password
    auth = (unquote(parts.username or ""), unquote(parts.password or "")) if user else None
    return Address(bare, auth)


def shown(url: str) -> str:
    """The address for a message: without user, password, query and fragment, whatever else is wrong with it."""
    start = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|//", url)
    scheme = start.group() if start else ""
    head, *tail = re.split(r"[?#]", url[len(scheme) :], maxsplit=1)
    if tail and "@" in tail[0]:
        return scheme + HIDDEN  # a password with a question mark, or a query with an @: nobody can tell
    return (scheme + head.rpartition("@")[2])[:200]


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """A copy. Raises ValueError, which names the header and not its value, for what HTTP cannot send."""
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ValueError("headers: a name that HTTP does not allow; names are letters, digits and hyphens.")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"headers[{name!r}] is not one line of ASCII text: HTTP cannot send it.")
    return dict(headers)


class Redactor:
    """Takes the credentials of a client out of a text that others wrote, such as a server's error message."""

    def __init__(self, auth: tuple[str, str] | None, headers: Mapping[str, str]) -> None:
        secrets: set[str] = set()
        if auth is not None:
            secrets |= {auth[1] or auth[0], b64encode(":".join(auth).encode()).decode()}
        for name, value in headers.items():
            if _SECRET_HEADER.search(name):
                secrets |= {value, *value.split()[1:]}  # "Bearer abc": abc alone too
        known = sorted((secret for secret in secrets if len(secret) >= _SHORTEST_SECRET), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(HIDDEN, text)
