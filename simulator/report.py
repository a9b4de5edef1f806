"""``report.html``: one file with its figures inside, nothing loaded from anywhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from simulator import plots
from simulator.compare import Comparison
from simulator.engine import SimResult
from simulator.metrics import measured_times
from simulator.session import Session
from simulator.tables import bytes_of, milliseconds, percent
from simulator.whatif import Outcome


def render_report(
    session: Session, comparison: Comparison, recorded: SimResult, modelled: SimResult | None, outcomes: Sequence[Outcome]
) -> bytes:
    """The report of a run: its comparison, and the ``outcomes`` of scenarios (the first one in detail)."""
    meta = session.run.meta
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        (files("simulator") / "templates/report.html.j2").read_text()
    )
    html = template.render(
        title=f"Simulated and measured: {meta.model.name}, {meta.sparse.algorithm}",
        subtitle=f"{len(session.run.requests)} requests, {len(session.run.steps)} steps on {meta.hardware.get('name', 'unnamed hardware')}",
        comparison=comparison,
        outcomes=outcomes,
        detail=outcomes[-1],
        facts=_facts(session),
        plots=_plots(session, comparison, recorded, modelled, outcomes),
        milliseconds=milliseconds,
        percent=percent,
        percent_plain=lambda share: f"{share:.1%}",
        bytes_of=bytes_of,
    )
    return html.encode()


def _plots(
    session: Session, comparison: Comparison, recorded: SimResult, modelled: SimResult | None, outcomes: Sequence[Outcome]
) -> dict[str, str]:
    series = [("measured", plots.MEASURED, measured_times(session.run)), ("recorded batches", plots.SIMULATED, recorded.requests)]
    if modelled is not None:
        series.append(("modelled", plots.MODELLED, modelled.requests))
    drawn = {
        "latency": plots.latency_cdfs(series),
        "steps": plots.step_times(session),
        "hits": plots.hit_rates(comparison.measured.pages, comparison.recorded.pages),
        "links": plots.link_bytes(session, recorded),
    }
    if len(outcomes) > 1:
        drawn["whatif"] = plots.whatif_curve(outcomes)
    inlined = {name: "data:image/svg+xml;base64," + base64.b64encode(plots.to_svg(figure)).decode() for name, figure in drawn.items()}
    return {"whatif": "", **inlined}


def _facts(session: Session) -> list[tuple[str, str]]:
    meta = session.run.meta
    facts = [("seed", str(meta.seed))]
    for part in (meta.model, meta.server, meta.sparse):
        facts.extend((name, str(value)) for name, value in part.model_dump().items())
    facts.extend((f"hardware: {name}", str(value)) for name, value in sorted(meta.hardware.items()))
    facts.extend((f"version: {name}", value) for name, value in sorted(meta.versions.items()))
    return facts
