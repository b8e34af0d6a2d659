"""The count of arguments that are `Any`, which bounds them in `.ci/run`."""

import ast
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "any_share"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a source distribution has no .ci")

SOURCE = ast.parse("""
Tree = Any
Trees = list[Tree]

def f(self, a: int, b: Any, c: "Callable[..., typing.Any]", *args: Any, d: Trees, **kwargs: Any) -> Scalar:
    def inner(x: Float[Array, "rows Any"], *more: list[Any]) -> Int[Array, ""] | None: ...
    y: Scalar = x
""")


def test_arguments_that_are_any_are_counted() -> None:
    found = list(runpy.run_path(str(SCRIPT))["arguments_of"](SOURCE))
    assert {argument.name for argument in found} == {"a", "b", "c", "args", "d", "kwargs", "x", "more"}
    assert {argument.name for argument in found if "Any" in argument.names} == {"b", "c", "args", "kwargs", "more"}
    assert {argument.name for argument in found if argument.passed_on} == {"args", "kwargs"}


def test_aliases_of_any_and_shapes_are_found() -> None:
    script = runpy.run_path(str(SCRIPT))
    assert script["aliases_of_any"]([SOURCE]) == {"Any", "Tree", "Trees"}
    assert script["shapes_in"](SOURCE) == 4
