"""Variational families of fixed shape, each built from one unconstrained array, for laws that run over all of them."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

import proxvi.distances
import proxvi.statistics

SHAPE = (2, 2, 3)  # two parameters for each of two data points and three latent units


def _normal(x: Array) -> dist.Distribution:
    return dist.Normal(x[0], jnp.exp(0.5 * x[1])).to_event(1)


def _bernoulli(x: Array) -> dist.Distribution:
    return dist.Bernoulli(logits=x[0] + x[1]).to_event(1)


def _gamma(x: Array) -> dist.Distribution:
    return dist.Gamma(1.0 + jnp.exp(0.5 * x[0]), jnp.exp(0.5 * x[1])).to_event(1)


def _multivariate_normal(x: Array) -> dist.Distribution:
    lower = jnp.asarray(0.2 * np.tril(np.ones((2, 3, 3)), -1), x.dtype)
    tril = lower + jax.vmap(jnp.diag)(jnp.exp(0.3 * x[1]))
    return dist.MultivariateNormal(x[0], scale_tril=tril)


def _masked(x: Array) -> dist.Distribution:
    return dist.Normal(x[0], jnp.exp(0.5 * x[1])).to_event(1).mask(jnp.array([True, False]))


def _expanded(x: Array) -> dist.Distribution:
    return dist.Normal(x[0, 0], jnp.exp(0.5 * x[1, 0])).expand((2, 3)).to_event(1)


def _transformed(x: Array) -> dist.Distribution:
    return dist.LogNormal(0.2 * x[0], jnp.exp(0.1 * x[1])).to_event(1)


def _tree(x: Array) -> dict[str, dist.Distribution]:
    return {"w": _normal(x), "z": _bernoulli(x)}


def _arrays(x: Array) -> dict[str, Array]:
    return {"kernel": x[0], "bias": x[1, 0]}


FAMILIES: dict[str, Callable[[Array], Any]] = {
    family.__name__.strip("_"): family
    for family in (
        _normal,
        _bernoulli,
        _gamma,
        _multivariate_normal,
        _masked,
        _expanded,
        _transformed,
        _tree,
        _arrays,
    )
}

STATISTICS = {name: getattr(proxvi.statistics, name) for name in proxvi.statistics.__all__}
DISTANCES = {name: getattr(proxvi.distances, name) for name in proxvi.distances.__all__}


def statistic_of(statistic: str, family: str) -> Callable[[Array], Any]:
    """The statistic as a function of the array; one that takes a prior gets the family's own standard member."""
    function, build = STATISTICS[statistic], FAMILIES[family]
    if "prior" in inspect.signature(function).parameters:
        return lambda x: function(build(x), build(jnp.zeros_like(x)))
    return lambda x: function(build(x))


def _fitting(statistic: str, family: str) -> list[str]:
    """The distances that fit the statistic on the family; what does not fit must say so by a TypeError."""
    fitting = []

    def look(x: Array) -> None:
        with contextlib.suppress(TypeError):
            value = statistic_of(statistic, family)(x)
            for name, distance in DISTANCES.items():
                with contextlib.suppress(TypeError):
                    distance(value, value)
                    fitting.append(name)

    jax.eval_shape(look, jnp.ones(SHAPE))
    return fitting


CASES = [
    (statistic, distance, family)
    for statistic in STATISTICS
    for family in FAMILIES
    for distance in _fitting(statistic, family)
]

# One family for each pair, for what takes long and does not depend on the family.
PAIRS = list({case[:2]: case for case in reversed(CASES)}.values())
