"""A real server to test against."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import httpx
import openai

KEY = "sk-secret"
SETTINGS = ("--page-size", "16", "--max-queue-size", "64", "--num-blocks", "400")


class Server:
    """`legato serve` in a process of its own, on a port that was free.

    Args:
        options: of the command.
        settings: further ones, of a cache and a queue that are small.
    """

    def __init__(self, *options: str, settings: Sequence[str] = SETTINGS) -> None:
        command = [sys.executable, "-m", "legato.cli", "serve", "smollm2", "--port", "0", *settings, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log = ""
        while not (found := re.search(r"serving smollm2 on (http://[0-9.:]+[0-9])", self.log)):
            line = self.process.stderr.readline()
            assert line, self.log
            self.log += line
        self.url = found[1]
        threading.Thread(target=self._read_log, daemon=True).start()  # a full pipe would stop it

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
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
