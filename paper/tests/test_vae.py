"""The autoencoder: its ELBO, its start, what the orthogonal constraint reaches."""

import contextlib
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import ELBO, Trace_ELBO, TraceMeanField_ELBO

import proxvi
from proxvi_paper.experiments import autoencoders, trials
from proxvi_paper.experiments.autoencoders import Grid, Trial
from proxvi_paper.models.model_and_guide import ModelAndGuide
from proxvi_paper.models.vae import autoencoder, encoder_weights

KEY = jax.random.key(0)
X = np.random.default_rng(0).integers(0, 2, (8, 12), dtype=np.uint8)


@functools.cache
def networks() -> ModelAndGuide:
    return autoencoder(KEY, pixels=12, latents=3, hidden=(6, 5))


def params_of(svi: proxvi.ProximitySVI) -> dict:
    return svi.get_params(svi.init(KEY, X))


def plain(elbo: ELBO) -> proxvi.ProximitySVI:
    return proxvi.ProximitySVI(*networks(), optax.adam(1e-3), elbo, ())


@pytest.mark.slow
def test_the_elbo_is_that_of_one_row_whatever_the_batch() -> None:
    params = params_of(plain(TraceMeanField_ELBO()))
    estimate = jax.jit(lambda x: Trace_ELBO(4_000).loss(KEY, params, *networks(), x))
    whole = estimate(X)
    rows = jnp.mean(jnp.stack([estimate(X[i][None]) for i in range(len(X))]))
    np.testing.assert_allclose(whole, rows, rtol=0.01)
    # by hand: E log p(x | z) by samples, and the divergence in closed form
    q = handlers.trace(handlers.seed(handlers.substitute(networks().guide, params), KEY)).get_trace(X)["z"]["fn"]
    mean, scale = q.base_dist.loc, q.base_dist.scale
    divergence = jnp.sum(0.5 * (mean**2 + scale**2 - 1) - jnp.log(scale), axis=1)

    def log_likelihood(key: jax.Array) -> jax.Array:
        z = mean + scale * jax.random.normal(key, mean.shape)
        model = handlers.substitute(networks().model, {**params, "z": z})
        site = handlers.trace(model).get_trace(X)["x"]
        return dist.Bernoulli(logits=site["fn"].base_dist.logits).log_prob(X).sum(axis=1)

    likelihood = jnp.mean(jax.vmap(log_likelihood)(jax.random.split(KEY, 4_000)), axis=0)
    np.testing.assert_allclose(-whole, jnp.mean(likelihood - divergence), rtol=0.01)


@pytest.mark.slow
def test_the_encoder_starts_orthogonal() -> None:
    params = params_of(plain(TraceMeanField_ELBO()))
    assert [weights.shape for weights in encoder_weights(params)] == [(12, 6), (6, 5), (5, 6)]
    for gram in proxvi.orthogonal(encoder_weights(params)):
        np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-5)


@pytest.mark.slow
def test_the_orthogonal_constraint_moves_the_encoder_alone() -> None:
    def after(magnitude: float) -> dict:
        constraint = autoencoders._orthogonal(Trial(method="PVI, orthogonal", magnitude=magnitude))
        svi = proxvi.ProximitySVI(*networks(), optax.sgd(1e-2), TraceMeanField_ELBO(), constraint)
        state, update = svi.init(KEY, X), jax.jit(svi.update)
        for _ in range(2):  # the reference is where it started: only the second step feels it
            state, _ = update(state, X)
        return svi.get_params(state)

    free, held = after(0.0), after(100.0)
    moved = [np.abs(a - b).max() for a, b in zip(encoder_weights(free), encoder_weights(held), strict=True)]
    assert min(moved) > 1e-7
    for a, b in zip(*(jax.tree.leaves(p["decoder$params"]) for p in (free, held)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)


@pytest.mark.parametrize("x", [X[0], X[:, :5]])
def test_other_shapes_are_refused(x: np.ndarray) -> None:
    linear = autoencoder(KEY, pixels=12, latents=3, hidden=())
    for function in linear:
        with pytest.raises(ValueError, match=r"`x` must be rows of 12 pixels, got shape"):
            handlers.seed(function, KEY)(x)


def test_the_grid_has_a_trial_for_each_magnitude() -> None:
    grid = Grid(seeds=(0,), magnitudes=(1.0, 0.1), methods=("VI", "PVI, orthogonal"))
    assert [(trial.method, trial.magnitude) for trial in grid.trials()] == [
        ("VI", 0.0),
        ("PVI, orthogonal", 1.0),
        ("PVI, orthogonal", 0.1),
    ]
    with pytest.raises(ValueError, match=r"`methods` must be of"):
        Grid(methods=("PVI",)).trials()


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(
    ("method", "magnitude", "row"),
    [
        ("PVI, orthogonal", 0.01, "| PVI, orthogonal, k 0.01 | −"),
        pytest.param("VI, KL warm-up", 0.0, "| VI, KL warm-up | −", marks=pytest.mark.nightly),
    ],
)
def test_a_trial_and_its_report(tmp_path: Path, method: str, magnitude: float, row: str) -> None:
    trial = Trial(method=method, magnitude=magnitude, steps=500, latents=3, hidden=(10,), samples=30, digits=50)
    held = pytest.warns(UserWarning, match="still makes up") if magnitude else contextlib.nullcontext()
    with held:  # the magnitude of the orthogonal constraint does not decay
        found = trials.run(trial, tmp_path, tmp_path / "runs")
    assert found["elbo"] <= found["log_likelihood"] < 0
    assert 0 <= found["active_units"] <= 3
    assert len(found["kl_per_dimension"]) == 3
    assert len(found["reconstructions"]) == 12
    printed = autoencoders.report(tmp_path)
    assert row in printed
    if method == "PVI, orthogonal":
        assert "−100.3 / −93.9" in printed
    assert (tmp_path / "samples.png").stat().st_size > 5_000

    # Another seed may have the same dimensions in another order: no divergence may change by that.
    (path,) = tmp_path.glob("*.json")
    other = json.loads(path.read_text())
    other["settings"]["seed"] += 1
    other["figures"]["active_units"] = 9
    other["figures"]["kl_per_dimension"] = np.roll(other["figures"]["kl_per_dimension"], 1).tolist()
    (tmp_path / "other.json").write_text(json.dumps(other))
    again = autoencoders.report(tmp_path)
    assert again.splitlines()[-1].split("|")[-3:] == printed.splitlines()[-1].split("|")[-3:]
    assert f"| {found['active_units']}, 9 |" in again  # in the order of seeds, not of files
