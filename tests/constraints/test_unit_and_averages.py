"""The unit of a relative magnitude, and averages over very many steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import proxvi
from proxvi.svi._nonfinite import is_finite


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_average_of_parameters_arrives_at_a_target_close_to_its_start(dtype: jnp.dtype) -> None:
    reference = proxvi.parameter_average(0.9999)
    target = jnp.full(1, -99.97, dtype)
    state = reference.init(jnp.full(1, -100.0, dtype), lambda: None)
    move = jax.jit(
        lambda state: jax.lax.fori_loop(0, 100_000, lambda i, s: reference.update(s, target, None, i), state)
    )
    arrived = reference.value(move(state), lambda p: p, None, jnp.zeros((), jnp.int32))
    np.testing.assert_allclose(arrived, target.astype(jnp.float32), atol=1e-4)


def test_average_of_a_statistic_moves_after_the_largest_number_of_steps() -> None:
    reference = proxvi.statistic_average(0.9999)
    state = reference.init(None, lambda: jax.ShapeDtypeStruct((), jnp.float32))
    last = jnp.array(2**31 - 1, jnp.int32)
    moved = reference.value(reference.update(state, None, jnp.ones(()), last), lambda p: p, jnp.ones(()), last)
    np.testing.assert_allclose(moved, 1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_large_finite_numbers_are_finite(dtype: str) -> None:
    largest = jnp.full((3, 2), jnp.finfo(dtype).max, dtype)
    assert is_finite(largest)
    assert not is_finite(largest.at[0, 1].set(jnp.inf))
    assert not is_finite({"a": largest, "b": largest.at[2, 0].set(jnp.nan)})


def magnitudes(losses: list[float]) -> list[float]:
    constraint = proxvi.Proximity(proxvi.identity, magnitude=1.0)
    state, seen = constraint.init(jnp.ones(1), lambda: jnp.ones(1)), []
    for loss in losses:
        step = constraint.step(state, jnp.ones(1), jnp.ones(1), lambda p: p, jnp.asarray(loss))
        state = step.state
        seen.append(float(step.magnitude))
    return seen


def test_unit_is_the_mean_size_of_the_first_ten_losses() -> None:
    losses = [float(x) for x in range(-3, 12)]
    sizes = [abs(x) for x in losses if x != 0.0][:10]
    assert magnitudes(losses)[-1] == pytest.approx(np.mean(sizes))


def test_one_unusual_first_loss_is_no_unit_for_good() -> None:
    for first in (1e-12, 0.0, float("nan"), float("inf")):
        assert magnitudes([first] + [7.0] * 20)[-1] > 6.0
