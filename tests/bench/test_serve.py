"""`legato bench serve`: its arithmetic, a server whose delays and chunks are known, and a real one."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from legato.bench.load import Load, Repeated, TraceBodies, bodies_of_prompts, bodies_of_workload, poisson
from legato.bench.serve import EventReader
from legato.bench.serve_figures import Reply, ServeFigures, Slo
from legato.errors import InvalidValueError
from legato.simulate.traces import read_trace
from tests.server.legato_server import KEY, Server

DATA = Path(__file__).parent.parent / "data"
ROOT = Path(__file__).parent.parent.parent

# Arithmetic


def test_figures_are_numpys() -> None:
    rng = np.random.default_rng(0)
    replies = []
    for due in rng.uniform(0, 9, 50):
        sent = due + rng.uniform(0, 0.1)
        pieces = sent + np.cumsum(rng.uniform(0.01, 0.5, 8))
        replies.append(Reply(due, sent, pieces[-1] + 0.2, pieces.tolist(), 10, 3, 20))
    replies.append(Reply(1.0, 1.0, 30.0, (2.0, 3.0), 7, 7, 7, error="timeout"))
    told = ServeFigures.of(60, replies, Slo(900, 130), [0.001, 0.003], 7.5)
    good = replies[:-1]
    waits = {
        "ttft_ms": [r.pieces[0] - r.due for r in good],
        "inter_token_ms": [(r.pieces[-1] - r.pieces[0]) / 19 for r in good],
        "gap_ms": [gap for r in good for gap in np.diff(r.pieces)],
        "request_ms": [r.ended - r.due for r in good],
        "lateness_ms": [r.sent - r.due for r in replies],
    }
    for name, seconds in waits.items():
        of = getattr(told, name)
        assert (of.p50, of.p90, of.p99) == pytest.approx(np.percentile(seconds, (50, 90, 99)) * 1e3, abs=0.01)
        assert of.mean == pytest.approx(np.mean(seconds) * 1e3, abs=0.01)
    met = (np.array(waits["ttft_ms"]) <= 0.9) & (np.array(waits["inter_token_ms"]) <= 0.13)
    assert 0 < met.sum() < 50 and told.goodput == pytest.approx(met.sum() / 30, abs=1e-3)
    assert (told.requests, told.completed, told.errors, told.seconds) == (60, 50, {"timeout": 1}, 30.0)
    assert (told.prompt_tokens, told.cached_tokens, told.tokens) == (500, 150, 1000)
    assert told.tokens_per_second == pytest.approx(1000 / 30, abs=0.1) and told.tokens_per_piece == 2.5
    assert told.cpu_share == 0.25
    moments = np.linspace(0, 30, 30001)
    under_way = sum((moments >= r.sent) & (moments < r.ended) for r in replies)
    assert told.concurrency["most"] == under_way.max()
    assert told.concurrency["mean"] == pytest.approx(under_way.mean(), abs=0.02)


def test_edges_of_figures() -> None:
    nothing = ServeFigures.of(3, [], Slo(1, 1), [], 0)
    assert (nothing.ttft_ms, nothing.tokens_per_second, nothing.goodput) == (None, 0.0, 0.0)
    assert "0 of 3 requests" in nothing.text() and nothing.warning() is None
    one_token = Reply(0, 0, 1, (0.5,), output_tokens=1)
    without_text = Reply(0, 0, 2, (), output_tokens=3)
    told = ServeFigures.of(2, [one_token, without_text], Slo(inter_token_ms=1), [0.5], 0)
    assert told.inter_token_ms is None and told.goodput == 1.0 and told.ttft_ms is not None
    assert told.ttft_ms.mean == 1250 and told.gap_ms is None
    assert ServeFigures.of(1, [one_token], Slo(), [], 0).goodput is None
    # One ends in the very moment in which the next begins: never two at once.
    turns = [Reply(i, i, i + 1, (i + 0.5,)) for i in range(3)]
    assert ServeFigures.of(3, turns, Slo(), [], 0).concurrency == {"mean": 1.0, "most": 1}
    late = ServeFigures.of(3, [Reply(0, 0.4, 1)], Slo(), [0.0], 0)
    assert "400 ms" in (late.warning() or "") and "woke" not in (late.warning() or "")


# What is sent, and when


def test_arrivals() -> None:
    due = poisson(4.0, 20_000, seed=1)
    gaps = np.diff(due)
    assert due[0] == 0 and len(due) == 20_000 and due == poisson(4.0, 20_000, seed=1) != poisson(4.0, 20_000, seed=2)
    # Exponential: mean and standard deviation 1/4, and 1/e of the gaps are longer than the mean.
    assert gaps.mean() == pytest.approx(0.25, rel=0.03) and gaps.std() == pytest.approx(0.25, rel=0.03)
    assert (gaps > 0.25).mean() == pytest.approx(np.exp(-1), rel=0.03)


def test_bodies_of_traces() -> None:
    requests = read_trace(DATA / "mooncake_400.jsonl", "mooncake", limit=40)
    bodies = TraceBodies(requests, 0, {"temperature": 0})
    assert [(len(b["prompt"]), b["max_tokens"]) for b in bodies] == [
        (r.prompt_length, r.output_length) for r in requests
    ]
    assert bodies[3] == bodies[3] and bodies[3]["prompt"] != TraceBodies(requests, 1, {})[3]["prompt"]
    for a in range(5):
        for b in range(a):
            ids = zip(requests[a].block_ids or (), requests[b].block_ids or (), strict=False)
            shared = next((i for i, (one, other) in enumerate(ids) if one != other), None)
            assert shared is not None
            assert bodies[a]["prompt"][: shared * 512] == bodies[b]["prompt"][: shared * 512]
            assert bodies[a]["prompt"][shared * 512] != bodies[b]["prompt"][shared * 512]
    azure = TraceBodies(read_trace(DATA / "azure_200.csv", "azure", limit=3), 0, {})
    assert [len(b["prompt"]) for b in azure][:2] == [374, 396] and azure[0]["prompt"][:9] != azure[1]["prompt"][:9]


def test_bodies_of_files(tmp_path: Path) -> None:
    lines = [
        "The sky",
        {"prompt_ids": [5, 6], "max_new_tokens": 3, "temperature": 1, "id": 7},
        {"messages": [{"role": "user", "content": "Hi"}], "cache_salt": "a"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    common = {"temperature": 0, "max_tokens": 9}
    plain = {"temperature": 0, "max_tokens": 9, "prompt": "The sky"}
    ids = {"temperature": 1, "max_tokens": 3, "prompt": [5, 6]}
    chat = {"temperature": 0, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "cache_salt": "a"}
    bodies = bodies_of_prompts(path, False, common)
    assert bodies == [plain, ids, chat]
    assert bodies_of_prompts(path, True, common)[0]["messages"] == [{"role": "user", "content": "The sky"}]
    assert list(Repeated(bodies, 5)) == [plain, ids, chat, plain, ids] and list(Repeated(bodies, 1)) == [plain]
    path.write_text('fine\n{"no": 1}')
    with pytest.raises(InvalidValueError, match="prompt 2: a line needs exactly one of"):
        bodies_of_prompts(path, False, {})
    path.write_text('{"name": "w", "requests": [{"prompt_ids": [1], "max_new_tokens": 4}]}')
    assert bodies_of_workload(path, common) == [{"temperature": 0, "prompt": [1], "max_tokens": 4}]
    with pytest.raises(InvalidValueError, match="no request"):
        Load([], None, 1)


def test_events_however_they_are_cut() -> None:
    events = [{"text": "ä"}, {"a": {"b": [1, 2]}}]
    stream = b": comment\r\n\r\n" + b"".join(b"data: " + json.dumps(e).encode() + b"\r\n\r\n" for e in events)
    stream += b"data:[DONE]\n\n"
    for size in range(1, len(stream) + 1):
        reader = EventReader()
        told = [e for i in range(0, len(stream), size) for e in reader.push(stream[i : i + size])]
        assert told == events and reader.done


# Against a server whose delays and chunks are known

FIRST, GAP = 0.05, 0.02


async def known_server(slow_begun: threading.Event, scope: Any, receive: Any, send: Any) -> None:
    """Answers with chunks of 1, 2, 3, 1, 2, 3... tokens, the first after FIRST and the others GAP apart; the prompt may
    ask for something else.
    """
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    asked = json.loads(body)
    assert asked["stream"] and asked["stream_options"] == {"include_usage": True}
    what = asked["prompt"] if "prompt" in asked else asked["messages"][0]["content"]
    if what == "slow":
        slow_begun.set()
    status = {"refuse": 429, "moved": 302}.get(str(what), 200)
    headers = [(b"content-type", b"text/event-stream"), (b"location", b"/elsewhere")]
    await send({"type": "http.response.start", "status": status, "headers": headers})

    async def event(content: Any) -> None:
        data = content if isinstance(content, str) else json.dumps(content)
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

    left, sizes = asked["max_tokens"], 0
    while left > 0 and status == 200:
        await asyncio.sleep(5 if what == "slow" else FIRST if sizes == 0 else GAP)
        size = min(left, 1 + sizes % 3)
        left, sizes = left - size, sizes + 1
        choice = {"text": "a" * size} if "prompt" in asked else {"delta": {"content": "a" * size}}
        await event({"choices": [{"index": 0, "finish_reason": None, **choice}]})
        if what == "break":
            await event({"error": {"message": "broken"}})
    usage = {
        "prompt_tokens": 4,
        "completion_tokens": asked["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    await event({"choices": [], "usage": None if what == "no usage" else usage})
    if what != "cut":
        await event("[DONE]")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture(scope="module")
def slow_begun() -> threading.Event:
    """Set once somebody has asked for the slow answer."""
    return threading.Event()


@pytest.fixture(scope="module")
def known(slow_begun: threading.Event) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(
            partial(known_server, slow_begun), port=port, log_level="error", lifespan="off", interface="asgi3"
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def bench(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "legato.cli", "bench", "serve", "--model", "m", "--url", url, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def prompts(tmp_path: Path) -> Any:
    def write(*lines: Any) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in lines))
        return str(path)

    return write


def test_chunks_of_several_tokens_are_counted_right(known: str, prompts: Any) -> None:
    lines = [{"prompt": "a", "max_new_tokens": 12}, {"messages": [{"role": "user", "content": "b"}]}]
    done = bench(known, "--prompts", prompts(*lines), "--clients", "2", "--max-tokens", "7", "--requests", "6")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["completed"], told["errors"], told["tokens"]) == (6, {}, 3 * 12 + 3 * 7)
    assert (told["prompt_tokens"], told["cached_tokens"], told["concurrency"]["most"]) == (24, 6, 2)
    assert told["tokens_per_piece"] == round(57 / (3 * 6 + 3 * 4), 3)
    # A server that sleeps can only be slower than that; how much slower is not of interest here.
    assert told["ttft_ms"]["p50"] >= FIRST * 1e3 and told["gap_ms"]["mean"] >= GAP * 1e3 * 0.9
    assert told["inter_token_ms"]["p99"] < told["gap_ms"]["p99"]
    assert told["seconds"] >= (FIRST + 5 * GAP) + (FIRST + 3 * GAP)


def test_errors_by_kind(known: str, prompts: Any) -> None:
    lines = [{"prompt": what} for what in ("refuse", "slow", "break", "no usage", "cut", "fine", "refuse", "moved")]
    options = ("--rate", "1000", "--timeout", "1", "--max-tokens", "4", "--slo-ttft", "60000")
    done = bench(known + "/v1/", "--prompts", prompts(*lines), *options)
    told = json.loads(done.stdout)
    assert told["errors"] == {
        "HTTP 429": 2, "HTTP 302": 1, "timeout": 1, "error in the stream": 1, "no usage told": 1, "ended too soon": 1
    }  # fmt: skip
    assert (told["completed"], told["tokens"], done.returncode) == (1, 4, 0)
    assert told["goodput"] == pytest.approx(1 / told["seconds"], abs=1e-3)
    assert told["concurrency"]["most"] > 1  # open: nobody waits for those before


def test_a_trace_is_played_at_its_own_times(known: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{seconds:09.6f},5,4" for seconds in (10.0, 10.2, 11.0)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    done = bench(known, "--trace", str(path), "--format", "azure", "--speedup", "2")
    told = json.loads(done.stdout)
    assert (told["completed"], told["tokens"]) == (3, 12)
    assert told["seconds"] >= 0.5 + FIRST  # half of the second that the last one came after the first


def test_ctrl_c_prints_what_is_finished(known: str, slow_begun: threading.Event, prompts: Any) -> None:
    path = prompts({"prompt": "fine"}, {"prompt": "fine"}, {"prompt": "slow"})
    slow_begun.clear()
    command = [sys.executable, "-m", "legato.cli", "bench", "serve", "--model", "m", "--url", known, "--prompts", path]
    with subprocess.Popen(
        [*command, "--clients", "1", "--max-tokens", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert slow_begun.wait(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    told = json.loads(out)
    assert (told["requests"], told["completed"], told["errors"], told["tokens"]) == (3, 2, {}, 4)


def test_refusals(known: str, prompts: Any) -> None:
    path = prompts({"prompt": "fine"})
    for options, said in [
        ((), "one of --workload, --prompts and --trace"),
        (("--prompts", path), "--clients or --rate"),
        (("--prompts", path, "--clients", "1", "--rate", "1"), "--clients or --rate"),
        (("--prompts", path, "--clients", "1", "--format", "azure"), "--format"),
        (("--prompts", path, "--clients", "1", "--speedup", "2"), "--speedup"),
    ]:
        done = bench(known, *options)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        done = bench(url, "--prompts", path, "--clients", "1")
    assert done.returncode == 2 and f"url='{url}' cannot be reached" in done.stderr
    for url in ("", "localhost:8000", "127.0.0.1:8000", "ftp://localhost", "http://", "http://localhost:99999"):
        done = bench(url, "--prompts", path, "--clients", "1")
        assert done.returncode == 2 and f"url='{url}' is not allowed" in done.stderr, done.stderr


# Against a real one


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--api-key", KEY)
    yield server
    server.stop()


def test_a_real_server(server: Server, tmp_path: Path) -> None:
    workload = json.loads((ROOT / "bench/mixed.json").read_text())
    requests = [{**r, "max_new_tokens": 5 + i} for i, r in enumerate(workload["requests"][:8])]
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"name": "w", "requests": requests}))
    options = ("--workload", str(path), "--rate", "20", "--slo-ttft", "600000", "--slo-itl", "600000")
    done = bench(server.url, *options, "--model", "smollm2", "--api-key", KEY)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["completed"], told["errors"]) == (8, {})
    assert told["tokens"] == sum(r["max_new_tokens"] for r in requests)
    assert told["prompt_tokens"] == sum(len(r["prompt_ids"]) for r in requests)
    assert told["goodput"] == told["requests_per_second"] > 0
    assert 0 < told["ttft_ms"]["p50"] < told["request_ms"]["p50"] and told["gap_ms"]["mean"] > 0
    refused = bench(server.url, *options, "--model", "smollm2", "--api-key", "wrong")
    assert refused.returncode == 2 and "HTTP 401" in refused.stderr
    unknown = bench(server.url, *options, "--api-key", KEY)
    assert unknown.returncode == 2 and "HTTP 404" in unknown.stderr and "smollm2" in unknown.stderr
