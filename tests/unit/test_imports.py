"""Dependencies point one way: the imports of every file, read without running it. And files stay small."""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("minidnn", "layup", "models")

# part of the tree -> what of our own it may import, besides itself; the longest matching part decides
ALLOWED = {
    "minidnn": ("minidnn",),
    "minidnn.errors": (),
    "minidnn.spec": (),
    "minidnn.scalars": (),
    "minidnn.random": ("minidnn.errors",),
    "minidnn.precision": ("minidnn.errors", "minidnn.spec"),
    "minidnn.graph": ("minidnn.errors", "minidnn.spec"),
    "minidnn.layers": ("minidnn.errors", "minidnn.spec", "minidnn.graph", "minidnn.random"),
    "minidnn.schedule": tuple(
        f"minidnn.{m}" for m in ("errors", "spec", "graph", "precision", "profiles", "optim", "scalars")
    ),
    "minidnn.kernels": (
        "minidnn.errors",
        "minidnn.spec",
        "minidnn.random",
        "minidnn.scalars",
        "minidnn.schedule.recipe",
    ),
    "models": ("minidnn.errors", "minidnn.graph", "minidnn.layers"),
    "layup": ("minidnn",),
}
FORBIDDEN = {"layup": ("minidnn.kernels", "minidnn.device", "minidnn.executor", "minidnn.capture")}
CUPY = ("minidnn.device.cuda", "minidnn.kernels.cuda", "minidnn.kernels.cudnn", "minidnn.parallel")
KERNEL_LIBRARIES = {"numpy", "cupy", "cupyx", "cudnn"}

LINES = {"minidnn": (9500, "minidnn/kernels"), "layup": (2500, "layup/report"), "models": (700, "models/none")}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def imports(source: str) -> Iterator[str]:
    """Dotted names of all modules a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, "relative imports hide the arrows"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if is_module(name) else node.module for name in whole)


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def violations(module: str, source: str) -> list[str]:
    """What a module imports against the rules."""
    part = max((p for p in ALLOWED if within(module, p)), key=len)
    found = []
    for name in imports(source):
        top = name.partition(".")[0]
        if top in PACKAGES:
            ok = within(name, part) or any(within(name, allowed) for allowed in ALLOWED[part])
            if part.partition(".")[0] != "minidnn" and name == "minidnn":
                ok = part == "layup"
            ok = ok and not any(within(name, forbidden) for forbidden in FORBIDDEN.get(part, ()))
        elif top in ("cupy", "cupyx", "cudnn"):
            ok = module.startswith(CUPY)
        else:
            ok = part != "minidnn.kernels" or top in KERNEL_LIBRARIES or top in sys.stdlib_module_names
            ok = ok and top not in ("scripts", "tests")
        if not ok:
            found.append(f"{module} imports {name}")
    return found


def test_imports_follow_the_arrows():
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 20
    assert [v for path in files for v in violations(module_name(path), path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("minidnn.graph", "from minidnn import layers"),
        ("minidnn.spec", "import minidnn.errors"),
        ("minidnn.schedule.lower", "from minidnn.layers.base import Call"),
        ("minidnn.schedule.lower", "def f():\n    import minidnn.kernels.base"),
        ("minidnn.kernels.numpy_conv", "from minidnn.schedule.plan import Plan"),
        ("minidnn.kernels.numpy_conv", "import scipy"),
        ("minidnn.kernels.numpy_conv", "import cupy"),
        ("minidnn.trainer", "import layup.policies"),
        ("minidnn.trainer", "from models import build"),
        ("minidnn.trainer", "import cupy.cuda"),
        ("models.vgg", "from minidnn.schedule.plan import Plan"),
        ("models.vgg", "import layup"),
        ("models.vgg", "import minidnn"),
        ("layup.cost", "from minidnn.kernels import base"),
        ("layup.cost", "import minidnn.device.emulated"),
    ],
)
def test_each_arrow_is_guarded(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize("package", LINES)
def test_packages_keep_their_line_budget(package):
    limit, apart = LINES[package]
    files = [p for p in (ROOT / package).rglob("*.py") if not p.is_relative_to(ROOT / apart)]
    assert sum(code_lines(path.read_text(encoding="utf-8")) for path in files) <= limit


def code_lines(source: str) -> int:
    """Lines that hold code: explaining in docstrings and comments costs nothing."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            documented.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in layout]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - documented)


def test_documentation_does_not_count_as_code():
    assert code_lines('"""Module."""\n\n# why\ndef f() -> int:\n    """Says."""\n    return 1  # one\n') == 2
