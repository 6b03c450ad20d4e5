"""The rules of CONTRIBUTING.md that a program can check."""

import ast
import enum
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

import fullgraph
from fullgraph import errors

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fullgraph"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *PACKAGE.rglob("*.md")])
CODE_AND_PROSE = [
    *PAGES,
    *(ROOT / name for name in ("dev", ".ci/run", ".pre-commit-config.yaml")),
    *ROOT.glob("*.toml"),
    *ROOT.glob("*.yml"),
    *(p for f in ("src", "tests", "benchmarks", "examples") for p in ROOT.glob(f"{f}/**/*.py")),
]


def public_members(module):
    """What a module offers: its `__all__`, or what of its names is defined in the package."""
    ours = {n: str(getattr(v, "__module__", "")) for n, v in vars(module).items()}
    names = getattr(module, "__all__", None) or [
        name for name, home in ours.items() if home.startswith("fullgraph") and name[0] != "_"
    ]
    return {name: getattr(module, name) for name in names}


def public_names():
    """Dotted name to object, for the package and the modules that it exports."""
    found = {}
    for name, value in public_members(fullgraph).items():
        if isinstance(value, types.ModuleType):
            found |= {f"{name}.{n}": member for n, member in public_members(value).items()}
        else:
            found[name] = value
    return found


PUBLIC = public_names()
DOCUMENTED = {
    name: value
    for name, value in PUBLIC.items()
    if inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, enum.Enum))
}


def id_of(path):
    return str(path.relative_to(ROOT))


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


# The public surface.


def test_all_is_what_the_package_exports():
    exported = {
        name
        for name, value in vars(fullgraph).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    exported -= {"annotations", "TYPE_CHECKING"}
    assert exported <= set(fullgraph.__all__)
    assert len(set(fullgraph.__all__)) == len(fullgraph.__all__)


def test_import_needs_neither_triton_nor_cuda_nor_the_extras():
    script = """
        import sys
        sys.modules["triton"] = None  # every import of it fails
        import fullgraph, fullgraph.kernels, torch
        for name in fullgraph.__all__:
            getattr(fullgraph, name)
        assert not torch.cuda.is_initialized()
        assert sys.modules.keys().isdisjoint({"typer", "rich", "matplotlib", "pytest"})
    """
    path = {"PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, check=True, env={**os.environ, **path})


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_explained(name):
    value = PUBLIC[name]
    if inspect.isclass(value) or callable(value):
        assert inspect.getdoc(value), f"{name} has no docstring"


def test_glossary_lists_the_public_names():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    table = glossary.partition("## Public names")[2]
    words = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))))
    assert set(fullgraph.__all__) - {"__version__"} <= words
    for word in words:
        assert resolve(f"fullgraph.{word}") is not None


# Docstrings.


def own_docstring(value):
    return inspect.cleandoc(value.__doc__ or "")


def raises_itself(function):
    """Whether the body has a `raise` with a class of this package."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    names = {c.func.id for c in raised if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}
    return any(hasattr(errors, name) for name in names)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_have_their_parts(name):
    value = DOCUMENTED[name]
    text = own_docstring(value)
    is_function = inspect.isfunction(value)
    try:
        signature = inspect.signature(value)
    except ValueError:  # some builtin bases give none
        return
    takes_arguments = any(
        p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()
    )
    made_by_user = "Made by `" not in text and (
        "__init__" in vars(value) or hasattr(value, "__dataclass_fields__")
    )
    if takes_arguments and (is_function or made_by_user):
        assert re.search(r"^(Args|Attributes):", text, re.MULTILINE), f"{name}: no Args"
    if is_function and signature.return_annotation not in (None, "None", inspect.Signature.empty):
        assert re.search(r"^(Returns|Yields):", text, re.MULTILINE), f"{name}: no Returns"
    if is_function and raises_itself(value):
        assert "\nRaises:" in text, f"{name}: no Raises"


# Words.

BANNED_NAMES = {
    "scale": "say scale_inv (multiplies the stored value) or give the encode factor a longer name",
    "hp": "say high_precision",
    "inp": "say input",
    "inputmat": "say input",
    "dy": "say grad_output",
    "dx": "say grad_input",
    "dw": "say grad_weight",
}


def public_names_in(tree):
    """Arguments of public functions and annotated fields of classes, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") and node.name != "__init__":
                continue
            for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                yield arg.arg, arg.lineno
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id, field.lineno


