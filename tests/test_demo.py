"""The demo without its servers: document, questions, tables, verdict, wrong use."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from sglang_ext.demo import __main__ as demo
from sglang_ext.demo.questions import HEAD, QUESTIONS, first_line, load_document
from sglang_ext.demo.server import Answer, Server, ServerError
from sglang_ext.demo.show import Shape, answers_table, metrics_table, parse_metrics, since

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "smollm2"

METRICS = """\
# HELP sglang:sparse_pages_selected_total pages attended by decoding rows
# TYPE sglang:sparse_pages_selected_total counter
sglang:sparse_pages_selected_total{engine_type="unified",model_name="m",tp_rank="0"} 1.234e+03
sglang:sparse_page_hits_total{model_name="m"} 1000.0
sglang:sparse_page_misses_total{model_name="m"} 200.0
sglang:sparse_pages_born_total{model_name="m"} 34.0
sglang:sparse_link_bytes_demand_total{model_name="m"} 1638400.0
sglang:sparse_link_bytes_prefix_total{model_name="m"} 0.0
sglang:sparse_link_bytes_write_total{model_name="m"} 2.5e+09
sglang:sparse_frames_used{model_name="m"} 0.0
sglang:sparse_frames_free{model_name="m"} 46080.0
sglang:sparse_home_tokens_used{model_name="m"} 5600.0
sglang:sparse_home_tokens_free{model_name="m"} 10784.0
sglang:num_running_reqs{model_name="m"} 3.0
"""


def text_of(renderable: object) -> str:
    console = Console(width=demo.WIDTH, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def answer(text: str, prompt: int = 5500, cached: int = 0, new: int = 32) -> Answer:
    return Answer(text, prompt, cached, new)


@pytest.mark.skipif(not (MODEL / "tokenizer.json").is_file(), reason="the model is not built")
def test_the_document_has_the_length_that_the_demo_is_about():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert 5400 <= len(tokenizer.encode(load_document()).ids) <= 6000
    longest = max(len(tokenizer.encode(question.prompt).ids) for question in QUESTIONS)
    assert longest + 64 < 8192  # the model's context
    # All prompts share the document, and the parallel ones fit home with what they generate.
    assert longest + len(QUESTIONS) * 256 < demo.HOME_TOKENS


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.expected)
def test_the_document_states_every_fact_once_in_the_words_of_the_answer(question):
    document = " ".join(load_document().split())
    assert document.count(f"{question.opening} {question.expected}") == 1
    assert document.count(question.opening) == 1
    assert question.prompt.startswith(HEAD + load_document())
    assert question.prompt.endswith(question.opening)  # no blank: the model's words begin with one


def test_facts_lie_outside_sink_and_window():
    document = load_document()
    for question in QUESTIONS:
        assert 0.05 < document.index(question.expected) / len(document) < 0.8


def test_questions_differ():
    for field in ("text", "opening", "expected"):
        assert len({getattr(question, field) for question in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize(
    ("text", "right"),
    [(" 6129034.\n\nThe", True), ("6129034", True), (" 2950684.", False), ("", False), (" 612903", False), ("The number 6129034", False)],
)
def test_an_answer_is_right_when_it_goes_on_with_the_fact(text, right):
    (question,) = (one for one in QUESTIONS if one.expected == "6129034")
    assert question.accepts(text) is right


def test_first_line_is_what_is_shown():
    assert first_line(" Edvard Lindqvist.\n\nThe master of the") == "Edvard Lindqvist."
    assert first_line("") == ""


def test_answers_table_marks_each_answer():
    dense = [answer(f" {question.expected}.\n\nmore") for question in QUESTIONS]
    sparse = [answer(" [bold]nonsense"), *dense[1:]]
    shown = text_of(answers_table(dense, sparse))
    assert shown.count("wrong") == 1
    assert shown.count(" ok ") == 2 * len(QUESTIONS) - 1
    assert "[bold]nonsense" in shown  # an answer is no markup
    assert max(map(len, shown.splitlines())) <= demo.WIDTH


def test_metrics_are_read_and_counted_since_the_start():
    after = parse_metrics(METRICS)
    assert after["sparse_pages_selected"] == 1234
    assert after["sparse_link_bytes_write"] == 2_500_000_000
    assert after["sparse_home_tokens_used"] == 5600
    assert "num_running_reqs" not in after
    grown = since({"sparse_pages_selected": 234, "sparse_home_tokens_used": 16}, after)
    assert (grown["sparse_pages_selected"], grown["sparse_page_hits"], grown["sparse_home_tokens_used"]) == (1000, 1000, 5600)


def test_context_pages_counts_every_decode_step_over_all_rows():
    # 16 + 1 tokens are two pages, and so on up to 16 + 3; the first token needs no decode step.
    assert Shape(layers=2, kv_heads=3).context_pages([answer("", prompt=16, new=4)]) == 2 * 3 * (2 + 2 + 2)
    assert Shape(layers=1, kv_heads=1).context_pages([answer("", prompt=14, new=4), answer("", prompt=5, new=1)]) == 1 + 1 + 2


def test_metrics_table_shows_shares_and_bytes():
    shown = text_of(metrics_table(parse_metrics(METRICS), 12_340))
    for part in ("1,234", "10.0% of the 12,340 context pages", "81.0%", "16.2%", "1.638 MB", "2.5 GB", "of 46,080", "of 16,384"):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= demo.WIDTH
    assert "0.0%" in text_of(metrics_table(dict.fromkeys(parse_metrics(METRICS), 0), 0))  # nothing ran: no division by zero


def test_verdict_names_counts_that_differ_and_no_times():
    summary = {"failures": ["tpot"], "exact": [{"name": "hits", "equal": True}, {"name": "demand_bytes", "equal": True}]}
    assert demo.verdict(summary) == []
    summary["exact"][1]["equal"] = False
    assert demo.verdict(summary) == ["demand_bytes"]


def test_wrong_use_is_told_with_exit_code_2(tmp_path, capsys):
    model = tmp_path / "model"
    cases = [
        ([], "--model"),
        (["--model", str(model)], "--out"),
        (["--model", str(model), "--out", str(tmp_path / "out")], f"--model {model} holds no config.json"),
    ]
    for arguments, message in cases:
        with pytest.raises(SystemExit) as ended:
            demo.main(arguments)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_a_folder_of_somebody_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "out"
    (out / "trace").mkdir(parents=True)
    for target, message in ((out, "did not write"), (tmp_path / "config.json", "is not a folder")):
        with pytest.raises(SystemExit) as ended:
            demo.main(["--model", str(tmp_path), "--out", str(target)])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert (out / "trace").is_dir()


def fake(tmp_path: Path, code: str) -> Server:
    server = Server(tmp_path, tmp_path / "server.log", ())
    server.command = [sys.executable, "-c", code]
    return server


def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path):
    lines = "print(*range(100), 'no such model', sep='\\n')"
    with fake(tmp_path, lines) as server, pytest.raises(ServerError) as caught:
        server.start()
    assert "ended while it started" in str(caught.value)
    assert str(caught.value).endswith("99\nno such model")
    assert "\n50\n" not in str(caught.value)


def test_no_process_of_a_server_outlives_its_block(tmp_path):
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print(child.pid, 'The server is fired up and ready to roll', flush=True)\n"
        "time.sleep(600)\n"
    )
    pids: list[int] = []

    def interrupted() -> None:
        with fake(tmp_path, code) as server:
            server.start()
            pids.append(int(server.log.read_text().split()[0]))
            os.kill(pids[0], 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    pid = pids[0]
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is alive")
