"""`kvway worker` on a machine without a C++ compiler: it starts, and says what attends and why."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import aiohttp
import pytest

from tests.worker.test_http_process import START_LIMIT_S, command
from tests.worker.torch_models import write_model

REASON = "no C++ compiler: install g++, or name one in the environment variable CXX"


@pytest.mark.timeout(START_LIMIT_S + 20)
async def test_a_worker_without_a_compiler_answers_and_says_what_attends_and_why(
    tmp_path: Path,
) -> None:
    """In its log and in its metrics, by name; nothing is compiled."""
    model, home, nothing = tmp_path / "model", tmp_path / "home", tmp_path / "bin"
    for folder in (model, home, nothing):
        folder.mkdir()
    write_model(model)
    ready_file = tmp_path / "ready.json"
    env = {name: value for name, value in os.environ.items() if name not in {"CXX", "CC"}}
    popen = await asyncio.create_subprocess_exec(
        *command("--model", str(model), "--num-blocks", "64", "--port", "0"),
        *("--ready-file", str(ready_file)),
        env={**env, "PATH": str(nothing), "KVWAY_HOME": str(home)},
        stderr=asyncio.subprocess.PIPE,
    )
    assert popen.stderr is not None
    loaded: dict[str, str] = {}
    try:
        async with asyncio.timeout(START_LIMIT_S):
            async for line in popen.stderr:
                said = json.loads(line)
                if said["event"] == "torch_engine_loaded":
                    loaded = said
                if said["event"] == "worker_ready":
                    break
            url = json.loads(ready_file.read_text())["url"]
            async with aiohttp.ClientSession() as http:
                async with http.get(url + "/metrics") as response:
                    metrics = await response.text()
                body = {"model": model.name, "prompt": [1, 2, 3], "max_tokens": 2}
                async with http.post(url + "/v1/completions", json=body) as response:
                    answered = response.status, await response.json()
    finally:
        popen.kill()
        await popen.communicate()
    assert (loaded["attention"], loaded["attention_reason"]) == ("sdpa", REASON)
    [info] = [line for line in metrics.splitlines() if line.startswith("kvway_attention_info{")]
    assert 'implementation="sdpa"' in info
    assert f'reason="{REASON}"' in info
    assert answered[0] == 200, answered[1]
    assert not (home / "compiled").exists() or not list(home.rglob("*.so"))
