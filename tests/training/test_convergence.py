"""The rule that says when a run has converged."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi
from proxvi.training._convergence import has_converged, is_time_to_ask, still_to_gain
from proxvi.training._progress import Progress

KEY = jax.random.key(0)


@settings(max_examples=50, deadline=None)
@given(slope=st.floats(-1e-2, 1e-2), noise=st.floats(0.0, 1.0), seed=st.integers(0, 99))
def test_the_gain_of_a_line_is_known_within_its_error(slope: float, noise: float, seed: int) -> None:
    steps = np.arange(4_000)
    losses = -slope * steps + noise * np.random.default_rng(seed).normal(size=len(steps))
    gain, error = still_to_gain(losses)
    assert gain == pytest.approx(slope * len(steps), abs=6 * error + 1e-6)
    assert error == pytest.approx(4 * noise * (2 / 1_000) ** 0.5, rel=0.6, abs=4 * abs(slope) * 25)


@pytest.mark.parametrize("noise", [0.5, 10.0])
def test_noise_alone_stops_a_run_at_once_or_later_but_not_never(noise: float) -> None:
    losses = noise * np.random.default_rng(0).normal(size=200_000)
    stops = [t for t in range(500, len(losses), 500) if is_time_to_ask(t - 500, t) and has_converged(losses[:t], 2.0)]
    # 4 · 2 standard errors of the difference of two quarters of t steps are 2 nats.
    expected = (4 * 2 * noise * 8**0.5 / 2.0) ** 2
    assert 0.2 * expected <= stops[0] <= max(2 * expected, 500)


@pytest.mark.parametrize("tail", [np.nan, np.inf])
def test_a_run_that_is_not_finite_or_too_short_has_not_converged(tail: float) -> None:
    assert not has_converged(np.append(np.zeros(999), tail), 1e9)
    assert not has_converged(np.zeros(19), 1e9)
    assert has_converged(np.zeros(20), 1e-9)


def test_it_is_asked_a_few_times_for_each_factor_of_ten() -> None:
    asked = [t for t in range(100, 100_001, 100) if is_time_to_ask(t - 100, t)]
    assert len([t for t in asked if 10_000 < t <= 100_000]) in (24, 25)
    assert all(b / a > 1.01 for a, b in itertools.pairwise(asked[8:]))


def model(x: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    with numpyro.plate("data", len(x)):
        numpyro.sample("x", dist.Normal(mean, 1), obs=x)


X = 3.0 + jax.random.normal(jax.random.key(1), (50,))
REPORTS = proxvi.Reporting(every=100)


def svi() -> SVI:
    return SVI(model, AutoNormal(model), optax.adam(0.02), Trace_ELBO())


def test_fit_stops_where_nothing_is_to_be_gained_and_stays_stopped(tmp_path: Path) -> None:
    run: dict[str, Any] = {"reporting": REPORTS, "stop_within": 2.0, "checkpointing": proxvi.Checkpointing(tmp_path)}
    stopped = proxvi.fit(svi(), KEY, 50_000, X, **run)
    whole = proxvi.fit(svi(), KEY, 50_000, X, reporting=REPORTS)
    steps = len(stopped.losses)
    assert 300 < steps < 10_000
    np.testing.assert_array_equal(stopped.losses, whole.losses[:steps])
    assert jnp.mean(whole.losses[steps : 2 * steps]) > jnp.mean(stopped.losses[-steps // 4 :]) - 2.0
    assert len(proxvi.fit(svi(), KEY, 50_000, X, **run).losses) == steps


def test_fit_does_not_stop_while_a_constraint_holds() -> None:
    # The standard deviation falls from 1 to 0.14, which is 2 of the 5 nats that may be lost over 10,000 steps.
    guide = AutoNormal(model, init_scale=1.0)
    limited = proxvi.ProximitySVI(model, guide, optax.adam(0.02), Trace_ELBO(), proxvi.SpeedLimit(over=10_000))
    steps = len(proxvi.fit(limited, KEY, 30_000, X, reporting=REPORTS, stop_within=2.0).losses)
    assert 3_500 < steps < 30_000


def test_luck_stops_when_all_starts_have_converged() -> None:
    wanted: dict[str, Any] = {"starts": 4, "progress_bar": False}
    report = proxvi.luck(svi(), KEY, 20_000, X, stop_within=2.0, **wanted)
    assert 20 <= report.traces.shape[1] < 60  # of a hundred windows
    assert report.verdict.startswith("No luck")


def test_luck_does_not_stop_within_a_constraint_or_a_schedule() -> None:
    warm_up = proxvi.WarmUpELBO(Trace_ELBO(), optax.linear_schedule(0.0, 1.0, 500))
    for loss, constraint in ((Trace_ELBO(), proxvi.SpeedLimit()), (warm_up, ())):
        scheduled = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.02), loss, constraint)
        with pytest.raises(ValueError, match="`stop_within` must be None with a constraint, annealing or KL warm-up"):
            proxvi.luck(scheduled, KEY, 1_000, X, stop_within=2.0)


@pytest.mark.parametrize("how", ["stop_within", "patience"])
def test_fit_does_not_stop_within_a_schedule(how: str) -> None:
    """The true ELBO is flat, or falls, while the objective is another one."""
    warm_up = proxvi.WarmUpELBO(Trace_ELBO(), lambda step: jnp.where(jnp.asarray(step) < 3_000, 0.0, 1.0))
    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.02), warm_up, ())
    stops: dict[str, Any] = {"stop_within": 2.0} if how == "stop_within" else {}
    stops |= {} if stops else {"validation": proxvi.Validation(X, patience=3)}
    steps = len(proxvi.fit(svi, KEY, 10_000, X, reporting=REPORTS, **stops).losses)
    assert 3_000 < steps < 10_000


def test_a_limit_that_changed_an_update_since_the_last_report_holds() -> None:
    """With batches it changes most updates, but not all, and perhaps not the one before a report."""
    progress = Progress(np.zeros(1_000), step=100)
    assert progress.hold(False, 40)
    assert progress.held_until == 100
    progress.step = 200
    assert not progress.hold(False, 40)
    assert progress.held_until == 100
    resumed = Progress(np.zeros(1_000))
    resumed.resume(200, np.zeros(200), json.loads(json.dumps(progress.notes())))
    assert not resumed.hold(False, 40)
    assert resumed.hold(False, 41)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_not_positive_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="`stop_within` must be"):
        proxvi.fit(svi(), KEY, 100, X, stop_within=wrong)
    with pytest.raises(ValueError, match="`stop_within` must be"):
        proxvi.luck(svi(), KEY, 100, X, stop_within=wrong)
