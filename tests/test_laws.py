"""Laws that every statistic × distance obeys, on every family they fit. New members are picked up by themselves."""

import functools
from typing import Any

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import CASES, DISTANCES, FAMILIES, PAIRS, SHAPE, STATISTICS, statistic_of
from hypothesis import given, settings
from hypothesis import strategies as st

import proxvi

SYMMETRIC = {"inverse_huber", "squared"}
DTYPES = {"float32": jnp.float32, "float64": jnp.float64}

arrays = hnp.arrays(np.float64, SHAPE, elements=st.floats(-3, 3, width=32))
every_pair = pytest.mark.parametrize(("statistic", "distance", "family"), PAIRS, ids=["-".join(c) for c in PAIRS])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def test_every_statistic_and_distance_is_under_the_laws() -> None:
    assert {case[0] for case in CASES} == set(STATISTICS)
    assert {case[1] for case in CASES} == set(DISTANCES)
    # No family drops out unseen: a pair fits distributions, or arrays, or both.
    distributions = set(FAMILIES) - {"arrays"}
    for pair in {case[:2] for case in CASES}:
        fits = {family for *other, family in CASES if tuple(other) == pair}
        assert fits in (distributions, {"arrays"}, set(FAMILIES)), pair


def laws(statistic: str, distance: str, family: str, dtype: str, max_examples: int) -> None:
    f, d = statistic_of(statistic, family), DISTANCES[distance]
    step = 1e-6

    @jax.jit
    def observe(x: Any, y: Any, direction: Any) -> dict[str, Any]:
        target = f(x)
        value, slope = jax.value_and_grad(lambda p: d(target, f(p)))(y)
        at_rest, slope_at_rest = jax.value_and_grad(lambda p: d(target, f(p)))(x)
        ahead, behind = (d(target, f(y + sign * step * direction)) for sign in (1, -1))
        pairs = zip(jax.tree.leaves(target), jax.tree.leaves(f(y)), strict=True)
        gaps = [jnp.abs(a - b).ravel() for a, b in pairs if jnp.issubdtype(jnp.result_type(a), jnp.floating)]
        return {
            "value": value,
            "backwards": d(f(y), target),
            "slope": slope,
            "at_rest": at_rest,
            "slope_at_rest": slope_at_rest,
            "directional": jnp.vdot(slope, direction),
            "finite_difference": (ahead - behind) / (2 * step),
            "smallest_gap": jnp.min(jnp.concatenate(gaps)),
        }

    @settings(max_examples=max_examples)
    @given(x=arrays, y=arrays, direction=arrays)
    def check(x: np.ndarray, y: np.ndarray, direction: np.ndarray) -> None:
        seen = jax.device_get(observe(*(jnp.asarray(a, DTYPES[dtype]) for a in (x, y, direction))))
        scale = 1.0 + float(seen["value"])
        assert seen["value"] >= 0
        assert np.all(np.isfinite(seen["slope"]))
        if distance in SYMMETRIC:
            np.testing.assert_allclose(seen["backwards"], seen["value"], rtol=1e-5, atol=1e-30)  # subnormals round
            assert seen["at_rest"] == 0  # to the last bit
            assert np.all(seen["slope_at_rest"] == 0)
        else:
            rounding = 1e-5 if dtype == "float32" else 1e-12
            assert seen["at_rest"] <= rounding
            assert np.all(np.abs(seen["slope_at_rest"]) <= 10 * rounding)
        # At a kink of the inverse Huber (a gap of 0) a difference quotient means nothing.
        if dtype == "float64" and (distance != "inverse_huber" or seen["smallest_gap"] > 1e-3):
            np.testing.assert_allclose(seen["directional"], seen["finite_difference"], rtol=1e-5, atol=1e-7 * scale)

    with jax.enable_x64(dtype == "float64"):
        check()


# Slopes are compared with finite differences in float64 only; float32 on every family is for the night, and so is a
# second distance that sums over gaps.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("statistic", "distance", "family", "dtype"),
    [
        pytest.param(*case, dtype, id="-".join((*case, dtype)), marks=pytest.mark.nightly if rare else ())
        for case in CASES
        for dtype in DTYPES
        for rare in [case not in PAIRS and (dtype == "float32" or case[1] == "inverse_huber")]
    ],
)
def test_distance_laws(statistic: str, distance: str, family: str, dtype: str) -> None:
    laws(statistic, distance, family, dtype, max_examples=200)


@pytest.mark.nightly
@every_dtype
@every_pair
def test_distance_laws_ten_thousand_times(statistic: str, distance: str, family: str, dtype: str) -> None:
    laws(statistic, distance, family, dtype, max_examples=10_000)


def descend(optimizer: optax.GradientTransformationExtraArgs) -> tuple[Any, Any]:
    """Run a noisy quadratic from a fixed start; the parameters and the losses."""
    target = jnp.linspace(-1.0, 1.0, 12).reshape(SHAPE)

    @jax.jit
    def run() -> tuple[Any, Any]:
        def step(carry: tuple[Any, Any], key: Any) -> tuple[tuple[Any, Any], Any]:
            params, state = carry
            noise = 0.1 * jax.random.normal(key, SHAPE)
            loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - target + noise) ** 2))(params)
            updates, state = optimizer.update(grads, state, params, value=loss)
            return (optax.apply_updates(params, updates), state), loss

        params = jnp.full(SHAPE, 0.5)
        keys = jax.random.split(jax.random.key(0), 1_000)
        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        return params, losses

    return jax.device_get(run())


@functools.cache
def bare_descent() -> tuple[Any, Any]:
    return descend(optax.with_extra_args_support(optax.adam(0.05)))


@pytest.mark.slow
@every_pair
def test_magnitude_zero_is_the_bare_optimizer_to_the_last_bit(statistic: str, distance: str, family: str) -> None:
    optimizer = proxvi.proximity(
        optax.adam(0.05), proxvi.Proximity(statistic_of(statistic, family), magnitude=0.0, distance=DISTANCES[distance])
    )
    for expected, actual in zip(bare_descent(), descend(optimizer), strict=True):
        assert expected.tobytes() == actual.tobytes()


@pytest.mark.parametrize("average", [proxvi.parameter_average, proxvi.statistic_average])
@pytest.mark.parametrize("magnitude", [0.0, lambda step: 0.0 * step], ids=["number", "schedule"])
def test_magnitude_zero_is_the_bare_optimizer_whatever_the_slope_holds(magnitude: Any, average: Any) -> None:
    optimizer = proxvi.proximity(
        optax.adam(0.05), proxvi.Proximity(lambda p: jnp.sqrt(0.0 * p), magnitude=magnitude, reference=average())
    )
    for expected, actual in zip(bare_descent(), descend(optimizer), strict=True):
        assert expected.tobytes() == actual.tobytes()


@every_dtype
def test_inverse_huber_is_continuous_in_value_and_slope_at_one(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        zero, one = jnp.zeros((), DTYPES[dtype]), jnp.ones((), DTYPES[dtype])
        below, above = jnp.nextafter(one, zero), jnp.nextafter(one, 2 * one)
        values = [jax.value_and_grad(proxvi.inverse_huber, argnums=1)(zero, x) for x in (below, one, above)]
        np.testing.assert_allclose([value for value, _ in values], 1.0, rtol=4 * jnp.finfo(one.dtype).eps)
        np.testing.assert_allclose([slope for _, slope in values], 1.0, rtol=4 * jnp.finfo(one.dtype).eps)
