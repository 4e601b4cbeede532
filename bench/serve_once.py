"""Start `legato serve` with SmolLM2, put a load on it by `legato bench serve`, print its figures, stop it.

    python bench/serve_once.py [OPTIONS OF legato serve --] OPTIONS OF legato bench serve

It can stand as a peer of `legato bench offline --compare`, which then says what HTTP costs.
"""

import re
import signal
import subprocess
import sys

LEGATO = [sys.executable, "-m", "legato.cli"]


def main(arguments: list[str]) -> int:
    split = arguments.index("--") + 1 if "--" in arguments else 0
    serve = [*LEGATO, "serve", "smollm2", "--port", "0", *arguments[: max(0, split - 1)]]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            log = ""
            while not (found := re.search(r"serving .* on (http://[0-9.:]+[0-9])", log)):
                line = server.stderr.readline()
                if not line:
                    sys.exit(f"legato serve ended: {log}")
                log += line
            bench = [*LEGATO, "bench", "serve", "--model", "smollm2", "--url", found[1], "--json", *arguments[split:]]
            return subprocess.run(bench).returncode
        finally:
            server.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
