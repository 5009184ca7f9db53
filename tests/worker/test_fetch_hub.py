"""The hub's own client, against a server on loopback that gives the few answers it asks for."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typing_extensions import override

SPEC = "owner/tiny"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"never to be fetched: a pickle",
    "onnx/config.json": b"another format's",
}
COMMIT = "c" * 40


class FakeHub(BaseHTTPRequestHandler):
    """The few answers of the Hugging Face Hub that a download asks for."""

    @override
    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        headers = {"X-Repo-Commit": COMMIT}
        status, body = 200, b""
        if "missing" in path:
            status, headers["X-Error-Code"] = 404, "RepoNotFound"
        elif path.endswith(f"/tree/{COMMIT}"):
            body = json.dumps(
                [
                    {"type": "file", "path": file, "size": len(data), "oid": "0" * 40}
                    for file, data in FILES.items()
                ]
            ).encode()
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": file} for file in FILES]
            body = json.dumps({"id": SPEC, "sha": COMMIT, "siblings": siblings}).encode()
        elif name in FILES:
            body = FILES[name]
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'  # noqa: S324
        else:
            status = 404
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if not is_head:
            self.wfile.write(body)


@pytest.fixture
def hub_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask_hub(url: str, spec: str, into: Path) -> str:
    """Run `download_from_hub` in a process of its own: its client reads the address at import."""
    script = """
        import sys
        from pathlib import Path
        from kvway_worker.fetch import download_from_hub
        try:
            download_from_hub(sys.argv[1], Path(sys.argv[2]))
        except Exception as error:
            print(type(error).__name__, error)
        else:
            print("done")
    """
    env = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(into / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), spec, str(into / "model")],
        env=env,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return done.stdout.strip()


def test_the_hub_gives_weights_tokenizer_and_configuration(hub_url: str, tmp_path: Path) -> None:
    assert ask_hub(hub_url, SPEC, tmp_path) == "done"
    fetched = {
        str(file.relative_to(tmp_path / "model")): file.read_bytes()
        for file in (tmp_path / "model").rglob("*")
        if file.is_file()
    }
    wanted = ("config.json", "tokenizer.json", "model.safetensors")
    assert fetched == {name: FILES[name] for name in wanted}


def test_a_model_that_the_hub_does_not_have_is_refused(hub_url: str, tmp_path: Path) -> None:
    answer = ask_hub(hub_url, "owner/missing", tmp_path)
    assert answer.startswith("ConfigError model 'owner/missing'")


def test_a_hub_that_cannot_be_reached_is_told_from_one_that_refuses(tmp_path: Path) -> None:
    assert ask_hub("http://127.0.0.1:9", SPEC, tmp_path).startswith("HubUnreachableError")
