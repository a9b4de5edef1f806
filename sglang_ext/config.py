"""SparseConfig: the one typed description of a sparse run. Flags and the YAML file are two spellings of it.

Two ways to say a memory size: a number of tokens (``65536``), or a size with its unit (``"8GiB"``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

PAGE_SIZES = (8, 16, 32, 64)
"""Supported ``--page-size``; 16 is the default."""

ALGORITHMS: dict[str, str] = {
    "dense": "sglang_ext.algorithms.dense:Dense",
    "streaming": "sglang_ext.algorithms.streaming:Streaming",
    "quest": "sglang_ext.algorithms.quest:Quest",
    "oracle": "sglang_ext.algorithms.oracle:PageOracle",
}
"""Built-in algorithms by name; a third party adds an entry point of group ``sglang_ext.algorithms``."""


LEAST_GIB = 0.0001
"""Smallest memory size in GiB: less holds no page of any model."""

MOST_LAYERS = 10_000
"""Layer numbers are below it, so that a mistyped range is refused and not unrolled."""

ALLOWED = {
    "algorithm": f"a name: {', '.join(ALGORITHMS)}, or a registered one",
    "budget": "tokens as a whole number >= 1 (512), or a fraction of the context in (0, 1] (0.25)",
    "sink": "a whole number of tokens >= 0",
    "window": "a whole number of tokens >= 0",
    "dense_layers": f"layer numbers in 0..{MOST_LAYERS - 1} and ranges of them (0,2-4)",
    "host_memory": f"a whole number of tokens >= 1 (65536), or a size in GiB with its unit, at least {LEAST_GIB}GiB (8GiB, 0.5GiB)",
    "device_memory": f"a whole number of tokens >= 1 (65536), or a size in GiB with its unit, at least {LEAST_GIB}GiB (8GiB, 0.5GiB)",
    "buffer_factor": "a number in [1, 1000]",
    "trace": "the path of a directory",
    "workspace_tokens": "a whole number of tokens >= 64",
}
"""What each field takes; a refusal says it."""


class MemorySize(BaseModel):
    """A memory size: tokens or bytes, one of the two."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tokens: int | None = None
    nbytes: int | None = None

    def __str__(self) -> str:
        return f"{self.tokens} tokens" if self.tokens is not None else f"{(self.nbytes or 0) / 2**30:g} GiB"

    @classmethod
    def parse(cls, value: object) -> MemorySize:
        """Read ``65536``, ``"65536"`` or ``"8GiB"``. Raises ``ValueError``."""
        if isinstance(value, MemorySize):
            return value
        # 15 digits: any memory there is, and no float overflows.
        match = re.fullmatch(r"\s*([0-9]{1,15})(\.[0-9]{1,15})?\s*(GiB)?\s*", str(value), re.IGNORECASE) if not isinstance(value, bool) else None
        if match is None:
            raise ValueError("not a memory size")
        whole, part, unit = match.groups()
        if unit:
            size = float(whole + (part or ""))
            if size < LEAST_GIB:
                raise ValueError("too small a memory size")
            return cls(nbytes=int(size * 2**30))
        if part or int(whole) < 1:
            raise ValueError("not a memory size: tokens are a whole number >= 1, a size needs its unit")
        return cls(tokens=int(whole))


def _parse_budget(value: object) -> object:
    """Keep ints and floats apart: 512 and "512" are tokens, 0.25 and "0.25" a fraction."""
    if isinstance(value, str):
        text = value.strip()
        try:
            return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        except ValueError:
            raise ValueError("neither tokens nor a fraction of the context") from None
    return _not_bool(value)


def _not_bool(value: object) -> object:
    """``True`` would pass as 1."""
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return value


def _parse_layers(value: object) -> object:
    """``"0,2-4"``, ``[0, 2, 3]`` or ``0``."""
    if isinstance(value, list | tuple):
        return tuple(_not_bool(layer) for layer in value)
    if isinstance(value, int):
        return (_not_bool(value),)
    if not isinstance(value, str):
        return value
    layers: list[int] = []
    for part in filter(None, (piece.strip() for piece in value.split(","))):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(f"{part!r} is not a layer or a range of layers")
        layers.extend(range(int(match[1]), min(int(match[2] or match[1]), MOST_LAYERS) + 1))
    return tuple(layers)


Memory = Annotated[MemorySize, BeforeValidator(MemorySize.parse)]
Tokens = Annotated[int, BeforeValidator(_not_bool)]


