"""The real `openai` client against a running `legato serve` with SmolLM2."""

import asyncio
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
import torch

from legato.cli.serve import CPU_BATCH_TOKENS
from tests.parity.reference import reference
from tests.server.legato_server import KEY, Server

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]


@pytest.fixture(scope="module")
def answer(smollm2: Any, smollm2_tokenizer: Any) -> str:
    ids = smollm2_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True)["input_ids"]
    tokens = reference(smollm2, ids, 24).tokens
    return str(smollm2_tokenizer.decode(tokens, skip_special_tokens=True))


def test_a_chat_is_what_generate_says(client: openai.OpenAI, answer: str) -> None:
    told = client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=24, temperature=0)
    assert told.object == "chat.completion" and told.model == "smollm2"
    assert told.choices[0].message.content == answer and told.choices[0].message.role == "assistant"
    assert told.choices[0].finish_reason in ("stop", "length")
    assert told.usage is not None and told.usage.total_tokens == told.usage.prompt_tokens + told.usage.completion_tokens
    assert 0 < told.usage.completion_tokens <= 24


def test_a_stream_is_the_same_in_pieces(client: openai.OpenAI, answer: str) -> None:
    stream = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_completion_tokens=24, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 4
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] in ("stop", "length") and not any(reasons[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert len({c.id for c in chunks}) == 1


def test_the_async_client_and_many_at_once(server: Server, answer: str) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=120) as client:
            calls = [
                client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=24, temperature=0)
                for _ in range(16)
            ]
            return [told.choices[0].message.content for told in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [answer] * 16


def test_samples_seeds_stops_and_logprobs(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 12, "temperature": 1.2, "seed": 5}
    told = client.chat.completions.create(**asked, n=4, logprobs=True, top_logprobs=3)
    again = client.chat.completions.create(**asked, n=4)
    assert [c.index for c in told.choices] == [0, 1, 2, 3]
    assert [c.message.content for c in told.choices] == [c.message.content for c in again.choices]
    assert len({c.message.content for c in told.choices}) > 1
    for choice in told.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        for token in choice.logprobs.content:
            assert token.logprob <= 0 and bytes(token.bytes or []).decode(errors="replace") == token.token
            assert 1 <= len(token.top_logprobs) <= 3
    whole = client.chat.completions.create(**{**asked, "temperature": 0, "max_tokens": 24}).choices[0].message.content
    assert whole is not None
    stop = whole[8:12]
    cut = client.chat.completions.create(**{**asked, "temperature": 0, "max_tokens": 24}, stop=[stop]).choices[0]
    assert cut.message.content == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    pieces = client.chat.completions.create(**asked, n=3, stream=True)
    texts = ["", "", ""]
    for chunk in pieces:
        for c in chunk.choices:
            texts[c.index] += c.delta.content or ""
    assert texts == [c.message.content for c in again.choices[:3]]


def test_answers_that_parse(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    told = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, temperature=1.5,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )  # fmt: skip
    place = json.loads(told.choices[0].message.content or "")
    assert place["city"] in ("Paris", "Rome") and 0 <= place["size"] <= 9
    choice = client.completions.create(
        model="smollm2", prompt="Yes or no?", extra_body={"choice": ["yes", "no"]}, temperature=1
    )
    assert choice.choices[0].text in ("yes", "no")


def test_completions_of_several_prompts(client: openai.OpenAI, smollm2: Any, smollm2_tokenizer: Any) -> None:
    prompts = ["The capital of France is", "Water boils at"]
    told = client.completions.create(model="smollm2", prompt=prompts, max_tokens=8, temperature=0, logprobs=2)
    for choice, prompt in zip(told.choices, prompts, strict=True):
        tokens = reference(smollm2, smollm2_tokenizer.encode(prompt), 8).tokens
        assert choice.text == smollm2_tokenizer.decode(tokens, skip_special_tokens=True)
        assert choice.logprobs is not None and "".join(choice.logprobs.tokens or []).startswith(choice.text)
        assert len(choice.logprobs.token_logprobs or []) == len(choice.logprobs.text_offset or [])
    same = client.completions.create(
        model="smollm2", prompt=[smollm2_tokenizer.encode(p) for p in prompts], max_tokens=8, temperature=0
    )
    assert [c.text for c in same.choices] == [c.text for c in told.choices]
    echoed = client.completions.create(
        model="smollm2", prompt=prompts[0], max_tokens=1, temperature=0, echo=True, logprobs=1
    ).choices[0]
    assert echoed.text.startswith(prompts[0]) and echoed.logprobs is not None
    assert echoed.logprobs.token_logprobs is not None
    assert echoed.logprobs.token_logprobs[0] is None and all(x < 0 for x in echoed.logprobs.token_logprobs[1:])
    stream = client.completions.create(model="smollm2", prompt=prompts, max_tokens=8, temperature=0, stream=True)
    texts = ["", ""]
    for chunk in stream:
        for c in chunk.choices:
            texts[c.index] += c.text
    assert texts == [c.text for c in told.choices]


def test_nothing_but_the_prompts_log_probabilities(client: openai.OpenAI, smollm2: Any, smollm2_tokenizer: Any) -> None:
    """What evaluations by likelihood ask for."""
    prompt = "Water boils at 100 degrees."
    asked = {"model": "smollm2", "prompt": prompt, "max_tokens": 0, "logprobs": 2}
    told = client.completions.create(**asked, echo=True)
    assert told.usage is not None and told.usage.completion_tokens == 0
    assert told.choices[0].text == prompt and told.choices[0].finish_reason == "length"
    ids = torch.tensor([smollm2_tokenizer.encode(prompt)])
    with torch.no_grad():
        every = smollm2(ids).logits[0].log_softmax(-1)
    wanted = every[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    found = told.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)
    pieces = list(client.completions.create(**asked, echo=True, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == prompt
    for wrong in ({"echo": False}, {"echo": True, "logprobs": None}, {"echo": True, "n": 2}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{**asked, **wrong})
        assert caught.value.param == "max_tokens"


def test_every_sample_begins_after_the_prompt(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    told = client.completions.create(
        model="smollm2", prompt=prompt, max_tokens=4, n=3, temperature=1, seed=5, echo=True, logprobs=0
    )
    for choice in told.choices:
        assert choice.text.startswith(prompt) and choice.logprobs is not None
        tokens, places = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
        assert len(tokens) >= 4
        for token, place in zip(tokens[-4:], places[-4:], strict=True):
            assert token.startswith("<|") or choice.text[place:].startswith(token), (choice.index, token, place)


def test_log_probabilities_inside_of_characters(client: openai.OpenAI) -> None:
    """Characters of several tokens: their bytes put together are the text, and tokens begin where they do."""
    prompt = "naïve 🦜 — 日本" * 8
    echoed = client.completions.create(
        model="smollm2", prompt=prompt, max_tokens=6, temperature=0, echo=True, logprobs=3, stream=False
    ).choices[0]
    found = echoed.logprobs
    assert found is not None and found.tokens and found.text_offset
    assert any(token.startswith("bytes:") for token in found.tokens)
    for token, place in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert echoed.text[place:].startswith(token), (token, place)
    assert found.text_offset == sorted(found.text_offset)
    pieces = client.completions.create(
        model="smollm2", prompt=prompt, max_tokens=6, temperature=0, echo=True, logprobs=3, stream=True
    )
    told_tokens = [
        token for piece in pieces if piece.choices[0].logprobs for token in piece.choices[0].logprobs.tokens or ()
    ]
    assert told_tokens == found.tokens
    told = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=40, temperature=1, logprobs=True, top_logprobs=20,
        extra_body={"choice": ["🦜 日本 naïve"]},
    ).choices[0]  # fmt: skip
    assert told.logprobs is not None and told.logprobs.content is not None
    spelled = b"".join(bytes(token.bytes or []) for token in told.logprobs.content if not token.token.startswith("<|"))
    assert spelled.decode() == told.message.content == "🦜 日本 naïve"
    assert any("\ufffd" in token.token for token in told.logprobs.content)


@pytest.mark.parametrize(
    ("wrong", "status", "param"),
    [
        ({"model": "gpt-5"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"n": 5000}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ({"top_logprobs": 50, "logprobs": True}, 400, "top_logprobs"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"stop": ""}, 400, "stop"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_openais(client: openai.OpenAI, wrong: Any, status: int, param: str, stream: bool) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{"model": "smollm2", "messages": MESSAGES, "stream": stream, **wrong})
    assert (caught.value.status_code, caught.value.param) == (status, param), caught.value.message


def test_keys(server: Server) -> None:
    for key in ("wrong", "sk-secre", "sk-secret2"):
        with pytest.raises(openai.AuthenticationError):
            server.client(key).models.list()
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/metrics").status_code == 401


def test_facts(server: Server, client: openai.OpenAI) -> None:
    assert f"max_batch_tokens={CPU_BATCH_TOKENS}," in server.log  # nobody has asked for longer passes
    assert [one.id for one in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers) as http:
        tokens = http.post("/tokenize", json={"prompt": "Hello, world"}).json()
        assert tokens["count"] == len(tokens["tokens"]) > 0
        assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "Hello, world"}
        assert http.post("/tokenize", json={"messages": MESSAGES}).json()["count"] > 10
        assert http.post("/detokenize", json={"tokens": [-1]}).json()["error"]["param"] == "tokens"
        assert http.post("/v1/embeddings", json={}).status_code == 400
        assert http.get("/ready").status_code == 200 and http.get("/nothing").status_code == 404
        assert http.get("/version").json()["version"]
        text = http.get("/metrics").text
        assert 'legato_requests_total{finish_reason="length"}' in text and "legato_running 0.0" in text
        asked = {"messages": MESSAGES, "max_tokens": 1, "no_such_field": 1, "日本\n": 1}
        told = http.post("/v1/chat/completions", json=asked)
        assert told.headers["X-Legato-Ignored-Fields"] == "no_such_field" and told.status_code == 200
        big = http.post("/v1/completions", content=b'{"prompt": "' + b"x" * (10 << 20) + b'"}')
        assert big.status_code == 413 and big.json()["error"]["code"] == "body_too_large"
        chunked = http.post("/v1/completions", content=(b"x" * (1 << 20) for _ in range(6)))
        assert chunked.status_code == 413 and chunked.json()["error"]["code"] == "body_too_large"
        for junk in (b"", b"{", b"\xff\xfe", b"[]", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'):
            told = http.post("/v1/completions", content=junk, headers={"Content-Type": "application/json"})
            assert told.status_code == 400 and told.json()["error"]["message"], junk


def test_a_client_that_goes_away_is_cancelled(server: Server) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())
            assert running(http) == 1
        for _ in range(100):
            if running(http) == 0:
                break
        assert running(http) == 0
        assert "legato_cache_used_share 0.0" in http.get("/metrics").text
        with pytest.raises(httpx.ReadTimeout):  # one whose response has not begun
            http.post("/v1/completions", json={**body, "stream": False}, timeout=1)
        deadline = time.monotonic() + 5
        while running(http) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running(http) == 0


def running(http: httpx.Client) -> float:
    found = re.search(r"^legato_running (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_sigterm_lets_running_calls_finish_and_refuses_new_ones() -> None:
    server = Server()
    with ThreadPoolExecutor() as threads, httpx.Client(base_url=server.url, timeout=60) as http:
        body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True}
        call = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        while running(http) == 0:
            pass
        server.process.send_signal(signal.SIGTERM)
        while http.get("/ready").status_code == 200:
            pass
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        told = call.result()
        assert told.status_code == 200 and told.json()["usage"]["completion_tokens"] == 300
    assert server.process.wait(30) == 0


def test_a_second_signal_ends_what_runs_with_an_error() -> None:
    server = Server()
    body = {"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True}
    with ThreadPoolExecutor() as threads, httpx.Client(base_url=server.url, timeout=60) as http:
        call = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            while running(http) < 2:
                pass
            server.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{server.url}/ready").status_code == 200:
                pass  # two signals that come together are one
            server.process.send_signal(signal.SIGTERM)
            told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert told[-1]["error"]["code"] == "shutting_down"
        assert call.result().status_code == 503 and call.result().json()["error"]["code"] == "shutting_down"
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_a_long_step() -> None:
    server = Server("--max-batch-tokens", "8192", settings=("--page-size", "256"))
    with ThreadPoolExecutor() as threads:
        body = {"prompt": [5] * 8000, "max_tokens": 100, "ignore_eos": True}
        call = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        for _ in range(2):
            time.sleep(1)  # it is not seen from outside when the step begins
            server.process.send_signal(signal.SIGTERM)
        told_at = time.monotonic()
        assert server.process.wait(60) in (0, 1)
        assert time.monotonic() - told_at < 10  # 2 to tell it, and what a busy machine adds; the step takes longer
        with suppress(httpx.HTTPError):
            assert call.result().status_code in (500, 503)
