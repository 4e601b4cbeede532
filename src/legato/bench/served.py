"""A server to measure or to misuse, in a process of its own."""

import re
import signal
import subprocess
import sys
import threading


class Served:
    """`legato serve smollm2` on a port that was free; made when it is ready.

    Args:
        options: of the command.

    Attributes:
        process: that it runs in.
        url: its address.
        log: what it has written to stderr so far.

    Raises:
        RuntimeError: it ended before it was ready; the message holds its log.
    """

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "legato.cli", "serve", "smollm2", "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self._stderr, self.log = self.process.stderr, ""
        while not (found := re.search(r"serving .* on (http://[0-9.:]+[0-9])", self.log)):
            line = self._stderr.readline()
            if not line:
                raise RuntimeError(f"legato serve ended: {self.log}")
            self.log += line
        self.url = found[1]
        threading.Thread(target=self._read_log, daemon=True).start()  # a full pipe would stop it

    def stop(self) -> int:
        """Let it finish what it runs. Returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)

    def _read_log(self) -> None:
        for line in self._stderr:
            self.log += line