@pytest.mark.parametrize("path", SOURCES, ids=id_of)
def test_no_banned_names(path):
    found = [
        f"{id_of(path)}:{line}: {name}: {BANNED_NAMES.get(name, 'say TILE')}"
        for name, line in public_names_in(tree_of(path))
        if name in BANNED_NAMES or name.startswith("BLOCK_")
    ]
    assert found == []


def test_banned_names_are_found():
    tree = ast.parse("def f(x, scale): ...\nclass C:\n    hp: int\ndef _g(dy): ...")
    assert [name for name, _ in public_names_in(tree)] == ["x", "scale", "hp"]


MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:home|mnt|opt|root|tmp|work|Users)/\w")


@pytest.mark.parametrize("path", CODE_AND_PROSE, ids=id_of)
def test_no_paths_of_one_machine(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if MACHINE_PATH.search(line)] == []


@pytest.mark.parametrize("path", SOURCES, ids=id_of)
def test_options_are_arguments_not_environment_variables(path):
    reads = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
        or (isinstance(node, ast.Name) and node.id in ("environ", "getenv"))
    ]
    assert reads == []


# Pages.


def test_changelog_has_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == fullgraph.__version__


def test_errors_page_shows_the_tree():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)`(?:, `(\w+)`)? \| (.+) \|$", page, re.MULTILINE)
    shown = {name: (*filter(None, bases), meaning) for name, *bases, meaning in rows}
    real = {
        name: (*(base.__name__ for base in value.__bases__), own_docstring(value).splitlines()[0])
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.FullgraphError)
    }
    assert shown == real


def resolve(dotted):
    """The object of a dotted name that begins with the package, modules imported on the way."""
    first, *rest = dotted.split(".")
    value = importlib.import_module(first)
    for name in rest:
        if not hasattr(value, name) and isinstance(value, types.ModuleType):
            importlib.import_module(f"{value.__name__}.{name}")
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("path", PAGES, ids=id_of)
def test_names_on_pages_exist(path):
    text = path.read_text(encoding="utf-8")
    for dotted in set(re.findall(r"(?<![\w./-])(?:fg|fullgraph)(?:\.[A-Za-z_]\w*)+", text)):
        try:
            resolve(re.sub(r"^fg\b", "fullgraph", dotted))
        except (AttributeError, ImportError):
            pytest.fail(f"{id_of(path)} names {dotted}, which does not exist")


@pytest.mark.parametrize("path", PAGES, ids=id_of)
def test_files_named_on_pages_exist(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    missing = [link for link in links if not (path.parent / link).exists()]
    quoted = re.findall(r"`((?:src|tests|docs|benchmarks|examples|requirements)/[\w./-]+)`", text)
    missing += [name for name in quoted if not (ROOT / name).exists()]
    assert missing == []


# The scaffolding.


def test_dev_reads_the_same_torch_range_as_pip():
    declared = re.findall(r'"(torch[^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "torch>=2.11,<2.16" in declared


@pytest.mark.parametrize("extra", ["cli", "dev", "docs"])
def test_every_extra_is_pinned(extra):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(rf"^{extra} = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    wanted = {name.replace("_", "-") for name in re.findall(r'"([\w-]+)(?:\[\w+\])?>=', listed[1])}
    pins = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8")
    pinned = {name.replace("_", "-") for name in re.findall(r"^([\w-]+)==", pins, re.MULTILINE)}
    assert wanted
    assert wanted <= pinned
