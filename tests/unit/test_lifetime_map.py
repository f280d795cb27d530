"""The lifetime map says what the rows say: literal rows, and a compiled step."""

import pytest

import minidnn
from minidnn.errors import UserError
from minidnn.graph import Role
from minidnn.lifetime_map import OP_LETTERS, ROLE_LETTERS, lifetime_map
from minidnn.schedule.instruction import D2H, H2D, HOST, Op
from minidnn.schedule.liveness import insert_lifetimes
from tests.unit.rows import persistent_offsets, row, value


def cells(text):
    """The map's lines by name: name -> cells."""
    return {line.split()[0]: line.partition("|")[2].rstrip("|") for line in text.splitlines() if "|" in line}


def small_step():
    """x -> a -> (b over a) -> loss; b goes to the host and comes back for the gradient."""
    w = value("w", 1024, persistent=True, role=Role.PARAMETER)
    x, a, g = value("x", role=Role.INPUT), value("a", 2048), value("d_a", 2048, role=Role.GRAD)
    scratch = value("a.workspace", 512, role=Role.WORKSPACE)
    b = a._replace(name="b", content=7)
    host, back = value("b on host", 2048, space=HOST), value("b", 2048)
    rows = [
        row("x", [x], op=Op.INPUT, stream=H2D),
        row("a", [a], [x, w], workspace=scratch),
        row("b", [b], [a]),
        row("a", [host], [b], op=Op.OFFLOAD, stream=D2H),
        row("loss", [value("loss")], [x], op=Op.FORWARD),
        row("a", [back], [host], op=Op.PREFETCH, stream=H2D),
        row("a", [g], [back], op=Op.BACKWARD_DATA),
        row("a", [w], [g], op=Op.UPDATE, accumulates=True),
    ]
    return insert_lifetimes(rows), persistent_offsets(rows)[0]


def test_letters_are_touches_and_dashes_are_waiting():
    rows, offsets = small_step()
    lines = cells(lifetime_map(rows, offsets))
    assert lines["row"] == ">FFvF^Bu"
    assert lines["x"] == "XX--X   "
    assert lines["a>b"] == " AAA AA "  # one line: away from the device between v and ^
    assert lines["a.workspace"] == " W      "
    assert lines["d_a"] == "      GG"
    assert lines["always"] == "=" * 8
    assert cells(lifetime_map(rows, offsets, space=HOST))["b"] == "   A-A  "


def test_live_bytes_are_those_of_the_rows_in_tenths_of_the_peak():
    rows, offsets = small_step()
    text = lifetime_map(rows, offsets)
    # w 1024 beside x 512; a 2048 and scratch 512; a; a; loss 512; a; a and d_a; d_a
    live = [1536, 4096, 3584, 3584, 2048, 3072, 5120, 3072]
    assert cells(text)["live,"] == "".join("*" if n == 5120 else str(10 * n // 5120) for n in live)
    assert "5.00 KiB |" in next(line for line in text.splitlines() if line.startswith("live"))


def test_a_column_of_several_rows_shows_its_most_frequent_work_and_its_largest_bytes():
    rows, offsets = small_step()
    text = lifetime_map(rows, offsets, columns=4)
    lines = cells(text)
    assert text.startswith("2 rows a column")
    assert (lines["2"], lines["x"], lines["d_a"]) == (">FFB", "X-X ", "   G")
    assert lines["live,"] == "87" + "6*"
    assert len({len(line) for line in lines.values()}) == 1
    assert len(cells(lifetime_map(rows, offsets, columns=3))["x"]) == 3


def test_address_order_puts_heirs_below_those_they_inherit_from():
    g = minidnn.Graph()
    x, y = g.input((4, 8, 8, 3)), g.label((4,))
    x = g.conv2d(g.conv2d(x, 8, 3, padding=1, name="conv1"), 8, 3, padding=1, name="conv2")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x), 10), y)
    train = minidnn.compile(g, device=None).program["train"]
    text = lifetime_map(train.rows, train.offsets, order="address")
    addresses = [int(line.split()[0]) for line in text.splitlines() if line.split()[0].isdigit()]
    mortal = [b for b in train.offsets if not b.persistent and b.space == "device"]
    assert addresses == sorted(train.offsets[b] for b in mortal)
    at_one_place = {}
    for line in text.splitlines():
        if line.split()[0].isdigit():
            at_one_place.setdefault(line.split()[0], []).append(line.partition("|")[2].rstrip("|"))
    assert any(len(lines) > 1 for lines in at_one_place.values())
    for lines in at_one_place.values():  # on the same bytes nobody lives at the same time as another
        assert all(sum(c != " " for c in column) <= 1 for column in zip(*lines, strict=True))


def test_limit_keeps_the_largest_and_counts_the_rest():
    rows, offsets = small_step()
    lines = lifetime_map(rows, offsets, limit=2).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["a>b", "d_a"]
    assert lines[3].startswith("... and 3 smaller")
    assert "smaller" not in lifetime_map(rows, offsets, limit=5)


def test_every_role_and_op_has_a_letter_and_the_legend_names_those_that_occur():
    assert set(ROLE_LETTERS) == set(Role) and len(set(ROLE_LETTERS.values())) == len(Role)
    meanings = {letter: meaning for letter, meaning in OP_LETTERS.values()}
    assert len(meanings) == len(set(OP_LETTERS.values()))  # a letter means one thing
    legend = lifetime_map(*small_step()).splitlines()[-2:]
    assert legend[0] == "rows: F forward, B backward data, u update, v to host, ^ from host, > batch in"
    assert legend[1] == "buffers: X input, A activation, G gradient, W workspace, - alive, waiting, a>b: b overwrites a"


def test_wrong_use_is_answered_in_words():
    rows, offsets = small_step()
    with pytest.raises(UserError, match="order='size' is unknown; choose birth or address"):
        lifetime_map(rows, offsets, order="size")
    with pytest.raises(UserError, match="needs the offsets"):
        lifetime_map(rows, order="address")
    with pytest.raises(UserError, match="columns=0 and limit=3 must be at least 1"):
        lifetime_map(rows, columns=0, limit=3)
    assert lifetime_map([]).splitlines()[0].endswith("||")
