import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from legato.models import load_model, load_tokenizer

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session", autouse=True)
def _share_of_the_processors() -> None:
    """Workers of pytest-xdist share them for what they compute; servers that tests start take all there are."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


@pytest.fixture(scope="module")
def all_processors() -> Iterator[None]:
    """For what must be right with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def questions() -> list[str]:
    """64 questions of GSM8K."""
    return [json.loads(line)["question"] for line in (DATA / "gsm8k_64.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2-135M-Instruct in float32; `legato pull smollm2` fetches it."""
    return load_model("smollm2", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Any:
    """Gemma-3-270M in float32: 15 sliding layers (window 512), 3 full ones; `legato pull gemma3` fetches it."""
    return load_model("gemma3", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def gemma3_tokenizer() -> Any:
    return load_tokenizer("gemma3")
