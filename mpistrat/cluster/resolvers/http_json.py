"""Questions to the programming interfaces of clouds: JSON over HTTP, by the standard library alone."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from ...base.errors import ClusterError, explain

__all__ = ["ask_json", "parse_object"]

_SECONDS = 30.0
_MOST = 1 << 28  # bytes of an answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An answer that sends elsewhere is an error: the token must not go to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def ask_json(
    function: str,
    url: str,
    headers: Mapping[str, str],
    *,
    remedy: str,
    body: Mapping[str, Any] | None = None,
    ca_file: str | None = None,
    proxies: bool = False,
) -> dict[str, Any]:
    """Return the JSON object that a server answers with.

    Args:
        function: who asks, for errors; `remedy`: what to do about them.
        url: whom to ask, and what.
        headers: sent along; they may hold a token, which no error shows.
        body: sent as JSON by POST; default: GET.
        ca_file: certificates of who may vouch for the server; default: the system's.
        proxies: whether proxies of the environment are used (`https_proxy`).

    Raises:
        ClusterError: no answer within 30 seconds, an error of the server, or no JSON object.
    """

    def refuse(got: str) -> ClusterError:
        return ClusterError(explain(function, url, expected="a JSON object", got=got, remedy=remedy))

    data = None if body is None else json.dumps(body).encode()
    kind = {} if data is None else {"Content-Type": "application/json"}
    try:
        handlers: list[Any] = [
            _NoRedirect(),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)),
        ]
        handlers += [] if proxies else [urllib.request.ProxyHandler({})]
        request = urllib.request.Request(url, data, {"Accept": "application/json", **kind, **headers})
        with urllib.request.build_opener(*handlers).open(request, timeout=_SECONDS) as answer:
            text = answer.read(_MOST + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise refuse(f"status {error.code} ({_message(error)})") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise refuse(f"none ({getattr(error, 'reason', error)!s:.200})") from None
    if len(text) > _MOST:
        raise refuse(f"more than {_MOST} bytes")
    return parse_object(function, url, text, remedy)


def parse_object(function: str, source: str, text: bytes | str, remedy: str) -> dict[str, Any]:
    """Return the JSON object that a text is.

    Raises:
        ClusterError: it is none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ClusterError(explain(function, source, expected="a JSON object", got=f"{text[:80]!r}", remedy=remedy))
    return found


def _message(error: urllib.error.HTTPError) -> str:
    """Return what a server says of its error: its JSON's message, else the standard's words."""
    try:
        found = json.loads(error.read(1 << 16))
        message = found.get("message") or found["error"]["message"]
    except (OSError, http.client.HTTPException, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        message = error.reason
    return f"{message!s:.200}"
