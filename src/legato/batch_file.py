"""Files of prompts in, files of results out: the work of `legato generate`."""

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from legato.config import ContinuousBatchingConfig
from legato.errors import EngineError, InvalidValueError
from legato.llm import LLM
from legato.manager import ContinuousBatchingManager
from legato.progress import completed
from legato.prompt_file import SAMPLING_FIELDS, PromptLine
from legato.request import GenerationOutput, RequestSpec
from legato.terminal import notice
from legato.text import decode, encode, encode_chat
from legato.timeline import Timeline, check_can_draw, draw_timeline, write_chrome_trace

logger = logging.getLogger(__name__)

INTERRUPTED = 130

Result = dict[str, Any]


@dataclass(frozen=True)
class Pictures:
    """Files that show what each request of a run went through.

    Attributes:
        timeline: a drawing; see `draw_timeline`.
        trace: for Perfetto; see `write_chrome_trace`.
    """

    timeline: Path | None = None
    trace: Path | None = None

    def check(self, output: Path | None) -> None:
        """Refuse now what would fail after the run.

        Raises:
            InvalidValueError: two files are one, or a picture of that kind cannot be drawn.
            OSError: a file cannot be written.
            MissingExtraError: there is nothing to draw with.
        """
        if self.timeline is not None:
            check_can_draw(self.timeline)
        files = [path for path in (output, self.timeline, self.trace) if path is not None]
        if len({path.resolve() for path in files}) < len(files):
            raise InvalidValueError("--output, --timeline and --trace must be different files")
        if output is not None and not output.parent.is_dir():
            raise FileNotFoundError(f"--output {output} cannot be written: there is no folder {output.parent}")
        for path in (self.timeline, self.trace):
            if path is not None:
                path.touch()

    @contextmanager
    def of(self, manager: ContinuousBatchingManager) -> Iterator[None]:
        """Watch the manager inside, write the files after."""
        if self.timeline is None and self.trace is None:
            yield
            return
        watched = Timeline()
        manager.watch(watched.add)
        try:
            yield
        finally:
            with suppress(EngineError):
                manager.watch(None)
            with manager.pause():  # until the step under way, if any, has ended: it still tells
                pass
            if self.trace is not None:
                write_chrome_trace(watched, self.trace)
            if self.timeline is not None:
                draw_timeline(watched, self.timeline)


def run_lines(
    lines: Sequence[PromptLine],
    model: str,
    load: Mapping[str, Any],
    config: ContinuousBatchingConfig,
    output: Path | None,
    resume: bool,
    pictures: Pictures,
) -> int:
    """Answer the lines and write the results.

    Args:
        load: given to `from_pretrained`.
        output: where; None: standard output.
        resume: keep the results that `output` holds already.
        pictures: drawn at the end, of an interrupted run too.

    Returns:
        The exit status: 0, 1 if some lines failed, 130 if interrupted.
    """
    pictures.check(output)
    done = _kept_results(lines, output) if resume and output is not None else {}
    todo = [line for line in lines if line.index not in done]
    if not todo:
        if output is not None and not done:
            output.write_text("")
        notice(f"legato: nothing to do: {len(done)} of {len(lines)} prompts are answered")
        return 0
    # The model first: what it cannot load for must not have cost the file that is there.
    with LLM(model, continuous_batching_config=config, **load) as llm, _open(output, append=bool(done)) as file:
        writer = OrderedWriter(file, [line.index for line in todo])
        with pictures.of(llm.manager):
            finished = _answer(todo, llm, writer)
    if done and output is not None:
        _sort_file(output, {**done, **writer.written})
    if not finished:
        return INTERRUPTED
    failed = [result for result in writer.written.values() if result["error"] is not None]
    if failed:
        first = failed[0]
        number = next(line.number for line in todo if line.index == first["index"])
        logger.warning(
            "%d of %d lines failed, the first of them line %d: %s",
            len(failed), len(writer.written), number, first["error"],
        )  # fmt: skip
    return 1 if failed else 0


