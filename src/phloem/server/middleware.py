"""What every request passes before its route: request id, key, origin, and a last net for faults of ours.

Owns authentication. Must not know what the routes do, only which of them are open or for operators.
"""

from __future__ import annotations

import hmac
import logging
import re
from secrets import token_hex
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phloem.config import ServerConfig
from phloem.errors import AuthenticationError, PermissionDeniedError, PhloemError
from phloem.server.context import ServerContext
from phloem.server.http_errors import error_response, internal_error
from phloem.server.sse import ClientGoneError

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key: they say whether the server lives, and nothing else."""

ADMIN_PATHS = frozenset({"/flush_cache", "/abort", "/abort_request", "/server_info", "/get_server_info"})
"""Paths for operators: they need the admin key where one is set."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else token_hex(16)
        scope["phloem.request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                route = getattr(scope.get("route"), "path", "unknown")
                self._context.metrics.count_response(route, message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            check_origin(headers)
            key = check_key(self._context.config, scope["path"], headers)
            scope["phloem.key_id"] = self._context.key_id(key) if key else ""
            await self._app(scope, receive, send_with_id)
        except ClientGoneError:
            logger.debug("client of request %s went away", request_id)
        except PhloemError as error:
            await error_response(error, scope["path"])(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if started:
                raise
            await error_response(internal_error(request_id), scope["path"])(scope, receive, send_with_id)


def check_origin(headers: Headers) -> None:
    """Refuse requests that a web page of another site makes a browser send. Programs send no Origin."""
    origin = headers.get("origin")
    if origin is not None and _host_of(origin) != headers.get("host", ""):
        raise PermissionDeniedError("requests from web pages of other origins are not served")


def _host_of(origin: str) -> str | None:
    """Host and port of an origin; None where it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def check_key(config: ServerConfig, path: str, headers: Headers) -> str:
    """The key that a request may use, '' where none is needed.

    Raises AuthenticationError without a right key, PermissionDeniedError for an ordinary key on an
    operators' path. Every key is compared in constant time, and all are compared.
    """
    needs_admin = path.rstrip("/") in ADMIN_PATHS and bool(config.admin_api_key)
    if path in OPEN_PATHS or not (config.api_keys or needs_admin):
        return ""
    given = _credential(headers)
    is_admin = bool(config.admin_api_key) and _same(given, config.admin_api_key)
    is_user = sum(_same(given, key) for key in config.api_keys) > 0
    if not (is_admin or is_user):
        raise AuthenticationError("a valid API key is needed: send the header 'Authorization: Bearer <key>'")
    if needs_admin and not is_admin:
        raise PermissionDeniedError("this route needs the admin key")
    return given


def _credential(headers: Headers) -> str:
    """The one key that a request carries; none or several different ones are refused."""
    keys = set(headers.getlist("x-api-key"))
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        keys.add(key.strip() if scheme.lower() == "bearer" else "")
    if len(keys) > 1:
        raise AuthenticationError("the request carries several different API keys; send one")
    return keys.pop() if keys else ""


def _same(given: str, expected: str) -> bool:
    return bool(given) and hmac.compare_digest(given.encode(), expected.encode())
