"""`legato generate`: as a process of its own where that matters, else in this one; and the files behind it."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from legato import cli
from legato.batch_file import OrderedWriter
from legato.prompt_file import read_lines
from legato.text import encode, encode_chat
from tests.parity.reference import reference
from tests.tiny import tiny_llama

LEGATO = [sys.executable, "-m", "legato.cli"]
LONG = 500  # tokens; a second or two
RESULT_FIELDS = [
    "index", "text", "finish_reason", "error",
    "num_prompt_tokens", "num_generated_tokens", "num_cached_tokens", "digest",
]  # fmt: skip

Line = str | dict[str, Any]
Result = dict[str, Any]


@pytest.fixture(scope="module")
def tiny(smollm2_tokenizer: Any) -> Any:
    return tiny_llama(vocab_size=len(smollm2_tokenizer))


@pytest.fixture(scope="module")
def folder(tiny: Any, smollm2_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random llama with SmolLM2's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.save_pretrained(folder)
    smollm2_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@dataclass(frozen=True)
class Done:
    """What a run left behind."""

    status: int
    stdout: str
    stderr: str


def run_here(monkeypatch: pytest.MonkeyPatch, folder: str, *arguments: Any) -> int:
    """Runs the command line in this process; an exception that would be a traceback fails the test."""
    command = ["legato", "generate", "--model", folder, "--num-blocks", 100, *arguments]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in command])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    return exited.value.code or 0  # type: ignore[return-value]


@pytest.fixture
def legato(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: str) -> Callable[..., Done]:
    """`run_here` with what it wrote."""

    def run(*arguments: Any, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        return Done(run_here(monkeypatch, folder, *arguments), *capfd.readouterr())

    return run


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    """Writes a prompt file."""

    def write(*lines: Line | bytes) -> Path:
        path = tmp_path / "prompts.jsonl"
        encoded = [line if isinstance(line, bytes) else as_text(line).encode() for line in lines]
        path.write_bytes(b"".join(line + b"\n" for line in encoded))
        return path

    return write


def as_text(line: Line) -> str:
    return line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)


def results_in(text: str) -> list[Result]:
    """The results in an output, which must be whole lines."""
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")] if text else []


def assert_one_line_error(done: Done, *words: str) -> None:
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("legato: error: ")
    assert all(word in done.stderr for word in words), done.stderr


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


# A process of its own


def test_standard_input_to_standard_output_in_order_and_nothing_else(folder: str) -> None:
    lines = [
        json.dumps({"prompt": "long", "max_new_tokens": 300}),
        "",
        "Hello, world",
        "   ",
        '{"prompt": "你好 🍵 \u2028 naïve", "id": "é\u2028🍵", "max_new_tokens": 3}',
        json.dumps({"messages": [{"role": "user", "content": "Hi"}]}),
    ]
    done = subprocess.run(
        [*LEGATO, "generate", "--model", folder, "--prompts", "-", "--max-new-tokens", "5"],
        input="\r\n".join(lines).encode(),
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    results = results_in(done.stdout.decode())
    assert [result["index"] for result in results] == [0, 1, 2, 3]
    assert [result["num_generated_tokens"] for result in results] == [300, 5, 3, 5]
    assert results[2]["id"] == "é\u2028🍵"


def run_on_a_terminal(*arguments: Any) -> Done:
    """`legato generate` while somebody looks at what it tells besides its results."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    process = subprocess.Popen([*LEGATO, "generate", *map(str, arguments)], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(ours, 4096):
                shown.extend(chunk)
        except OSError:  # how Linux says that the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    stdout, _ = process.communicate(timeout=60)
    reader.join(10)
    os.close(ours)
    return Done(process.returncode, stdout.decode(), shown.decode())


