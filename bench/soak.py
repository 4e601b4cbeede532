"""Misuse a real `legato serve` for some minutes, and see that it keeps its word to those who behave.

    python bench/soak.py --minutes 15

64 clients stay, leave before or in the middle of an answer, send half of a body, junk or what is far too much, read
slowly; all at random, by a seed. The exit status is 1 if a request that was well formed and stayed got anything but
its whole answer (or 429), if anything was answered with 5xx, if /health did not say 200 all the time, if anything runs
or holds memory at the end, or, in runs of 5 minutes or more, if the server has grown by more than 3% after a third.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from legato.bench.served import Served

CLIENTS = 64
PATIENCE_SECONDS = 120
SETTINGS = ("--page-size", "16", "--num-blocks", "300", "--max-queue-size", "24", "--max-body-bytes", "500000")
PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time", "def fib(n):", "1, 2, 3,", "Dear Sir,"]
RECURSIVE_SCHEMA = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
TOO_MUCH: list[dict[str, Any]] = [
    {"prompt": "x", "n": 5000},
    {"prompt": "x", "max_tokens": 10**9},
    {"prompt": "x " * 60_000},
    {"prompt": [5] * 30_000},
    {"prompt": ["x"] * 1000},
    {"prompt": "x", "logit_bias": {str(i): 100.0 for i in range(20_000)}, "max_tokens": 2},
    {"prompt": "x", "json_schema": {"type": "nonsense"}},
    {"prompt": "x", "json_schema": RECURSIVE_SCHEMA, "max_tokens": 8},
    {"prompt": "x", "regex": "(((" * 50},
    {"prompt": "x", "temperature": -1},
    {"prompt": []},
    {"prompt": "x", "stop": ["y"] * 5000, "max_tokens": 2},
]


@dataclass
class Soak:
    """One run against a server.

    Attributes:
        url: of the server.
        process: the server.
        answers: of `PROMPTS`, greedy, by an idle server.
        seen: what happened, how often.
        failures: what must not happen.
        rss: the server's memory in bytes, over time.
    """

    url: str
    process: psutil.Process
    answers: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)

    async def run(self, seconds: float, seed: int) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_SECONDS, limits=limits) as http:
            for prompt in PROMPTS:
                told = await http.post("/v1/completions", json=greedy(prompt))
                self.answers.append(told.json()["choices"][0]["text"])
            deadline = time.monotonic() + seconds
            watching = asyncio.create_task(self._watch(http))
            async with asyncio.TaskGroup() as clients:
                for number in range(CLIENTS):
                    clients.create_task(self._client(http, random.Random(f"{seed} {number}"), deadline))
            watching.cancel()
            await self._end(http)

    async def _client(self, http: httpx.AsyncClient, rng: random.Random, deadline: float) -> None:
        ways = (
            self._stay, self._stay, self._stay_streaming, self._stay_streaming, self._sample, self._leave_streaming,
            self._leave, self._half_a_body, self._junk, self._too_much,
        )  # fmt: skip
        while time.monotonic() < deadline:
            way = rng.choice(ways)
            start = time.monotonic()
            try:
                status = await way(http, rng)
            except httpx.HTTPError as error:
                self.failures.append(f"{way.__name__}: {type(error).__name__} after {time.monotonic() - start:.0f} s")
                continue
            self.seen[f"{way.__name__[1:]} {status}"] += 1
            if status >= 500:
                self.failures.append(f"{way.__name__}: HTTP {status}")
            if status == 429:
                await asyncio.sleep(rng.uniform(0.1, 1))

    # Those who behave

    async def _stay(self, http: httpx.AsyncClient, rng: random.Random) -> int:
        which = rng.randrange(len(PROMPTS))
        told = await http.post("/v1/completions", json=greedy(PROMPTS[which]))
        if told.status_code != 429:
            self._compare(which, told.status_code, told.json()["choices"][0]["text"] if told.is_success else told.text)
        return told.status_code

    async def _stay_streaming(self, http: httpx.AsyncClient, rng: random.Random) -> int:
        which, text, done = rng.randrange(len(PROMPTS)), "", False
        pause = rng.choice((0, 0, 0.1))  # some read slowly
        async with http.stream("POST", "/v1/completions", json={**greedy(PROMPTS[which]), "stream": True}) as told:
            async for line in told.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    text += event["choices"][0]["text"] if "choices" in event else line
                await asyncio.sleep(pause)
            if told.status_code != 429:
                self._compare(which, told.status_code, text if done else f"{text} and no end")
            return told.status_code

    async def _sample(self, http: httpx.AsyncClient, rng: random.Random) -> int:
        asked = {"prompt": rng.choice(PROMPTS), "n": 3, "temperature": 1, "max_tokens": 20, "ignore_eos": True}
        told = await http.post("/v1/completions", json=asked)
        if told.is_success and told.json()["usage"]["completion_tokens"] != 60:
            self.failures.append(f"samples are not whole: {told.json()['usage']}")
        elif not told.is_success and told.status_code != 429:
            self.failures.append(f"samples: HTTP {told.status_code}")
        return told.status_code

    def _compare(self, which: int, status: int, text: str) -> None:
        if status != 200 or text != self.answers[which]:
            self.failures.append(f"{PROMPTS[which]!r} was answered with HTTP {status} {text[:200]!r}")

    # Those who do not

    async def _leave_streaming(self, http: httpx.AsyncClient, rng: random.Random) -> int:
        asked = {"prompt": rng.choice(PROMPTS), "max_tokens": 500, "ignore_eos": True, "stream": True}
        left = rng.randrange(20)
        async with http.stream("POST", "/v1/completions", json=asked) as told:
            async for _ in told.aiter_lines():
                left -= 1
                if left < 0:
                    break
            return told.status_code

    async def _leave(self, http: httpx.AsyncClient, rng: random.Random) -> int:
        asked = {"prompt": rng.choice(PROMPTS), "max_tokens": 500, "ignore_eos": True, "n": rng.randrange(1, 4)}
        try:
            async with asyncio.timeout(rng.uniform(0, 1)):
                return (await http.post("/v1/completions", json=asked)).status_code
        except TimeoutError:
            return 0

    async def _half_a_body(self, http: httpx.AsyncClient, rng: random.Random) -> int:
        url = httpx.URL(self.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        body = json.dumps(greedy(rng.choice(PROMPTS))).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write((head + body)[: rng.randrange(1, len(head + body))])
        await writer.drain()
        await asyncio.sleep(rng.uniform(0, 2))
        writer.close()
        return 0

    async def _junk(self, http: httpx.AsyncClient, rng: random.Random) -> int:
        path = rng.choice(
            ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/nothing", "/metrics")
        )
        content = rng.choice((rng.randbytes(rng.randrange(2000)), b"{" * 5000, b'{"prompt": null}', b"[" * 100_000))
        headers = {"Content-Type": rng.choice(("application/json", "text/plain", "multipart/form-data"))}
        return (
            await http.request(rng.choice(("POST", "PUT", "GET")), path, content=content, headers=headers)
        ).status_code

    async def _too_much(self, http: httpx.AsyncClient, rng: random.Random) -> int:
        asked = rng.choice(TOO_MUCH)
        try:
            async with asyncio.timeout(5):  # some of it is answered, and takes its time
                return (await http.post("/v1/completions", json=asked)).status_code
        except TimeoutError:
            return 0

    # Looking on

    async def _watch(self, http: httpx.AsyncClient) -> None:
        while True:
            try:
                told = await http.get("/health", timeout=10)
                if told.status_code != 200:
                    self.failures.append(f"/health: HTTP {told.status_code}")
            except httpx.HTTPError as error:
                self.failures.append(f"/health: {type(error).__name__}")
            self.rss.append(self.process.memory_info().rss)
            await asyncio.sleep(1)

    async def _end(self, http: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + 10
        while True:
            text = (await http.get("/metrics")).text
            left = {name: float(value) for name, value in re.findall(r"^(legato_\w+) (\S+)$", text, re.MULTILINE)}
            left = {name: left[name] for name in ("legato_running", "legato_waiting", "legato_cache_used_share")}
            if not any(left.values()):
                return
            if time.monotonic() > deadline:
                self.failures.append(f"10 seconds after the last request there is still {left}")
                return
            await asyncio.sleep(0.2)

    def growth(self) -> float:
        """Of the server's memory since the first third: medians of twentieths of the run."""
        size = max(1, len(self.rss) // 20)
        third = len(self.rss) // 3
        return statistics.median(self.rss[-size:]) / statistics.median(self.rss[third : third + size]) - 1


def greedy(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    server = Served(*SETTINGS)
    run = Soak(server.url, psutil.Process(server.process.pid))
    try:
        asyncio.run(run.run(asked.minutes * 60, asked.seed))
    finally:
        status = server.stop()
    growth = run.growth()
    if asked.minutes >= 5 and growth > 0.03:
        run.failures.append(f"the server has grown by {growth:.1%}")
    if status != 0:
        run.failures.append(f"the server ended with {status}")
    told = {"seen": dict(sorted(run.seen.items())), "growth": round(growth, 4), "rss_mib": run.rss[-1] >> 20}
    print(json.dumps({**told, "failures": len(run.failures), "first": run.failures[:10]}, indent=1))
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
