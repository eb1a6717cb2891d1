"""The web server of the page: HTML, server-sent events, and the same facts as JSON.

It listens on this machine alone, or asks for a token. Only a page with a token has actions.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tallystick.errors import UNREADABLE, OptionError, without_values
from tallystick.ops.ui import rendering
from tallystick.ops.ui.actions import Actions
from tallystick.ops.ui.facts import PageFacts
from tallystick.ops.ui.page import CheckpointReader, LiveRun
from tallystick.ops.ui.rendering import charts
from tallystick.run.console import LINES
from tallystick.run.epoch_loop import Trigger
from tallystick.text import printable

LOCAL = "127.0.0.1"
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
COOKIE = "tallystick-token"
TOKEN_VARIABLE = "TALLYSTICK_UI_TOKEN"
"""The environment variable with the token of a page."""
EVERY_S = 1.0
"""The interval at which an open page gets what has changed."""
LOOK_AGAIN_S = 10.0
"""The maximum age of what was read from the checkpoint and Kafka."""
CLOSE_S = 5.0
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Source:
    """The facts, looked up no more often than needed, for any number of viewers.

    Args:
        read: looks at checkpoint and Kafka.
        add: adds what a run in this process reports; None: there is none.
        act: does what a visitor of a page with a token asks for.
    """

    def __init__(
        self,
        read: Callable[[], PageFacts],
        add: Callable[[PageFacts], PageFacts] | None = None,
        act: Callable[[str, Mapping[str, Any]], str] | None = None,
    ) -> None:
        self._read = read
        self._add = add
        self.act = act
        self._lock = threading.Lock()
        self._facts: PageFacts | None = None
        self._read_at_s = 0.0

    def facts(self) -> PageFacts:
        """Return the facts, read again if older than `LOOK_AGAIN_S`."""
        with self._lock:
            if self._facts is None or time.monotonic() - self._read_at_s > LOOK_AGAIN_S:
                self._facts = self._read()
                self._read_at_s = time.monotonic()
            facts = self._facts
        return facts if self._add is None else self._add(facts)


class Server:
    """One page at one port.

    Args:
        source: of the facts; may be replaced while the page is open.
        host: the address to listen on; any but this machine's own needs a token.
        port: 0: any that is free.
        token: what a visitor has to know; "": nothing.

    Raises:
        OptionError: the port is taken.
    """

    def __init__(self, source: Source, port: int, host: str = LOCAL, token: str = "") -> None:
        assert token or host == LOCAL, "others need a token"
        self.source = source
        self._has_token = bool(token)
        try:
            self._socket = socket.create_server((host, port))
        except (OSError, OverflowError) as error:
            raise OptionError(
                f"the page cannot listen on port {port} of {host}: {error}. Choose another port: "
                f"--port, or ui_port= of Pipeline.start"
            ) from None
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            self._app(host, token), log_level="warning", access_log=False, server_header=False
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until the process is asked to end, or `close` is called."""
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        """Serve in a thread of its own, which does not keep the process alive."""
        self._thread = threading.Thread(target=self.run, name="tallystick page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._socket.close()

    def _app(self, host: str, token: str) -> Starlette:
        middleware = [Middleware(_Headers)]
        if host == LOCAL:  # a page elsewhere whose name leads here gets nothing
            middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_NAMES]))
        if token:
            middleware.append(Middleware(_NeedsToken, token=token))
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/facts.json", self._json),
                Route("/events", self._events),
                Route("/actions/{action}", self._act, methods=["POST"]),
                Mount("/static", StaticFiles(directory=rendering.HERE / "static")),
            ],
            middleware=middleware,
        )

    async def _page(self, _: Request) -> Response:
        facts = await run_in_threadpool(self.source.facts)
        page = partial(rendering.page, may_act=self._may_act)
        return HTMLResponse(await run_in_threadpool(page, facts))

    async def _json(self, _: Request) -> Response:
        return JSONResponse(asdict(await run_in_threadpool(self.source.facts)))

    @property
    def _may_act(self) -> bool:
        return self._has_token and self.source.act is not None

    async def _act(self, request: Request) -> Response:
        """Do an action. The holder of a token comes from this page, or from no page at all.

        A page elsewhere cannot send JSON here without a question that is not answered, and its
        origin is another one.
        """
        if (act := self.source.act) is None or not self._has_token:
            return _answer(403, f"this page has no actions: set {TOKEN_VARIABLE} before its start")
        origin = request.headers.get("origin", "")
        if origin and origin.partition("://")[2] != request.headers.get("host"):
            return _answer(403, "asked from another page")
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _answer(415, "expected application/json")
        try:
            fields = json.loads(await request.body())
            assert isinstance(fields, dict), "an object"
        except UNREADABLE:
            return _answer(400, "expected a JSON object")
        try:
            text = await run_in_threadpool(act, request.path_params["action"], fields)
        except Exception as error:
            return _answer(409, without_values(error))
        return _answer(200, text)

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(self._changes(request), media_type="text/event-stream")

    async def _changes(self, request: Request) -> AsyncIterator[str]:
        """Yield the sections that have changed, and the charts if their epochs have."""
        known: dict[str, str] = {}
        drawn: object = None
        while not self._server.should_exit and not await request.is_disconnected():
            facts = await run_in_threadpool(self.source.facts)
            now = rendering.sections(facts)
            news = {name: html for name, html in now.items() if known.get(name) != html}
            numbers = charts(facts)
            sent = {"sections": news, "charts": numbers if numbers != drawn else None}
            known, drawn = now, numbers
            yield f"data: {json.dumps(sent)}\n\n"
            await asyncio.sleep(EVERY_S)


