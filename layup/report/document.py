"""Document: ``report.html``, one file with everything inside: pages, styles, script and data. It asks the network for nothing."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, Protocol

from layup.report.bill import bill_data, layer_bills
from layup.report.ring import ring_data
from layup.report.spaces import CATEGORIES, NAMES
from layup.report.view import DECISIONS, OPS, ROLES, Strings, view
from layup.report.waterfall import Stage
from layup.report.waterfall import waterfall as make_waterfall
from minidnn.graph import Role
from minidnn.metrics import provenance, write_text
from minidnn.schedule import plan as plans
from minidnn.schedule.instruction import COMPUTE, Op
from minidnn.spec import BLOCK_BYTES
from minidnn.step import CompiledStep

FORMAT = 1
SCRIPTS = ("core.js", "model.js", "lifetimes.js", "streams.js", "bill.js", "curve.js", "ring.js", "main.js")
MOST_PLAIN = 3 << 20
"""Bytes of data that are written as plain JSON; more is deflated and written in base64."""


class Reasoned(Protocol):
    """What is used of what a planner returns: for each layer that decides, one line that says why."""

    @property
    def reasons(self) -> Mapping[str, str]:
        """By layer."""
        ...


def write_report(
    path: str | Path,
    step: CompiledStep,
    *,
    planned: Reasoned | None = None,
    naive: CompiledStep | None = None,
    curve: Mapping[str, Any] | None = None,
    waterfall: Sequence[Stage] | None = None,
    memory: int | None = None,
    title: str = "A training step",
) -> None:
    """Write the report of a compiled step, whole or not at all. What is drawn is one steady step, however many were run.

    Args:
        planned: gives the reason of each decision.
        naive: the same step under the plan ``naive``; None: it is compiled here.
        curve: ``{"rows": [...], "minimum_bytes": n}``, the rows of ``layup.report.compare``; None: that page says how to get it.
        waterfall: from ``layup.report.waterfall``; None: made here, which compiles a step for each technique; (): left out.
        memory: the budget in bytes, to be drawn; it may be one that the step exceeds.
        title: names the net and the data.
    """
    data = report_data(step, planned=planned, naive=naive, curve=curve, waterfall=waterfall, memory=memory, title=title)
    write_text(Path(path), render(data))


def report_data(
    step: CompiledStep,
    *,
    planned: Reasoned | None = None,
    naive: CompiledStep | None = None,
    curve: Mapping[str, Any] | None = None,
    waterfall: Sequence[Stage] | None = None,
    memory: int | None = None,
    title: str = "A training step",
) -> dict[str, Any]:
    """All that the pages show, as plain data. Sizes of ``views`` are in blocks of ``block`` bytes; see ``layup.report.view``."""
    strings = Strings()
    other = naive.program if naive is not None else None
    if other is None and step.plan != plans.naive():
        other = step.request.program(plans.naive())
    if waterfall is None:
        waterfall = make_waterfall(step, [] if other is None else [(plans.naive(), other.prediction)])
    keep = next((s for s in waterfall if not s.plan.decisions and not s.plan.streamed and _reuses_all(s, step)), None)
    profile, precision = step.profile, step.precision.name
    rows = step.program["train"].rows
    forward = sum(row.flops for row in rows if row.op is Op.FORWARD)
    made = provenance(step.seed)
    bills = layer_bills(step, None if planned is None else planned.reasons)
    decisions = {bill.name: bill.decision for bill in bills}
    views = {"plan": view(step.program, step.program["train"], step.gpu, precision, strings, decisions)}
    if other is not None:
        views["naive"] = view(other, other["train"], step.gpu, precision, strings, {})
    return {
        "format": FORMAT,
        "title": title,
        "subtitle": f"batch {step.batch}, {precision}, {len(step.graph.nodes):,} layers, "
        f"{step.graph.parameter_count:,} parameters; plan {step.plan.policy}; seconds are predicted for {step.gpu.device}",
        "footer": f"One steady step; all runs of it are alike ({step.steps:,} so far). Bytes are exact, in blocks of "
        f"{BLOCK_BYTES}; seconds are a model. Recipe {step.recipe.hash}. Made by {made['command']}, seed {step.seed}, "
        + ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        **made,
        "block": BLOCK_BYTES,
        "ops": list(OPS),
        "roles": list(ROLES),
        "role_categories": [CATEGORIES[role] for role in Role],
        "category_names": list(NAMES),
        "decisions": list(DECISIONS),
        "plan": step.plan.to_json(),
        "memory_bytes": memory,
        "peak_bytes": profile.peak_bytes,
        "reserved_bytes": profile.reserved_bytes,
        "host_bytes": profile.host_bytes,
        "host_peak_bytes": profile.host_peak_bytes,
        "measured_peak_bytes": step.measured.peak_bytes,
        "keep_bytes": keep and keep.reserved_bytes,
        "keep_step_ns": keep and _ns(keep.step_seconds),
        "offloaded_bytes": sum(v.spec.nbytes for row in rows if row.op is Op.OFFLOAD for v in row.reads),
        "recompute_fraction": sum(r.flops for r in rows if r.op is Op.RECOMPUTE) / forward if forward else 0.0,
        "stream_bytes": _copied(step),
        "waterfall": [_stage_data(stage) for stage in waterfall],
        "curve": None if curve is None else dict(curve),
        "bill": bill_data(bills, strings),
        "views": views,
        "ring": ring_data(step),
        "strings": strings.texts,
    }


def render(data: Mapping[str, Any]) -> str:
    """The HTML file that shows ``report_data``."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    encoding = ""
    if len(text) > MOST_PLAIN:
        text, encoding = base64.b64encode(zlib.compress(text.encode(), 9)).decode(), ' data-encoding="deflate-base64"'
    return Template(_page("page.html")).substitute(
        TITLE=escape(str(data["title"])),
        STYLE=_page("style.css"),
        SCRIPT="\n".join(_page(name) for name in SCRIPTS),
        ENCODING=encoding,
        DATA=text.replace("<", "\\u003c"),
    )


def read_data(html: str) -> dict[str, Any]:
    """The data inside a report. Reads what ``render`` wrote, nothing else."""
    tag, _, rest = html.partition('<script id="data"')[2].partition(">")
    text = rest.partition("</script>")[0]
    if "deflate-base64" in tag:
        text = zlib.decompress(base64.b64decode(text)).decode()
    data: dict[str, Any] = json.loads(text)
    return data


def _page(name: str) -> str:
    return (resources.files("layup.report") / "page" / name).read_text(encoding="utf-8")


def _reuses_all(stage: Stage, step: CompiledStep) -> bool:
    """Whether a stage is ``keep``: all reuse that this step may have."""
    reuse = stage.plan.reuse
    rest = (reuse.lifetimes, reuse.in_place, reuse.workspace, reuse.gradient_window)
    return stage.used and all(rest) and (reuse.layerwise_update is not False or step.whole_gradients)


def _stage_data(stage: Stage) -> dict[str, Any]:
    return {
        "name": stage.name,
        "what": stage.what,
        "used": stage.used,
        "peak_bytes": stage.peak_bytes,
        "reserved_bytes": stage.reserved_bytes,
        "host_bytes": stage.host_bytes,
        "step_ns": _ns(stage.step_seconds),
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _copied(step: CompiledStep) -> dict[str, int]:
    """Bytes that each copy stream moves in a step."""
    moved: dict[str, int] = {}
    for row in step.program["train"].rows:
        if row.stream != COMPUTE and not row.kernel and row.writes:
            moved[row.stream] = moved.get(row.stream, 0) + row.writes[0].spec.nbytes
    return moved