def _answer(lines: Sequence[PromptLine], llm: LLM, writer: "OrderedWriter") -> bool:
    """Run the lines and hand each result to the writer as it comes. Returns whether all are; Ctrl-C cuts it short."""
    try:
        runnable = []
        for line in lines:
            try:
                runnable.append((line, _make_spec(line, llm.tokenizer)))
            except InvalidValueError as error:
                writer.add(_result(line, None, "", str(error)))
        for index, output in completed(llm.manager, [spec for _, spec in runnable], show=True):
            text = decode(llm.tokenizer, output.generated_tokens) if output.text is None else output.text
            writer.add(_result(runnable[index][0], output, text))
    except KeyboardInterrupt:
        return False
    finally:
        writer.finish()
    return True


def _make_spec(line: PromptLine, tokenizer: Any) -> RequestSpec:
    if line.error is not None:
        raise InvalidValueError(line.error)
    fields = line.fields
    if "messages" in fields:
        input_ids = encode_chat(tokenizer, fields["messages"])
    elif "prompt" in fields:
        input_ids = encode(tokenizer, fields["prompt"])
    else:
        input_ids = fields["prompt_ids"]
    sampling = {name: fields[name] for name in SAMPLING_FIELDS if name in fields} | {"n": 1}  # a line, an answer
    own = {name: fields[name] for name in ("cache_salt", "priority") if name in fields}
    return RequestSpec(input_ids, fields["max_new_tokens"], sampling=sampling, **own)


def _result(line: PromptLine, output: GenerationOutput | None, text: str, error: str | None = None) -> Result:
    return {
        "index": line.index,
        **({"id": line.fields["id"]} if "id" in line.fields else {}),
        "text": text,
        "finish_reason": "error" if output is None else output.finish_reason,
        "error": error if output is None else output.error,
        "num_prompt_tokens": 0 if output is None else len(output.prompt_ids),
        "num_generated_tokens": 0 if output is None else len(output.generated_tokens),
        "num_cached_tokens": 0 if output is None else output.num_cached_tokens,
        "digest": line.digest,
    }


class OrderedWriter:
    """Writes results in the order of `indices`, each as soon as those before it are written.

    Args:
        file: where; flushed after every result.
        indices: all that may come, ascending.
    """

    def __init__(self, file: TextIO, indices: Iterable[int]) -> None:
        self.written: dict[int, Result] = {}
        self._file = file
        self._next = list(reversed(list(indices)))
        self._early: dict[int, Result] = {}

    def add(self, result: Result) -> None:
        self._early[result["index"]] = result
        while self._next and self._next[-1] in self._early:
            self._write(self._early.pop(self._next.pop()))

    def finish(self) -> None:
        """Nothing more will come: write what had to wait, in order."""
        for index in sorted(self._early):
            self._write(self._early.pop(index))

    def _write(self, result: Result) -> None:
        self._file.write(_dump(result))
        self._file.flush()
        self.written[result["index"]] = result


def _kept_results(lines: Sequence[PromptLine], output: Path) -> dict[int, Result]:
    """Results in a file that are whole, without error, and of lines that are still the same."""
    if not output.exists():
        return {}
    digests = {line.index: line.digest for line in lines}
    kept = {}
    # Not splitlines(), which also splits at characters that may stand inside a line. A torn line need not be text.
    for text in output.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            result = json.loads(text)
        except ValueError:
            continue  # the run was killed while it wrote this line
        if not isinstance(result, dict) or result.get("error") is not None:
            continue
        index, digest = result.get("index"), result.get("digest")
        if isinstance(index, int) and digests.get(index) == digest:
            kept[index] = result
    return kept


def _dump(result: Result) -> str:
    """One line of JSON; half a character, which an id may hold, becomes an escape."""
    return json.dumps(result, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"


def _sort_file(output: Path, results: Mapping[int, Result]) -> None:
    """Put a file that was appended to in input order, all at once."""
    sorted_path = output.with_name(output.name + ".sorted")
    sorted_path.write_text("".join(_dump(results[index]) for index in sorted(results)), encoding="utf-8")
    os.replace(sorted_path, output)


@contextmanager
def _open(output: Path | None, append: bool) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    with output.open("a" if append else "w", encoding="utf-8") as file:
        if append:
            file.write("\n")  # ends a line that was cut off; blank lines are dropped when the file is sorted
        yield file
