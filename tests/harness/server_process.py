"""`paceline serve` as a process."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx


class Server:
    """A process that serves the mini, or the models in the arguments; its stderr is kept."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        drafter = [] if "--drafter" in arguments else ["--drafter", "none"]
        command = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--threads", "1", *drafter, *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
        self._lines: list[str] = []
        self._is_ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._is_ready.wait(120)
        if not self.url:
            self.close()
            raise AssertionError(self.stderr)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            if found := re.search(r"answers at (http://\S+)/v1", line):
                self.url = found[1]
                self._is_ready.set()
        self._is_ready.set()

    @property
    def stderr(self) -> str:
        return "".join(self._lines)

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, headers=headers)

    def resident_bytes(self) -> int:
        """Memory of the process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def wait(self) -> int:
        """Its exit code."""
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def close(self) -> None:
        assert self.process.stderr is not None
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        self.process.stderr.close()
