"""SparseConfig: every field takes its good values in both spellings, and refuses every wrong one by name, with what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.algorithms import algorithm_names, check_algorithm
from sglang_ext.config import ALGORITHMS, ALLOWED, DEFAULT_BUDGET, MemorySize, SparseConfig, build_config, load_config

NAN, INF = float("nan"), float("inf")
HUGE = "9" * 400


def _file(directory: Path, text: str) -> Path:
    path = directory / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


GOOD: list[tuple[str, Any, Any]] = [
    ("algorithm", "streaming", "streaming"),
    ("budget", "512", 512),
    ("budget", 10**9, 10**9),
    ("budget", "0.25", 0.25),
    ("budget", 1.0, 1.0),
    ("budget", "1.0", 1.0),
    ("budget", " 512 ", 512),
    ("sink", "0", 0),
    ("sink", 128, 128),
    ("window", "0", 0),
    ("window", 32, 32),
    ("dense_layers", "0,2-4", (0, 2, 3, 4)),
    ("dense_layers", "4,0, 2-4 ,2", (0, 2, 3, 4)),
    ("dense_layers", 3, (3,)),
    ("dense_layers", "3", (3,)),
    ("dense_layers", [2, 0], (0, 2)),
    ("dense_layers", "", ()),
    ("host_memory", 65536, MemorySize(tokens=65536)),
    ("host_memory", "65536", MemorySize(tokens=65536)),
    ("host_memory", "8GiB", MemorySize(nbytes=2**33)),
    ("device_memory", "0.5 gib", MemorySize(nbytes=2**29)),
    ("device_memory", 1, MemorySize(tokens=1)),
    ("buffer_factor", "3", 3.0),
    ("buffer_factor", 1, 1.0),
    ("buffer_factor", 2.5, 2.5),
    ("trace", "run/1", "run/1"),
    ("workspace_tokens", "64", 64),
]


@pytest.mark.parametrize(("field", "given_value", "want"), GOOD)
def test_a_good_value_is_taken(field: str, given_value: Any, want: Any, tmp_path: Path) -> None:
    """As a flag's text or as a value from a file; both spellings give equal configurations, and nothing else changes."""
    config = build_config({field: given_value})
    assert getattr(config, field) == want
    assert type(getattr(config, field)) is type(want)
    assert config.model_dump(exclude={field}) == build_config({}).model_dump(exclude={field})
    assert load_config(_file(tmp_path, yaml.safe_dump({field: given_value})), {}) == config
    assert load_config(None, {field: given_value}) == config


def test_defaults() -> None:
    """What a run does when nothing is said; with dense nothing limits it."""
    config = build_config({})
    assert (config.algorithm, config.budget, config.sink, config.window) == ("quest", DEFAULT_BUDGET, 64, 256)
    assert (config.dense_layers, config.buffer_factor, config.trace) == ((), 5.0, None)
    assert build_config({"algorithm": "dense"}).budget is None
    assert set(ALLOWED) == set(SparseConfig.model_fields)


