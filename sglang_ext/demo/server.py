"""An SGLang server as a child process: its start, its answers, its certain end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

READY = "The server is fired up and ready to roll"
"""SGLang logs it after its warm-up. Its ``/health`` would run a request, which would be in the trace."""

COMMON = ("--dtype", "float32", "--device", "cpu", "--disable-cuda-graph", "--random-seed", "1", "--sleep-on-idle")
START_SECONDS = 600
ANSWER_SECONDS = 600
SHOWN_LINES = 25


class ServerError(RuntimeError):
    """A server that does not start, dies or does not answer; the message has the end of its log."""


@dataclass(frozen=True)
class Answer:
    """What ``/generate`` said."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """``with Server(...) as server: server.start()``: gone with all its processes outside, however the block is left."""

    def __init__(self, model: Path, log: Path, arguments: tuple[str, ...]) -> None:
        self.log = log
        self.port = free_port()
        self.command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
        self.command += ["--port", str(self.port), *COMMON, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it serves."""
        # Without a visible GPU the CPU reference platform serves, on every machine alike.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while READY not in self.log.read_text(encoding="utf-8", errors="replace"):
            if self._process is None or self._process.poll() is not None:
                raise self.failure("the server ended while it started")
            if time.monotonic() > end:
                raise self.failure(f"the server did not start within {START_SECONDS} s")
            time.sleep(0.25)

    def failure(self, what: str) -> ServerError:
        """An error that shows the end of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        return ServerError("\n".join([f"{what}; the last lines of {self.log}:", *(line[:200] for line in lines)]))

    def _open(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        # No proxy may stand between this machine and itself.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=ANSWER_SECONDS) as reply:
                return bytes(reply.read())
        except OSError as error:
            raise self.failure(f"{path}: {error}") from None

    def ask(self, prompt: str, new_tokens: int) -> Answer:
        """Greedy, exactly ``new_tokens`` tokens."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        reply = json.loads(self._open("/generate", {"text": prompt, "sampling_params": sampling}))
        meta = reply["meta_info"]
        return Answer(reply["text"], meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"])

    def ask_together(self, prompts: list[str], new_tokens: int) -> list[Answer]:
        """All at once: SGLang batches them."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, new_tokens), prompts))

    def metrics(self) -> str:
        """The text of ``/metrics``."""
        return self._open("/metrics").decode()

    def stop(self) -> None:
        """Ask the server to end, then end whatever is left of its process group."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
