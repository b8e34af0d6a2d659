"""The fingerprint of a run. A checkpoint with another fingerprint belongs to another run."""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import CodeType

import jax
import numpy as np
from jax import Array

from proxvi._typing import Batch, Json, Tree
from proxvi.svi import ProximitySVI, ProximitySVIState
from proxvi.training._devices import local


def describe(svi: ProximitySVI, key: Array, state: ProximitySVIState, batch: Batch) -> Json:
    """Key, constraints, estimator, version of JAX, and the program of a step."""
    constraints = [
        {f.name: _setting(getattr(c, f.name)) for f in fields(c) if f.name not in ("magnitude", "reference")}
        for c in svi.constraints
    ]
    program = jax.make_jaxpr(svi.update)(jax.tree.map(local, state), *batch)
    return {
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "constraints": constraints,
        "loss": type(svi.loss).__name__,
        "jax": jax.__version__,
        # Learning rate, schedules and architecture are in the program. Its equations are sorted, because an ELBO may
        # add up its sites in another order in each process.
        "program": hashlib.sha256("\n".join(sorted(equations(program))).encode()).hexdigest(),
    }


def _setting(value: object) -> object:
    return name_and_code(value) if callable(value) else value


def signature(tree: Tree) -> str:
    """Shapes and dtypes, as text."""
    arrays = [x if hasattr(x, "dtype") else np.asarray(x) for x in jax.tree.leaves(tree)]  # nothing leaves the device
    leaves = [f"{np.dtype(x.dtype).name}{list(x.shape)}" for x in arrays]
    return ", ".join(leaves) or "none"


def digest(tree: Tree) -> str:
    """SHA-256 of the contents."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        total.update(np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()


def equations(program: Tree) -> Iterator[str]:
    """The equations of a program, without the names of its variables, and its constants."""
    for constant in getattr(program, "consts", ()):
        yield f"{signature(constant)} {digest(constant)}"
    for equation in getattr(program, "jaxpr", program).eqns:
        constants = [str(x.val) for x in equation.invars if hasattr(x, "val")]
        settings = []
        for name, value in equation.params.items():
            inner = [x for x in jax.tree.leaves(value, is_leaf=_is_program) if _is_program(x)]
            for each in inner:
                yield from equations(each)
            if not inner and not callable(value):
                settings.append(f"{name}={value}")
        results = [str(x.aval) for x in equation.outvars]
        yield re.sub(r"0x[0-9a-f]+", "", f"{equation.primitive} {constants} {results} {settings}")


def _is_program(x: object) -> bool:
    return hasattr(x, "eqns")


def name_and_code(function: Callable[..., object]) -> str:
    """The name of a function and a digest of its code: `lambda q: entropy(q["a"])` is not that of `q["b"]`."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if not hasattr(function, "__code__"):
        return name
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    closed_over = [repr(x) for x in cells if isinstance(x, str | int | float | bool)]
    return f"{name} {hashlib.sha256(' '.join([*_code(function.__code__), *closed_over]).encode()).hexdigest()[:8]}"


def _code(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names}"
    for constant in code.co_consts:
        yield from _code(constant) if isinstance(constant, CodeType) else (repr(constant),)