def test_progress_is_shown_on_a_terminal(folder: str, prompts: Callable[..., Path], output: Path) -> None:
    path = prompts("one", {"prompt": "two", "max_new_tokens": LONG}, {"prompt": "three"}, {"wrong": 1})
    arguments = ["--model", folder, "--prompts", path, "--output", output, "--max-new-tokens", 4]
    done = run_on_a_terminal(*arguments)
    assert done.stderr.startswith("legato: starting")
    bars = done.stderr.replace("\n", "\r").split("\r")
    running = [bar for bar in bars if "2/3" in bar and "batch 1" in bar]
    assert running, "no bar while the long request runs alone"
    assert "req" in running[-1]
    rate, _, rest = running[-1].rpartition(", ")[0].rpartition(" tok/s, batch 1")
    assert float(rate.split()[-1]) > 0
    assert rest == ""
    assert running[-1].rstrip("]").rpartition("cache ")[2].rstrip("]% ").isdecimal()
    assert any("3/3" in bar for bar in bars)
    assert "Traceback" not in done.stderr
    assert (done.status, done.stdout) == (1, "")  # a line failed
    assert [result["finish_reason"] for result in results_in(output.read_text())] == [*["length"] * 3, "error"]
    prompts("one", {"prompt": "two", "max_new_tokens": LONG}, {"prompt": "three"})  # in place of the file before
    again = run_on_a_terminal(*arguments, "--resume")
    assert (again.status, again.stdout) == (0, "")
    assert "nothing to do: 3 of 3 prompts are answered" in again.stderr


LINES_TO_INTERRUPT: list[Line] = [
    *[{"prompt": f"{i} 🍵", "max_new_tokens": 3 + i} for i in range(3)],
    {"prompt": "sampled", "max_new_tokens": 5, "temperature": 1.0, "seed": 3},
    {"prompt": "long", "max_new_tokens": LONG, "id": "slow"},
    *[{"prompt": f"{i} after", "max_new_tokens": 3} for i in range(3)],
    {"prompt": "longer", "max_new_tokens": LONG + 5},
]
QUICK, QUICK_LATER, SLOW = [0, 1, 2, 3], [5, 6, 7], [4, 8]


