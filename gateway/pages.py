"""The chat page: three files of ours and an icon. They load nothing from anywhere else, and the browser is told so."""

from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

FOLDER = Path(__file__).with_name("page")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add(app: web.Application) -> None:
    """GET /chat and what it needs. Read once."""
    for file in sorted(FOLDER.iterdir()):
        path = "/chat" if file.name == "chat.html" else f"/chat/{file.name}"
        app.router.add_get(path, _serve(file.read_bytes(), TYPES[file.suffix]))


def _serve(body: bytes, kind: str) -> Handler:
    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return serve