class _Headers:
    """Middleware that sets headers by which a browser does no more than the page needs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        await self._app(scope, receive, with_headers)


class _NeedsToken:
    """Middleware that admits holders of the token: in the address, a cookie, or a header."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)
        response: Response | None = None
        if self._is_right(given := request.query_params.get("token", "")):
            response = RedirectResponse(request.url.remove_query_params("token"), status_code=303)
            response.set_cookie(COOKIE, given, httponly=True, samesite="strict")
        elif not any(
            map(
                self._is_right,
                (
                    request.cookies.get(COOKIE, ""),
                    request.headers.get("authorization", "").removeprefix("Bearer "),
                ),
            )
        ):
            text = "This page needs its token: open the address that was printed at its start.\n"
            response = PlainTextResponse(text, status_code=401)
        await (response or self._app)(scope, receive, send)

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token)


def _answer(status: int, text: str) -> Response:
    return JSONResponse({"text": printable(text)}, status)


def new_token() -> str:
    """Draw a token."""
    return secrets.token_urlsafe(24)


_servers: dict[int, Server] = {}
"""By port. A page outlives its query, to show why that ended; the next start takes the port."""
_lock = threading.Lock()


def open_page(port: int, checkpoint: str, options: Mapping[str, str], live: LiveRun) -> None:
    """Serve the page of a run.

    Args:
        port: of this machine.
        checkpoint: the pipeline's.
        options: of the connection to the cluster that decides, with Kafka's names.
        live: the facts about the run.

    Raises:
        OptionError: there is no such port, or another program has it; or the trigger is none.
    """
    if not 0 < port < 65536:
        raise OptionError(f"ui_port={port}: expected 1 to 65535, for example 4050")
    interval_ms = Trigger.of(live.trigger).interval_ms or None
    reader = CheckpointReader(checkpoint, options, interval_ms)
    source = Source(reader.read, live.add_to, Actions(checkpoint, options))
    LINES.attach()
    with _lock:
        if (server := _servers.get(port)) is not None:
            server.source = source
            return
        server = _servers[port] = Server(source, port, token=os.environ.get(TOKEN_VARIABLE, ""))
        server.start()
