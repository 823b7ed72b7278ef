"""What people look at: the chat page and the API's page. Neither loads anything from anywhere else.

Owns no state. The files are read once, at start. Swagger UI comes out of its package (swagger-ui-py); a browser is told
to load nothing that is not from here.
"""

from importlib.util import find_spec
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway import openapi
from gateway.middleware import json_answer

FOLDER = Path(__file__).with_name("page")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'{}; img-src 'self'{}; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
SWAGGER = ("swagger-ui.css", "swagger-ui-bundle.js")
ALSO = {"chat": ("", ""), "docs": (" 'unsafe-inline'", " data:")}  # Swagger UI writes styles and has its icons in them


def add(app: web.Application) -> None:
    """GET /chat, /docs, what they need, and /openapi.json."""
    for page, also in ALSO.items():
        for file in sorted((FOLDER / page).iterdir()):
            path = f"/{page}" if file.suffix == ".html" else f"/{page}/{file.name}"
            app.router.add_get(path, _serve(file, also))
    for name in SWAGGER:
        app.router.add_get(f"/docs/{name}", _serve(_swagger() / name, ALSO["docs"]))
    document = openapi.document()

    async def described(_: web.Request) -> web.Response:
        return json_answer(document)

    async def front(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "/chat"})

    app.router.add_get("/openapi.json", described)
    app.router.add_get("/", front)


def _swagger() -> Path:
    """The package's files, without running it: it is made for other servers."""
    spec = find_spec("swagger_ui")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("static")


def _serve(file: Path, also: tuple[str, str]) -> Handler:
    body, kind = file.read_bytes(), TYPES[file.suffix]
    headers = HEADERS | {"Content-Security-Policy": HEADERS["Content-Security-Policy"].format(*also)}

    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    return serve
