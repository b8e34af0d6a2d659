"""Logistic regression: the ELBO against sampling, and all methods at one optimum."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from proxvi_paper.experiments import logistic as experiment
from proxvi_paper.experiments.sweeps import Options
from proxvi_paper.models import logistic
from proxvi_paper.models.logistic import Weights

KEY = jax.random.key(0)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_elbo_is_that_of_samples(temperature: float) -> None:
    keys = jax.random.split(KEY, 4)
    x, y = jax.random.normal(keys[0], (20, 4)), jax.random.bernoulli(keys[1], 0.4, (20,)).astype(jnp.float32)
    params = Weights(jax.random.normal(keys[2], (4,)), jnp.array([-1.0, 0.0, 0.5, -2.0]))
    q, samples = logistic.posterior(params), 200_000
    w = jax.vmap(q.sample)(jax.random.split(keys[3], samples))
    log_joint = dist.Bernoulli(logits=w @ x.T).log_prob(y[None]).sum(1) + dist.Normal(0.0, 1.0).log_prob(w).sum(1)
    values = np.asarray(log_joint - temperature * jax.vmap(q.log_prob)(w), np.float64)
    error = values.std() / samples**0.5
    assert abs(values.mean() - float(logistic.elbo(params, x, y, temperature))) < 4 * error


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods",
    [("VI", "PVI, KL", "KL-proximal steps"), pytest.param(tuple(experiment.METHODS), marks=pytest.mark.nightly)],
    ids=["some", "all"],
)
def test_methods_end_at_the_one_mode(methods: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "METHODS", {name: experiment.METHODS[name] for name in methods})
    options = Options(tmp_path, tmp_path / "runs")
    options.run("logistic-regression", experiment.Grid(starts=1).trials())
    printed = experiment.report(tmp_path / "logistic-regression")
    rows = dict(re.findall(r"^\| (\S.*?) \| 1 \| .* \| (−?[0-9.]+) \|$", printed, re.MULTILINE))
    assert set(rows) == set(experiment.METHODS)
    assert max(abs(float(gap.replace("−", "-"))) for gap in rows.values()) < 0.1


@pytest.mark.slow
def test_a_row_of_zeros_has_a_slope() -> None:
    params = Weights(jnp.zeros(2), jnp.zeros(2))
    slopes = jax.grad(logistic.elbo)(params, jnp.zeros((1, 2)), jnp.ones(1))
    assert all(jnp.all(jnp.isfinite(slope)) for slope in slopes)
