"""Who may import whom: traces <- sglang_ext.policy <- simulator, kernels <- sglang_ext; and what works without torch and sglang."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = {"sglang_ext", "simulator", "traces", "sparse_ops"}
HEAVY = {"torch", "sglang", "triton", "flashinfer", "transformers"}


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _module(path: Path) -> str:
    """Dotted name of the package that ``path`` lies in, for relative imports."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import anywhere in the file, functions and ``TYPE_CHECKING`` blocks included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = _module(path).split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            # ``from package import module`` may name a module.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def _offences(package: str, allowed: tuple[str, ...], forbidden: set[str]) -> list[str]:
    """Imports of ``package`` that name a forbidden top-level package, save modules that begin with one of ``allowed``."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in _files(package)
        for line, name in _imports(path)
        if name.split(".")[0] in forbidden and not any(name == one or name.startswith(f"{one}.") for one in allowed)
    ]


RULES = [
    ("traces", ("traces",), OURS | HEAVY),
    ("sglang_ext/policy", ("sglang_ext.policy",), OURS | HEAVY),
    ("simulator", ("simulator", "traces", "sglang_ext.policy", "sglang_ext.cli_output"), OURS | HEAVY),
    ("kernels/sparse_ops", ("sparse_ops",), OURS | {"sglang"}),
    ("sglang_ext", ("sglang_ext", "sparse_ops", "traces", "simulator.cli"), OURS),
]


@pytest.mark.parametrize(("package", "allowed", "forbidden"), RULES, ids=[rule[0] for rule in RULES])
def test_a_package_imports_only_what_it_may(package: str, allowed: tuple[str, ...], forbidden: set[str]) -> None:
    """DESIGN section 2; the simulator's commands are the one thing of it that the command line takes up."""
    assert _files(package)
    assert _offences(package, allowed, forbidden) == []


def test_policies_import_numpy_and_the_standard_library_only() -> None:
    """The class that serves is the class that is simulated: it must run where nothing else is installed."""
    wrong = [
        f"{path.name}:{line} {name}"
        for path in _files("sglang_ext/policy")
        for line, name in _imports(path)
        if not name.startswith("sglang_ext.policy") and name.split(".")[0] not in {*sys.stdlib_module_names, "numpy"}
    ]
    assert wrong == []


def test_the_rules_see_an_offence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports in functions, relative ones and ``from package import module`` count too."""
    package = tmp_path / "traces"
    package.mkdir()
    (package / "a.py").write_text("def f():\n    from sglang_ext import policy\n", encoding="utf-8")
    (package / "b.py").write_text("from . import a\nfrom .a import f\nimport numpy\nimport traces.a\n", encoding="utf-8")
    (package / "c.py").write_text("import numpy, torch.nn\n", encoding="utf-8")
    (package / "d.py").write_text("import importlib\nimportlib.import_module('sglang.srt')\n", encoding="utf-8")
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert _offences("traces", ("traces",), OURS | HEAVY) == [
        "traces/a.py:2 imports sglang_ext.policy",
        "traces/c.py:1 imports torch.nn",
        "traces/d.py:2 imports sglang.srt",
    ]


@pytest.mark.parametrize(
    "modules",
    [
        ["sglang_ext"],
        ["sglang_ext.config", "sglang_ext.refusals", "sglang_ext.algorithms", "sglang_ext.policy", "sglang_ext.plugin"],
        ["traces.reader", "traces.writer", "traces.validate", "simulator.engine", "simulator.cli", "sglang_ext.cli", "sglang_ext.doctor"],
    ],
    ids=["package", "configuration", "command line"],
)
def test_importing_pulls_in_neither_torch_nor_sglang(modules: list[str]) -> None:
    """In a fresh process, with everything that these import in turn."""
    code = f"import sys, {', '.join(modules)}; print(*sorted({HEAVY!r} & {{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


def test_importing_the_package_imports_nothing() -> None:
    """``import sglang_ext`` costs nothing: not even numpy."""
    code = "import sys; before = set(sys.modules); import sglang_ext; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["sglang_ext"]
