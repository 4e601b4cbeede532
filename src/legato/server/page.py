"""The page at `/`, and what it shows of the engine."""

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Response
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from legato.manager import ContinuousBatchingManager
from legato.server.errors import ApiError
from legato.server.live import LiveView
from legato.server.streaming import EventStream

_FILES = Path(__file__).parent / "page"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asked for again each time, and answered in short if unchanged
}


def add_page(app: FastAPI, manager: ContinuousBatchingManager, is_open: Callable[[], bool]) -> None:
    """Add the page, its files and `/engine/events`.

    Args:
        app: the application.
        manager: what the page shows.
        is_open: whether watchers may stay.
    """
    live = LiveView(manager)
    app.mount("/page", _PageFiles(directory=_FILES))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(_FILES / "index.html", headers=_HEADERS)

    @app.get("/engine/events", include_in_schema=False)  # a stream that never ends is no use to who reads a schema
    async def engine_events() -> Response:
        """What the engine does, as server-sent events."""
        if not is_open():
            raise ApiError(503, "the engine is not running", kind="server_error", code="not_ready")
        return EventStream(live.events(is_open), {})


class _PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response
