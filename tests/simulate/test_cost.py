"""The cost model: fitted to steps, read from files."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from legato.errors import InvalidValueError
from legato.simulate.cost import CostModel, StepShape

TRUE = CostModel(step=0.02, token=1e-3, request=5e-4, key=2e-6, pair=1e-8, moved_page=1e-4)


def shapes(count: int) -> list[StepShape]:
    rng = np.random.default_rng(0)
    result = []
    for _ in range(count):
        requests, keys = int(rng.integers(1, 64)), int(rng.integers(100, 50_000))
        tokens = requests + int(rng.integers(0, 1000))
        result.append(StepShape(tokens, requests, keys, tokens * keys // requests))
    return result


def test_a_fit_finds_the_model_that_made_the_times() -> None:
    fitted = CostModel.fit([(shape, TRUE.seconds(shape)) for shape in shapes(200)], TRUE.moved_page)
    assert asdict(fitted) == pytest.approx(asdict(TRUE), rel=1e-6)


def test_a_fit_of_noise_has_no_negative_times() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        fitted = CostModel.fit([(shape, float(rng.uniform(0.01, 1))) for shape in shapes(30)], 0.0)
        assert min(asdict(fitted).values()) >= 0


def test_a_file_may_hold_the_model_or_what_bench_prints(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    for content in (asdict(TRUE), {"model": "smollm2", "steps": 9, "cost": asdict(TRUE)}):
        file.write_text(json.dumps(content))
        assert CostModel.load(file) == TRUE


@pytest.mark.parametrize("content", ["[]", '{"cots": 1}', '{"step": -1}', '{"token": "1"}', '{"cost": 3}', "nonsense"])
def test_a_wrong_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "cost.json"
    file.write_text(content)
    with pytest.raises(InvalidValueError, match=r"cost"):
        CostModel.load(file)
