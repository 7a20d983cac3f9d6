"""The tree of the repository: who may import whom, links, sizes, and what a wheel holds."""

import ast
import io
import os
import shutil
import subprocess
import sys
import tokenize
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINE_LIMIT = 5000  # lines of Python code outside tests/, bench/ and the demo pair's recipe
LINKS = ("kernels", "models")
CODE = ("minispec", *LINKS)


def python_files(*folders: str) -> list[Path]:
    """Relative to the root, links not followed."""
    found = [
        Path(base, name).relative_to(ROOT)
        for folder in folders
        for base, _, names in os.walk(ROOT / folder)
        for name in names
        if name.endswith(".py") and not Path(base, name).is_symlink()
    ]
    return sorted(found)


def module_name(path: Path) -> str:
    """By its import name: models/x.py is minispec.models.x."""
    parts = list(path.with_suffix("").parts)
    parts = parts if parts[0] == "minispec" else ["minispec", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files(*CODE)}


def imports(name: str) -> set[str]:
    """Every module that a module imports, anywhere in it, by its full name."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) or {base}
    return found


def test_relative_imports_are_understood() -> None:
    """The check below is only as good as this."""
    assert "minispec.drafting" in imports("minispec.drafting.chain")
    assert "minispec.tree" in imports("minispec.drafting.chain")
    assert "minispec.kernels.int4_moe" in imports("minispec.models.kimi_k25")
    assert "torch" in imports("minispec.tree")


# module or package -> what of minispec it may import; the longest name that fits counts
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "minispec.kernels": ("minispec.kernels",),
    "minispec.models": ("minispec.kernels", "minispec.models"),
    # the recipe that made the demo pair trains with what users train with
    "minispec.models.demo": ("minispec.kernels", "minispec.models", "minispec.train"),
    "minispec.tree": ("minispec.models.interface",),
    "minispec.sampling": ("minispec.models.interface",),
    "minispec.kv": ("minispec.models.interface",),
    "minispec.stats": (),
    "minispec.tokenizer": ("minispec.models",),
    "minispec.config": ("minispec.drafting", "minispec.models"),
    "minispec.verify": (
        "minispec.verify", "minispec.tree", "minispec.sampling", "minispec.kv", "minispec.models",
    ),
    "minispec.drafting": (
        "minispec.drafting", "minispec.tree", "minispec.sampling", "minispec.kv",
        "minispec.models",
    ),
    "minispec.treeview": ("minispec.tokenizer", "minispec.tree", "minispec.verify"),
    "minispec.round": (
        "minispec.drafting", "minispec.verify", "minispec.tree", "minispec.sampling",
        "minispec.kv", "minispec.stats", "minispec.models",
    ),
}  # fmt: skip
CLIS = {"generate", "doctor", "record", "train"}


def below(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


@pytest.mark.parametrize("name", MODULES)
def test_who_imports_whom(name: str) -> None:
    rules = [root for root in MAY_IMPORT if below(name, (root,))]
    siblings = {other for other in imports(name) if below(other, ("minispec",))}
    if rules:
        allowed = MAY_IMPORT[max(rules, key=len)]
        assert {other for other in siblings if not below(other, allowed)} == set()
    else:  # the engine and what is built on it: nothing imports a command line
        clis = tuple(f"minispec.{cli}" for cli in CLIS)
        assert {other for other in siblings if below(other, clis)} == set()
    assert "minispec.engine" not in siblings or name.rpartition(".")[2] in CLIS | {"graphs"}


@pytest.mark.parametrize("name", [name for name in MODULES if below(name, ("minispec.kernels",))])
def test_kernels_need_torch_and_triton_only(name: str) -> None:
    outside = {other.partition(".")[0] for other in imports(name)} - sys.stdlib_module_names
    assert outside <= {"torch", "triton", "minispec"}


def test_no_ring_of_imports() -> None:
    """Following imports from any module never leads back to it (packages and their files apart)."""

    def unit(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[:2]) if parts[1:2] in (["verify"], ["drafting"]) else name

    edges: dict[str, set[str]] = {unit(name): set() for name in MODULES}
    for name in MODULES:
        inside = {unit(other) for other in imports(name) if other in MODULES}
        edges[unit(name)] |= inside - {unit(name)}
    done: set[str] = set()
    while len(done) < len(edges):
        ready = {name for name, needs in edges.items() if name not in done and needs <= done}
        assert ready, f"a ring among {sorted(edges.keys() - done)}"
        done |= ready


def test_the_command_line_loads_no_heavy_library() -> None:
    heavy = ["triton", "transformers", "matplotlib", "minispec.train", "minispec.models.synthetic"]
    program = f"import sys, minispec.generate; print([m for m in {heavy} if m in sys.modules])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


# files


@pytest.mark.parametrize("name", LINKS)
def test_links(name: str) -> None:
    """Relative, so that a clone anywhere works; no __init__.py, so that nothing is shadowed."""
    link = ROOT / "minispec" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert not list((ROOT / name).rglob("__init__.py"))
    assert not [path for path in (ROOT / name).rglob("*") if path.is_symlink()]


ALL_FILES = python_files(*CODE, "tests", "bench") + [Path("setup.py")]


@pytest.mark.parametrize("path", ALL_FILES, ids=str)
def test_module_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text()))
    assert docstring and docstring.strip()


@pytest.mark.parametrize("path", ALL_FILES, ids=str)
def test_no_line_over_100_columns(path: Path) -> None:
    lines = enumerate((ROOT / path).read_text().splitlines(), start=1)
    assert [(number, len(line)) for number, line in lines if len(line) > 100] == []


def code_lines(path: Path) -> int:
    """Lines that hold code: blank lines, comments and docstrings do not count."""
    source = path.read_text()
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    held = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in (*blank, tokenize.ENDMARKER)
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(held - documented)


def test_the_engine_stays_small() -> None:
    engine = [path for path in python_files(*CODE) if path.parts[:2] != ("models", "demo")]
    counts = {path: code_lines(ROOT / path) for path in engine}
    largest = sorted(counts, key=lambda path: -counts[path])[:5]
    assert sum(counts.values()) < LINE_LIMIT, [f"{path}: {counts[path]}" for path in largest]


# the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a wheel built from a copy: nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    skipped = (".git", ".venv", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", ".work")
    shutil.copytree(
        ROOT, folder / "tree", symlinks=True, ignore=shutil.ignore_patterns(*skipped, ".peers")
    )
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q"]
    command = [sys.executable, "-m", "pip", "wheel", *options, ".", "-w", str(folder / "out")]
    done = subprocess.run(command, cwd=folder / "tree", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (file,) = (folder / "out").glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        assert not [info for info in archive.infolist() if info.external_attr >> 28 == 0xA]
        return archive.namelist()


def test_the_wheel_holds_every_module_once(wheel: list[str]) -> None:
    wanted = [path if path.parts[0] == "minispec" else Path("minispec") / path
              for path in MODULES.values()]  # fmt: skip
    held = [name for name in wheel if name.endswith(".py")]
    assert Counter(held) == Counter(path.as_posix() for path in wanted)


def test_the_wheel_holds_the_demo(wheel: list[str]) -> None:
    """Whatever stands in models/demo: weights, tokenizer, prompts, the recipe's word lists."""
    demo = ROOT / "models" / "demo"
    wanted = {
        f"minispec/models/demo/{path.relative_to(demo).as_posix()}"
        for path in demo.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= set(wheel)


def test_the_wheel_holds_nothing_else(wheel: list[str]) -> None:
    assert len(wheel) == len(set(wheel))
    tops = {name.partition("/")[0] for name in wheel}
    assert tops - {"minispec"} == {top for top in tops if top.endswith(".dist-info")}
    assert not [name for name in wheel if name.count("minispec/") > 1 or "__pycache__" in name]
    assert not [name for name in wheel if name.startswith(("minispec/tests", "minispec/bench"))]
