"""A minute of `bench/soak.py`; it says what it checks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent.parent / "bench/soak.py"


@pytest.mark.slow
def test_a_minute_of_misuse() -> None:
    done = subprocess.run([sys.executable, SOAK, "--minutes", "1"], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)["seen"]
    for what in ("stay 200", "stay_streaming 200", "sample 200", "leave_streaming 200", "leave 0", "half_a_body 0"):
        assert seen.get(what, 0) > 0, f"nobody did {what}: {seen}"
