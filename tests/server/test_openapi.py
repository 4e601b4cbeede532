"""The server's own OpenAPI: the reference is made of it, and schemathesis finds no answer that it does not declare."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from legato.cli.reference import reference
from tests.server.legato_server import KEY, Server

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "missing_required_header", "unsupported_method",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Its calls end soon, whatever they ask for."""
    server = Server("--api-key", KEY, "--request-timeout", "1")
    yield server
    server.stop()


def test_the_reference_is_up_to_date() -> None:
    assert REFERENCE.read_text() == reference(), "run: make reference"


def test_every_field_and_flag_is_described(server: Server) -> None:
    told = httpx.get(f"{server.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    bare = [
        f"{name}.{field}"
        for name, schema in told["components"]["schemas"].items()
        if name.endswith(("Request", "Options"))
        for field, said in schema["properties"].items()
        if not said.get("description")
    ]
    assert not bare, f"describe {bare} with Field(description=...)"
    assert not re.findall(r"^\| `--.* \|  \|$", reference(), re.MULTILINE)


def test_fuzz(server: Server, tmp_path: Path) -> None:
    seconds = int(os.environ.get("LEGATO_FUZZ_SECONDS", "40"))
    report = tmp_path / "report.json"
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color", "--seed", "6",
        "--max-time", str(seconds), "--max-examples", "100000", "--phases", "coverage,fuzzing",
        "--header", f"Authorization: Bearer {KEY}", "--checks", ",".join(CHECKS), "--generation-database", "none",
        "--request-timeout", "30", "--continue-on-failure", "--no-shrink", "--report-json-path", str(report),
    ]  # fmt: skip
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.server.fuzz_hooks"}
    told = subprocess.run(
        command, cwd=REFERENCE.parents[1], env=environment, capture_output=True, text=True, timeout=seconds + 120,
        check=False,
    )  # fmt: skip
    print(told.stdout)
    assert told.returncode == 0, told.stdout[-8000:] + told.stderr[-2000:]
    assert json.loads(report.read_text())
    metrics = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    generated = re.search(r"^legato_generated_tokens_total (\S+)$", metrics, re.MULTILINE)
    assert generated is not None and float(generated[1]) > 100  # it was let in, and answered
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.settles("legato_running 0.0")
