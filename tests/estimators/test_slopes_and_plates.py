"""Where NumPyro's own sites are awkward: a logit of exactly 0, and plates within `scan`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import Array
from numpyro.contrib.control_flow import scan
from numpyro.infer import ELBO

import proxvi
from proxvi._distributions import log_density


def model() -> None:
    z = numpyro.sample("z", dist.Bernoulli(0.5))
    numpyro.sample("x", dist.Normal(3.0 * z, 1.0), obs=3.0)


def guide() -> None:
    numpyro.sample("z", dist.Bernoulli(logits=numpyro.param("logit")))


@pytest.mark.parametrize("loss", [proxvi.LeaveOneOutELBO(5), proxvi.VimcoELBO(5)])
def test_gradient_at_a_logit_of_exactly_zero_is_the_limit_of_those_beside_it(loss: ELBO) -> None:
    keys = jax.random.split(jax.random.key(0), 4_000)

    @jax.jit
    def gradient(logit: float) -> Array:
        def of_key(key: Array) -> Array:
            return jax.grad(lambda x: loss.loss(key, {"logit": x}, model, guide))(logit)

        return jnp.mean(jax.vmap(of_key)(keys))

    np.testing.assert_allclose(gradient(0.0), gradient(1e-6), rtol=1e-3)


def test_likelihood_at_a_logit_of_exactly_zero_has_the_right_slope() -> None:
    def network(x: Array) -> None:
        logit = jnp.asarray(numpyro.param("head", jnp.zeros(())))
        with numpyro.plate("rows", 3):
            numpyro.sample("z", dist.Bernoulli(0.5))
            numpyro.sample("x", dist.Bernoulli(logits=logit * jnp.ones(3)), obs=x)

    def start(_: Array) -> None:
        with numpyro.plate("rows", 3):
            numpyro.sample("z", dist.Bernoulli(0.5))

    x, loss = jnp.array([1.0, 1.0, 0.0]), proxvi.LeaveOneOutELBO(2)
    slope = jax.jit(jax.grad(lambda head: loss.loss(jax.random.key(0), {"head": head}, network, start, x)))(0.0)
    np.testing.assert_allclose(slope, -jnp.sum(x - 0.5), rtol=1e-6)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda d: d,
        lambda d: d.to_event(1),
        lambda d: d.expand((4, 3)).to_event(1),
        lambda d: d.mask(jnp.array([True, False, True])),
        lambda d: d.mask(jnp.array([True, False, True])).to_event(1),
    ],
    ids=["plain", "event", "expanded", "masked", "masked event"],
)
def test_log_density_of_wrapped_bernoullis_is_numpyros(wrap: Any) -> None:
    logits = jnp.array([-120.0, 0.3, 2.0])
    d = wrap(dist.Bernoulli(logits=logits))
    with jax.numpy_rank_promotion("allow"):  # as NumPyro needs it where it expands
        value = d.sample(jax.random.key(1))
    site = {"fn": d, "value": value, "intermediates": []}

    def of_logits(density: Any) -> Array:
        return jax.jit(jax.grad(lambda x: jnp.sum(density(wrap(dist.Bernoulli(logits=x))))))(logits)

    with jax.numpy_rank_promotion("allow"):
        np.testing.assert_array_equal(log_density(site), d.log_prob(value))

        ours = of_logits(lambda d: log_density({**site, "fn": d}))
        np.testing.assert_allclose(ours, of_logits(lambda d: d.log_prob(value)), rtol=1e-5, atol=1e-6)


def test_a_value_may_have_more_axes_than_expanded_bernoullis() -> None:
    d, value = dist.Bernoulli(logits=jnp.array(0.3)).expand([3]).to_event(1), jnp.ones((4, 3))
    with jax.numpy_rank_promotion("allow"):  # as NumPyro needs it where it expands
        np.testing.assert_array_equal(log_density({"fn": d, "value": value, "intermediates": []}), d.log_prob(value))


def test_a_masked_row_may_be_nan() -> None:
    x = jnp.array([1.0, jnp.nan, 0.0])

    def slope(loss: Any, x: Array) -> Array:
        def model(x: Array) -> None:
            bias = jnp.asarray(numpyro.param("bias", jnp.zeros(())))
            with numpyro.plate("rows", len(x)):
                numpyro.sample("z", dist.Bernoulli(0.5))
                numpyro.sample("x", dist.Bernoulli(logits=bias * jnp.ones(len(x))).mask(~jnp.isnan(x)), obs=x)

        def guide(x: Array) -> None:
            with numpyro.plate("rows", len(x)):
                numpyro.sample("z", dist.Bernoulli(0.5))

        return jax.grad(lambda bias: loss.loss(jax.random.key(0), {"bias": bias}, model, guide, x))(0.3)

    for loss in (proxvi.LeaveOneOutELBO(2), proxvi.VimcoELBO(2)):
        np.testing.assert_allclose(slope(loss, x), slope(loss, x[jnp.array([0, 2])]), rtol=1e-6)


def test_plate_within_scan() -> None:
    def chain(x: Array) -> None:
        def step(carry: float, row: Array) -> tuple[float, None]:
            with numpyro.plate("N", 2):
                z = numpyro.sample("z", dist.Bernoulli(0.5))
                numpyro.sample("x", dist.Normal(1.0 * z, 1.0), obs=row)
            return carry, None

        scan(step, 0.0, x)

    def guess(x: Array) -> None:
        shift = jnp.asarray(numpyro.param("shift", 0.0))

        def step(carry: float, row: Array) -> tuple[float, None]:
            with numpyro.plate("N", 2):
                numpyro.sample("z", dist.Bernoulli(logits=shift + row))
            return carry, None

        scan(step, 0.0, x)

    x = jnp.tile(jnp.array([0.5, -1.0]), (4, 1))

    def exact(shift: Array) -> Array:
        q = jax.nn.sigmoid(shift + x)
        log_ratio = [jnp.log(0.5) + dist.Normal(z, 1.0).log_prob(x) for z in (0.0, 1.0)]
        entropy = dist.Bernoulli(logits=shift + x).entropy()
        return -jnp.sum((1 - q) * log_ratio[0] + q * log_ratio[1] + entropy)

    keys = jax.random.split(jax.random.key(0), 4_000)
    loss = proxvi.LeaveOneOutELBO(4)
    gradient = jax.grad(lambda shift, key: loss.loss(key, {"shift": shift}, chain, guess, x))
    each = jax.jit(jax.vmap(gradient, in_axes=(None, 0)))(0.1, keys)
    error = float(jnp.std(each)) / np.sqrt(len(keys))
    assert abs(float(jnp.mean(each)) - float(jax.jit(jax.grad(exact))(0.1))) < 4 * error
