"""What goes wrong: engines that fail, clients that are slow, gone or too many, servers that must stop."""

import asyncio
import gc
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ValidationError

from legato import ContinuousBatchingConfig, ContinuousBatchingManager
from legato.grammar import GrammarCompiler
from legato.request import RequestSpec
from legato.server import run as running
from legato.server.errors import ApiError
from legato.server.limits import Limits, OpenCalls
from legato.server.protocol import (
    CONSTRAINTS_ELSEWHERE,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
)
from legato.server.service import MOST_PREPARING, Service
from tests.server.legato_server import KEY, Server
from tests.tiny import tiny_llama

ENDLESS: Any = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "required": ["x"], "additionalProperties": False,
                                                     "properties": {"x": {"$ref": "#/$defs/a"}}}}}  # fmt: skip
LONG = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@contextmanager
def serving(manager: ContinuousBatchingManager, tokenizer: Any, **settings: Any) -> Iterator[str]:
    """The same server in a thread of this process, where it can be tampered with; its address."""
    urls: list[str] = []
    is_up = threading.Event()
    with manager.session():
        service = Service(manager, tokenizer, "tiny", **settings)
        server = running.new_server(service, "127.0.0.1", 0, 5.0, lambda url: (urls.append(url), is_up.set()))
        thread = threading.Thread(target=server.run)
        thread.start()
        assert is_up.wait(30)
        try:
            yield urls[0]
        finally:
            server.should_exit = server.force_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def open_server(smollm2_tokenizer: Any) -> Iterator[str]:
    config = ContinuousBatchingConfig(page_size=16, num_blocks=100, max_batch_tokens=256)
    model = tiny_llama(vocab_size=len(smollm2_tokenizer))
    manager = ContinuousBatchingManager(model, continuous_batching_config=config, tokenizer=smollm2_tokenizer)
    with serving(manager, smollm2_tokenizer, limits=Limits(characters=5000)) as url:
        yield url
    manager.destroy()


@pytest.fixture
def manager() -> Iterator[ContinuousBatchingManager]:
    config = ContinuousBatchingConfig(page_size=16, num_blocks=400, max_batch_tokens=256, max_queue_size=4)
    manager = ContinuousBatchingManager(tiny_llama(), continuous_batching_config=config)
    yield manager
    manager.stop(hard_stop=True)


