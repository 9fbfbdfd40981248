"""The web server of the dashboard.

Starlette and uvicorn: both are small and maintained, parse HTTP with care, and check the host of a request, which the
standard library's http.server does not. Every page and answer comes from this process; it loads nothing else.

Only this machine can reach it by default. On another address every request needs a token: the printed link holds it,
and the browser then keeps it in a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from fedpick.core.errors import FedpickError, InvalidInput, MissingDependency
from fedpick.dashboard import content
from fedpick.experiments.encoding import to_json
from fedpick.experiments.store import Store
from fedpick.report.html import page_of
from fedpick.report.material import read_material

try:
    import uvicorn
    from plotly.offline import get_plotlyjs
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise MissingDependency(
        f"The dashboard needs {error.name}. Install it with: pip install 'fedpick[dashboard]'"
    ) from error

__all__ = ["build_app", "is_loopback", "new_token", "serve"]

_COOKIE = "fedpick-token"
_MOST_REPORTS = 4
"""Finished pages that are kept; each has about 5 MB."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ASSETS = {"dashboard.js": "text/javascript", "dashboard.css": "text/css"}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """A secret of 256 bits for a link."""
    return secrets.token_urlsafe(32)


class _Reports:
    """The reports of experiments, made once for every state of their runs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pages: dict[tuple[int, str], str] = {}
        self._making = threading.Lock()

    def page(self, number: int) -> str:
        with self._making:  # a page takes seconds: a second request waits for the first
            experiment = self._store.experiment(number)
            runs = self._store.overview().get(experiment.id, [])
            state = to_json([[run.run_id, run.status, run.rounds_done] for run in runs] + [experiment.hash])
            key = (experiment.id, state)
            if key not in self._pages:
                made = page_of(read_material(self._store, experiment))
                kept = [item for item in self._pages.items() if item[0][0] != experiment.id][-_MOST_REPORTS + 1 :]
                self._pages = dict([*kept, (key, made)])
            return self._pages[key]


def build_app(store: Store, *, token: str | None = None) -> Starlette:
    """Build the application. `token` None: for this machine only, by the names of loopback."""
    reports = _Reports(store)

    def index(request: Request) -> Response:
        return HTMLResponse(_asset("dashboard.html"))

    def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name == "plotly.js":
            return Response(get_plotlyjs(), media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})
        if name == "page.css":
            return Response(_asset(name, "fedpick.report"), media_type="text/css")
        if name not in _ASSETS:
            return PlainTextResponse("not found", 404)
        return Response(_asset(name), media_type=_ASSETS[name])

    def experiments(request: Request) -> Response:
        return _json({"store": store.name, "experiments": content.overview(store), "measures": content.MEASURES})

    def lines(request: Request) -> Response:
        wanted = [_whole(text) for text in request.query_params.getlist("experiment")]
        return _json(content.curves(store, wanted, request.query_params.get("measure", "accuracy")))

    def report(request: Request) -> Response:
        return HTMLResponse(
            reports.page(_whole(request.path_params["number"])), headers={"Content-Security-Policy": ""}
        )

    async def guard(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        if token is not None:
            given = request.query_params.get("token")
            if given is not None and hmac.compare_digest(given.encode(), token.encode()):
                # The address bar and the history lose the token.
                answer: Response = RedirectResponse(request.url.path, 303)
                answer.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
                return _hardened(answer)
            if not hmac.compare_digest(request.cookies.get(_COOKIE, "").encode(), token.encode()):
                words = "Open the link that `fedpick dashboard` printed: it holds a token."
                return _hardened(PlainTextResponse(words, 401))
        return _hardened(await proceed(request))

    middleware = [Middleware(BaseHTTPMiddleware, dispatch=guard)]
    if token is None:
        # A page elsewhere cannot reach the server under a name of its own that points to this machine.
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1"]))
    middleware.append(Middleware(GZipMiddleware, minimum_size=2000))
    return Starlette(
        routes=[
            Route("/", index),
            Route("/assets/{name}", asset),
            Route("/api/experiments", experiments),
            Route("/api/curves", lines),
            Route("/report/{number}", report),
        ],
        middleware=middleware,
        exception_handlers={FedpickError: _refused},
    )


def _hardened(response: Response) -> Response:
    headers = response.headers
    headers.setdefault("Content-Security-Policy", _POLICY)
    if not headers["Content-Security-Policy"]:
        del headers["Content-Security-Policy"]  # a report states its own
    headers.setdefault("Cache-Control", "no-store")
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    return response


def _asset(name: str, package: str = "fedpick.dashboard") -> str:
    return (resources.files(package) / "assets" / name).read_text(encoding="utf-8")


def _json(value: Any) -> Response:
    return Response(to_json(value, sort_keys=False), media_type="application/json")


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise InvalidInput("An experiment is named by its number.")
    return int(text)


def _refused(request: Request, error: Exception) -> Response:
    return Response(to_json({"error": str(error)}), 400, media_type="application/json")


def serve(store: Store, *, host: str, port: int, token: str | None, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. `ready` is called with the link when the port is open; `port` 0: any free one."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InvalidInput(
            f"Port {port} of {host} cannot be used: {error.strerror}. Choose another, or any free one: --port 0."
        ) from error
    with listener:
        number = listener.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{number}/" + (f"?token={token}" if token else ""))
        config = uvicorn.Config(build_app(store, token=token), log_level="warning", lifespan="off", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])
