"""The fingerprint of a run. A checkpoint with another fingerprint belongs to another run."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import Array

from proxvi._typing import Batch, Json, Tree
from proxvi.constraints import SpeedLimit
from proxvi.svi import ProximitySVI, ProximitySVIState
from proxvi.training._devices import is_key, local

SUMS = ("add", "add_any")
NOT_COMPUTED = ("name", "debug_info")  # parameters of an equation that say how the source calls it
MODULUS = 2**256


def describe(svi: ProximitySVI, key: Array, state: ProximitySVIState, batch: Batch) -> Json:
    """Key, estimator, version of JAX, and the program of a step, in which everything else is."""
    program = jax.make_jaxpr(svi.update)(jax.tree.map(local, state), *batch)
    over = [c.over and float(c.over) for c in svi.constraints if isinstance(c, SpeedLimit)]
    return {
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "constraints": [type(constraint).__name__ for constraint in svi.constraints],
        "loss": type(svi.loss).__name__,
        "jax": jax.__version__,
        "program": program_digest(program),
        # What `inject_hyperparams` or a `mutable` site sets there is not in the program.
        "start": digest(jax.tree.map(local, (state.optim_state, state.mutable_state))),
        # It is in the state, and not in the program; None is a part of the length of the run, which may change.
        **({"over": over} if any(over) else {}),
    }


def signature(tree: Tree) -> str:
    """Shapes and dtypes, as text."""
    arrays = [x if hasattr(x, "dtype") else np.asarray(x) for x in jax.tree.leaves(tree)]  # nothing leaves the device
    leaves = [f"{np.dtype(x.dtype).name}{list(x.shape)}" for x in arrays]
    return ", ".join(leaves) or "none"


def digest(tree: Tree) -> str:
    """SHA-256 of the contents."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        total.update(content(leaf))
    return total.hexdigest()


def content(leaf: Tree) -> memoryview:
    """The bytes of an array, copied only if they are not in memory in one piece; of random keys their bits."""
    array = np.ascontiguousarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return array.reshape(-1).view(np.uint8).data


def program_digest(program: Tree) -> str:
    """SHA-256 of what a program computes, the same in every process.

    The digest of a value is that of its equation (operation, settings, digests of its inputs), down to the inputs of
    the program, which are numbered, and its constants, by content. So the digest follows the flow of data, and names
    and unused equations have no part in it. The digest of a sum is the sum of the digests of its terms, because an
    ELBO may add up its sites in another order in each process.
    """
    return f"{_digest_of(_outputs(program)):064x}"


def _outputs(program: Tree) -> list[int]:
    """The digests of the results of a jaxpr."""
    jaxpr: Any = getattr(program, "jaxpr", program)  # a closed one has its constants beside it
    constants = [_digest_of(signature(x), digest(x)) for x in getattr(program, "consts", ())]
    inputs = [_digest_of("input", i, str(x.aval)) for i, x in enumerate(jaxpr.invars)]
    known: dict[Any, int] = dict(zip([*jaxpr.constvars, *jaxpr.invars], constants + inputs, strict=True))

    def of(value: Any) -> int:
        if hasattr(value, "val"):  # a literal
            return _digest_of(str(value.aval), digest(value.val))
        return known[value]

    for equation in jaxpr.eqns:
        terms = [of(x) for x in equation.invars]
        if equation.primitive.name in SUMS:
            known[equation.outvars[0]] = sum(terms) % MODULUS
            continue
        settings = {name: value for name, value in equation.params.items() if name not in NOT_COMPUTED}
        made = _digest_of(equation.primitive.name, _plain(settings), _host_functions(equation), terms)
        known |= {x: _digest_of(made, i, str(x.aval)) for i, x in enumerate(equation.outvars)}
    return [of(x) for x in jaxpr.outvars]


def _plain(value: object) -> object:
    """A setting of an equation as text that is the same in every process."""
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return _outputs(value)
    if isinstance(value, Mapping):
        return sorted((str(name), _plain(x)) for name, x in value.items())
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(x)) for x in value)
    if isinstance(value, tuple | list):
        return [_plain(x) for x in value]
    if isinstance(value, np.ndarray | jax.Array):
        return signature(value), digest(value)
    if (callable(value) and not isinstance(value, type)) or hasattr(value, "call_wrapped"):
        return "function"  # makes derivatives, which the program already has; those on the host are `_host_functions`
    return re.sub(r"0x[0-9a-f]+", "", str(value))


def _host_functions(equation: Any) -> list[str]:
    """The names and code of the Python functions that a callback to the host calls."""
    if "callback" not in equation.primitive.name:
        return []
    functions = [getattr(x, "callback_func", x) for x in equation.params.values() if callable(x)]
    codes = [getattr(function, "__code__", None) for function in functions]
    return [re.sub(r"0x[0-9a-f]+", "", f"{c.co_name} {c.co_code.hex()} {c.co_names} {c.co_consts}") for c in codes if c]


def _digest_of(*parts: object) -> int:
    return int(hashlib.sha256(repr(parts).encode()).hexdigest(), 16)
