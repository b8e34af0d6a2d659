"""Algorithm 2 with any Optax optimiser. With `optax.identity()` its update is the gradient with the constraint."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest

import proxvi


def bernoulli_entropy(params: jax.Array) -> jax.Array:
    return proxvi.entropy(dist.Bernoulli(logits=params).to_event(1))


def test_update_equation_by_hand() -> None:
    """Two steps of equation (fast-update) with f(λ) = λ², squared distance, ρ = 0.1, k = 2, α = 0.5, worked by hand."""
    with jax.enable_x64(True):
        optimizer = proxvi.proximity(
            optax.sgd(0.1),
            proxvi.Proximity(
                lambda params: params**2,
                magnitude=2.0,
                distance=proxvi.squared,
                reference=proxvi.parameter_average(0.5),
                relative=False,
            ),
        )
        params = jnp.array(3.0, jnp.float64)
        state = optimizer.init(params)
        # L(λ) = −λ, so ∇(−L) = 1. At step 0, λ̃ = λ = 3: the constraint is silent. λ_1 = 3 − 0.1 = 2.9.
        updates, state = optimizer.update(jnp.ones((), jnp.float64), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(jnp.asarray(params), 2.9, rtol=1e-15)
        # λ̃ = ½·3 + ½·2.9 = 2.95, f(λ̃) = 8.7025, f(λ) = 8.41, ∇d ∇f = 2(8.41 − 8.7025)·2·2.9 = −3.393.
        # λ_2 = 2.9 − 0.1 (1 + 2·(−3.393)) = 3.4786.
        updates, state = optimizer.update(jnp.ones((), jnp.float64), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(jnp.asarray(params), 3.4786, rtol=1e-14)
        (report,) = proxvi.telemetry(state)
        np.testing.assert_allclose(report.distance, (8.41 - 8.7025) ** 2, rtol=1e-12)
        np.testing.assert_allclose(report.magnitude, 2.0)


@pytest.mark.slow
def test_share_is_measured_from_the_second_step_on() -> None:
    link = proxvi.proximity(
        optax.identity(),
        proxvi.Proximity(
            proxvi.identity,
            magnitude=2.0,
            distance=proxvi.squared,
            reference=proxvi.parameter_average(0.0),
            relative=False,
        ),
    )
    state, shares = link.init(jnp.array(0.0)), []
    for t in range(18):  # each step moves by 0.5, so k ∇d = 2 · 2 · 0.5 = 2 beside a gradient of 6
        _, state = link.update(jnp.array(6.0), state, jnp.array(0.5 * t))
        shares.append(float(proxvi.telemetry(state)[0].share))
    assert np.isnan(shares[0])  # the reference is the current iterate
    assert shares[1:] == [0.25] * 17


def test_kl_proximal_step_of_a_conjugate_model() -> None:
    """Argmin −ELBO(q) + k KL(q ‖ q_0) for a Gaussian posterior has natural parameters (η_post + k η_0) / (1 + k)."""
    k = 3.0
    posterior, start = dist.Normal(2.0, 0.5), {"loc": -1.0, "log_scale": 0.3}

    def q(params: dict[str, Any]) -> dist.Distribution:
        return dist.Normal(params["loc"], jnp.exp(params["log_scale"]))

    def natural(d: Any) -> np.ndarray:
        return np.array([d.loc / d.scale**2, 1.0 / d.scale**2])

    with jax.enable_x64(True):
        anchor = proxvi.Reference(  # q_0 held fixed is the reference of one proximal step
            init=lambda params, describe: jax.tree.map(jnp.array, params),
            update=lambda state, params, value, step: state,
            value=lambda state, statistic, value, step: statistic(state),
        )
        optimizer = proxvi.proximity(
            optax.adam(optax.exponential_decay(0.05, 2_000, 1e-3)),
            proxvi.Proximity(q, magnitude=k, distance=proxvi.kl, reference=anchor, relative=False),
        )
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), start)

        def step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
            params, state = carry
            # KL to the posterior is −ELBO up to a constant
            grads = jax.grad(lambda p: dist.kl_divergence(q(p), posterior))(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (final, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=6_000)
        expected = (natural(posterior) + k * natural(q(start))) / (1.0 + k)
        np.testing.assert_allclose(natural(q(final)), expected, rtol=1e-6)


def quadratic(optimizer: Any, steps: int, start: Any) -> tuple[Any, Any, Any]:
    """Minimise Σ(λ − 2)²; the parameters, the state, and the parameters along the way."""

    def step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], Any]:
        params, state = carry
        loss, grads = jax.value_and_grad(lambda p: jnp.sum((p - 2.0) ** 2))(params)
        updates, state = optimizer.update(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    (params, state), trace = jax.lax.scan(step, (start, optimizer.init(start)), length=steps)
    return params, state, trace


@pytest.mark.parametrize(
    ("reference", "magnitude"),
    [
        (proxvi.parameter_average(0.99), 100.0),
        (proxvi.statistic_average(0.99), 100.0),
        (proxvi.parameter_average(0.0), 1_000.0),  # the previous step is close by: only a strong pull shows
        (proxvi.statistic_average(0.0), 1_000.0),
    ],
)
def test_constraint_slows_the_statistic_and_then_lets_go(reference: proxvi.Reference, magnitude: float) -> None:
    optimizer = proxvi.proximity(
        optax.adam(0.01),
        proxvi.Proximity(
            bernoulli_entropy,
            magnitude=optax.exponential_decay(magnitude, 2_000, 1e-10),
            reference=reference,
            distance=proxvi.squared,
        ),
    )
    start = jnp.zeros(3)
    free, _, free_trace = quadratic(optax.with_extra_args_support(optax.adam(0.01)), 2_000, start)
    held, state, held_trace = quadratic(optimizer, 2_000, start)
    moved = [float(jnp.max(bernoulli_entropy(start) - bernoulli_entropy(t[100]))) for t in (free_trace, held_trace)]
    assert 0 <= moved[1] < 0.9 * moved[0]
    np.testing.assert_allclose(held, free, atol=1e-3)
    np.testing.assert_allclose(free, 2.0, atol=1e-3)
    assert proxvi.telemetry(state)[0].share < 0.01


def test_relative_magnitude_is_in_units_of_the_first_finite_losses() -> None:
    link = proxvi.proximity(optax.identity(), proxvi.Proximity(proxvi.identity, magnitude=0.5))
    params = jnp.ones(2)
    update, state, seen = jax.jit(link.update), link.init(params), []
    for loss in (jnp.nan, 0.0, -8.0, 100.0):
        _, state = update(params, state, params, value=jnp.asarray(loss))
        seen.append(float(proxvi.telemetry(state)[0].magnitude))
    assert seen == [0.0, 0.0, 4.0, 27.0]  # half of the mean of 8 and 100


@pytest.mark.slow
def test_magnitude_follows_the_schedule_of_the_paper() -> None:
    steps, gamma = 50, 1e-10
    link = proxvi.proximity(
        optax.identity(),
        proxvi.Proximity(proxvi.identity, magnitude=optax.exponential_decay(1.0, steps, gamma), relative=False),
    )
    params = jnp.ones(2)
    state, seen = link.init(params), []
    for _ in range(steps):
        _, state = link.update(params, state, params)
        seen.append(float(proxvi.telemetry(state)[0].magnitude))
    np.testing.assert_allclose(seen, gamma ** (np.arange(steps) / steps), rtol=1e-5)


def test_a_magnitude_that_turns_nan_is_not_hidden() -> None:
    link = proxvi.proximity(
        optax.identity(),
        proxvi.Proximity(
            proxvi.identity, magnitude=lambda step: jnp.where(jnp.less(step, 1), 1.0, jnp.nan), relative=False
        ),
    )
    params = jnp.ones(2)
    updates, state = link.update(params, link.init(params), params)
    assert np.all(np.isfinite(jnp.asarray(updates)))
    updates, state = link.update(params, state, params)
    assert np.all(np.isnan(jnp.asarray(updates)))


def test_no_gradient_reaches_the_prior() -> None:
    params = {"q": jnp.array(1.0), "prior": jnp.array(0.0)}
    link = proxvi.proximity(
        optax.identity(),
        proxvi.Proximity(
            lambda p: proxvi.kl_to_prior(dist.Normal(p["q"], 1.0), dist.Normal(p["prior"], 1.0)),
            magnitude=1.0,
            reference=proxvi.statistic_average(0.5),
            relative=False,
        ),
    )
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, state = link.update(zeros, link.init(params), params)
    updates, _ = link.update(zeros, state, {"q": jnp.array(2.0), "prior": jnp.array(-1.0)})
    assert jax.tree.map(lambda update: bool(update != 0), updates) == {"q": True, "prior": False}


@pytest.mark.slow
def test_several_constraints_add_up_and_each_has_its_own_share() -> None:
    params, later = jnp.array([1.0, -1.0]), jnp.array([0.5, 0.5])
    entropy = proxvi.Proximity(bernoulli_entropy, magnitude=2.0, relative=False)
    euclid = proxvi.Proximity(proxvi.identity, magnitude=3.0, distance=proxvi.squared, relative=False)

    def constrained(*constraints: proxvi.Proximity) -> tuple[Any, Any]:
        optimizer = proxvi.proximity(optax.identity(), constraints)
        _, state = optimizer.update(jnp.zeros(2), optimizer.init(params), params)
        return optimizer.update(jnp.ones(2), state, later)

    both, state = constrained(entropy, euclid)
    each = [constrained(c) for c in (entropy, euclid)]
    np.testing.assert_allclose(both, each[0][0] + each[1][0] - 1.0, rtol=1e-6)
    reports = proxvi.telemetry(state)
    assert [float(t.magnitude) for t in reports] == [2.0, 3.0]
    for together, (_, alone) in zip(reports, each, strict=True):
        assert 0.1 < float(together.share) < 0.9
        assert together.share == proxvi.telemetry(alone)[0].share


@pytest.mark.slow
def test_hundred_starts_under_vmap_inside_scan_compile_once() -> None:
    traces = 0

    @jax.jit
    def run(starts: jax.Array) -> tuple[Any, Any, Any]:
        nonlocal traces
        traces += 1
        optimizer = proxvi.proximity(
            optax.adam(0.05),
            proxvi.Proximity(
                bernoulli_entropy,
                magnitude=optax.exponential_decay(1.0, 500, 1e-10),
                reference=proxvi.statistic_average(),
            ),
        )
        return jax.vmap(lambda start: quadratic(optimizer, 500, start))(starts)

    starts = jax.random.normal(jax.random.key(0), (100, 3))
    final, state, _ = run(starts)
    run(starts + 1.0)
    assert traces == 1
    assert jnp.shape(proxvi.telemetry(state)[0].share) == (100,)
    np.testing.assert_allclose(final, 2.0, atol=1e-2)
    optimizer = proxvi.proximity(
        optax.adam(0.05),
        proxvi.Proximity(
            bernoulli_entropy, magnitude=optax.exponential_decay(1.0, 500, 1e-10), reference=proxvi.statistic_average()
        ),
    )
    alone, _, _ = jax.jit(lambda start: quadratic(optimizer, 500, start))(starts[7])
    np.testing.assert_allclose(final[7], alone, rtol=1e-4)


@pytest.mark.slow
def test_vmap_over_magnitudes() -> None:
    params, later = jnp.array([1.0]), jnp.array([0.5])

    def pull(magnitude: jax.Array) -> jax.Array:
        link = proxvi.proximity(
            optax.identity(),
            proxvi.Proximity(proxvi.identity, magnitude=magnitude, distance=proxvi.squared, relative=False),
        )
        _, state = link.update(jnp.zeros(1), link.init(params), params)
        return jnp.asarray(link.update(jnp.zeros(1), state, later)[0])

    pulls = jax.vmap(pull)(jnp.array([0.0, 1.0, 2.0]))
    np.testing.assert_allclose(pulls[2], 2 * pulls[1], rtol=1e-6)
    assert pulls[0] == 0
    assert pulls[1] != 0


@pytest.mark.slow
def test_sharded_batch_gives_the_updates_of_one_device() -> None:
    """`k · d(mean f)` is not linear in the batch, so the mean must be over all devices before the distance."""
    assert jax.device_count() == 8
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.random.normal(jax.random.key(0), (64, 10))
    params = jax.random.normal(jax.random.key(1), (10, 4))

    def entropy(params: jax.Array, batch: jax.Array) -> jax.Array:
        return proxvi.entropy(dist.Bernoulli(logits=batch @ params).to_event(1))

    link = proxvi.proximity(
        optax.identity(),
        proxvi.Proximity(
            entropy, magnitude=5.0, distance=proxvi.squared, reference=proxvi.statistic_average(0.9), relative=False
        ),
        example={"batch": batch},
    )

    @jax.jit
    def run(batch: jax.Array) -> Any:
        def step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], Any]:
            params, state = carry
            grads = jax.grad(lambda p: jnp.mean((batch @ p - 1.0) ** 2))(params)
            updates, state = link.update(grads, state, params, batch=batch)
            updates = jnp.asarray(updates)
            return (params - 0.1 * updates, state), (updates, updates - grads)

        return jax.lax.scan(step, (params, link.init(params)), length=20)[1]

    updates, ours = run(batch)
    sharded = jax.device_put(batch, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    assert len(sharded.sharding.device_set) == 8
    gaps = jnp.max(jnp.abs(run(sharded)[0] - updates), axis=(1, 2))
    assert np.all(gaps <= 1e-6 * jnp.max(jnp.abs(updates), axis=(1, 2)))
    assert np.all(jnp.linalg.norm(ours[5:], axis=(1, 2)) > 0.02 * jnp.linalg.norm(updates[5:], axis=(1, 2)))
    # The test can tell: the mean of the distances of the shards is another number.
    moved = 1.1 * params
    whole = proxvi.squared(entropy(params, batch), entropy(moved, batch))
    parts = [proxvi.squared(entropy(params, part), entropy(moved, part)) for part in jnp.split(batch, 8)]
    assert abs(np.mean(parts) - whole) > 0.02 * whole


def test_partition_keeps_a_reference_only_for_what_the_statistic_reads() -> None:
    params = {"encoder": jnp.ones(3), "decoder": jnp.ones((5, 5))}
    constraint = proxvi.Proximity(lambda p: p["encoder"] ** 2, magnitude=1.0, relative=False)
    optimizer = optax.partition(
        {"held": proxvi.proximity(optax.sgd(0.1), constraint), "free": optax.sgd(0.1)},
        {"encoder": "held", "decoder": "free"},
    )
    state = optimizer.init(params)
    assert {leaf.shape for leaf in jax.tree.leaves(state)} == {(), (3,)}
    updates, _ = optimizer.update(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_parameters_split_over_a_mesh_of_explicit_axes() -> None:
    """`jax.make_mesh` makes such axes by default; nothing may be flattened there."""
    mesh = jax.make_mesh((2, 4), ("rows", "columns"))
    constraint = proxvi.Proximity(
        lambda p: (jnp.sum(p**2), proxvi.orthogonal(p)), magnitude=1.0, distance=lambda _, f: f[0], relative=False
    )
    optimizer = proxvi.proximity(optax.adam(0.1), constraint)
    params = jnp.arange(32.0).reshape(4, 8)

    def steps(params: Any) -> Any:
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for _ in range(2):  # the share is measured in the second
            updates, state = update(params, state, params)
            params = params + updates
        return params, proxvi.telemetry(state)[0].share

    alone, share = steps(params)
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows", "columns"))
        split, same = steps(jax.device_put(params, sharding))
    assert split.sharding.spec == jax.sharding.PartitionSpec("rows", "columns")
    np.testing.assert_allclose(split, alone, rtol=1e-5)
    np.testing.assert_allclose(same, share, rtol=1e-5)


def test_the_optimiser_is_not_forgotten_and_cannot_come_first() -> None:
    constraint = proxvi.Proximity(proxvi.identity, magnitude=1.0, relative=False)
    wrong: Any = constraint
    with pytest.raises(TypeError, match="optimizer"):
        proxvi.proximity(wrong, constraint)


def test_state_and_parameters_may_be_donated_together() -> None:
    optimizer = proxvi.proximity(optax.sgd(0.1), proxvi.Proximity(proxvi.identity, magnitude=1.0, relative=False))

    def step(params: jax.Array, state: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(2 * params, state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.ones(1_000)
    state = optimizer.init(params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        params, state = jitted(params, state)
    assert np.all(np.isfinite(params))


@pytest.mark.slow
def test_state_keeps_its_structure_and_dtypes_for_low_precision_parameters() -> None:
    for reference in (proxvi.parameter_average(), proxvi.statistic_average()):
        link = proxvi.proximity(
            optax.identity(), proxvi.Proximity(proxvi.identity, magnitude=1.0, reference=reference, relative=False)
        )
        params = jnp.ones(4, jnp.bfloat16)
        state = link.init(params)
        updates, after = link.update(params, state, params)
        assert isinstance(updates, jax.Array)
        assert updates.dtype == jnp.bfloat16
        described = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (state, after)]
        assert described[0] == described[1]
