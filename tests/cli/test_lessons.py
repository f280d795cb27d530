"""Every lesson runs, accepts the right answer alone, stays small, and shows what it claims."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import layup
import minidnn

FOLDER = Path(__file__).parents[2] / "scripts" / "lessons"
OURS = {"minidnn", "layup", "models", "lesson"}

# lesson -> (right answer, what a learner may answer first); a function finds the right answer in what the lesson shows
ANSWERS = {
    "01_chain": ("3", ("2", "21", "many")),
    "02_skip": ("3", ("2", "4")),
    "03_workspace": (lambda module, shown: max(re.findall(r"'conv\d': (\d+)", shown), key=int), ("3036672", "1")),
    "04_pool_or_slab": ("No", ("yes", "")),
    "05_recompute": ("0.19", ("0.2", "0.1")),
    "06_offload": ("0", ("1", "12")),
    "07_sensitive": ("6", ("0", "4")),
    "08_gradient_window": ("2", ("6", "12")),
    "09_budget": (lambda module, shown: layup.minimum_memory(module.net(), profile=module.laptop(1)), ("45%",)),
    "10_ring": ("1.75", ("1.5", "2")),
}


@pytest.fixture
def lesson(monkeypatch):
    """Load a lesson by the name of its file, as if it had been started there."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        spec = importlib.util.spec_from_file_location(f"lesson_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    sys.modules.pop("lesson", None)


def names():
    return sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))


def test_there_are_ten_lessons_in_order_and_the_readme_lists_them():
    assert [name[:2] for name in names()] == [f"{number:02}" for number in range(1, 11)]
    listed = re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == names() == list(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_lesson_shows_a_map_and_a_question_and_knows_the_right_answer(name, lesson, capsys):
    module = lesson(name)
    right, wrong = ANSWERS[name]
    assert module.main([]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^row +\|.*F.*\|$|^\d+ rows a column +\|.*F.*\|$", shown, re.MULTILINE)
    assert "live, tenths of peak" in shown and "Question: " in shown and "--answer VALUE" in shown
    assert re.search(r"\d", shown.rpartition("buffers: ")[2])
    assert shown.isascii()  # any terminal can show it
    assert "right." not in shown
    right = right if isinstance(right, str) else str(right(module, shown))
    for answer in wrong:
        assert module.main(["--answer", answer]) == 1
        assert f"{answer}: not yet. " in capsys.readouterr().out
    assert module.main(["--answer", right]) == 0
    assert re.search(rf"^{re.escape(right)}: right\. \w.*\.$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("name", names())
def test_a_lesson_is_small_explains_itself_and_needs_numpy_alone(name):
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 60
    tree = ast.parse(source)
    text = ast.get_docstring(tree)
    assert text.startswith(f"Lesson {int(name[:2])}: ") and 6 <= len(text.splitlines()) <= 9
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    tops = {dotted.partition(".")[0] for dotted in imported}
    assert tops <= OURS | {"numpy"} | sys.stdlib_module_names


def test_the_answer_is_a_number_or_a_word_in_any_writing(lesson):
    lesson("01_chain")
    same = sys.modules["lesson"].same
    assert same("1,354,752", "1354752") and same(" 3.0 ", "3") and same("YES", "yes") and same("0.19", "0.19")
    assert not same("0.190001", "0.19") and not same("1354753", "1354752") and not same("", "no") and not same("x", "3")


def test_lesson_5_springs_the_trap_and_the_engine_does_not(lesson, capsys):
    lesson("05_recompute").main(["--answer", "0.19"])
    shown = capsys.readouterr().out
    assert "recompute differs from keep in: nothing\n" in shown
    averages = "norm1.running_mean, norm1.running_var, norm1.num_batches_tracked"
    assert f"the trap differs from keep in: {averages}\n" in shown
    assert "in units of keep's 0.1 m: 1.900." in shown


def test_lesson_7_changes_sides_with_the_link(lesson, capsys):
    module = lesson("07_sensitive")
    sides = []
    for link in ("1", "4"):
        module.main(["--link", link])
        sides.append(dict(re.findall(r"^(\w+) +copy .*: (\w+-sensitive)$", capsys.readouterr().out, re.MULTILINE)))
    slow, fast = sides
    assert list(slow) == list(fast)
    changed = {slow[layer] for layer in slow if slow[layer] != fast[layer]}
    assert changed == {"compute-sensitive", "transfer-sensitive"}  # not all the same way, as the lesson says
    assert module.main(["--answer", str(sum(slow[layer] != fast[layer] for layer in slow))]) == 0


@pytest.mark.parametrize("name", ANSWERS)
def test_the_options_of_a_lesson_are_listed_and_a_wrong_one_is_one_sentence(name, lesson, capsys):
    module = lesson(name)
    with pytest.raises(SystemExit) as done:
        module.main(["--help"])
    assert done.value.code == 0 and "--answer" in capsys.readouterr().out
    with pytest.raises(minidnn.UserError, match="unknown option --anser; did you mean --answer"):
        module.main(["--anser", "3"])


def test_lesson_9_offloads_and_recomputes_with_a_reason_and_changes_no_bit(lesson, capsys):
    module = lesson("09_budget")
    assert module.main([]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"^  \w+ +offload: .*; recompute would cost .*; keeping it would exceed the budget by ", shown, re.MULTILINE
    )
    assert re.search(r"^  \w+ +recompute: .* of the link; keeping it would exceed the budget by ", shown, re.MULTILINE)
    assert "after a step the weights differ from keep's in: nothing\n" in shown
    fewer, more = map(int, re.search(r"^(\d+) bytes instead of (\d+), for ", shown, re.MULTILINE).groups())
    assert fewer <= 0.45 * more
    with pytest.raises(minidnn.DoesNotFit, match="the smallest that runs") as refusal:
        module.main(["--memory", "1KiB"])
    smallest = refusal.value.minimum_bytes
    assert module.main(["--memory", str(smallest), "--answer", str(smallest)]) == 0
    assert "nothing\n" in capsys.readouterr().out


def test_lesson_6_triggers_a_race_and_names_its_two_rows(lesson, capsys):
    module = lesson("06_offload")
    module.main([])
    shown = capsys.readouterr().out
    assert re.search(
        r"^wait 3: row \d+ \(ALLOC conv3 on compute\) waits for row \d+ \(OFFLOAD conv1 on d2h\)$", shown, re.M
    )
    assert re.search(
        r"without wait 3 of \d+: row \d+ \(ALLOC conv3 .* and row \d+ \(OFFLOAD conv1 .* no wait orders them", shown
    )
    assert re.search(r"^order \d+ spoils .*conv2\.weight", shown, re.MULTILINE)
    assert re.search(r"^conv1 on host .*\| +A-+A +\|$", shown, re.MULTILINE)
    back = re.findall(r"^wait (\d+): row \d+ \(BACKWARD_WEIGHT .* \(PREFETCH ", shown, re.MULTILINE)
    assert len(back) == 2
    module.main(["--wait", back[0]])  # a value used before it is back
    assert re.search(r"^order \d+ spoils ", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(minidnn.UserError, match=r"--wait 99 is none of the waits; choose 0 to \d+"):
        module.main(["--wait", "99"])
