"""Algorithm 1 against closed forms, and against Algorithm 2."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest

import proxvi
from proxvi.transforms import InnerLoopState

KEY = jax.random.key(0)
PREVIOUS = proxvi.parameter_average(0.0)


def absolute(statistic: Any, magnitude: float, **options: Any) -> proxvi.Proximity:
    return proxvi.Proximity(statistic, magnitude=magnitude, relative=False, **options)


def update(
    optimizer: optax.GradientTransformation, gradient: jax.Array, state: optax.OptState, params: jax.Array
) -> tuple[jax.Array, InnerLoopState]:
    """One step of a single array; Optax's own types allow any tree."""
    updates, state = optimizer.update(gradient, state, params)
    assert isinstance(updates, jax.Array)
    assert isinstance(state, InnerLoopState)
    return updates, state


@pytest.mark.slow
def test_no_constraint_is_gradient_descent_to_the_last_bit() -> None:
    constraint = absolute(proxvi.identity, 0.0)
    ours, theirs = proxvi.proximity_inner_loop(KEY, 0.1, constraint), optax.sgd(0.1)
    params = jax.random.normal(KEY, (50,))
    ours_params, theirs_params = params, params
    ours_state, theirs_state = ours.init(params), theirs.init(params)
    for _ in range(20):
        ours_updates, ours_state = ours.update(jnp.sin(ours_params), ours_state, ours_params)
        theirs_updates, theirs_state = theirs.update(jnp.sin(theirs_params), theirs_state, theirs_params)
        ours_params = jnp.asarray(optax.apply_updates(ours_params, ours_updates))
        theirs_params = jnp.asarray(optax.apply_updates(theirs_params, theirs_updates))
    assert np.asarray(ours_params).tobytes() == np.asarray(theirs_params).tobytes()
    assert isinstance(ours_state, InnerLoopState)
    assert ours_state.iterations == 2  # the second finds nothing to change


@pytest.mark.slow
def test_linear_statistic_reaches_the_closed_form_maximiser() -> None:
    """For f(λ) = Aλ and squared distance, (I/ρ + 2k AᵀA)(λ' − λ_t) = −g − 2k Aᵀ(Aλ_t − Aλ̃)."""
    with jax.enable_x64(True):
        rho, k = 0.1, 1.5
        matrix = np.random.default_rng(0).normal(size=(3, 4))
        params, gradient = np.arange(4.0), np.array([1.0, -2.0, 0.5, 3.0])
        optimizer = proxvi.proximity_inner_loop(
            KEY,
            rho,
            absolute(lambda p: jnp.asarray(matrix) @ p, k, distance=proxvi.squared, reference=PREVIOUS),
            inner_learning_rate=0.02,  # ρ k ‖AᵀA‖ is above 1, so the paper's own inner step would not contract
            tolerance=1e-12,
            max_iterations=10_000,
        )
        start = jnp.asarray(params)
        step, state = update(optimizer, jnp.asarray(gradient), optimizer.init(start), start)
        expected = np.linalg.solve(np.eye(4) / rho + 2 * k * matrix.T @ matrix, -gradient)
        np.testing.assert_allclose(step, expected, atol=1e-6)
        assert state.residual <= 1e-12
        assert 1 < state.iterations < 10_000


def test_quadratic_statistic_reaches_the_closed_form_maximiser() -> None:
    """For f(λ) = λ² and squared distance, U is a quartic whose stationary points solve a cubic."""
    with jax.enable_x64(True):
        rho, k, params, gradient = 0.1, 0.3, 1.5, 4.0
        optimizer = proxvi.proximity_inner_loop(
            KEY,
            rho,
            absolute(lambda p: p**2, k, distance=proxvi.squared, reference=PREVIOUS),
            inner_learning_rate=0.02,
            tolerance=1e-12,
            max_iterations=10_000,
        )
        start = jnp.asarray(params)
        step, _ = update(optimizer, jnp.asarray(gradient), optimizer.init(start), start)
        # −U'(λ') = g + (λ' − λ)/ρ + 4k λ'(λ'² − λ²)
        roots = np.roots([4 * k, 0.0, 1 / rho - 4 * k * params**2, gradient - params / rho])
        (expected,) = roots[np.abs(roots.imag) < 1e-12].real
        np.testing.assert_allclose(params + step, expected, atol=1e-6)


