"""``python -m sglang_ext.demo --model DIR --out OUT``: a real model and a real server, dense and sparse, then the trace simulated.

Exit codes: 0 done, 1 a step failed or a simulated count differs from the measured one, 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

from sglang_ext.cli_output import FAILED, OK
from sglang_ext.demo.questions import BATCH_TOKENS, NEW_TOKENS, QUESTIONS
from sglang_ext.demo.server import Answer, Server, ServerError
from sglang_ext.demo.show import Shape, answers_table, metrics_table, parse_metrics, since

WIDTH = 110
HOME_TOKENS = 16384
SEQUENTIAL = 4
"""Questions that the sparse server gets one after the other; the others come at once, so that there are decode batches."""

# The stock backend attends a chunk together with all that went before it: one chunk is the least work.
DENSE = ("--attention-backend", "torch_native", "--max-total-tokens", str(HOME_TOKENS), "--chunked-prefill-size", "8192")
SPARSE: dict[str, str] = {
    "--sparse-algorithm": "quest",
    "--sparse-budget": "1024",
    "--sparse-sink": "64",
    "--sparse-window": "256",
    "--sparse-buffer-factor": "2",
    "--sparse-host-memory": str(HOME_TOKENS),
    "--sparse-device-memory": "8192",
}
GRID = "sparse.buffer_factor=1,2,3,5,8"
SETTLE_SECONDS = 60


class Demo:
    """The stages in their order; each tells what it does and how long it took."""

    def __init__(self, model: Path, out: Path, console: Console) -> None:
        self.model, self.out, self.console = model, out, console
        self.trace = out / "trace"
        self.begin = time.monotonic()
        self.warnings: list[str] = []

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """One line when it is over: seconds since the start, what, its own seconds."""
        begin = time.monotonic()
        with self.console.status(what):
            yield
        now = time.monotonic()
        self.console.print(f"[bold]\\[{now - self.begin:5.0f} s][/bold] {what} ({now - begin:.1f} s)", highlight=False)

    def warn(self, text: str) -> None:
        """Shown now and at the end."""
        self.warnings.append(text)
        self.console.print(f"[bold yellow]WARNING:[/bold yellow] {escape(text)}", highlight=False)

    def run(self) -> int:
        """All stages; returns the exit code."""
        self.out.mkdir(parents=True, exist_ok=True)
        if self.trace.exists():
            shutil.rmtree(self.trace)  # an earlier demo's
        dense = self.ask_dense()
        sparse, again, counters = self.ask_sparse()
        self.tell_answers(dense, sparse, again, counters)
        return self.simulate()

    def ask_dense(self) -> list[Answer]:
        """The stock server's answers."""
        with Server(self.model, self.out / "dense.log", DENSE) as server:
            with self.stage("dense: stock SGLang server, backend torch_native, started"):
                server.start()
            with self.stage("dense: first question, the document is prefilled"):
                answers = [server.ask(QUESTIONS[0].prompt, NEW_TOKENS)]
            with self.stage(f"dense: {len(QUESTIONS) - 1} further questions at once"):
                answers += server.ask_together([question.prompt for question in QUESTIONS[1:]], NEW_TOKENS)
        return answers

    def ask_sparse(self) -> tuple[list[Answer], list[Answer], dict[str, int]]:
        """The sparse server's answers one by one, those at once, and its counters over all of them."""
        flags = [part for pair in SPARSE.items() for part in pair]
        self.console.print(f"         sparse flags: {' '.join(flags)}", highlight=False)
        with Server(self.model, self.out / "sparse.log", (*flags, "--sparse-trace", str(self.trace), "--enable-metrics")) as server:
            with self.stage("sparse: the same server with these flags, started"):
                server.start()
            before = parse_metrics(server.metrics())
            with self.stage("sparse: first question, the document is prefilled and written home"):
                answers = [server.ask(QUESTIONS[0].prompt, NEW_TOKENS)]
            with self.stage("sparse: second question, same document"):
                answers.append(server.ask(QUESTIONS[1].prompt, NEW_TOKENS))
            with self.stage(f"sparse: {len(QUESTIONS) - 2} further questions, one after the other"):
                answers += [server.ask(question.prompt, NEW_TOKENS) for question in QUESTIONS[2:]]
            with self.stage(f"sparse: all questions again, at once, {BATCH_TOKENS} tokens each"):
                again = server.ask_together([question.prompt for question in QUESTIONS], BATCH_TOKENS)
            counters = since(before, self.settled(server, answers[0].prompt_tokens // 2, len(answers) + len(again)))
        return answers, again, counters

    def settled(self, server: Server, long: int, count: int) -> dict[str, int]:
        """Metrics of the idle server, when its trace is complete and holds ``count`` requests with prompts of at least ``long`` tokens."""
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            meta = json.loads((self.trace / "meta.json").read_text(encoding="utf-8"))
            requests = (self.trace / "requests.jsonl").read_text(encoding="utf-8").splitlines() if meta["complete"] else []
            if sum(json.loads(line).get("prompt_tokens", 0) >= long for line in requests) == count:
                metrics = parse_metrics(server.metrics())
                if metrics["sparse_pages_selected"] == meta["totals"]["sparse_pages_selected"]:
                    return metrics
            if time.monotonic() > end:
                raise server.failure(f"the trace in {self.trace} is not complete {SETTLE_SECONDS} s after the last answer")
            time.sleep(0.2)

    def tell_answers(self, dense: list[Answer], sparse: list[Answer], again: list[Answer], counters: dict[str, int]) -> None:
        """Both tables, and what SGLang reused of the document."""
        self.console.print(answers_table(dense, sparse))
        for name, answers in (("dense", dense), ("sparse", sparse), ("batched sparse", again)):
            wrong = sum(not question.accepts(answer.text) for question, answer in zip(QUESTIONS, answers, strict=True))
            if wrong:
                self.warn(f"{wrong} of {len(QUESTIONS)} {name} answers are wrong")
        second = sparse[1]
        self.console.print(
            f"Radix hit: {second.cached_tokens:,} of the second question's {second.prompt_tokens:,} prompt tokens were cached "
            f"(first question: {sparse[0].cached_tokens:,}); their pages lie in home.",
            highlight=False,
        )
        model = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        shape = Shape(model["num_hidden_layers"], model["num_key_value_heads"])
        self.console.print(metrics_table(counters, shape.context_pages([*sparse, *again])))

    def simulate(self) -> int:
        """The trace through ``sglang-ext``; counts must be equal, times may warn."""
        for arguments in (["trace", "validate", self.trace], ["compare", self.trace, "--out", self.out / "compare"]):
            code = self.tool(*arguments)
            if code not in (OK, FAILED) or (code == FAILED and arguments[0] != "compare"):
                return self.failed(f"sglang-ext {arguments[0]} ended with exit code {code}")
        summary = json.loads((self.out / "compare" / "summary.json").read_text(encoding="utf-8"))
        unequal = verdict(summary)
        if unequal:
            return self.failed(f"simulated counts differ from the measured ones: {', '.join(unequal)}")
        if summary["failures"]:
            self.warn(
                f"pages and bytes are equal, but {len(summary['failures'])} times are not within {summary['tolerance']:.0%}; to be expected where "
                "the machine does other work meanwhile."
            )
        for arguments in (["simulate", self.trace, "--set", GRID], ["report", self.trace, "--out", self.out / "report"]):
            code = self.tool(*arguments, quiet=arguments[0] == "report")
            if code != OK:
                return self.failed(f"sglang-ext {arguments[0]} ended with exit code {code}")
        self.console.print(f"Report:   {self.out / 'report' / 'report.html'}", highlight=False, soft_wrap=True)
        self.console.print(f"Timeline: {self.out / 'report' / 'trace.json.gz'} (open in ui.perfetto.dev)", highlight=False, soft_wrap=True)
        done = f"demo done in {time.monotonic() - self.begin:.0f} s"
        self.console.print(
            f"[bold green]{done}[/bold green]" + (f", {len(self.warnings)} warning(s) above" if self.warnings else ""), highlight=False
        )
        return OK

    def tool(self, *arguments: object, quiet: bool = False) -> int:
        """Run ``sglang-ext`` with ``arguments`` and show its stdout; its stderr goes where ours goes."""
        words = [str(argument) for argument in arguments]
        command = [sys.executable, "-c", "from sglang_ext.cli import main; main()", *words]
        environment = {**os.environ, "COLUMNS": str(self.console.width)}
        with self.stage(f"$ sglang-ext {' '.join(words)}"):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
        if not quiet or done.returncode != OK:
            self.console.print(done.stdout.rstrip(), highlight=False, markup=False, soft_wrap=True)
        return done.returncode

    def failed(self, text: str) -> int:
        """Tell why the demo failed."""
        self.console.print(f"[bold red]FAILED:[/bold red] {escape(text)}", highlight=False)
        return FAILED


def verdict(summary: dict[str, Any]) -> list[str]:
    """Names of the counts that are not equal in the summary that ``sglang-ext compare --out`` wrote."""
    return [line["name"] for line in summary["exact"] if not line["equal"]]


def parse(arguments: list[str] | None) -> tuple[Path, Path]:
    """Model folder and output folder; exits with 2 and a message where they can't be used."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ext.demo", description="Serve a small model dense and sparse, then simulate the run."
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder of the model")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for logs, trace and report")
    given = parser.parse_args(arguments)
    if not (given.model / "config.json").is_file():
        parser.error(f"--model {given.model} holds no config.json; make the demo's model: python -m sglang_ext.demo.model {given.model}")
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"--out {given.out} is not a folder")
    if (given.out / "trace").exists() and not (given.out / "sparse.log").exists():
        parser.error(f"--out {given.out} holds a folder trace that this demo did not write; give another folder")
    return given.model, given.out


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    model, out = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return Demo(model, out, console).run()
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; the server is stopped", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
