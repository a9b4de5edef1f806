"""Records of a run and the columns of its files. Times are integer nanoseconds since the run's start (``meta.epoch_ns``).

Bytes of the link follow from counts, which a test holds: a head page is ``2 * page_size * head_dim * kv_itemsize`` bytes (K and V of
one KV head); ``demand`` = misses x head page; ``prefix`` = pages of the prefix x KV heads x head page, for every chunk that is
prefilled after one; ``write`` = tokens x KV heads x 2 x head_dim x kv_itemsize.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from traces import SCHEMA_VERSION

WARM = 0
"""Selection kind: pages that get frames after a request's last prefill chunk; resets the row."""
DECODE = 1
"""Selection kind: pages that a decode step attends."""

PHASES = ("index", "offload", "select", "retrieve", "attend")
"""Measured phases of a step, summed over layers; what is left of ``forward_ns`` is the rest of the model."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelShape(_Record):
    """Shape of the served model on one rank."""

    name: str
    layers: PositiveInt
    query_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    kv_dtype: str
    kv_itemsize: PositiveInt


class ServerShape(_Record):
    """What the scheduler was started with; the simulator's scheduler obeys the same."""

    page_size: PositiveInt
    chunked_prefill_size: int = Field(description="tokens a prefill batch; <= 0 is off")
    max_prefill_tokens: PositiveInt
    max_running_requests: PositiveInt
    home_tokens: PositiveInt = Field(description="logical tokens that home holds")
    device_frames: PositiveInt = Field(description="frames of the device tier; one holds a page of one KV head of one layer")
    context_length: PositiveInt
    schedule_policy: str
    overlap: bool
    mixed_chunk: bool
    radix_cache: bool


class SparseShape(_Record):
    """The sparse configuration as it was resolved."""

    algorithm: str
    budget: int | float | None = Field(description="tokens (int), fraction of the context (float), or no limit")
    sink: NonNegativeInt
    window: NonNegativeInt
    dense_layers: tuple[int, ...]
    buffer_factor: float


class RunMeta(_Record):
    """``meta.json``."""

    schema_version: int = SCHEMA_VERSION
    epoch_ns: NonNegativeInt = Field(description="wall clock of time 0, nanoseconds since 1970")
    seed: int
    model: ModelShape
    server: ServerShape
    sparse: SparseShape
    hardware: dict[str, str | int | float]
    versions: dict[str, str]
    complete: bool = Field(default=False, description="true once the writer was closed in order")
    totals: dict[str, int] = Field(default_factory=dict, description="counters at the end, by the names of the metrics")

    @property
    def head_page_bytes(self) -> int:
        """Bytes of one page of one KV head, K and V."""
        return 2 * self.server.page_size * self.model.head_dim * self.model.kv_itemsize


class RequestRecord(_Record):
    """One line of ``requests.jsonl``, written when the request ends."""

    id: NonNegativeInt
    arrival_ns: NonNegativeInt = Field(description="the scheduler received it")
    scheduled_ns: NonNegativeInt | None = Field(description="its first prefill chunk was launched")
    first_token_ns: NonNegativeInt | None = Field(description="its first token was handed on")
    finish_ns: NonNegativeInt | None = Field(description="its last token was handed on")
    prompt_tokens: NonNegativeInt
    output_tokens: NonNegativeInt
    max_new_tokens: NonNegativeInt
    cached_tokens: NonNegativeInt = Field(description="prompt tokens found in the radix tree at its first admission")
    page_hashes: tuple[str, ...] = Field(description="salted chained hash of every full page of prompt + output, 16 hex digits each")
    retractions: NonNegativeInt
    status: Literal["finished", "aborted", "refused"]


class StepRecord(_Record):
    """One row of ``steps.parquet``. Lists over ``requests`` are parallel; lists over layers have ``model.layers`` entries."""

    step: NonNegativeInt
    mode: Literal["prefill", "decode", "mixed"]
    start_ns: NonNegativeInt
    end_ns: NonNegativeInt
    forward_ns: NonNegativeInt = Field(description="model forward without sampling and scheduling")
    requests: tuple[int, ...]
    prefix_tokens: tuple[int, ...] = Field(description="tokens before those of this step, by request")
    new_tokens: tuple[int, ...] = Field(description="tokens of this step, by request; 1 for decode")
    decoding: tuple[bool, ...] = Field(description="whether the request decodes (sparse) or prefills (dense) in this step")
    running: NonNegativeInt
    waiting: NonNegativeInt
    index_ns: NonNegativeInt
    offload_ns: NonNegativeInt
    select_ns: NonNegativeInt
    retrieve_ns: NonNegativeInt
    attend_ns: NonNegativeInt
    selected: tuple[int, ...] = Field(description="pages attended by decoding rows, by layer")
    hits: tuple[int, ...]
    misses: tuple[int, ...]
    born: tuple[int, ...] = Field(description="pages that began in this step and got a frame without crossing the link, by layer")
    demand_bytes: tuple[int, ...]
    prefix_bytes: tuple[int, ...]
    write_bytes: tuple[int, ...]
    frames_used: NonNegativeInt
    home_used: NonNegativeInt = Field(description="tokens of home in use or cached")


_I32 = pa.list_(pa.int32())
_I64 = pa.list_(pa.int64())

STEP_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("mode", pa.string()),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("forward_ns", pa.int64()),
        ("requests", _I32),
        ("prefix_tokens", _I32),
        ("new_tokens", _I32),
        ("decoding", pa.list_(pa.bool_())),
        ("running", pa.int32()),
        ("waiting", pa.int32()),
        *((f"{phase}_ns", pa.int64()) for phase in PHASES),
        ("selected", _I64),
        ("hits", _I64),
        ("misses", _I64),
        ("born", _I64),
        ("demand_bytes", _I64),
        ("prefix_bytes", _I64),
        ("write_bytes", _I64),
        ("frames_used", pa.int64()),
        ("home_used", pa.int64()),
    ]
)

SELECTION_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("request", pa.int32()),
        ("context", pa.int32()),  # tokens of the request at this step, its newest included
        ("kind", pa.int8()),  # WARM or DECODE
        ("added_counts", _I32),  # [layers * kv_heads], layer-major: pages that this row attends now and did not in its previous event
        ("added", _I32),  # concatenated, ascending inside a row
        ("removed_counts", _I32),
        ("removed", _I32),
    ]
)

PageSets = npt.NDArray[np.int32]
"""``[layers, kv_heads, S]`` page numbers within the request, ascending, -1 pads at the end of a row."""
