"""Start `legato serve` with SmolLM2, put a load on it by `legato bench serve`, print its figures, stop it.

    python bench/serve_once.py [OPTIONS OF legato serve --] OPTIONS OF legato bench serve

It can stand as a peer of `legato bench offline --compare`, which then says what HTTP costs.
"""

import subprocess
import sys

from legato.bench.served import Served


def main(arguments: list[str]) -> int:
    split = arguments.index("--") + 1 if "--" in arguments else 0
    server = Served(*arguments[: max(0, split - 1)])
    try:
        bench = [sys.executable, "-m", "legato.cli", "bench", "serve", "--model", "smollm2", "--url", server.url]
        return subprocess.run([*bench, "--json", *arguments[split:]]).returncode
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
