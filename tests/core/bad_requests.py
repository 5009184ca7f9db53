"""One table of requests, good and bad, for both programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.core.bad_framing import (
    CANARY,
    CHAT,
    CHUNKED,
    CHUNKS,
    GOOD_BODY,
    MAX_BODY_BYTES,
    SMUGGLED,
    Vector,
    framing,
    get,
    good,
    length,
    malformed,
    message,
    post,
)


def heads() -> Iterator[Vector]:
    """Yields what may stand in the head of a request."""
    yield good(
        "HTTP/1.0",
        message(b"POST " + CHAT + b" HTTP/1.0", length(GOOD_BODY), GOOD_BODY, host=b""),
        closes=True,
    )
    yield good("close", post(headers=b"Connection: close\r\n"), closes=True)
    yield good("UTF-8 in a value", post(headers="x-a: \u00e9\r\n".encode()))
    yield good("tabs around a value", post(headers=b"x-a:\ta\t\r\n"))
    yield good("underscores", post(headers=b"Content_Length: 3\r\nTransfer_Encoding: chunked\r\n"))
    yield good("a header of 8 KB", post(headers=b"x-a: " + b"a" * 8000 + b"\r\n"))
    yield good("120 headers", post(headers=b"x-a: b\r\n" * 120))
    yield good(
        "upgrade to HTTP/2",
        post(headers=b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"),
    )
    yield good(
        "upgrade to WebSocket", post(headers=b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
    )
    yield Vector(
        "upgrade with a request in the body",
        post(SMUGGLED, b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),
        400,
        "invalid_json",
        closes=False,
    )
    yield good("range", post(headers=b"Range: bytes=0-1\r\nIf-None-Match: *\r\nTE: trailers\r\n"))
    yield good(
        "an empty host", message(headers=length(GOOD_BODY), body=GOOD_BODY, host=b"Host:\r\n")
    )
    yield good(
        "a strange host",
        message(headers=length(GOOD_BODY), body=GOOD_BODY, host=b"Host: [a b]/@\r\n"),
    )
    yield malformed("no host", message(headers=length(GOOD_BODY), body=GOOD_BODY, host=b""))
    yield malformed("two hosts", post(headers=b"Host: y\r\n"))
    for name, line in {
        "a control character": b"x-a: a\x01b",
        "NUL": b"x-a: a\0b",
        "DEL": b"x-a: a\x7fb",
        "CR": b"x-a: a\rb: c",
        "LF": b"x-a: a\nb: c",
        "a folded line": b"x-a: a\r\n b",
        "a blank before the colon": b"x-a : b",
        "no name": b": a",
        "no colon": CANARY,
        "a blank in a name": b"a b: c",
        "UTF-8 in a name": b"\xc3\xa9: a",
        "a value that is no UTF-8": b"x-a: \xe9",
        "a content type twice": b"Content-Type: a/b\r\nContent-Type: c/d",
    }.items():
        yield malformed(f"header with {name}", post(headers=line + b"\r\n"))
    yield malformed("200 headers", post(headers=b"x-a: b\r\n" * 200))
    for name, line in {
        "a header of 9 KB": b"x-a: " + CANARY + b"a" * 9000,
        "a header of 1 MB": b"x-a: " + CANARY + b"a" * 1_000_000,
        "a name of 9 KB": CANARY + b"a" * 9000 + b": b",
    }.items():
        yield Vector(
            name, post(headers=line + b"\r\n"), 431, "request_header_fields_too_large", closes=True
        )
    yield Vector(
        "a path of 9 KB",
        get(b"/" + CANARY + b"a" * 9000),
        431,
        "request_header_fields_too_large",
        closes=True,
    )
    yield Vector(
        "a path of 8 KB", get(b"/" + CANARY + b"a" * 8000), 404, "not_found", closes=False
    )
    yield malformed("LF alone", post().replace(b"\r\n", b"\n"))
    yield malformed("a blank before the method", b" " + post())
    yield malformed("tabs in the request line", post().replace(b" /v1", b"\t/v1", 1))
    yield malformed("random bytes", bytes(range(128, 256)) + CANARY + b"\r\n\r\n")
    yield malformed("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + CANARY + b"\r\n\r\n")
    yield malformed("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    for version in (b"HTTP/1.2", b"HTTP/11", b"http/1.1", b"HTTP/1.1 x", CANARY):
        yield malformed(f"version {version.decode()}", message(b"GET /health " + version))
    for name, version in {"HTTP/2.0": b" HTTP/2.0", "HTTP/0.9": b""}.items():
        sent = b"GET /health" + version + b"\r\n\r\n"
        yield Vector(f"version {name}", sent, 505, "http_version_not_supported", closes=True)


def expectations_and_sizes() -> Iterator[Vector]:
    """Yields what a client announces of its body, and what the body is then."""
    over = b" " * (MAX_BODY_BYTES - len(GOOD_BODY) + 1)
    yield good("as long as allowed", post(GOOD_BODY + over[1:]))
    yield Vector("a byte too long", post(GOOD_BODY + over), 413, "payload_too_large", closes=True)
    yield Vector("10 MB", post(b"[" * 10_000_000), 413, "payload_too_large", closes=True)
    yield Vector(
        "10 MB that never come",
        message(headers=b"Content-Length: 10000000\r\n"),
        413,
        "payload_too_large",
        closes=True,
    )
    chunks = b"".join(
        b"400\r\n" + b" " * 1024 + b"\r\n" for _ in range(MAX_BODY_BYTES // 1024 + 1)
    )
    yield Vector(
        "chunks too long",
        message(headers=CHUNKED, body=chunks + CHUNKS),
        413,
        "payload_too_large",
        closes=True,
    )
    tiny = b"".join(b"1\r\n%c\r\n" % byte for byte in GOOD_BODY) + b"0\r\n\r\n"
    yield good("chunks of a byte", message(headers=CHUNKED, body=tiny))
    for value in (CANARY, b"200-ok", b"100-continue, x", b"100-continue\r\nExpect: x", b""):
        name = value.decode().replace("\r\n", " ") or "nothing"
        yield Vector(
            f"expects {name}",
            post(headers=b"Expect: " + value + b"\r\n"),
            417,
            "expectation_failed",
            closes=True,
        )
    yield Vector(
        "expects to go on with too much",
        message(headers=b"Content-Length: 10000000\r\nExpect: 100-continue\r\n"),
        413, "payload_too_large", closes=True,
    )  # fmt: skip
    for coding in (
        b"gzip",
        b"deflate",
        b"br",
        b"zstd",
        b"lzma",
        b"identity, gzip",
        b"identity\r\nContent-Encoding: gzip",
        CANARY,
    ):
        name = coding.decode().replace("\r\n", " ")
        yield Vector(
            f"encoding {name}",
            post(headers=b"Content-Encoding: " + coding + b"\r\n"),
            415,
            "unsupported_media_type",
            closes=True,
        )
    yield good("encoding identity", post(headers=b"Content-Encoding: Identity\r\n"))
    # What the body is, is known by its route; clients say all kinds of things about it.
    for content_type in (
        b"text/plain",
        b"application/json; charset=utf-16",
        b"multipart/form-data; boundary=x",
        b";;=",
    ):
        yield good(
            f"type {content_type!r}", post(headers=b"Content-Type: " + content_type + b"\r\n")
        )


def methods_and_targets() -> Iterator[Vector]:
    """Yields what is asked for, and how."""
    for method in (b"GET", b"HEAD", b"PUT", b"DELETE", b"PATCH", b"TRACE", b"PROPFIND"):
        yield Vector(
            f"method {method.decode()}", get(CHAT, method), 405, "method_not_allowed", closes=False
        )
    for method in (b"POST", b"PUT", b"DELETE"):
        yield Vector(
            f"{method.decode()} of a page",
            get(b"/health", method),
            405,
            "method_not_allowed",
            closes=False,
        )
    yield Vector("OPTIONS", get(CHAT, b"OPTIONS"), 204, None, closes=False)
    for target in (b"/health", b"/ready", b"/metrics", b"/v1/models"):
        for method in (b"GET", b"HEAD"):
            yield good(
                f"{method.decode()} {target.decode()}", get(target, method), num_generated=0
            )
    yield good("query", get(b"/health?" + CANARY + b"=%ff"), num_generated=0)
    yield good("fragment", get(b"/health#x"), num_generated=0)
    yield good("absolute form", get(b"http://" + CANARY + b"/health"), num_generated=0)
    yield good(
        "a page with a body",
        message(b"GET /health HTTP/1.1", length(SMUGGLED), SMUGGLED),
        num_generated=0,
    )
    yield Vector(
        "CONNECT",
        message(b"CONNECT x:80 HTTP/1.1", length(SMUGGLED), SMUGGLED),
        501,
        "not_implemented",
        closes=True,
    )
    yield malformed("a method in small letters", get(CHAT, b"post"))
    yield malformed("no such method", get(CHAT, CANARY.replace(b"-", b"").upper()))
    for target in (
        *(b"/" + CANARY, b"//admin/decisions", b"/admin/decisions", b"/v1/../admin/decisions"),
        *(b"/v1/%2e%2e/admin/decisions", CHAT + b"/", CHAT + b";x", CHAT + b"%00", b"/V1/models"),
        *(b"/v1%2fmodels", b"/%00", b"/%ff", b"/%ed%a0%80", b"/%", b"/%zz", b"/\\health", b"/.."),
        *(b"/a%0d%0aX:y", b'/"<script>', b"http://x/" + CANARY),
    ):
        yield Vector(f"target {target.decode()[:40]}", get(target), 404, "not_found", closes=False)
    yield Vector("OPTIONS *", get(b"*", b"OPTIONS"), 404, "not_found", closes=False)
    for target in (
        b"*",
        b"health",
        b"@x/health",
        b"/he alth",
        b"/\xff",
        b"/a\x01",
        b"http://[::1",
        b"http://a:99999999/",
    ):
        yield malformed(f"target {target.decode('latin-1')}", get(target))


def bodies() -> Iterator[Vector]:
    """Yields bodies that are framed well; the connection goes on."""
    head = b'{"model":"tiny","messages":[{"role":"user","content":"%b"}]' % CANARY

    def refused(name: str, code: str, body: bytes, status: int = 400) -> Vector:
        return Vector(f"body: {name}", post(body), status, code, closes=False)

    yield good("body: NUL in a text", post(head.replace(CANARY, b"\\u0000") + b',"max_tokens":1}'))
    yield refused("empty", "invalid_json", b"")
    yield refused("not JSON", "invalid_json", CANARY)
    yield refused("truncated", "invalid_json", head)
    yield refused("two", "invalid_json", (head + b"}") * 2)
    yield refused("byte order mark", "invalid_json", b"\xef\xbb\xbf" + head + b"}")
    yield refused("UTF-16", "invalid_json", (head + b"}").decode().encode("utf-16"))
    yield refused("array", "invalid_request", b'["%b"]' % CANARY)
    yield refused("null", "invalid_request", b"null")
    yield refused("a byte that is no UTF-8", "invalid_utf8", head + b',"user":"\xff"}')
    yield refused("half a surrogate pair", "invalid_utf8", head + b',"user":"\\ud800"}')
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"9" * 5000):
        yield refused(
            f"number {number[:9].decode()}", "invalid_number", head + b',"x":{"y":%b}}' % number
        )
    yield refused("key twice", "duplicate_key", head + b',"model":"%b"}' % CANARY)
    yield refused("key twice, escaped", "duplicate_key", head + b',"mod\\u0065l":"x"}')
    yield refused(
        "key twice in a message",
        "duplicate_key",
        head.replace(b'"content"', b'"role":"x","content"') + b"}",
    )
    yield refused(
        "key twice, of the client's",
        "duplicate_key",
        head + b',"x":{"%b":1,"%b":2}}' % (CANARY, CANARY),
    )
    yield refused("too deep", "too_complex", head + b',"x":' + b"[" * 64 + b"]" * 64 + b"}")
    yield refused(
        "deeper than any stack",
        "too_complex",
        head + b',"x":' + b"[" * 40_000 + b"]" * 40_000 + b"}",
    )
    yield refused("long key", "too_complex", head + b',"%b":1}' % (CANARY * 30))
    for name, value in {
        "temperature": b'"1"',
        "max_tokens": b"1.0",
        "n": b"true",
        "seed": b"18446744073709551616",
        "stop": b'["%b",""]' % CANARY,
        "top_p": b"-1",
        "logit_bias": b'{"%b":1}' % CANARY,
        "stream": b'"%b"' % CANARY,
        "messages": b"[]",
    }.items():
        body = b'{"model":"tiny","%b":%b' % (name.encode(), value)
        rest = b"" if name == "messages" else b',"messages":[{"role":"user","content":"hi"}]'
        yield refused(f"{name} {value.decode()[:9]}", "invalid_request", body + rest + b"}")
    yield refused(
        "unknown role", "invalid_request", head.replace(b'"user"', b'"%b"' % CANARY) + b"}"
    )
    yield refused("unknown model", "model_not_found", head.replace(b"tiny", CANARY) + b"}", 404)
    yield refused(
        "breaks of an event stream",
        "model_not_found",
        head.replace(b"tiny", CANARY + b"\\n\\ndata: [DONE]\\n\\n") + b"}",
        404,
    )


VECTORS: Final = (
    *framing(),
    *heads(),
    *expectations_and_sizes(),
    *methods_and_targets(),
    *bodies(),
)
