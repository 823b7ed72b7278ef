"""Bodies, headers and frames of HTTP that are too large, too deep, or no text."""

import gzip
import json

from tests.gateway.attacks.target import CHATS, Attack, Got, Target, all_are, counted, status

CLOSE = "Connection: close"
MOST_MB = 100.0  # what the gateway may have kept of it all


async def giants(target: Target) -> Got:
    before = target.memory_mb()
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answers = [
        await target.raw(target.posted(json.dumps(target.chat("x" * (5 << 20))).encode(), CLOSE)),
        await target.raw(target.posted(b"{", "Content-Length: 99999999999", CLOSE) + b" " * (6 << 20), limit_s=3),
        await target.raw([target.posted(b"", "Transfer-Encoding: chunked", CLOSE), *[chunk] * 400], limit_s=3),
        await target.raw(target.posted(gzip.compress(bytes(1 << 26)), "Content-Encoding: gzip", CLOSE)),
    ]
    got, more = [status(answer) for answer in answers], target.memory_mb() - before
    return Got(f"{counted(got)}; {max(0, more):.0f} MB kept", set(got) <= {400, 413} and more < MOST_MB)


async def headers(target: Target) -> Got:
    body = json.dumps(target.chat()).encode()
    answers = [
        await target.raw(target.posted(body, "X: " + "x" * 100_000, CLOSE)),
        await target.raw(target.posted(body, *(f"X-{number}: y" for number in range(20_000)), CLOSE)),
        await target.raw(target.posted(body, CLOSE, path="/" + "x" * 100_000)),
        await target.raw(target.posted(body, "X" * 100_000 + ": y", CLOSE)),
    ]
    return all_are([status(answer) for answer in answers], 0, 400, 431)


async def deep(target: Target) -> Got:
    most = 1_000_000
    schema = b'{"items":' * 5_000 + b"{}" + b"}" * 5_000
    start = json.dumps(target.chat())[:-1].encode()
    bodies = [
        b"[" * most,
        b'{"a":' * most,
        start + b',"metadata":' + b"[" * most + b"]" * most + b"}",
        start + b',"messages":' + b"[" * 3000 + b"]" * 3000 + b"}",
        start + b',"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":' + schema + b"}}}",
    ]
    return all_are([(await target.ask(CHATS, body))[0] for body in bodies], 400, 413)


