"""`ProximitySVI` where NumPyro's SVI goes, too: donated states, closed-over data, plates, other states."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import Array
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO, init_to_value
from numpyro.infer.autoguide import AutoNormal
from numpyro.primitives import mutable

import proxvi
from proxvi.svi import warn_after_run


def model(x: Array) -> None:
    numpyro.sample("x", dist.Normal(numpyro.sample("mean", dist.Normal(0.0, 10.0)), 1.0), obs=x)


def constraint(steps: int = 100, **options: Any) -> proxvi.Proximity:
    magnitude = options.pop("magnitude", optax.exponential_decay(1.0, steps, 1e-10))
    return proxvi.Proximity(proxvi.entropy, magnitude=magnitude, **options)


def new(**options: Any) -> proxvi.ProximitySVI:
    return proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO(), constraint(**options))


@pytest.mark.slow
def test_a_loop_may_donate_the_state() -> None:
    svi, x = new(), jnp.array(3.0)
    kept, donated = svi.init(jax.random.key(0), x), svi.init(jax.random.key(0), x)
    update, donating = jax.jit(svi.update), jax.jit(svi.update, donate_argnums=0)
    for _ in range(3):
        (kept, loss), (donated, same) = update(kept, x), donating(donated, x)
        assert loss == same


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the constraint on `entropy` still")  # five steps
def test_run_may_be_mapped_over_what_the_model_closes_over() -> None:
    def fit(x: Array) -> Array:
        def model() -> None:
            numpyro.sample("x", dist.Normal(numpyro.sample("mean", dist.Normal(0.0, 10.0)), 1.0), obs=x)

        svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO(), constraint())
        return svi.run(jax.random.key(0), 5, progress_bar=False).params["mean_auto_loc"]

    x = jnp.array([3.0, 1.0])
    np.testing.assert_allclose(jax.vmap(fit)(x), [fit(x[0]), fit(x[1])], rtol=1e-5)


@pytest.mark.parametrize(("magnitude", "warns"), [(1.0, True), (1e-3, True), (1e-8, False)])
def test_a_share_of_vanishing_gradients_is_no_constraint_that_holds(magnitude: float, warns: bool) -> None:
    """At an optimum with a loss of exactly 0 the share of the gradient is a ratio of two numbers next to 0."""
    svi = new()
    state = svi.init(jax.random.key(0), jnp.array(3.0))
    (held,) = state.constraints
    report = proxvi.Telemetry(distance=jnp.ones(()), magnitude=jnp.array(100.0 * magnitude), share=jnp.array(0.9))
    held = held._replace(telemetry=report, constraint=held.constraint._replace(unit=jnp.array(100.0)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_after_run(svi.constraints, [held], np.full(10_000, 100.0))
    assert bool(caught) == warns


@pytest.mark.slow
def test_a_constraint_that_lets_go_at_the_end_is_named() -> None:
    """A run of 100 steps whose magnitude falls below a millionth at step 95."""
    late = lambda step: jnp.where(step < 95, 1.0, 0.0)  # noqa: E731
    with pytest.warns(UserWarning, match="let go 6 steps before the end of 100"):
        new(magnitude=late).run(jax.random.key(0), 100, jnp.array(3.0), progress_bar=False)


@pytest.mark.parametrize("run", [partial(proxvi.ProximitySVI.run, progress_bar=False), proxvi.fit], ids=["run", "fit"])
def test_a_unit_of_next_to_nothing_is_named(run: Any) -> None:
    """The loss is 0 in the first steps, of which the unit is made, and then falls to −10,000."""

    def climbing() -> None:
        numpyro.factor("height", 1e4 - (jnp.asarray(numpyro.param("w", 0.0)) - 100.0) ** 2)
        numpyro.sample("z", dist.Normal(0.0, 1.0))

    def guide() -> None:
        numpyro.sample("z", dist.Normal(numpyro.param("loc", 0.0), 1.0))

    optimizer = optax.sgd(lambda step: jnp.where(jnp.asarray(step) < 10, 1e-6, 0.1))
    svi = proxvi.ProximitySVI(climbing, guide, optimizer, TraceMeanField_ELBO(), constraint(50))
    with pytest.warns(UserWarning, match=r"the unit of `magnitude`.* fallen by 1e\+04: .*relative=False"):
        run(svi, jax.random.key(0), 100)


@pytest.mark.parametrize("magnitude", [0.0, optax.constant_schedule(0.0)], ids=["number", "schedule"])
def test_a_magnitude_of_zero_ignores_a_slope_that_is_not_finite(magnitude: Any) -> None:
    def flat() -> None:
        numpyro.sample("z", dist.Normal(0.0, 1.0))

    def guide() -> None:
        numpyro.sample("z", dist.Normal(numpyro.param("loc", jnp.zeros(())), 1.0))

    def steep(q: dict[str, Any]) -> Array:
        return jnp.sqrt(jnp.abs(q["z"].loc) * 0.0)

    held = proxvi.Proximity(steep, magnitude=magnitude, relative=False)
    svi = proxvi.ProximitySVI(flat, guide, optax.sgd(0.1), Trace_ELBO(), held)
    plain = SVI(flat, guide, optax.sgd(0.1), Trace_ELBO())
    ours, _ = svi.update(svi.init(jax.random.key(0)))
    theirs, _ = plain.update(plain.init(jax.random.key(0)))
    assert svi.get_params(ours)["loc"] == plain.get_params(theirs)["loc"]


@pytest.mark.slow
def test_weights_in_a_plate_of_features_are_held_as_expanded_ones() -> None:
    y = jnp.arange(10.0)

    def expanded() -> None:
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([10]))
        numpyro.factor("y", dist.Normal(w, 0.1).log_prob(y).sum())

    def in_plate() -> None:
        with numpyro.plate("features", 10):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.factor("y", dist.Normal(w, 0.1).log_prob(y).sum())

    reports = []
    for same in (expanded, in_plate):
        guide = AutoNormal(same, init_loc_fn=init_to_value(values={"w": jnp.zeros(10)}))
        svi = proxvi.ProximitySVI(same, guide, optax.adam(0.05), Trace_ELBO(), constraint(magnitude=1.0))
        state, update = svi.init(jax.random.key(0)), jax.jit(svi.update)
        for _ in range(5):
            state, _ = update(state)
        reports.append(proxvi.telemetry(state)[0])
    np.testing.assert_allclose(*([r.distance, r.magnitude] for r in reports), rtol=1e-5)


def test_data_points_are_averaged_and_groups_without_data_are_not() -> None:
    def grouped(group: Array, y: Array) -> None:
        with numpyro.plate("groups", 3):
            level = jnp.asarray(numpyro.sample("level", dist.Normal(0.0, 1.0)))
        with numpyro.plate("data", 5):
            noise = jnp.asarray(numpyro.sample("noise", dist.Normal(0.0, 1.0)))
            numpyro.sample("y", dist.Normal(level[group] + noise, 1.0), obs=y)

    shapes: dict[str, tuple[int, ...]] = {}

    def look(q: dict[str, Any]) -> Any:
        value = proxvi.entropy(q)
        shapes.update({name: jnp.shape(v) for name, v in value.items()})
        return value

    held = proxvi.Proximity(look, magnitude=1.0)
    svi = proxvi.ProximitySVI(grouped, AutoNormal(grouped), optax.adam(0.1), Trace_ELBO(), held)
    jax.eval_shape(svi.init, jax.random.key(0), jnp.array([0, 0, 1, 1, 2]), jnp.ones(5))
    assert shapes == {"level": (3,), "noise": ()}


def test_the_state_of_another_svi_is_refused_by_name() -> None:
    other, x = SVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO()), jnp.array(3.0)
    state: Any = other.init(jax.random.key(0), x)
    with pytest.raises(TypeError, match="`init_state` must come from a ProximitySVI"):
        new().run(jax.random.key(0), 5, x, init_state=state, progress_bar=False)


def test_mutable_state_with_several_particles_is_refused_by_name() -> None:
    def counting(x: Array) -> None:
        initial: Any = {"n": jnp.zeros(())}
        count: Any = mutable("count", initial)
        count["n"] = count["n"] + 1
        model(x)

    svi = proxvi.ProximitySVI(counting, AutoNormal(model), optax.adam(0.05), proxvi.LeaveOneOutELBO(2), constraint())
    with pytest.raises(ValueError, match=r"`loss` must be an ELBO of one particle .* mutable sites"):
        svi.init(jax.random.key(0), jnp.array(3.0))


def test_evaluate_is_the_loss_of_the_next_step_where_state_is_mutable() -> None:
    """NumPyro's leaves the mutable state out."""

    def counting(x: Array) -> None:
        initial: Any = {"n": jnp.zeros(())}
        count: Any = mutable("count", initial)
        numpyro.factor("of_count", -count["n"])
        count["n"] = count["n"] + 1
        model(x)

    svi = proxvi.ProximitySVI(counting, AutoNormal(model), optax.adam(0.05), Trace_ELBO(), ())
    state, x = svi.init(jax.random.key(0), jnp.array(3.0)), jnp.array(3.0)
    for _ in range(2):
        evaluated = svi.evaluate(state, x)
        state, loss = svi.update(state, x)
        np.testing.assert_allclose(evaluated, loss, rtol=1e-5)
