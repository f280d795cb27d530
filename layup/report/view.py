"""View: one schedule as plain data, from which the pages of the report are drawn. Nothing here is rounded but times.

Lists that belong together are columns of equal length. Texts are numbers into one shared table; bytes are counted in blocks
of 512, of which every footprint and offset is a multiple; times are whole nanoseconds, 0 is the end of the step before.

``rows``: what runs, in list order: ``op target stream start duration``; ``touches``: buffers each row writes, then reads;
``waits``: ``row, waited row, lag`` for rows of other streams. The last two are left out of a view with very many rows.
``buffers``: one rectangle each: address, size, and the half-open range of *events* for which it is alive. A buffer may hold
several values, one after another in place (``holds``); it is named after the last, whose layer's decision is why it lives.
``spaces``: for the slab and the pinned slab, every ALLOC and FREE is an event: the row it comes before, and the allocator's
counter after it, read from the engine's own curve and never summed up from the rectangles. ``categories``: the same bytes
by what they are for, as ``event, blocks`` pairs where they change; ``merged``: those of the buffers that are not drawn one by
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from layup.report.spaces import MEMORY_OPS, Life, blocks_of, choose, contents, space_data, space_of
from layup.report.timeline import steady_times, waits_between
from minidnn.graph import Role
from minidnn.profiles import Profile
from minidnn.schedule.instruction import DEVICE, HOST, Buffer, Instruction, Op
from minidnn.schedule.program import Program, Schedule

OPS = tuple(op.value for op in Op if op not in MEMORY_OPS)
ROLES = tuple(role.value for role in Role)
DECISIONS = ("", "keep", "offload", "recompute", "streamed")
MOST_TOUCHES = 12000
"""A view with more rows leaves out which row touches which buffer."""


class Strings:
    """A table of texts; each is kept once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """The number of a text."""
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]


def view(
    program: Program,
    schedule: Schedule,
    gpu: Profile,
    precision: str,
    strings: Strings,
    decisions: Mapping[str, str],
) -> dict[str, Any]:
    """One steady step of a schedule as plain data. ``decisions``: by layer; layers that are not in it keep."""
    rows = schedule.rows
    position: list[int] = []  # of every row: how many rows run before it
    running: list[int] = []
    for index, row in enumerate(rows):
        position.append(len(running))
        if row.op not in MEMORY_OPS:
            running.append(index)
    persistent = program.persistent
    spaces = {
        DEVICE: space_of(DEVICE, rows, position, schedule, persistent.buffers),
        HOST: space_of(HOST, rows, position, schedule, persistent.host_buffers),
    }
    contents(rows, [life for space in spaces.values() for life in space.lives])
    times = steady_times(rows, gpu, precision)
    lives, merged_area = choose(spaces.values())
    number = {life.buffer: i for i, life in enumerate(lives)}
    profile = schedule.profile
    data: dict[str, Any] = {
        "peak_bytes": profile.peak_bytes,
        "reserved_bytes": program.reserved_bytes,
        "host_bytes": program.host_bytes,
        "host_peak_bytes": profile.host_peak_bytes,
        "step_ns": round(profile.step_seconds * 1e9),
        "peak_row": position[profile.peak_row] if rows else 0,
        "peak_text": profile.peak_text,
        "rows": {
            "op": [OPS.index(rows[i].op.value) for i in running],
            "target": [strings(rows[i].target) for i in running],
            "stream": [strings(rows[i].stream) for i in running],
            "start": [times[i][0] for i in running],
            "duration": [times[i][1] - times[i][0] for i in running],
        },
        "buffers": {
            "name": [strings(life.name) for life in lives],
            "layer": [strings(life.layer) for life in lives],
            "holds": [[strings(name) for name in life.values] if len(life.values) > 1 else [] for life in lives],
            "shape": [strings(life.shape) for life in lives],
            "role": [ROLES.index(life.buffer.role.value) for life in lives],
            "decision": [DECISIONS.index(_decision(life, decisions)) for life in lives],
            "host": [int(life.buffer.space == HOST) for life in lives],
            "persistent": [int(life.buffer.persistent) for life in lives],
            "blocks": [blocks_of(life.buffer) for life in lives],
            "offset": [life.offset for life in lives],
            "born": [life.born for life in lives],
            "died": [life.died for life in lives],
        },
        "spaces": {
            "device": space_data(spaces[DEVICE], number),
            "pinned": space_data(spaces[HOST], number),
        },
        "merged": {"buffers": sum(len(s.lives) for s in spaces.values()) - len(lives), "byte_rows": merged_area},
    }
    if len(running) <= MOST_TOUCHES:
        data["waits"] = waits_between(rows, position)
        data["touches"] = {
            "writes": [_numbers((v.buffer for v in rows[i].writes), number) for i in running],
            "reads": [_numbers(_read(rows[i]), number) for i in running],
        }
    return data


def _read(row: Instruction) -> list[Buffer]:
    scratch = [] if row.workspace is None else [row.workspace.buffer]
    return [*(v.buffer for v in row.reads), *scratch]


def _numbers(buffers: Iterable[Buffer], number: Mapping[Buffer, int]) -> list[int]:
    return [number[b] for b in dict.fromkeys(buffers) if b in number]


def _decision(life: Life, decisions: Mapping[str, str]) -> str:
    """Why a buffer is there: the decision about the value it holds last; streamed parameters and copies say it themselves."""
    own = life.buffer.decision
    if life.buffer.role is not Role.ACTIVATION or life.buffer.space == HOST or not own:
        return own
    return decisions.get(life.layer, "keep")
