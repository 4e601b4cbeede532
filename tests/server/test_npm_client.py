"""The real `openai` client of npm against a running server."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.legato_server import KEY, Server

PACKAGE = Path(__file__).with_name("npm")


@pytest.fixture(scope="module")
def node() -> str:
    node, npm = shutil.which("node"), shutil.which("npm")
    assert node and npm, "this test needs node and npm on the path (Node.js 20 or newer)"
    command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    installed = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, timeout=300, check=False)
    assert installed.returncode == 0, installed.stderr
    return node


def test_a_stream(node: str, server: Server) -> None:
    command = [node, str(PACKAGE / "stream.mjs"), f"{server.url}/v1", KEY, "What is the capital of France?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "Paris" in told["whole"]
    assert "".join(told["pieces"]) == told["whole"] and len(told["pieces"]) > 4
    assert told["usage"]["completion_tokens"] > 4
    assert told["refused"] == {"status": 400, "param": "temperature"}
    assert server.settles("legato_running 0.0"), "a stream that was left goes on"