SIZES = ["0", 0, "-1", -1, "4GB", "4 MiB", "GiB", "0GiB", "0.00000001GiB", "-1GiB", "1e3GiB", "", "lots", NAN, INF, True, None, 1.5, "1.5", [1], HUGE, HUGE + "GiB"]
COUNTS = [-1, "-1", "a", "", 1.5, "1.5", NAN, INF, True, False, None, [1]]
WRONG: list[tuple[str, Any]] = [
    *(("budget", value) for value in (-1, "-1", 0, "0", 0.0, NAN, "nan", INF, "inf", "1e999", "64x", "", 1.0001, "1.0001", -0.5, True, False, [1], "1 2")),
    *(("sink", value) for value in COUNTS),
    *(("window", value) for value in COUNTS),
    *(("workspace_tokens", value) for value in (*COUNTS, 0, 63)),
    *(("dense_layers", value) for value in ("3-1", "a", "1-", "-1", -1, "0,,x", "1.5", 1.5, [-1], ["a"], [1.5], [True], True, None, "0-10000", "0-999999999999", [10**9])),
    *(("host_memory", value) for value in SIZES),
    *(("device_memory", value) for value in SIZES),
    *(("buffer_factor", value) for value in (0, 0.5, -1, "0.99", NAN, "nan", INF, "inf", 1001, "x", "", True, None, [2])),
    *(("trace", value) for value in ("", "  ", 5, True, ["run"])),
    *(("algorithm", value) for value in (5, None, True, ["quest"])),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    """The message has the field, the value and what is allowed (edge case 5)."""
    with pytest.raises(ValueError, match=field) as caught:
        build_config({field: value})
    message = str(caught.value)
    shown = (f"{field}(={value!r})", f"{field}(={value})", f"{field}(={float(value)!r})" if isinstance(value, str) and _number(value) else "")
    assert any(one and one in message for one in shown), message
    assert ALLOWED[field] in message or "must be" in message, message


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@settings(deadline=None)
@given(value=st.one_of(st.text(max_size=12), st.floats(), st.integers(), st.booleans(), st.none(), st.lists(st.integers(), max_size=2)))
@pytest.mark.parametrize("field", sorted(set(ALLOWED) - {"algorithm", "trace"}))
def test_any_value_is_taken_in_range_or_refused(field: str, value: Any) -> None:
    """Whatever is written: a configuration whose numbers are in range, or ``ValueError``; never another exception, never a NaN."""
    try:
        config = build_config({field: value})
    except ValueError:
        return
    assert config.budget is None or (config.budget >= 1 if isinstance(config.budget, int) else 0 < config.budget <= 1)
    assert min(config.sink, config.window) >= 0
    assert 1 <= config.buffer_factor <= 1000
    assert all(layer >= 0 for layer in config.dense_layers)
    for size in (config.host_memory, config.device_memory):
        assert (size.tokens is None) != (size.nbytes is None)
        assert (size.tokens or size.nbytes or 0) >= 1


@pytest.mark.parametrize(("wrong", "near"), [("buget", "budget"), ("sinks", "sink"), ("dense-layers", "dense_layers"), ("hostmemory", "host_memory")])
def test_an_unknown_key_names_the_nearest(wrong: str, near: str) -> None:
    """And all that are known (edge case 35)."""
    with pytest.raises(ValueError, match=f"unknown key '{wrong}', did you mean '{near}'.*known: algorithm, budget"):
        build_config({wrong: 1})


def test_an_unknown_key_near_nothing() -> None:
    """No guess, still the list; a key need not be text."""
    for wrong in ("zzzz", 7):
        with pytest.raises(ValueError, match=rf"unknown key {wrong!r} \(known: "):
            build_config({wrong: 1})  # type: ignore[dict-item]


def test_an_unknown_algorithm_names_the_nearest() -> None:
    """A third party may register one, so it is looked up by name when the server's arguments are checked."""
    assert set(ALGORITHMS) <= set(algorithm_names())
    for name in ALGORITHMS:
        check_algorithm(name)
    with pytest.raises(ValueError, match=r"algorithm\(='qest'\) is not known, did you mean 'quest'\? \(known: dense, streaming, quest, oracle"):
        check_algorithm("qest")
    with pytest.raises(ValueError, match=r"algorithm\(=''\) is not known \(known"):
        check_algorithm("")


@pytest.mark.parametrize(("text", "what"), [("- 1\n- 2\n", "got list"), ("5\n", "got int"), ("quest\n", "got str")])
def test_a_file_that_is_no_mapping_is_refused(text: str, what: str, tmp_path: Path) -> None:
    """Naming the file and what it holds."""
    with pytest.raises(ValueError, match=rf"--sparse-config .*c\.yaml must hold keys and values, {what}"):
        load_config(_file(tmp_path, text), {})


@pytest.mark.parametrize("text", ["budget: [1\n", "a: b: c\n", "\tbudget: 1\n", '{"budget": 1', "!!python/object:os.system {}\n"])
def test_a_malformed_file_is_refused(text: str, tmp_path: Path) -> None:
    """With the place that YAML tells; no object is built."""
    with pytest.raises(ValueError, match=r"c\.yaml is not YAML(.|\n)*line 1"):
        load_config(_file(tmp_path, text), {})


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    """YAML would let the second win without a word: the first would do nothing (edge case 35)."""
    with pytest.raises(ValueError, match=r"key 'budget' stands there twice, again in line 3"):
        load_config(_file(tmp_path, "budget: 512\nsink: 0\nbudget: 1024\n"), {})


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    """A missing one, a directory, and one that is not text."""
    with pytest.raises(ValueError, match=r"--sparse-config .*none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml", {})
    with pytest.raises(ValueError, match="Is a directory"):
        load_config(tmp_path, {})
    (tmp_path / "c.yaml").write_bytes(b"budget: \xff\xfe\n")
    with pytest.raises(ValueError, match=r"c\.yaml is not UTF-8 text"):
        load_config(tmp_path / "c.yaml", {})


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    """Nothing said, nothing changed; JSON is YAML too."""
    assert load_config(_file(tmp_path, "# nothing\n"), {}) == build_config({})
    assert load_config(_file(tmp_path, json.dumps({"budget": 0.5})), {}) == build_config({"budget": 0.5})


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    """Key by key; a wrong value names the file and the flags that were given with it."""
    path = _file(tmp_path, "budget: 512\nsink: 32\n")
    config = load_config(path, {"budget": "0.5"})
    assert (config.budget, config.sink) == (0.5, 32)
    with pytest.raises(ValueError, match=r"c\.yaml with sparse flags window: window\(='-1'\)"):
        load_config(path, {"window": "-1"})
    assert load_config(_file(tmp_path, "budget: wrong\n"), {"budget": "600"}).budget == 600
    with pytest.raises(ValueError, match=r"^sparse flags: window\(='-1'\)"):
        load_config(None, {"window": "-1"})


def test_every_wrong_field_is_named_at_once() -> None:
    """Not one start a mistake."""
    with pytest.raises(ValueError, match=r"sink\(=-1\).*window\(='x'\).*buffer_factor\(=0\)"):
        build_config({"sink": -1, "window": "x", "buffer_factor": 0})


@pytest.mark.parametrize("field", ["budget", "sink", "window", "dense_layers", "buffer_factor"])
def test_dense_refuses_what_would_do_nothing(field: str, tmp_path: Path) -> None:
    """In one file, and across file and flags."""
    value = {"dense_layers": "0", "buffer_factor": "2"}.get(field, "600")
    with pytest.raises(ValueError, match=rf"{field} would have no effect with algorithm=dense"):
        build_config({"algorithm": "dense", field: value})
    with pytest.raises(ValueError, match=rf"{field} would have no effect with algorithm=dense"):
        load_config(_file(tmp_path, f"{field}: {value}\n"), {"algorithm": "dense"})


@pytest.mark.parametrize(("values", "least"), [({"budget": 100}, 328), ({"budget": 64, "sink": 0, "window": 64}, 72), ({"sink": 2048}, 2312)])
def test_a_budget_that_cannot_hold_sink_and_window_is_refused(values: dict[str, Any], least: int) -> None:
    """They count inside, and the page being written comes on top (edge case 7); the budget may be the default one."""
    with pytest.raises(ValueError, match=rf"budget\(={values.get('budget', DEFAULT_BUDGET)}\) must hold sink\(=.*at least {least} tokens. Raise"):
        build_config(values)
    assert build_config({**values, "budget": least}).budget == least


def test_a_config_is_frozen() -> None:
    """Built once; nobody changes it later."""
    config = build_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.sink = 1  # type: ignore[misc]


@pytest.mark.parametrize(("size", "text"), [("65536", "65536 tokens"), ("8GiB", "8 GiB"), ("0.5GiB", "0.5 GiB")])
def test_a_size_is_told_as_it_was_given(size: str, text: str) -> None:
    """The start-up line and refusals print it."""
    assert str(MemorySize.parse(size)) == text
    assert MemorySize.parse(MemorySize.parse(size)) == MemorySize.parse(size)