@pytest.fixture(scope="module")
def uninterrupted(folder: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What `LINES_TO_INTERRUPT` give in one go."""
    prompts = tmp_path_factory.mktemp("uninterrupted") / "prompts.jsonl"
    output = prompts.with_name("out.jsonl")
    prompts.write_text("".join(as_text(line) + "\n" for line in LINES_TO_INTERRUPT), encoding="utf-8")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run_here(monkeypatch, folder, "--prompts", prompts, "--output", output) == 0
    return output.read_bytes()


@pytest.fixture
def process_under_way(folder: str, prompts: Callable[..., Path], output: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has written its first results and works on the others."""
    process = subprocess.Popen(
        [*LEGATO, "generate", "--model", folder, "--prompts", prompts(*LINES_TO_INTERRUPT), "--output", output],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= len(QUICK), process)
    time.sleep(0.1)
    yield process
    if process.poll() is None:
        process.kill()
        process.communicate()


def test_control_c_keeps_what_is_finished_and_resume_does_the_rest(
    process_under_way: subprocess.Popen[str],
    legato: Callable[..., Done],
    tmp_path: Path,
    output: Path,
    uninterrupted: bytes,
) -> None:
    process_under_way.send_signal(signal.SIGINT)
    stdout, stderr = process_under_way.communicate(timeout=20)
    assert (process_under_way.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    whole = uninterrupted.splitlines(keepends=True)
    assert output.read_bytes() == b"".join(whole[i] for i in [*QUICK, *QUICK_LATER])
    again = legato("--prompts", tmp_path / "prompts.jsonl", "--output", output, "--resume")
    assert (again.status, again.stdout) == (0, "")
    assert output.read_bytes() == uninterrupted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_a_killed_run_can_be_resumed(
    process_under_way: subprocess.Popen[str],
    legato: Callable[..., Done],
    tmp_path: Path,
    output: Path,
    uninterrupted: bytes,
) -> None:
    process_under_way.kill()
    process_under_way.communicate()
    assert uninterrupted.startswith(output.read_bytes())
    whole = uninterrupted.splitlines(keepends=True)
    torn = whole[len(QUICK)][:200]
    output.write_bytes(b"".join(whole[i] for i in QUICK) + torn)
    again = legato("--prompts", tmp_path / "prompts.jsonl", "--output", output, "--resume")
    assert (again.status, again.stdout) == (0, "")
    assert output.read_bytes() == uninterrupted


# Lines


def test_every_kind_of_line_is_answered_as_the_model_alone_would(
    legato: Callable[..., Done], prompts: Callable[..., Path], tiny: Any, smollm2_tokenizer: Any
) -> None:
    hello = encode(smollm2_tokenizer, "Hello")
    messages = [{"role": "user", "content": "Hi"}]
    stop = reference(tiny, hello, 9).tokens[4]
    lines: list[tuple[Line, list[int], int]] = [
        ("Hello", hello, 9),
        ({"prompt": "Hello", "max_new_tokens": 4}, hello, 4),
        ({"prompt_ids": hello}, hello, 9),
        ({"messages": messages}, encode_chat(smollm2_tokenizer, messages), 9),
        ({"prompt": "Hello", "stop_token_ids": [stop], "ignore_eos": True}, hello, 5),
        ({"prompt": "Hello", "stop_token_ids": stop}, hello, 5),
        ({"prompt": "Hello", "temperature": 0, "top_k": 3, "top_p": 0.5, "seed": 1}, hello, 9),
        ({"prompt": "Hello", "temperature": 0.9, "top_k": 1}, hello, 9),
        ('"Hello"', encode(smollm2_tokenizer, '"Hello"'), 9),  # only an object is JSON
        ("17", encode(smollm2_tokenizer, "17"), 9),
        ("[1, 2]", encode(smollm2_tokenizer, "[1, 2]"), 9),
        ("null", encode(smollm2_tokenizer, "null"), 9),
        ("naïve 你好 🍵 a\u2028b\u0085c", encode(smollm2_tokenizer, "naïve 你好 🍵 a\u2028b\u0085c"), 9),
        ("  indented", encode(smollm2_tokenizer, "  indented"), 9),
    ]
    done = legato("--prompts", prompts(*[line for line, _, _ in lines]), "--max-new-tokens", 9)
    assert done.status == 0
    results = results_in(done.stdout)
    for result, (line, ids, count) in zip(results, lines, strict=True):
        assert result["num_prompt_tokens"] == len(ids), line
        assert result["num_generated_tokens"] == count, line
        tokens = reference(tiny, ids, count).tokens
        assert result["text"] == smollm2_tokenizer.decode(tokens, skip_special_tokens=True), line
        assert result["finish_reason"] == ("stop" if count == 5 else "length"), line
        assert list(result) == RESULT_FIELDS


def test_plain_text_can_be_a_chat(legato: Callable[..., Done], prompts: Callable[..., Path]) -> None:
    message = {"messages": [{"role": "user", "content": "Hi"}]}
    done = legato("--prompts", prompts("Hi", message, {"prompt": "Hi"}), "--chat", "--max-new-tokens", 4)
    chat, same, plain = results_in(done.stdout)
    assert chat["text"] == same["text"]
    assert chat["digest"] == same["digest"] != plain["digest"]
    assert plain["num_prompt_tokens"] == 1


GOOD: Line = {"prompt": "good", "max_new_tokens": 6}
BAD: list[tuple[Line | bytes, str]] = [
    ("{", "not a JSON object"),
    ('{"prompt": "a"', "not a JSON object"),
    ('{"prompt": "a"} trailing', "not a JSON object"),
    ("{'prompt': 'a'}", "not a JSON object"),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", ""),
    ('{"prompt": ' + "[" * 100_000, ""),
    ({}, "exactly one of"),
    ({"id": 1}, "exactly one of"),
    ({"prompt": "a", "messages": []}, "this one has prompt, messages"),
    ({"prompt": "a", "prompt_ids": [5]}, "this one has prompt, prompt_ids"),
    ({"prompt": "a", "tempature": 1}, "'tempature'"),
    ({"prompt": "a", "do_sample": True}, "'do_sample'"),
    ({"prompt": ""}, "empty"),
    ({"prompt": 5}, "prompt=5"),
    ({"prompt": None}, "prompt=None"),
    ({"prompt": ["a"]}, "prompt="),
    ({"messages": "a"}, "messages='a'"),
    ({"messages": {}}, "messages={}"),
    ({"messages": []}, "messages=[]"),
    ({"messages": [5]}, "messages=[5]"),
    ({"messages": [{"role": "user"}]}, "role and content"),
    ({"messages": [{"role": "user", "content": {"text": 1}}]}, "messages"),
    ({"prompt_ids": []}, "empty"),
    ({"prompt_ids": "12"}, "_ids="),
    ({"prompt_ids": 5}, "_ids="),
    ({"prompt_ids": {"5": 5}}, "_ids="),
    ({"prompt_ids": ["5"]}, "_ids="),
    ({"prompt_ids": [1.5]}, "_ids="),
    ({"prompt_ids": [[5]]}, "_ids="),
    ({"prompt_ids": [49152]}, "49152"),
    ({"prompt_ids": [-1]}, "-1"),
    ({"prompt_ids": [2**70]}, str(2**70)),
    ({"prompt_ids": [5] * 5000}, "4096"),
    ({"prompt": "a", "max_new_tokens": "5"}, "max_new_tokens='5'"),
    ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens=0"),
    ({"prompt": "a", "max_new_tokens": 1.5}, "max_new_tokens=1.5"),
    ({"prompt": "a", "max_new_tokens": [5]}, "max_new_tokens=[5]"),
    ({"prompt": "a", "max_new_tokens": True}, "max_new_tokens=True"),
    ({"prompt": "a", "temperature": "hot"}, "temperature='hot'"),
    ({"prompt": "a", "temperature": -1}, "temperature=-1"),
    ('{"prompt": "a", "temperature": NaN}', "temperature=nan"),
    ('{"prompt": "a", "temperature": 1e999}', "temperature=inf"),
    ({"prompt": "a", "top_k": -2}, "top_k=-2"),
    ({"prompt": "a", "top_k": 2.0}, "top_k=2.0"),
    ({"prompt": "a", "top_p": 0}, "top_p=0"),
    ({"prompt": "a", "top_p": 1.1}, "top_p=1.1"),
    ({"prompt": "a", "seed": -1}, "seed=-1"),
    ({"prompt": "a", "seed": 2**64}, f"seed={2**64}"),
    ({"prompt": "a", "ignore_eos": 1}, "ignore_eos=1"),
    ({"prompt": "a", "stop_token_ids": "2"}, "stop_token_ids='2'"),
    ({"prompt": "a", "stop_token_ids": [1.5]}, "stop_token_ids"),
    (b'{"prompt": "half a character: \\ud83c"}', ""),
    (b'{"messages": [{"role": "user", "content": "\\ud83c"}]}', ""),
]


def test_each_bad_line_fails_alone(legato: Callable[..., Done], prompts: Callable[..., Path], output: Path) -> None:
    lines = [line for bad, _ in BAD for line in (bad, GOOD)]
    done = legato("--prompts", prompts(*lines), "--output", output)
    assert (done.status, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    results = results_in(output.read_text(encoding="utf-8"))
    assert [result["index"] for result in results] == list(range(len(lines)))
    (text,) = {result["text"] for result in results[1::2]}
    assert text
    assert all(result["error"] is None for result in results[1::2])
    for result, (line, reason) in zip(results[::2], BAD, strict=True):
        assert result["finish_reason"] == "error", line
        assert reason in result["error"], line
        assert result["error"], line
        assert (result["text"], result["num_generated_tokens"]) == ("", 0), line


@pytest.mark.parametrize(
    "huge", [{"top_k": 2**70, "temperature": 1}, {"stop_token_ids": [2**70]}, {"max_new_tokens": 2**70}], ids=str
)
def test_a_huge_number_hurts_nobody_else(
    legato: Callable[..., Done], prompts: Callable[..., Path], huge: dict[str, Any]
) -> None:
    """Whether it is refused or means "as many as there are"."""
    done = legato("--prompts", prompts({"prompt": "good", **huge}, GOOD), "--num-blocks", 2, "--max-new-tokens", 6)
    assert done.status in (0, 1)
    good = results_in(done.stdout)[1]
    assert (good["error"], good["num_generated_tokens"]) == (None, 6)


IDS: list[Any] = [None, True, 0, -1.5, 10**30, "", "é🍵\u2028", [], [1, [2]], {}, {"a": {"b": None}}, "\x00", 1e300]


def test_an_id_may_be_anything_and_comes_back(legato: Callable[..., Done], prompts: Callable[..., Path]) -> None:
    lines = [{"prompt": "a", "id": given_id, "max_new_tokens": 1} for given_id in IDS]
    lines.append({"max_new_tokens": 1, "id": "of a bad line"})
    results = results_in(legato("--prompts", prompts(*lines)).stdout)
    assert [result["id"] for result in results] == [*IDS, "of a bad line"]
    assert [type(result["id"]) for result in results[:-1]] == [type(given_id) for given_id in IDS]


def test_an_id_that_is_half_a_character_hurts_nobody_else(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path
) -> None:
    done = legato("--prompts", prompts(rb'{"prompt": "a", "id": "\ud83c"}', GOOD), "--output", output)
    assert "Traceback" not in done.stderr
    results = results_in(output.read_text(encoding="utf-8"))
    assert results[1]["error"] is None
    again = legato("--prompts", output.with_name("prompts.jsonl"), "--output", output, "--resume")
    assert again.status == done.status
    assert results_in(output.read_text(encoding="utf-8")) == results


def test_blank_lines_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeff{"prompt": "a"}\r\n\r\n \t\r\nb\r\n\n{"prompt": "c"}'.encode())
    lines = read_lines(path, False, {"max_new_tokens": 3})
    assert [line.error for line in lines] == [None] * 3
    assert [(line.index, line.number) for line in lines] == [(0, 1), (1, 4), (2, 6)]
    assert [line.fields["prompt"] for line in lines] == ["a", "b", "c"]


def test_a_failed_line_is_told_by_its_number_in_the_file(
    legato: Callable[..., Done], prompts: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    legato("--prompts", prompts("one", "", "  ", {"wrong": 1}, "two"), "--max-new-tokens", 1)
    assert "1 of 3 lines failed, the first of them line 4:" in caplog.text


def test_the_digest_changes_with_all_that_decides_the_answer() -> None:
    def digest(line: Line, chat: bool = False, **common: Any) -> str:
        (parsed,) = read_lines(io.StringIO(as_text(line)), chat, {"max_new_tokens": 3, **common})
        return parsed.digest

    assert (
        digest({"prompt": "a", "seed": 1}) == digest({"seed": 1, "prompt": "a"}) == digest('{ "seed":1, "prompt":"a"}')
    )
    assert digest("a") == digest({"prompt": "a"}) == digest({"prompt": "a", "max_new_tokens": 3})
    different = [
        digest("a"),
        digest("b"),
        digest("a", chat=True),
        digest("a", max_new_tokens=4),
        digest("a", temperature=0.5),
        digest({"prompt": "a", "temperature": 0.6}),
        digest({"prompt": "a", "top_k": 4}),
        digest({"prompt": "a", "ignore_eos": True}),
        digest({"prompt": "a", "id": 5}),
        digest({"prompt": "a", "id": "5"}),
        digest('{"prompt": "a"'),
        digest({"prompt_ids": [1, 2]}),
        digest({"prompt_ids": [2, 1]}),
    ]
    assert len(set(different)) == len(different)


# Sampling from the command line


def test_seeds_make_samples_repeatable(legato: Callable[..., Done], prompts: Callable[..., Path]) -> None:
    path = prompts(*["same"] * 3, {"prompt": "same", "temperature": 0}, {"prompt": "same", "seed": 7})

    def texts(*arguments: Any) -> list[str]:
        done = legato("--prompts", path, "--max-new-tokens", 6, *arguments)
        return [result["text"] for result in results_in(done.stdout)]

    sampled = texts("--temperature", 1, "--seed", 1)
    assert texts("--temperature", 1, "--seed", 1) == sampled
    other = texts("--temperature", 1, "--seed", 2)
    assert len({*sampled[:3], *other[:3]}) == 6, "each line, and each seed, has samples of its own"
    assert other[3:] == sampled[3:]
    assert len(set(texts())) == 1, "greedy without --temperature"


def test_resuming_with_a_seed_gives_the_samples_of_one_go(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path
) -> None:
    path = prompts(*[f"prompt {i}" for i in range(4)])
    arguments = ["--prompts", path, "--output", output, "--max-new-tokens", 6, "--temperature", 1]
    legato(*arguments, "--seed", 1)
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    legato(*arguments, "--seed", 1, "--resume")
    assert output.read_bytes() == whole
    legato(*arguments, "--seed", 2, "--resume")
    assert not set(output.read_bytes().splitlines()) & set(whole.splitlines()), "results of another seed were kept"


# Resuming


def test_resume_keeps_the_finished_and_runs_the_rest(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path
) -> None:
    lines: list[Line] = [{"prompt": f"prompt {i}", "max_new_tokens": 3} for i in range(7)]
    arguments = ["--output", output, "--resume"]
    legato("--prompts", prompts(*lines), *arguments)  # nothing there yet
    first = results_in(output.read_text(encoding="utf-8"))
    assert len(first) == 7
    kept = [0, 2, 5]
    marked = [{**result, "text": f"kept \u2028\u0085\u2029 {result['index']} 🍵 é \x1c"} for result in first]
    marked[1] |= {"error": "it failed", "finish_reason": "error"}
    marked[4]["digest"] = "0" * 16
    there = [json.dumps(result, ensure_ascii=False) for result in marked]
    there[6] = there[6][:-1]  # torn
    garbage = ["", "[]", "5", "null", "nonsense", '{"index": [0]}', '{"index": {}, "digest": "x"}', '{"error": null}']
    text = "\n".join([there[5], *garbage, there[4], there[0], there[1], there[2], there[2], there[6]])
    output.write_text(text, encoding="utf-8")
    lines[3] = {"prompt": "another", "max_new_tokens": 3}
    assert legato("--prompts", prompts(*lines), *arguments).status == 0
    after = output.read_text(encoding="utf-8").split("\n")
    assert after.pop() == ""
    assert [json.loads(line)["index"] for line in after] == list(range(7))
    assert [i for i, line in enumerate(after) if line == there[i]] == kept
    for i in (1, 4, 6):
        assert json.loads(after[i]) == first[i]
    assert json.loads(after[3])["digest"] != first[3]["digest"]


@pytest.mark.parametrize(
    "cut", ["in an emoji", "in a number", "before the end of the line", "at once", "nothing whole"]
)
def test_resume_after_a_torn_line(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path, cut: str
) -> None:
    lines = [{"prompt": f"prompt {i}", "id": "🍵", "max_new_tokens": 3} for i in range(3)]
    arguments = ["--prompts", prompts(*lines), "--output", output, "--resume"]
    legato(*arguments)
    whole = output.read_bytes()
    first, second, _ = whole.splitlines(keepends=True)
    torn = {
        "in an emoji": first + second[: second.index("🍵".encode()) + 2],
        "in a number": first + second[: second.index(b"num_generated_tokens") + 23],
        "before the end of the line": first + second[:-1],
        "at once": first + second[:1],
        "nothing whole": first[:40],
    }
    output.write_bytes(torn[cut])
    assert legato(*arguments).status == 0
    assert output.read_bytes() == whole


def test_resume_counts_what_failed_again_and_drops_lines_that_are_gone(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path
) -> None:
    arguments = ["--output", output, "--resume", "--max-new-tokens", 2]
    assert legato("--prompts", prompts("a", {"wrong": 1}, "c", "d"), *arguments).status == 1
    first = output.read_bytes().splitlines()
    assert legato("--prompts", prompts("a", {"wrong": 1}, "c"), *arguments).status == 1
    assert output.read_bytes().splitlines() == first[:3]
    assert legato("--prompts", prompts("a", "b", "c"), *arguments).status == 0
    assert output.read_bytes().splitlines()[::2] == first[:3:2]


def test_with_nothing_left_to_do_no_model_is_loaded(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path, folder: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.symlink_to(folder)
    arguments = ["--model", model, "--prompts", prompts("a", "b"), "--output", output, "--resume"]
    legato(*arguments, "--max-new-tokens", 2)
    before = output.read_bytes()
    model.unlink()
    model.mkdir()
    assert legato(*arguments, "--max-new-tokens", 2).status == 0
    assert output.read_bytes() == before


def test_a_resume_that_cannot_work_costs_nothing(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path
) -> None:
    arguments = ["--prompts", prompts("a", "b"), "--output", output, "--resume", "--max-new-tokens", 2]
    legato(*arguments)
    whole = output.read_bytes()
    output.write_bytes(whole.splitlines(keepends=True)[0])
    assert_one_line_error(legato(*arguments, "--model", "/no/such/model"), "/no/such/model")
    assert output.read_bytes().strip() == whole.splitlines()[0]
    assert legato(*arguments).status == 0
    assert output.read_bytes() == whole


def test_an_engine_that_fails_while_resuming_leaves_a_file_that_can_be_resumed(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": f"prompt {i}", "max_new_tokens": count} for i, count in enumerate([2, 2, 2, 30])]
    arguments = ["--prompts", prompts(*lines), "--output", output, "--resume"]
    legato(*arguments)
    whole = output.read_bytes()
    first, second, third, _ = whole.splitlines(keepends=True)
    output.write_bytes(first + second[:50])
    forward, steps = LlamaForCausalLM.forward, iter(range(10))

    def fail_in_time(*args: Any, **kwargs: Any) -> Any:
        if "paged" in kwargs and next(steps, None) is None:
            raise ZeroDivisionError("planted")
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail_in_time)
    failed = legato(*arguments)
    assert (failed.status, failed.stdout) == (1, "")
    assert failed.stderr.splitlines()[-1] == "legato: error: the engine failed: ZeroDivisionError: planted"
    kept = output.read_bytes().splitlines(keepends=True)
    assert [line for line in kept if line in (first, second, third)] == [first, second, third]
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    assert legato(*arguments).status == 0
    assert output.read_bytes() == whole


def test_without_resume_the_output_is_written_anew(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path
) -> None:
    output.write_text("something old\n" * 100)
    assert legato("--prompts", prompts("a"), "--output", output, "--max-new-tokens", 2).status == 0
    assert len(results_in(output.read_text(encoding="utf-8"))) == 1


# What cannot work


def test_an_empty_file_gives_an_empty_file(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path
) -> None:
    assert legato("--prompts", prompts(), "--output", output) == Done(0, "", "")
    assert output.read_bytes() == b""
    assert legato("--prompts", "-") == Done(0, "", "")
    assert legato("--prompts", prompts("", "  ", "\t"), "--output", output, "--resume") == Done(0, "", "")


def test_a_missing_prompt_file(legato: Callable[..., Done], tmp_path: Path, output: Path) -> None:
    assert_one_line_error(legato("--prompts", tmp_path / "nothing.jsonl", "--output", output), "nothing.jsonl")
    assert_one_line_error(legato("--prompts", tmp_path, "--output", output), str(tmp_path))
    assert not output.exists()


def test_an_output_that_cannot_be_written(
    legato: Callable[..., Done], prompts: Callable[..., Path], tmp_path: Path
) -> None:
    for extra in ([], ["--resume"]):
        done = legato("--prompts", prompts("a"), "--output", tmp_path / "no" / "such" / "out.jsonl", *extra)
        assert_one_line_error(done, "out.jsonl", "no folder")


def test_a_prompt_file_that_is_not_utf_8(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path
) -> None:
    done = legato("--prompts", prompts("fine", "naïve".encode("latin-1")), "--output", output)
    assert_one_line_error(done, "prompts.jsonl", "utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/no/such/model"], ["/no/such/model"]),
        (["--scheduler", "lifo"], ["scheduler_type='lifo'"]),
        (["--page-size", 2], ["page_size=2"]),
        (["--num-blocks", 0], ["num_blocks=0"]),
        (["--max-batch-tokens", -1], ["max_batch_tokens=-1"]),
        (["--dtype", "float99"], ["float99"]),
        (["--device", "nonsense"], ["nonsense"]),
    ],
    ids=str,
)
def test_settings_that_cannot_work(
    legato: Callable[..., Done], prompts: Callable[..., Path], arguments: list[Any], words: list[str]
) -> None:
    assert_one_line_error(legato("--prompts", prompts("a"), *arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume"], "--output"),
        (["--max-new-tokens", 0], "--max-new-tokens"),
        (["--max-new-tokens", "x"], "--max-new-tokens"),
        (["--temperature", -1], "--temperature"),
        (["--seed", -1], "--seed"),
        (["--unknown"], "--unknown"),
        (["--output", "/tmp"], "--output"),
    ],
    ids=str,
)
def test_usage_errors(
    legato: Callable[..., Done], prompts: Callable[..., Path], arguments: list[Any], words: str
) -> None:
    done = legato("--prompts", prompts("a"), *arguments)
    assert (done.status, done.stdout) == (2, "")
    assert "Usage: " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert words in done.stderr.splitlines()[-1]


# The writer


@given(order=st.permutations(range(0, 24, 3)), count=st.integers(0, 8))
def test_results_are_written_in_order_as_soon_as_possible(order: list[int], count: int) -> None:
    file, indices = io.StringIO(), sorted(order)
    writer = OrderedWriter(file, indices)
    for done, index in enumerate(order[:count], start=1):
        writer.add({"index": index, "text": "a\nb\u2028é"})
        ready = next((i for i, wanted in enumerate(indices) if wanted not in order[:done]), len(indices))
        assert [result["index"] for result in results_in(file.getvalue())] == indices[:ready]
        assert list(writer.written) == indices[:ready]
    writer.finish()
    assert [result["index"] for result in results_in(file.getvalue())] == sorted(order[:count])
    assert set(writer.written) == set(order[:count])


# What was cached, and pictures of the run


def test_lines_that_begin_alike_share_unless_their_salts_differ(
    legato: Callable[..., Done], prompts: Callable[..., Path]
) -> None:
    common = list(range(100, 140))
    lines = [{"prompt_ids": [*common, i], "cache_salt": salt} for i, salt in enumerate(("a", "a", "b"))]
    settings = ["--page-size", 8, "--max-new-tokens", 2]
    done = legato("--prompts", prompts(*lines), *settings)
    assert sorted(result["num_cached_tokens"] for result in results_in(done.stdout)) == [0, 0, 40]
    done = legato("--prompts", prompts(*lines), *settings, "--no-sharing")
    assert [result["num_cached_tokens"] for result in results_in(done.stdout)] == [0, 0, 0]
    done = legato("--prompts", prompts({"prompt_ids": [5], "cache_salt": 7}), *settings)
    assert done.status == 1
    assert "cache_salt=7" in results_in(done.stdout)[0]["error"]


@pytest.mark.parametrize("offload_space", [0, 0.01])
def test_pictures_show_a_run_under_pressure(
    legato: Callable[..., Done], prompts: Callable[..., Path], tmp_path: Path, offload_space: float
) -> None:
    picture, trace = tmp_path / "run.svg", tmp_path / "run.json"
    lines = [{"prompt_ids": [100 + i] * 30, "max_new_tokens": 40, "ignore_eos": True} for i in range(12)]
    tight = ["--page-size", 4, "--num-blocks", 60, "--scheduler", "prefill_first", "--offload-space", offload_space]
    done = legato("--prompts", prompts(*lines), *tight, "--timeline", picture, "--trace", trace)
    assert (done.status, len(results_in(done.stdout))) == (0, 12)
    assert "<svg" in picture.read_text()
    states = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    assert {"waiting", "prefill", "decode"} <= states
    assert ("offloaded" in states, "reset" in states) == (offload_space > 0, offload_space == 0)


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_run(
    legato: Callable[..., Done], prompts: Callable[..., Path], output: Path
) -> None:
    done = legato("--prompts", prompts("Hi"), "--output", output, "--timeline", "run.gif")
    assert_one_line_error(done, "run.gif", ".svg")
    assert not output.exists()


def test_files_that_would_overwrite_each_other_are_refused(
    legato: Callable[..., Done], prompts: Callable[..., Path], tmp_path: Path
) -> None:
    same = tmp_path / "same.svg"
    assert_one_line_error(legato("--prompts", prompts("Hi"), "--output", same, "--timeline", same), "different files")
    assert not same.exists()
    assert_one_line_error(legato("--prompts", prompts("Hi"), "--trace", tmp_path / "none" / "trace.json"), "none")


@pytest.mark.parametrize("option", ["--output", "--timeline", "--trace"])
def test_the_prompt_file_is_never_written_to(
    legato: Callable[..., Done], prompts: Callable[..., Path], option: str
) -> None:
    file = prompts("Hi")
    done = legato("--prompts", file, option, file)
    assert (done.status, done.stdout) == (2, "")
    assert file.read_text() == "Hi\n"
