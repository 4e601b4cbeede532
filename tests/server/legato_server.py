"""A real server to test against."""

import time
from collections.abc import Sequence

import httpx
import openai

from legato.bench.served import Served

KEY = "sk-secret"
SETTINGS = ("--page-size", "16", "--max-queue-size", "64", "--num-blocks", "400")


class Server:
    """`legato serve` in a process of its own, on a port that was free.

    Args:
        options: of the command.
        settings: further ones, of a cache and a queue that are small.
    """

    def __init__(self, *options: str, settings: Sequence[str] = SETTINGS) -> None:
        self._served = Served(*settings, *options)
        self.process, self.url = self._served.process, self._served.url

    @property
    def log(self) -> str:
        return self._served.log

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def settles(self, line: str, key: str = KEY, seconds: float = 10) -> bool:
        """Whether the metrics come to hold such a line."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if line in httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {key}"}).text.splitlines():
                return True
            time.sleep(0.05)
        return False

    def stop(self) -> None:
        assert self._served.stop() == 0