def ids(url: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": [1, 2, 3], "ignore_eos": True, **more}, timeout=60)


def test_an_engine_that_fails_tells_everybody_and_is_not_healthy(
    manager: ContinuousBatchingManager, smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = manager._thread._engine
    assert engine is not None
    step, fails = engine.step, threading.Event()

    def step_or_fail(*given: Any) -> Any:
        if fails.is_set():
            raise ZeroDivisionError("planted")
        time.sleep(0.01)
        return step(*given)

    monkeypatch.setattr(engine, "step", step_or_fail)
    with ThreadPoolExecutor() as threads, serving(manager, smollm2_tokenizer) as url:
        whole = [threads.submit(ids, url, max_tokens=3000) for _ in range(3)]
        streamed = {"prompt": [5], "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=streamed, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            fails.set()
            rest = [line for line in lines if line]
        assert "engine_failed" in rest[-2] and rest[-1] == "data: [DONE]"
        for call in whole:
            told = call.result(30)
            assert told.status_code == 500 and told.json()["error"]["code"] == "engine_failed"
            assert "planted" not in told.text
        assert httpx.get(f"{url}/health").status_code == 503 and httpx.get(f"{url}/ready").status_code == 503
        after = ids(url)
        assert after.status_code in (500, 503) and after.json()["error"]["type"] == "server_error"


def test_a_fault_of_the_server_itself_is_told_in_openais_shape(
    manager: ContinuousBatchingManager, smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [ZeroDivisionError("planted"), ValueError("planted"), KeyError("planted")]

    def fail(*_: object) -> None:
        raise faults.pop()

    monkeypatch.setattr(Service, "specs", fail)
    with serving(manager, smollm2_tokenizer) as url:
        while faults:
            told = ids(url)
            assert told.status_code == 500 and told.json()["error"]["message"] == "internal error"


def test_a_full_queue_says_when_to_come_again(manager: ContinuousBatchingManager, smollm2_tokenizer: Any) -> None:
    with ThreadPoolExecutor(16) as threads, serving(manager, smollm2_tokenizer) as url, manager.pause():
        calls = [threads.submit(ids, url, max_tokens=2) for _ in range(4)]
        while manager._thread._engine.num_waiting < 4:  # type: ignore[union-attr]
            time.sleep(0.01)
        refused = ids(url, max_tokens=2)
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        several = ids(url, max_tokens=2, prompt=[[1], [2], [3], [4]])
        assert several.status_code == 429
    assert [call.result(30).status_code for call in calls] == [200] * 4


def test_slow_heads_and_slow_bodies_are_hung_up_on(
    manager: ContinuousBatchingManager, smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "HEAD_SECONDS", 0.5)
    with serving(manager, smollm2_tokenizer, limits=Limits(body_seconds=0.5)) as url:
        host, port = url.removeprefix("http://").split(":")
        for head in (b"", b"GET /heal", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection((host, int(port)), timeout=20) as slow:
                slow.sendall(head)
                assert slow.recv(1000) == b""  # the connection is closed
        body = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        with socket.create_connection((host, int(port)), timeout=20) as slow:
            slow.sendall(body)
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
        with httpx.Client() as http:  # a connection that says enough stays
            assert [http.get(f"{url}/health").status_code for _ in range(3)] == [200] * 3
            time.sleep(0.8)
            assert http.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (b"GET /", b"a" * 1024),
        (b"GET / HTTP/1.1\r\nX-Long: ", b"a" * 1024),
        (b"GET / HTTP/1.1\r\n", b"X-Many: " + b"a" * 1014 + b"\r\n"),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-After: " + b"a" * 1013 + b"\r\n"),
        (CHUNKED + b"2;", b"a" * 1024),
    ],
    ids=["path", "header", "headers", "trailers", "extension"],
)
def test_who_never_ends_a_head_is_hung_up_on(
    manager: ContinuousBatchingManager, smollm2_tokenizer: Any, begun: bytes, more: bytes
) -> None:
    with serving(manager, smollm2_tokenizer) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as endless:
            endless.sendall(begun)
            with pytest.raises(ConnectionError):
                for _ in range(1 << 14):
                    endless.sendall(more)
        assert httpx.get(f"{url}/health").status_code == 200


def test_who_never_reads_is_hung_up_on(
    manager: ContinuousBatchingManager, smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "READ_SECONDS", 0.5)
    content = b'{"prompt": [1], "max_tokens": 4000, "ignore_eos": true, "stream": true, "logprobs": 20, "n": 4}'
    calls = OpenCalls()
    with serving(manager, smollm2_tokenizer, open_calls=calls) as url, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        host, port = url.removeprefix("http://").split(":")
        deaf.connect((host, int(port)))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        deaf.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        while not calls.number:
            time.sleep(0.01)
        deadline = time.monotonic() + 60
        while calls.number and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not calls.number
        received = [b""]
        with suppress(ConnectionResetError):
            while piece := deaf.recv(1 << 20):
                received.append(piece)
        assert b"200 OK" in received[1] and b"[DONE]" not in received[-1]


def test_a_timeout_holds_for_whoever_reads_slowly(manager: ContinuousBatchingManager, smollm2_tokenizer: Any) -> None:
    """Also where outputs wait for it, so that it need not wait for any."""

    async def read() -> int:
        service, asked = Service(manager, smollm2_tokenizer, "tiny"), CompletionRequest(prompt=[1], stream=True)
        asked.timeout, asked.max_tokens, asked.ignore_eos = 0.5, 2000, True
        count = 0
        with pytest.raises(ApiError) as caught:
            async for _ in service.run(asked, service.specs(asked, [[1]]), service.deadline(asked.timeout)):
                count += 1
                await asyncio.sleep(0.02)
        assert caught.value.status == 408 and caught.value.headers["X-Should-Retry"] == "false"
        return count

    with manager.session():
        assert asyncio.run(read()) < 200


def test_what_is_refused_is_not_cancelled(manager: ContinuousBatchingManager, smollm2_tokenizer: Any) -> None:
    with serving(manager, smollm2_tokenizer) as url:
        assert ids(url, n=4, prompt=[99]).status_code == 400
        assert 'finish_reason="cancelled"' not in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize(
    ("kind", "field", "given"),
    [
        (CompletionRequest, "prompt", [{}] * 100_000),
        (CompletionRequest, "prompt", [[None]] * 100_000),
        (CompletionRequest, "prompt", [[0, "x"]] * 100_000),
        (CompletionRequest, "stop", [1] * 100_000),
        (CompletionRequest, "stop_token_ids", ["x"] * 100_000),
        (CompletionRequest, "choice", [1] * 100_000),
        (CompletionRequest, "logit_bias", {str(i): "x" for i in range(100_000)}),
        (ChatRequest, "messages", [{}] * 100_000),
        (ChatRequest, "messages", [{"role": "user", "content": [1] * 100_000}]),
        (ChatRequest, "tools", [{}] * 100_000),
        (ResponsesRequest, "input", [1] * 100_000),
        (ResponsesRequest, "metadata", {str(i): 1 for i in range(100_000)}),
        (DetokenizeRequest, "tokens", [None] * 100_000),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_wrong_entry_of_many_is_told(kind: type[BaseModel], field: str, given: Any) -> None:
    """Each would take microseconds to tell, and a kilobyte: together they would hold the server's loop for seconds."""
    needed = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}
    fields = {name: value for name, value in needed.items() if name in kind.model_fields}
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({**fields, field: given})
    assert caught.value.error_count() <= 8
    assert all(error["loc"][0] == field for error in caught.value.errors())


def test_a_body_of_ever_so_many_fields_is_refused() -> None:
    with pytest.raises(ValidationError, match="at most 1000"):
        CompletionRequest.model_validate({"prompt": "x", **{f"x{i}": 1 for i in range(1000)}})


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("tools", '[{"type": "function", "name": "f", "parameters": {"a": NaN}}]'),
        ("tools", '[{"type": "function", "name": "f", "parameters": {"a": 1e999}}]'),
        ("tools", '[{"type": "function", "name": "f", "extra": "\\ud800"}]'),
        ("text", '{"format": {"type": "json_schema", "schema": {"const": Infinity}}}'),
        ("metadata", '{"a": "\\ud800"}'),
        ("metadata", '{"\\ud800": "a"}'),
        ("instructions", '"\\ud800"'),
    ],
)
def test_a_response_is_not_asked_to_tell_what_is_no_json(
    manager: ContinuousBatchingManager, smollm2_tokenizer: Any, field: str, content: str
) -> None:
    with serving(manager, smollm2_tokenizer) as url:
        body = f'{{"input": "x", "max_output_tokens": 1, "{field}": {content}}}'
        told = httpx.post(f"{url}/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert told.status_code == 400 and told.json()["error"]["param"] == field, told.text


def test_strict_refuses_what_it_does_not_know(manager: ContinuousBatchingManager, smollm2_tokenizer: Any) -> None:
    with serving(manager, smollm2_tokenizer, strict=True) as url:
        told = ids(url, max_tokens=1, no_such_field=1)
        assert told.status_code == 400 and told.json()["error"]["param"] == "no_such_field"
        assert ids(url, max_tokens=1, user="me").status_code == 200
        told = ids(url, max_tokens=1, stream=True, stream_options={"include_everything": True})
        assert told.status_code == 400 and told.json()["error"]["param"] == "stream_options.include_everything"
        for path, asked, field in (
            ("/tokenize", {"prompt": "x", "no_such_field": 1}, "no_such_field"),
            ("/detokenize", {"tokens": [5], "no_such_field": 1}, "no_such_field"),
            ("/v1/responses", {"input": "x", "text": {"no_such_field": 1}}, "text.no_such_field"),
        ):
            told = httpx.post(url + path, json=asked)
            assert told.status_code == 400 and told.json()["error"]["param"] == field
        assert ids(url, max_tokens=1, stream=True, stream_options={"include_obfuscation": True}).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "asked"),
    [
        *(("/v1/completions", name, {"prompt": "x", name: {"type": "object"}}) for name in CONSTRAINTS_ELSEWHERE),
        ("/v1/chat/completions", "response_format",
         {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object", "schema": {}}}),
        ("/v1/chat/completions", "json_schema",
         {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"},
          "json_schema": {}}),
        ("/v1/responses", "text", {"input": "x", "text": {"format": {"type": "text", "schema_of": {}}}}),
        ("/v1/completions", "grammar", {"prompt": "x", "max_tokens": 3, "grammar": 'start: "a" start'}),
        ("/v1/completions", "json_schema", {"prompt": "x", "max_tokens": 3, "json_schema": ENDLESS}),
        ("/v1/responses", "text",
         {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": ENDLESS}}}),
        ("/v1/responses", "text", {"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}),
        ("/v1/chat/completions", "grammar",
         {"messages": [{"role": "user", "content": "x"}], "tool_choice": "none", "grammar": "bad",
          "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/v1/chat/completions", "top_logprobs",
         {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}),
        ("/v1/chat/completions", "chat_template_kwargs",
         {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 5}}),
        ("/v1/chat/completions", "chat_template_kwargs",
         {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"self": 5}}),
        ("/v1/completions", "min_tokens", {"prompt": "x", "min_tokens": 10**9}),
        ("/v1/chat/completions", "response_format",
         {"messages": [{"role": "user", "content": "x"}],
          "response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}}),
        ("/v1/responses", "text", {"input": "x", "text": {"format": {"type": "text", "schema": {}}}}),
        ("/v1/completions", "min_tokens", {"prompt": "x", "min_tokens": 4, "max_tokens": 3}),
        ("/v1/completions", "stop", {"prompt": "x", "stop": ["max_new_tokens=5", ""]}),
        ("/v1/completions", "n", {"prompt": [1], "n": -5, "timeout": 1e-9}),
        ("/v1/completions", "prompt", {"prompt": "\ud800"}),
        ("/v1/completions", "prompt", {"prompt": ["x", "long " * 2000]}),
        ("/v1/completions", "prompt", {"prompt": [5] * 500, "max_tokens": 2000}),
        ("/v1/completions", "max_tokens", {"prompt": "x", "max_tokens": 0}),
        ("/v1/completions", "logit_bias", {"prompt": "x", "logit_bias": {"5": False}}),
        ("/v1/chat/completions", "messages", {"messages": []}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "long " * 2000}]}),
        ("/v1/chat/completions", "messages",
         {"messages": [{"role": "user", "content": [{"type": "text", "text": "long " * 2000}]}]}),
        ("/v1/chat/completions", "chat_template_kwargs",
         {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tokenize": True}}),
        ("/v1/responses", "input", {"input": [{"type": "picture"}]}),
        ("/v1/responses", "input", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("/v1/responses", "input", {"input": []}),
        ("/v1/responses", "input", {"input": [{"role": 5}]}),
        ("/v1/responses", "input", {"input": "\ud800"}),
        ("/v1/responses", "input", {"input": "long " * 2000}),
        ("/v1/responses", "max_output_tokens", {"input": "x", "max_output_tokens": 0}),
        ("/tokenize", "messages", {"messages": []}),
        ("/tokenize", "prompt", {"prompt": "\ud800"}),
        ("/tokenize", "prompt", {"prompt": "long " * 2000}),
        ("/tokenize", "messages", {"messages": [{"role": "user", "content": "long " * 2000}]}),
    ],
)  # fmt: skip
def test_the_field_at_fault_is_named_as_the_client_calls_it(
    open_server: str, path: str, field: str, asked: dict[str, Any]
) -> None:
    told = httpx.post(open_server + path, content=json.dumps(asked), headers={"Content-Type": "application/json"})
    assert told.status_code == 400 and told.json()["error"]["param"] == field, told.text[:500]
    is_long = "long long" in json.dumps(asked)
    assert ("characters" in told.json()["error"]["message"]) is is_long, told.text  # it was not even tokenized
    assert "<state>" not in told.text and len(told.text) < 1000
    if "stop" in asked:
        assert "max_new_tokens=5" in told.text  # as it was given
        return
    ours = ("input_ids", "max_new_tokens", *({"max_tokens"} - {field} if "max_output_tokens" in asked else ()))
    assert not any(name in told.json()["error"]["message"] for name in ours), told.text
    assert len(told.text) < 1000  # not all that was sent, back again


class SlowTokenizer:
    """SmolLM2's, which takes as long as it is told to."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.goes_on, self.begun = tokenizer, threading.Event(), list[str]()

    def __call__(self, text: str, **_: Any) -> Any:
        self.begun.append(text)
        assert self.goes_on.wait(60)
        return {"input_ids": [5]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@contextmanager
def draining(manager: ContinuousBatchingManager, tokenizer: Any) -> Iterator[tuple[str, Service, Any]]:
    """A server in this process that is to end by itself: its address, its service, and what sends it a signal."""
    with manager.session():
        service = Service(manager, tokenizer, "tiny")
        urls, is_up = list[str](), threading.Event()
        server = running.new_server(service, "127.0.0.1", 0, 1.0, lambda url: (urls.append(url), is_up.set()))
        thread = threading.Thread(target=server.run)
        thread.start()
        assert is_up.wait(30)
        try:
            yield urls[0], service, lambda: server.handle_exit(signal.SIGTERM, None)
        finally:
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_what_is_still_tokenized_is_given_up_with_its_client_and_told_of_the_end(
    manager: ContinuousBatchingManager, smollm2_tokenizer: Any, path: str
) -> None:
    slow = SlowTokenizer(smollm2_tokenizer)
    with draining(manager, slow) as (url, service, terminate), ThreadPoolExecutor() as threads:
        try:
            for _ in range(12):  # clients that leave, more than there are threads
                with suppress(httpx.TimeoutException):
                    httpx.post(url + path, json={"prompt": "left"}, timeout=0.2)
            stays = threads.submit(httpx.post, url + path, json={"prompt": "stays"}, timeout=60)
            deadline = time.monotonic() + 10
            while service.open_calls.number != 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert service.open_calls.number == 1  # of those who left there is none
            terminate()
            told = stays.result(30)
            assert told.status_code == 503 and told.json()["error"]["code"] == "shutting_down"
            assert slow.begun.count("left") <= MOST_PREPARING  # and what had not begun never does
        finally:
            slow.goes_on.set()


@pytest.fixture
def slow_compiler(
    smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[ContinuousBatchingManager, threading.Event]:
    """A manager, and what its grammars wait for before they are compiled."""
    goes_on, compile_it = threading.Event(), GrammarCompiler._compiled

    def slowly(compiler: GrammarCompiler, name: str, text: str) -> Any:
        assert goes_on.wait(60)
        return compile_it(compiler, name, text)

    monkeypatch.setattr(GrammarCompiler, "_compiled", slowly)
    config = ContinuousBatchingConfig(page_size=16, num_blocks=400, max_batch_tokens=256)
    model = tiny_llama(vocab_size=len(smollm2_tokenizer))
    manager = ContinuousBatchingManager(model, continuous_batching_config=config, tokenizer=smollm2_tokenizer)
    return manager, goes_on


def test_whatever_a_call_waits_for_it_is_told_of_the_end(
    smollm2_tokenizer: Any, slow_compiler: tuple[ContinuousBatchingManager, threading.Event]
) -> None:
    """A grammar, the rest of its own body, and its turn; and who has had a part of a stream is told there."""
    manager, goes_on = slow_compiler

    def half_a_body(url: str) -> bytes:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            return b"".join(iter(lambda: sock.recv(4096), b""))

    try:
        with draining(manager, smollm2_tokenizer) as (url, service, terminate), ThreadPoolExecutor(8) as threads:
            compiling = [threads.submit(ids, url, max_tokens=4, regex="[ab]{2}") for _ in range(3)]
            sending = threads.submit(half_a_body, url)
            long = {"max_tokens": 3000, "min_tokens": 3000}
            whole, stream = threads.submit(ids, url, **long), threads.submit(ids, url, stream=True, **long)
            deadline = time.monotonic() + 10
            while service.open_calls.number < 6 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.2)
            terminate()
            time.sleep(0.1)
            terminate()
            with suppress(httpx.TransportError):  # it may be gone already
                assert ids(url).status_code == 503
            for call in (*compiling, whole):
                assert call.result(10).status_code == 503
                assert call.result().json()["error"]["code"] == "shutting_down"
            assert b"503" in sending.result(10).partition(b"\r\n")[0] and b"shutting_down" in sending.result()
            assert "shutting_down" in stream.result(10).text and stream.result().text.endswith("data: [DONE]\n\n")
    finally:
        goes_on.set()


def test_streams_in_longer_parts(smollm2_tokenizer: Any) -> None:
    config = ContinuousBatchingConfig(page_size=16, num_blocks=400, max_batch_tokens=256, stream_interval=3600)
    manager = ContinuousBatchingManager(tiny_llama(), continuous_batching_config=config)
    with serving(manager, smollm2_tokenizer) as url:
        whole = ids(url, max_tokens=40, seed=1).json()["choices"][0]["text"]
        told = ids(url, max_tokens=40, seed=1, stream=True).text
    pieces = [json.loads(line[6:])["choices"][0] for line in told.splitlines() if line.startswith("data: {")]
    assert 1 <= len(pieces) <= 2  # the first and the last do not wait
    assert "".join(piece["text"] for piece in pieces) == whole and pieces[-1]["finish_reason"] == "length"


def test_who_asks_for_no_grammar_waits_for_none(
    smollm2_tokenizer: Any, slow_compiler: tuple[ContinuousBatchingManager, threading.Event]
) -> None:
    manager, goes_on = slow_compiler
    with serving(manager, smollm2_tokenizer) as url, ThreadPoolExecutor(40) as threads:
        slow = [threads.submit(ids, url, max_tokens=4, regex="[ab]{2}") for _ in range(40)]
        try:
            time.sleep(0.5)
            assert all(ids(url, max_tokens=4).status_code == 200 for _ in range(3))
            assert not any(call.done() for call in slow)
        finally:
            goes_on.set()
        texts = [call.result(60).json()["choices"][0]["text"] for call in slow]
    assert all(set(text) <= {"a", "b"} and len(text) == 2 for text in texts)


def test_prompts_and_choices_are_bounded(manager: ContinuousBatchingManager, smollm2_tokenizer: Any) -> None:
    with serving(manager, smollm2_tokenizer, limits=Limits(prompts=8)) as url:  # of which max_queue_size takes 4
        for wrong, param in (({"prompt": [[1]] * 5}, "prompt"), ({"n": 5}, "n"), ({"prompt": [[1]] * 3, "n": 2}, "n")):
            told = ids(url, max_tokens=1, **wrong)
            assert told.status_code == 400 and told.json()["error"]["param"] == param, told.text
    with serving(manager, smollm2_tokenizer, limits=Limits(prompts=3, choices=4)) as url:
        for wrong, param in (
            ({"prompt": [[1]] * 4}, "prompt"),
            ({"prompt": [[1]] * 3, "n": 2}, "n"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [1] * 5000}, "prompt"),
            ({"prompt": [99]}, "prompt"),
        ):
            told = ids(url, max_tokens=1, **wrong)
            assert told.status_code == 400 and told.json()["error"]["param"] == param, told.text


def test_a_killed_client_leaves_nothing_behind(server: Server) -> None:
    body = {**LONG, "stream": True}
    program = f"""
import httpx
with httpx.stream("POST", "{server.url}/v1/completions", headers={HEADERS}, json={body}) as stream:
    for line in stream.iter_lines():
        print(line, flush=True)
"""
    client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.readline()
    client.kill()
    client.wait()
    assert server.settles("legato_running 0.0") and server.settles("legato_cache_used_share 0.0")
    assert server.settles('legato_requests_total{finish_reason="cancelled"} 1.0')


def test_who_does_not_read_holds_nobody_up(server: Server, client: openai.OpenAI) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    deaf = []
    for _ in range(8):
        sock = socket.create_connection((host, int(port)), timeout=20)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        content = b'{"prompt": "Once", "max_tokens": 300, "ignore_eos": true, "stream": true}'
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Authorization: Bearer {KEY}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
        )  # fmt: skip
        deaf.append(sock)
    told = client.completions.create(model="smollm2", prompt="Water", max_tokens=8, extra_body={"ignore_eos": True})
    assert told.usage is not None and told.usage.completion_tokens == 8
    assert server.settles("legato_running 0.0", seconds=60)  # their answers are made and wait for them
    for sock in deaf:
        sock.close()


def test_after_its_time_a_drain_ends_what_still_runs() -> None:
    server = Server("--drain-timeout", "0.5")
    url, body = f"{server.url}/v1/completions", {**LONG, "stream": True}
    lines: list[str] = []
    with httpx.stream("POST", url, json=body, timeout=60) as told:
        for line in told.iter_lines():
            if not lines:
                server.process.send_signal(signal.SIGTERM)
            lines.append(line)
    told_last = [line for line in lines if line.startswith("data: {")][-1]
    assert json.loads(told_last[6:])["error"]["code"] == "shutting_down"
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.log


def test_who_is_cancelled_while_submitting_leaves_no_request_behind(manager: ContinuousBatchingManager) -> None:
    async def submit_and_go() -> None:
        async def ask() -> None:
            async for _ in manager.as_completed_async([RequestSpec([1, 2], 3000, eos_token_id=-1)]):
                pass

        with manager.pause():
            asking = asyncio.ensure_future(ask())
            await asyncio.sleep(0)  # it has handed its request to a thread, and waits
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    with manager.session():
        asyncio.run(submit_and_go())
        deadline = time.monotonic() + 20
        while manager._thread._unfinished and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not manager._thread._unfinished
        assert manager.stats.num_generated_tokens < 3000


def test_who_is_gone_is_told_of_no_failure(manager: ContinuousBatchingManager) -> None:
    """Of a submission that fails after its client has left nobody hears, and nothing complains of that."""

    async def submit_and_go() -> list[str]:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told["message"]))
        with manager._thread._turn:  # for which the submission waits
            asking = asyncio.ensure_future(anext(manager.as_completed_async([RequestSpec([1], 2)] * 5)))  # over 4
            await asyncio.sleep(0.2)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        await asyncio.sleep(0.3)
        gc.collect()
        return complaints

    with manager.session():
        assert asyncio.run(submit_and_go()) == []


def test_an_address_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "legato.cli", "serve", "no-such-model", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "cannot be listened on" in done.stderr and "no-such-model" not in done.stderr


def test_a_body_that_is_not_called_json_is_told_so(manager: ContinuousBatchingManager, smollm2_tokenizer: Any) -> None:
    with serving(manager, smollm2_tokenizer) as url:
        for kind in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
            told = httpx.post(f"{url}/v1/completions", content=b'{"prompt": [1], "max_tokens": 1}', headers=kind)
            assert told.status_code == 400 and "must be application/json" in told.json()["error"]["message"]
