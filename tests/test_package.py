"""What holds of the package as a whole: its layers, its documentation, its side effects."""

import ast
import doctest
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import proxvi

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "proxvi"
PAPER = ROOT / "paper" / "src" / "proxvi_paper"

# Imports point down this list only; modules on one line are siblings and do not import each other, folders are rooms.
LAYERS = [
    ["plots"],
    ["__init__"],
    ["starts"],
    ["evaluation"],
    ["training"],
    ["svi"],
    ["transforms", "estimators"],
    ["constraints", "_arguments"],
    ["distances", "statistics"],
    ["_distributions"],
    ["_validation"],
    ["_typing"],
]
# The paper's experiments are a package of their own, above the library; every module of it may import the library.
PAPER_LAYERS = [["cli"], ["experiments"], ["plots", "models", "datasets"], ["__init__"]]


def imported_modules(path: Path, package: str) -> set[str]:
    """The modules and folders of a package that a file imports; "" if it imports the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module)) if module == package:
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)) if module.startswith(f"{package}."):
                found.add(module.split(".")[1])
            case ast.Import():
                found |= {f"{a.name}.".split(".")[1] for a in node.names if a.name.split(".")[0] == package}
    return found


@pytest.mark.parametrize(
    ("path", "source", "layers"),
    [
        pytest.param(path, source, layers, id=str(path.relative_to(source.parent)))
        for source, layers in ((SOURCE, LAYERS), (PAPER, PAPER_LAYERS))
        for path in sorted(source.rglob("*.py"))
    ],
)
def test_imports_point_down_the_layers(path: Path, source: Path, layers: list[list[str]]) -> None:
    level = {module: number for number, modules in enumerate(layers) for module in modules}
    room = path.relative_to(source).parts[0].removesuffix(".py")
    assert room in level, f"give {room} a place in the layers"
    for module in imported_modules(path, source.name) - {room, ""}:
        assert level[module] > level[room], f"{room} must not import {module}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_library_does_not_import_the_paper(path: Path) -> None:
    assert not imported_modules(path, PAPER.name)


@pytest.mark.parametrize("name", proxvi.__all__)
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    member = getattr(proxvi, name)
    documentation = inspect.getdoc(member) or ""
    assert doctest.DocTestParser().get_examples(documentation), f"{name} has no example"
    if inspect.isfunction(member):
        parameters = set(inspect.signature(member).parameters)
        for parameter in parameters:
            assert re.search(rf"^\s+{parameter}: ", documentation, re.M), f"{name} does not document {parameter}"
        assert "Returns:" in documentation


def test_public_names_are_sorted_and_complete() -> None:
    assert proxvi.__all__ == sorted(proxvi.__all__)
    public = {name for name in vars(proxvi) if not name.startswith("_") and not inspect.ismodule(getattr(proxvi, name))}
    assert public == set(proxvi.__all__)
    modules = {path.stem for path in SOURCE.rglob("*.py")}
    assert not modules & set(proxvi.__all__), "a module named like a public function hides it"


def test_the_listing_of_the_library_is_short() -> None:
    assert len([path for path in SOURCE.iterdir() if path.name != "__pycache__"]) <= 16


@pytest.mark.slow
def test_import_starts_no_backend_and_needs_only_the_core() -> None:
    """Nothing heavy, optional or global happens at import."""
    script = """
import sys, proxvi
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "import started a backend"
optional = {"matplotlib", "orbax", "grain", "pooch", "tyro", "arviz", "arviz_stats", "flax", "equinox", "jaxtyping"}
assert not optional & set(sys.modules), optional & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_is_in_the_reference() -> None:
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    missing = [name for name in proxvi.__all__ if not re.search(rf":: proxvi\.{name}$", reference, re.M)]
    assert not missing


CODE = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "promised"), CODE)
def test_code_of_the_readme_prints_what_it_says(code: str, promised: str, capsys: pytest.CaptureFixture[str]) -> None:
    with jax.numpy_rank_promotion("allow"):  # as it is outside of the tests
        exec(code, {})
    printed = capsys.readouterr().out
    assert printed
    if promised:
        assert re.sub(r"[-\d.]+", "#", printed) == re.sub(r"[-\d.]+", "#", promised)
        number = r"-?\d+(?:\.\d+)?"
        for ours, theirs in zip(re.findall(number, printed), re.findall(number, promised), strict=True):
            last_digit = 10.0 ** -len(theirs.partition(".")[2])  # it may differ from machine to machine
            assert float(ours) == pytest.approx(float(theirs), abs=2.1 * last_digit)


def test_pages_have_no_code_that_is_not_run() -> None:
    """In the documentation code is a cell, which the build executes, or part of an example, which the tests run."""
    for page in (ROOT / "docs").rglob("*.md"):
        if page.name != "upstream.md":  # `test_upstream.py` runs its scripts
            assert "```python" not in page.read_text(), page


def test_pages_are_short_and_their_code_is_narrow() -> None:
    """At most 1,200 words outside of tables and code; at most 88 columns of code, so that nothing is clipped."""
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text()
        for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.S | re.M):
            assert max(map(len, block.splitlines()), default=0) <= 88, (page, max(block.splitlines(), key=len))
        prose = re.sub(r"^```.*?^```|^\|.*?$", "", text, flags=re.S | re.M)
        assert len(prose.split()) <= 1_200, page


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
COMMAND = r"\bpython ((?:examples|benchmarks|tests/training)/\w+\.py[^`\n#]*)"
COMMANDS = sorted({command.strip() for page in PAGES for command in re.findall(COMMAND, page.read_text())})


@pytest.mark.parametrize("command", COMMANDS)
def test_scripts_in_the_pages_exist_with_their_options(command: str) -> None:
    name, *rest = shlex.split(command)
    source = (ROOT / name).read_text()
    if "training_speeds" in source:  # which has the options
        source += (ROOT / "benchmarks" / "timing.py").read_text()
    if "add_json_option" in source:
        source += (ROOT / "benchmarks" / "records.py").read_text()
    known = " ".join(re.findall(r'add_argument\(\s*"(--[\w-]+)"', source))
    for option in rest:
        if option.startswith("--"):
            assert re.search(rf"{option}\b", known), f"{option} is no option of {name}"
