"""Reading recorded traces."""

from pathlib import Path

import pytest

from legato.errors import InvalidValueError
from legato.simulate.traces import read_trace

DATA = Path(__file__).parent.parent / "data"


def test_mooncake_requests_come_with_their_blocks() -> None:
    requests = read_trace(DATA / "mooncake_400.jsonl", "mooncake")
    assert len(requests) == 400
    first = requests[0]
    assert (first.arrival, first.prompt_length, first.output_length) == (0, 6758, 500)
    assert (first.block_ids, first.block_size) == (list(range(14)), 512)


def test_azure_requests_come_with_lengths_and_seconds() -> None:
    requests = read_trace(DATA / "azure_200.csv", "azure")
    assert len(requests) == 200
    assert [(r.prompt_length, r.output_length, r.block_ids) for r in requests[:2]] == [
        (374, 44, None),
        (396, 109, None),
    ]
    assert [r.arrival for r in requests[:2]] == pytest.approx([0, 4.314579])


def test_repeated_traces_follow_each_other_and_share_nothing() -> None:
    once = read_trace(DATA / "mooncake_400.jsonl", "mooncake")
    twice = read_trace(DATA / "mooncake_400.jsonl", "mooncake", repeat=2)
    assert twice[:400] == once
    assert [r.prompt_length for r in twice[400:]] == [r.prompt_length for r in once]
    assert [r.arrival for r in twice] == sorted(r.arrival for r in twice)
    blocks = [{i for r in half for i in r.block_ids or ()} for half in (twice[:400], twice[400:])]
    assert not blocks[0] & blocks[1]
    assert len(read_trace(DATA / "azure_200.csv", "azure", repeat=3, limit=450)) == 450


@pytest.mark.parametrize(
    ("trace_format", "content", "request_number"),
    [
        ("mooncake", '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n{}', 2),
        ("mooncake", '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]}', 1),
        ("mooncake", '{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}', 1),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": -1, "hash_ids": [1]}', 1),
        ("mooncake", '{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}', 1),
        ("mooncake", '{"timestamp": 0, "input_length": Infinity, "output_length": 1, "hash_ids": [1]}', 1),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 1e300, "hash_ids": [1]}', 1),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', 1),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [18446744073709551616]}', 1),
        ("mooncake", "[" * 100_000, 1),
        ("mooncake", "[1, 2]", 1),
        ("mooncake", "nonsense", 1),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2", 1),
        ("azure", '{"timestamp": 0, "input_length": 5}', 1),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "1" * 200_000, 1),
        ("azure", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6805900,1", 1),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,many,2", 1),
    ],
)
def test_what_is_not_of_the_format_is_refused_by_number(
    tmp_path: Path, trace_format: str, content: str, request_number: int
) -> None:
    file = tmp_path / "trace"
    file.write_text(content)
    with pytest.raises(InvalidValueError, match=rf"request {request_number} is not in {trace_format} format"):
        read_trace(file, trace_format)


def test_blank_lines_are_passed_over_and_the_first_request_comes_at_0(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    line = '{"timestamp": %d, "input_length": 5, "output_length": 0, "hash_ids": [1]}\n'
    file.write_text(line % 7000 + "\n" + line % 5000 + "\n\n")
    requests = read_trace(file, "mooncake")
    assert [(r.arrival, r.output_length) for r in requests] == [(0, 1), (2, 1)]