class SparseConfig(BaseModel):
    """How a run attends, and what memory it may use. Unknown keys and impossible values raise ``ValueError`` (see :func:`load_config`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: str = Field(default="quest", description="selection algorithm: dense, streaming, quest, oracle (tests and studies), or a registered one")
    budget: Annotated[int | float | None, BeforeValidator(_parse_budget)] = Field(
        default=None, description="tokens a row may attend in a step (512), or a fraction of its context (0.25); sink and window count inside"
    )
    sink: Tokens = Field(default=64, ge=0, description="tokens at the start that are always attended")
    window: Tokens = Field(default=256, ge=0, description="most recent tokens that are always attended")
    dense_layers: Annotated[tuple[int, ...], BeforeValidator(_parse_layers)] = Field(
        default=(), description="layers that attend everything, as 0,2-4"
    )
    host_memory: Memory = Field(default=MemorySize(nbytes=2 * 2**30), description="home: KV in host memory, 8GiB or a number of tokens")
    device_memory: Memory = Field(
        default=MemorySize(nbytes=2**29), description="frames, summaries and workspace, 4GiB; or frames for a number of tokens of all layers and heads"
    )
    buffer_factor: Annotated[float, BeforeValidator(_not_bool)] = Field(
        default=5.0, ge=1.0, le=1000.0, description="frames of a row in multiples of the pages that a step attends"
    )
    trace: str | None = Field(default=None, description="directory that the run is recorded into")
    workspace_tokens: Tokens = Field(
        default=8192, ge=64, description="prefix tokens of one layer that prefill holds at a time; a longer prefix is attended in pieces"
    )

    @field_validator("trace")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("empty")
        return value

    @field_validator("dense_layers")
    @classmethod
    def _sorted_layers(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        wrong = [layer for layer in value if not 0 <= layer < MOST_LAYERS]
        if wrong:
            raise ValueError(f"no layer {wrong[0]}")
        return tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _budget_fits(self) -> SparseConfig:
        if self.algorithm == "dense":
            # Its rows own a frame for every page, so that a buffer factor changes nothing either.
            idle = sorted({"budget", "sink", "window", "dense_layers", "buffer_factor"} & self.model_fields_set)
            if idle:
                raise ValueError(f"{', '.join(idle)} would have no effect with algorithm=dense, which attends everything: leave one of the two out")
        elif self.budget is None:
            object.__setattr__(self, "budget", DEFAULT_BUDGET)
        if isinstance(self.budget, float) and not 0.0 < self.budget <= 1.0:
            raise ValueError(f"budget(={self.budget}) as a fraction of the context must be in (0, 1]; for tokens write a whole number")
        if isinstance(self.budget, int):
            if self.budget < 1:
                raise ValueError(f"budget(={self.budget}) must be at least 1 token, or a fraction of the context in (0, 1]")
            self._budget_holds(self.budget)
        return self

    def _budget_holds(self, budget: int) -> None:
        """Refuse a budget that is too small at any page size; :class:`~sglang_ext.policy.PageBudget` has the rule of the run's own."""
        forced = {page: -(-self.sink // page) + -(-self.window // page) + 1 for page in PAGE_SIZES}
        if all(-(-budget // page) < pages for page, pages in forced.items()):
            raise ValueError(
                f"budget(={budget}) must hold sink(={self.sink}), window(={self.window}) and the page being written: at least "
                f"{min(page * pages for page, pages in forced.items())} tokens. Raise the budget, or lower sink or window"
            )


DEFAULT_BUDGET = 1024
"""Tokens a row attends when neither flags nor file say."""


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """``", did you mean 'x'?"`` for the known name closest to ``name``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def build_config(values: Mapping[str, Any], *, source: str = "configuration") -> SparseConfig:
    """A config from plain values. Raises ``ValueError`` naming the field, its value and what is allowed."""
    known = SparseConfig.model_fields
    for key in values:
        if key not in known:
            raise ValueError(f"{source}: unknown key {key!r}{nearest(str(key), list(known))} (known: {', '.join(known)})")
    try:
        return SparseConfig(**values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            field = str(problem["loc"][0]) if problem["loc"] else ""
            text = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{field}(={values.get(field)!r}): {text}; allowed: {ALLOWED[field]}" if field in known else text)
        # A union or a list of layers reports each of its members.
        lines = list(dict.fromkeys(lines))
        raise ValueError(f"{source}: " + "; ".join(lines)) from None


def load_config(path: str | Path | None, overrides: Mapping[str, Any]) -> SparseConfig:
    """The file's values, then ``overrides`` (flags that were given). Raises ``ValueError`` for anything wrong in either."""
    values: dict[str, Any] = {}
    source = "sparse flags"
    if path is not None:
        source = f"{path} with sparse flags {', '.join(overrides)}" if overrides else f"{path}"
        values.update(_read_yaml(path))
    values.update(overrides)
    return build_config(values, source=source)


def _read_yaml(path: str | Path) -> dict[str, Any]:
    """Keys and values of a YAML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), path)
    except OSError as error:
        raise ValueError(f"--sparse-config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--sparse-config {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--sparse-config {path} is not YAML: {error}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise ValueError(f"--sparse-config {path} must hold keys and values, got {type(loaded).__name__}")
    return loaded or {}


def _refuse_repeated_keys(root: yaml.Node | None, path: str | Path) -> None:
    """YAML would let the last of two equal keys win without a word."""
    seen: set[str] = set()
    for key, _ in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value in seen:
            raise ValueError(f"--sparse-config {path}: key {key.value!r} stands there twice, again in line {key.start_mark.line + 1}")
        seen.add(key.value)