async def no_text(target: Target) -> Got:
    good = json.dumps(target.chat("@")).encode()
    bad = [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\\ud800", b"\xf4\x90\x80\x80", b"\0"]
    bodies = [good.replace(b"@", one) for one in bad] + [b"\xfe\xff" + good, b"\0", b"\xff" * 1000]
    return all_are([(await target.ask(CHATS, body))[0] for body in bodies], 400)


async def numbers(target: Target) -> Got:
    start = json.dumps({k: v for k, v in target.chat().items() if k != "max_tokens"})[:-1]
    odd = ("1e999", "-1", "NaN", "Infinity", "9" * 5000, "1.5", "0x10", "true", "1e400", "[]", '"1"')
    bodies = [f'{start},"max_tokens":{number}}}'.encode() for number in odd]
    bodies += [f'{start},"temperature":{number}}}'.encode() for number in ("1e999", "NaN", "-1e-1", "9" * 5000)]
    bodies += [f'{start},"seed":{number}}}'.encode() for number in ("9" * 30, "-" + "9" * 30, "1.5")]
    return all_are([(await target.ask(CHATS, body))[0] for body in bodies], 400)


async def schemas(target: Target) -> Got:
    """Regular expressions and schemas that take for ever, or all memory, where nobody bounds them."""
    before = target.memory_mb()
    every: list[dict[str, object]] = [
        {"type": "string", "pattern": "(a+)+$"},
        {"type": "string", "pattern": "(x{1,1000}){1,1000}"},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
        {"enum": [f"v{number}" for number in range(200_000)]},
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:1/schema"},
        {"properties": {f"p{number}": {} for number in range(20_000)}},
        {"anyOf": [{"anyOf": [{"const": f"{a}{b}"} for a in range(100)]} for b in range(100)]},
    ]
    got = []
    for schema in every:
        asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        got.append((await target.ask(CHATS, target.chat(response_format=asked)))[0])
    more = target.memory_mb() - before
    return Got(f"{counted(got)}; {max(0, more):.0f} MB kept", set(got) <= {200, 400} and more < 2 * MOST_MB)


async def injected(target: Target) -> Got:
    """Nothing that a client says may become a header of the answer, nor its request id."""
    body = json.dumps(target.chat()).encode()
    evil = "evil\r\nSet-Cookie: a=b"
    asked = [
        target.posted(body, "x-request-id: evil", CLOSE),
        target.posted(body, f"x-request-id: {evil}", CLOSE),
        target.posted(body, "x-request-id: evil\r\n Set-Cookie: a=b", CLOSE),
        target.posted(body, "x-request-id: evil\rSet-Cookie: a=b", CLOSE),
        target.posted(body, "x-request-id: evil\nSet-Cookie: a=b", CLOSE),
        target.posted(json.dumps(target.chat(model=evil)).encode(), CLOSE),
        target.posted(json.dumps(target.chat(user=evil)).encode(), f"traceparent: {evil}", CLOSE),
        target.posted(body, CLOSE, path="/v1/models/evil%0d%0aSet-Cookie:%20a=b").replace(b"POST", b"GET", 1),
        target.posted(body, "x-lorafleet-replica: 0\u00e9", CLOSE),
    ]
    answers = [await target.raw(one) for one in asked]
    heads = [answer.partition(b"\r\n\r\n")[0].lower() for answer in answers]
    clean = not any(b"set-cookie" in head or b"evil" in head for head in heads)
    got = [status(answer) for answer in answers]
    return Got(f"{counted(got)}; none of it in a header: {clean}", clean and set(got) <= {200, 400, 403, 404})


async def smuggled(target: Target) -> Got:
    """Two readings of one request: whoever stands before us must not see another request than we do."""
    inner = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    body = json.dumps(target.chat()).encode()
    asked = [
        target.posted(b"0\r\n\r\n" + inner, "Content-Length: 5", "Transfer-Encoding: chunked"),
        target.posted(b"0\r\n\r\n" + inner, f"Content-Length: {5 + len(inner)}", "Transfer-Encoding: chunked"),
        target.posted(body + inner, f"Content-Length: {len(body)}", f"Content-Length: {len(body) + len(inner)}"),
        target.posted(body + inner, f"Content-Length: +{len(body)}"),
        target.posted(body + inner, f"Content-Length: {len(body)}, {len(body)}"),
        target.posted(b"0\r\n\r\n" + inner, "Transfer-Encoding: chunked, identity"),
        target.posted(b"0\r\n\r\n" + inner, "Transfer-Encoding: xchunked"),
        target.posted(b"0\r\n\r\n" + inner, "Transfer-Encoding : chunked"),
    ]
    answers = [await target.raw(one, limit_s=3) for one in asked]
    through = sum(b'{"status":"ok"}' in answer for answer in answers)
    return Got(f"{counted(map(status, answers))}; {through} let through", through == 0)


async def paths(target: Target) -> Got:
    asked = ("/chat/../../etc/passwd", "/chat/..%2f..%2fetc/passwd", "/chat/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
             "/docs/..%5c..%5cetc", "/internal/replicas", "/metrics", "/v1/models/..%2f..%2fmetrics")  # fmt: skip
    got = []
    for path in asked:
        line = target.posted(b"", CLOSE, path=path).replace(b"POST", b"GET", 1)
        got.append(answer := await target.raw(line))
        assert b"root:" not in answer
    return all_are([status(answer) for answer in got], 400, 404)


ATTACKS = [
    Attack("giant bodies", "5 MB, 100 GB announced, 25 MB in chunks, 64 MB packed in 64 KB", giants),
    Attack("giant bodies", "headers, header names, a path of 100 KB; 20,000 headers", headers),
    Attack("malformed bodies", "JSON nested a million deep, and schemas", deep),
    Attack("malformed bodies", "UTF-8 that is none, half characters, NUL", no_text),
    Attack("malformed bodies", "numbers beyond all bounds, and none", numbers),
    Attack("malformed bodies", "schemas and expressions made to explode", schemas),
    Attack("injection", "line ends in x-request-id, model, path, traceparent", injected),
    Attack("injection", "requests smuggled in another one's body", smuggled),
    Attack("injection", "paths out of the pages, and of the other port", paths),
]