def test_kl_proximal_step_of_a_gaussian_mean_has_its_closed_form() -> None:
    """With q = Normal(m, s) and d = KL(q ‖ q_t) = (m' − m)²/2s², the step is −g / (1/ρ + k/s²)."""
    with jax.enable_x64(True):
        rho, k, scale = 0.5, 0.2, 0.7
        optimizer = proxvi.proximity_inner_loop(
            KEY,
            rho,
            absolute(lambda p: dist.Normal(p, scale), k, distance=proxvi.kl, reference=PREVIOUS),
            tolerance=1e-13,
        )
        start, gradient = jnp.asarray(1.0), jnp.asarray(2.0)
        step, _ = update(optimizer, gradient, optimizer.init(start), start)
        np.testing.assert_allclose(step, -2.0 / (1 / rho + k / scale**2), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "past"),
    [(proxvi.parameter_average(0.8), 0.8), (proxvi.statistic_average(0.8), 0.8 / 1.8)],
    ids=["parameters", "statistic"],
)
def test_the_second_step_is_held_by_an_average_of_the_past(reference: proxvi.Reference, past: float) -> None:
    """For f(λ) = λ and squared distance, with λ̃ = wλ₀ + (1 − w)λ₁ the second step is −(g + 2kw s₁) / (1/ρ + 2k).

    The average of parameters starts at λ₀, so that w = α; that of the statistic starts at nothing, and is divided by
    the sum of its weights, so that w = α / (1 + α).
    """
    with jax.enable_x64(True):
        rho, k, gradient = 0.1, 1.5, jnp.asarray(2.0)
        constraint = absolute(proxvi.identity, k, distance=proxvi.squared, reference=reference)
        optimizer = proxvi.proximity_inner_loop(KEY, rho, constraint, tolerance=1e-12, max_iterations=1_000)
        start = jnp.asarray(1.0)
        first, state = update(optimizer, gradient, optimizer.init(start), start)
        second, state = update(optimizer, gradient, state, start + first)
        expected = -gradient / (1 / rho + 2 * k)
        np.testing.assert_allclose(first, expected, rtol=1e-6)
        np.testing.assert_allclose(second, -(gradient + 2 * k * past * expected) / (1 / rho + 2 * k), rtol=1e-6)
        np.testing.assert_allclose(state.telemetry.distance, (past * first + second) ** 2, rtol=1e-6)
        assert state.telemetry.magnitude == k


@pytest.mark.parametrize("reference", [proxvi.parameter_average(0.9), proxvi.statistic_average(0.9), PREVIOUS])
def test_both_algorithms_end_at_the_same_optimum(reference: proxvi.Reference) -> None:
    constraint = {
        "magnitude": optax.exponential_decay(1.0, 500, 1e-8),
        "distance": proxvi.squared,
        "reference": reference,
    }

    def entropy(params: jax.Array) -> jax.Array:
        return proxvi.entropy(dist.Bernoulli(logits=params))

    one = proxvi.proximity_inner_loop(KEY, 0.05, proxvi.Proximity(entropy, **constraint))
    two = proxvi.proximity(optax.sgd(0.05), proxvi.Proximity(entropy, **constraint))

    def run(optimizer: Any) -> jax.Array:
        def step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
            params, state = carry
            loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - 2.0) ** 2))(params)
            updates, state = optimizer.update(grads, state, params, value=loss)
            return (optax.apply_updates(params, updates), state), None

        start = jnp.array([0.5, -0.5])
        return jax.lax.scan(step, (start, optimizer.init(start)), length=500)[0][0]

    finals = [jax.jit(run, static_argnums=0)(optimizer) for optimizer in (one, two)]
    np.testing.assert_allclose(finals[0], 2.0, atol=1e-4)
    np.testing.assert_allclose(finals[0], finals[1], atol=1e-4)


def test_a_loop_that_does_not_converge_says_so() -> None:
    constraint = absolute(proxvi.identity, 100.0, distance=proxvi.squared, reference=PREVIOUS)
    optimizer = proxvi.proximity_inner_loop(KEY, 0.1, constraint, max_iterations=7, noise=1.0)
    params = jnp.ones(2)
    _, state = update(optimizer, params, optimizer.init(params), params)
    assert state.iterations == 7
    assert state.residual > 1e-6


@pytest.mark.parametrize("magnitude", [0.5, 2.0, 20.0])
def test_the_default_distance_converges_at_its_kink(magnitude: float) -> None:
    """For f(λ) = λ and the inverse Huber below 1, U is a soft threshold: the step is −ρ · sign(g) max(|g| − k, 0)."""
    optimizer = proxvi.proximity_inner_loop(
        KEY, 0.1, absolute(proxvi.identity, magnitude, reference=PREVIOUS), max_iterations=200
    )
    params, gradient = jnp.zeros(()), jnp.ones(())
    step, state = update(optimizer, gradient, optimizer.init(params), params)
    np.testing.assert_allclose(step, -0.1 * max(1.0 - magnitude, 0.0), atol=1e-5)
    assert state.residual <= 1e-6


@pytest.mark.slow
def test_a_schedule_may_start_at_zero_and_fall_below_the_inner_rate() -> None:
    for schedule in (optax.linear_schedule(0.0, 0.05, 10), optax.exponential_decay(0.05, 20, 0.01)):
        optimizer = proxvi.proximity_inner_loop(
            KEY, schedule, absolute(proxvi.identity, 1.0, distance=proxvi.squared), inner_learning_rate=0.01
        )
        params = jnp.ones(2)
        state = optimizer.init(params)
        for _ in range(20):
            updates, state = update(optimizer, 2 * params, state, params)
            params = jnp.asarray(optax.apply_updates(params, updates))
        assert np.all((params > 0) & (params < 1))


def test_a_gradient_that_is_not_finite_makes_no_step_of_the_noise() -> None:
    constraint = proxvi.Proximity(lambda params: params, magnitude=1.0, relative=False)
    optimizer = proxvi.proximity_inner_loop(jax.random.key(0), 0.1, constraint)
    params = jnp.zeros(2)
    updates, _ = update(optimizer, jnp.array([jnp.nan, 1.0]), optimizer.init(params), params)
    assert jnp.all(jnp.isnan(updates))
