"""Moving averages against their closed forms."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import proxvi

STEPS = 1_000_000


def reference_after(reference: proxvi.Reference, iterate: Callable[[Any], Any], dtype: Any, steps: int) -> Any:
    """The reference that the optimiser holds after it has seen `iterate(0), …, iterate(steps)`."""
    link = proxvi.proximity(
        optax.identity(), proxvi.Proximity(proxvi.identity, magnitude=1.0, reference=reference, relative=False)
    )

    @jax.jit
    def run() -> Any:
        def step(state: Any, t: Any) -> tuple[Any, None]:
            params = iterate(t).astype(dtype)
            return link.update(jnp.zeros_like(params), state, params)[1], None

        state = link.init(iterate(jnp.zeros((), dtype)).astype(dtype))
        return jax.lax.scan(step, state, jnp.arange(steps + 1))[0].constraints[0].constraint.reference.value

    return jax.device_get(run())


@pytest.mark.parametrize("decay", [0.9, 0.9999, 0.999999])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_averages_equal_the_closed_form_after_a_million_steps(decay: float, dtype: str) -> None:
    """For the ramp λ_t = t / T both averages are geometric sums."""
    t, alpha = STEPS, decay
    # λ̃_t = λ_t − α (1 − αᵗ) / (1 − α) · slope, from λ̃_0 = λ_0
    parameters = 1.0 - alpha * -np.expm1(t * np.log(alpha)) / (1 - alpha) / t
    # Σ α^{t−i} i / Σ α^{t−i} over i = 0…t
    n = t + 1
    weights = -np.expm1(n * np.log(alpha)) / (1 - alpha)
    lag = alpha * (1 - n * alpha**t + t * alpha ** (t + 1)) / (1 - alpha) ** 2
    statistics = 1.0 - lag / weights / t
    tolerance = 1e-9 if dtype == "float64" else 2e-6  # without compensated summation 0.1, for the longest memory
    with jax.enable_x64(dtype == "float64"):
        for reference, expected in (
            (proxvi.parameter_average(decay), parameters),
            (proxvi.statistic_average(decay), statistics),
        ):
            actual = reference_after(reference, lambda i: jnp.asarray(i, dtype) / STEPS, dtype, STEPS)
            np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=0)


def test_bfloat16_parameters_keep_a_float32_reference_that_moves() -> None:
    def jump(t: Any) -> jax.Array:
        return jnp.where(t == 0, 0.0, 1.0)

    for reference in (proxvi.parameter_average(0.999), proxvi.statistic_average(0.999)):
        average = reference_after(reference, jump, jnp.bfloat16, 1_000)
        assert average.dtype == jnp.float32
        assert 0.5 < average < 1.0


def test_decay_zero_is_the_previous_step() -> None:
    for reference in (proxvi.parameter_average(0.0), proxvi.statistic_average(0.0)):
        link = proxvi.proximity(
            optax.identity(),
            proxvi.Proximity(
                proxvi.identity, magnitude=1.0, distance=proxvi.squared, reference=reference, relative=False
            ),
        )
        update, state, pulls = jax.jit(link.update), link.init(jnp.array(1.0)), []
        for params in (1.0, 4.0, 6.0):
            updates, state = update(jnp.array(0.0), state, jnp.array(params))
            pulls.append(float(jnp.asarray(updates)))
        assert pulls == [0.0, 6.0, 4.0]  # 2 (λ_t − λ_{t−1})
