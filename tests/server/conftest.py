"""A server for a file of tests, and its client."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.legato_server import KEY, Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--api-key", KEY)
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client
