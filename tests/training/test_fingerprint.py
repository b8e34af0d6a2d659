"""The fingerprint of a run: what a step computes, whatever its parts are called."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.primitives import mutable

import proxvi
from proxvi.training._run_fingerprint import describe, digest, program_digest

from .common import KEY

ROWS = jnp.ones(8)


def latents() -> Any:
    return (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")


def a_minus_b(x: Any) -> None:
    a, b = latents()
    numpyro.sample("x", dist.Normal(a - b, 1.0), obs=x)


def b_minus_a(x: Any) -> None:
    a, b = latents()
    numpyro.sample("x", dist.Normal(b - a, 1.0), obs=x)


def other_names(data: Any) -> None:
    """The same as `a_minus_b`."""
    first, second = latents()
    _ = first * 7.0
    numpyro.sample("x", dist.Normal(first - second, 1.0), obs=data)


def scaled_by(scale: Any) -> Callable[[Any], None]:
    def model(x: Any) -> None:
        spread = jax.jit(lambda a: a * scale)(numpyro.sample("a", dist.Gamma(2.0, 1.0)))
        numpyro.sample("x", dist.Normal(0.0, spread), obs=x)

    return model


def of_site(q: Any, site: str) -> Any:
    return proxvi.entropy(q[site])


def of_sites(sites: tuple[str, ...]) -> Callable[[Any], Any]:
    return lambda q: proxvi.entropy({site: q[site] for site in sites})


def program(**options: Any) -> str:
    return described(**options)["program"]


def described(model: Any = a_minus_b, optimizer: Any = None, loss: Any = None, statistic: Any = None) -> dict[str, Any]:
    constraints = () if statistic is None else proxvi.Proximity(statistic, magnitude=1.0)
    optimizer = optimizer or optax.adam(0.1)
    svi = proxvi.ProximitySVI(model, AutoNormal(model), optimizer, loss or Trace_ELBO(), constraints)
    return describe(svi, KEY, svi.init(KEY, ROWS), (ROWS,))


ONES, SPOILT = np.ones(8, np.float32), np.array([1, 1, 1, 1, 1, 7, 1, 1], np.float32)
LONG = np.ones(5_000, np.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": a_minus_b}, {"model": b_minus_a}),
        ({"statistic": partial(of_site, site="a")}, {"statistic": partial(of_site, site="b")}),
        ({"statistic": of_sites(("a",))}, {"statistic": of_sites(("b",))}),
        ({"statistic": proxvi.entropy}, {"statistic": proxvi.mean_variance}),
        ({"model": scaled_by(ONES)}, {"model": scaled_by(SPOILT)}),
        ({"model": scaled_by(jnp.asarray(ONES))}, {"model": scaled_by(jnp.asarray(SPOILT))}),
        ({"optimizer": optax.adam(0.1)}, {"optimizer": optax.adam(0.2)}),
        ({"optimizer": optax.adam(0.1)}, {"optimizer": optax.adam(optax.constant_schedule(0.1))}),
        ({"loss": Trace_ELBO()}, {"loss": Trace_ELBO(num_particles=2)}),
    ],
    ids=["flow", "partial", "closure", "statistic", "numpy", "jax", "rate", "schedule", "particles"],
)
def test_another_computation_has_another_digest(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert program(**one) != program(**other)
    assert program(**one) == program(**one)


def counts_from(first: float) -> Callable[[Any], None]:
    def model(x: Any) -> None:
        count: Any = mutable("count", jnp.float32(first))
        numpyro.sample("x", dist.Normal(numpyro.sample("a", dist.Normal(0.0, 1.0)) + 0.0 * count, 1.0), obs=x)

    return model


def test_mutable_state_at_the_start_counts() -> None:
    one, other = described(model=counts_from(0.0)), described(model=counts_from(1.0))
    assert one["program"] == other["program"]
    assert one["start"] != other["start"]
    assert one == described(model=counts_from(0.0))


def test_one_entry_of_a_long_constant_counts() -> None:
    def of(constant: np.ndarray) -> str:
        return program_digest(jax.make_jaxpr(lambda x: jnp.sum(constant * x))(1.0))

    spoilt = LONG.copy()
    spoilt[2_500] = 7.0
    assert of(LONG) == of(LONG.copy())
    assert of(LONG) != of(spoilt)
    assert digest(LONG) == digest(np.repeat(LONG, 2)[::2])  # by contents, not by how they lie in memory


def test_names_and_unused_lines_do_not_count() -> None:
    assert program(model=a_minus_b) == program(model=other_names)


def test_the_order_of_a_sum_does_not_count_but_that_of_a_difference_does() -> None:
    def of(function: Callable[..., Any]) -> str:
        return program_digest(jax.make_jaxpr(function)(1.0, 2.0, 3.0))

    assert of(lambda a, b, c: a + b + c) == of(lambda a, b, c: (c + a) + b)
    assert of(lambda a, b, c: a + b + c) != of(lambda a, b, c: a + b + b)
    assert of(lambda a, b, c: a - b + c) != of(lambda a, b, c: b - a + c)
    assert of(lambda a, b, c: jnp.sin(a + b) + c) != of(lambda a, b, c: jnp.sin(a + c) + b)
    assert of(lambda a, b, c: (a, b + c)) != of(lambda a, b, c: (b, a + c))
    assert of(lambda a, b, c: jax.lax.cond(a > 0, lambda: b, lambda: c)) != of(
        lambda a, b, c: jax.lax.cond(a > 0, lambda: c, lambda: b)
    )


def test_the_code_of_a_callback_counts() -> None:
    def of(function: Callable[..., Any]) -> str:
        like = jax.ShapeDtypeStruct((), jnp.float32)
        return program_digest(jax.make_jaxpr(lambda x: jax.pure_callback(function, like, x))(1.0))

    assert of(lambda x: x + 1) == of(lambda x: x + 1)
    assert of(lambda x: x + 1) != of(lambda x: x + 2)


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_every_process_has_the_same_digest() -> None:
    """Sets of strings have another order in each."""
    code = "from tests.training import test_fingerprint as t; t.print_programs()"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(printed) == 1
    assert len(printed.pop().split()) == 6


def print_programs() -> None:
    """For the processes of the test above."""
    for loss in (Trace_ELBO(), TraceMeanField_ELBO(), TraceGraph_ELBO()):
        found = described(loss=loss, statistic=proxvi.entropy)
        print(found["program"], found["start"])
