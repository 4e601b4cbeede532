"""lm-eval's `local-completions` against a running server: `make lm-eval`. It has an environment of its own, since it
brings sixty packages that nothing else here needs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from legato.models import catalog_model, pull_model
from tests.server.legato_server import KEY, Server

DATA = Path(__file__).parents[1] / "data" / "lm_eval"


def evaluate(python: str, url: str, folder: Path) -> dict[str, Any]:
    """Results by task, as lm-eval writes them."""
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder)}
    environment.pop("PYTHONPATH", None)
    tokenizer = pull_model(catalog_model("smollm2"))
    model = f"model=smollm2,base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=8,max_length=2048"
    command = [
        python, "-m", "lm_eval", "--model", "local-completions", "--model_args", model, "--include_path", str(DATA),
        "--tasks", "legato_gsm8k,legato_gsm8k_answers", "--output_path", str(folder), "--batch_size", "4",
    ]  # fmt: skip
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[2], timeout=600)
    (found,) = folder.rglob("results_*.json")
    return dict(json.loads(found.read_text())["results"])


def main() -> None:
    """Runs both tasks; fails if one has no figure, or if right answers are no likelier than scrambled ones."""
    server = Server("--api-key", KEY)
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = evaluate(sys.argv[1], server.url, Path(folder))
    finally:
        server.stop()
    print(json.dumps(results, indent=2))
    assert "exact_match,last-number" in results["legato_gsm8k"]
    assert results["legato_gsm8k_answers"]["acc,none"] > 0.5


if __name__ == "__main__":
    main()
