"""Gradient estimators against exact enumeration of small discrete models."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import primitives
from numpyro.handlers import condition
from numpyro.infer import ELBO, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.util import log_density

import proxvi
from proxvi.estimators import score_function

DRAWS = 100_000
DATA = jnp.array([0.5, 2.5, -1.0])


class Problem(NamedTuple):
    """A model and a guide, small enough to enumerate: `latents` gives the shape of each site on the whole data."""

    model: Callable[..., Any]
    guide: Callable[..., Any]
    latents: dict[str, tuple[int, ...]]
    params: dict[str, Any]
    subsample_size: int | None = None


def param(name: str, value: Any) -> jax.Array:
    """As an array; NumPyro's own type allows None, too."""
    return jnp.asarray(numpyro.param(name, value))


def one_layer() -> Problem:
    def model(subsample_size: int | None = None) -> None:
        del subsample_size
        prior = numpyro.param("prior", jnp.array([0.3, -0.4]))
        z = numpyro.sample("z", dist.Bernoulli(logits=prior).to_event(1))
        numpyro.sample("x", dist.Normal(z @ param("weights", jnp.array([1.0, 2.0])), 1.0), obs=2.5)

    def guide(subsample_size: int | None = None) -> None:
        del subsample_size
        numpyro.sample("z", dist.Bernoulli(logits=numpyro.param("q", jnp.array([0.7, -0.2]))).to_event(1))

    return Problem(model, guide, {"z": (2,)}, {"prior": [0.3, -0.4], "weights": [1.0, 2.0], "q": [0.7, -0.2]})


def one_layer_in_a_plate(subsample_size: int | None = None) -> Problem:
    def model(subsample_size: int | None = None) -> None:
        weight, prior = param("weight", 1.5), param("prior", 0.2)
        with numpyro.plate("data", 3, subsample_size=subsample_size) as index:
            z = numpyro.sample("z", dist.Bernoulli(logits=prior))
            numpyro.sample("x", dist.Normal(weight * z, 1.0), obs=DATA[index])

    def guide(subsample_size: int | None = None) -> None:
        slope = param("slope", 0.6)
        with numpyro.plate("data", 3, subsample_size=subsample_size) as index:
            numpyro.sample("z", dist.Bernoulli(logits=slope * DATA[index] + 0.1))

    params = {"weight": 1.5, "prior": 0.2, "slope": 0.6}
    return Problem(model, guide, {"z": (3,)}, params, subsample_size)


def two_layers() -> Problem:
    def model(subsample_size: int | None = None) -> None:
        del subsample_size
        top = numpyro.sample("top", dist.Bernoulli(logits=numpyro.param("prior", 0.2)))
        below = numpyro.sample("below", dist.Bernoulli(logits=param("down", 1.1) * top - 0.4))
        numpyro.sample("x", dist.Normal(param("weight", 2.0) * below, 1.0), obs=1.5)

    def guide(subsample_size: int | None = None) -> None:
        del subsample_size
        below = numpyro.sample("below", dist.Bernoulli(logits=numpyro.param("q", 0.5)))
        numpyro.sample("top", dist.Bernoulli(logits=param("up", 0.9) * below - 0.3))

    params = {"prior": 0.2, "down": 1.1, "weight": 2.0, "q": 0.5, "up": 0.9}
    return Problem(model, guide, {"top": (), "below": ()}, params)


def two_layers_in_a_plate(subsample_size: int | None = None) -> Problem:
    def model(subsample_size: int | None = None) -> None:
        prior, down, weight = param("prior", 0.2), param("down", 1.1), param("weight", 2.0)
        with numpyro.plate("data", 3, subsample_size=subsample_size) as index:
            top = numpyro.sample("top", dist.Bernoulli(logits=prior))
            below = numpyro.sample("below", dist.Bernoulli(logits=down * top - 0.4))
            numpyro.sample("x", dist.Normal(weight * below, 1.0), obs=DATA[index])

    def guide(subsample_size: int | None = None) -> None:
        slope, up = param("slope", 0.6), param("up", 0.9)
        with numpyro.plate("data", 3, subsample_size=subsample_size) as index:
            below = numpyro.sample("below", dist.Bernoulli(logits=slope * DATA[index] + 0.1))
            numpyro.sample("top", dist.Bernoulli(logits=up * below - 0.3))

    params = {"prior": 0.2, "down": 1.1, "weight": 2.0, "slope": 0.6, "up": 0.9}
    return Problem(model, guide, {"top": (3,), "below": (3,)}, params, subsample_size)


def groups_beside_data() -> Problem:
    """Two plates with one axis and one length, whose elements have nothing to do with each other."""

    def model(subsample_size: int | None = None) -> None:
        del subsample_size
        with numpyro.plate("groups", 3):
            on = jnp.asarray(numpyro.sample("on", dist.Bernoulli(logits=param("prior", -0.8))))
        with numpyro.plate("data", 3):
            numpyro.sample("x", dist.Normal(param("weight", 2.0) * on[jnp.array([1, 2, 0])], 1.0), obs=DATA)

    def guide(subsample_size: int | None = None) -> None:
        del subsample_size
        with numpyro.plate("groups", 3):
            numpyro.sample("on", dist.Bernoulli(logits=numpyro.param("q", jnp.array([0.5, 0.1, -0.5]))))

    return Problem(model, guide, {"on": (3,)}, {"prior": -0.8, "weight": 2.0, "q": [0.5, 0.1, -0.5]})


def rows_within_columns() -> Problem:
    """A site outside of all plates, one in a plate, one in two."""

    def model(subsample_size: int | None = None) -> None:
        del subsample_size
        top = numpyro.sample("top", dist.Bernoulli(logits=numpyro.param("prior", 0.2)))
        with numpyro.plate("columns", 2, dim=-1):
            below = numpyro.sample("below", dist.Bernoulli(logits=param("down", 1.1) * top - 0.4))
            with numpyro.plate("rows", 3, dim=-2):
                x = DATA[:, None] + jnp.array([0.0, 0.3])
                numpyro.sample("x", dist.Normal(param("weight", 1.2) * below, 1.0), obs=x)

    def guide(subsample_size: int | None = None) -> None:
        del subsample_size
        top = numpyro.sample("top", dist.Bernoulli(logits=numpyro.param("q", 0.5)))
        with numpyro.plate("columns", 2, dim=-1):
            slopes = param("slopes", jnp.array([0.6, -0.2]))
            numpyro.sample("below", dist.Bernoulli(logits=slopes + 0.9 * top))

    params = {"prior": 0.2, "down": 1.1, "weight": 1.2, "q": 0.5, "slopes": [0.6, -0.2]}
    return Problem(model, guide, {"top": (), "below": (2,)}, params)


PROBLEMS = {
    "one layer": one_layer(),
    "one layer, plate": one_layer_in_a_plate(),
    "one layer, subsampled plate": one_layer_in_a_plate(2),
    "two layers": two_layers(),
    "two layers, plate": two_layers_in_a_plate(),
    "two layers, subsampled plate": two_layers_in_a_plate(2),
    "groups beside data": groups_beside_data(),
    "rows within columns": rows_within_columns(),
}


def configurations(problem: Problem) -> dict[str, jax.Array]:
    """Every assignment of the latents, stacked."""
    sizes = {name: int(np.prod(shape)) for name, shape in problem.latents.items()}
    bits = jnp.array(list(itertools.product([0, 1], repeat=sum(sizes.values()))))
    parts = jnp.split(bits, np.cumsum(list(sizes.values()))[:-1], axis=1)
    return {name: part.reshape(-1, *shape) for part, (name, shape) in zip(parts, problem.latents.items(), strict=True)}


def log_weights(problem: Problem, params: Any, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Log q and log p − T log q of every assignment."""

    def joint(z: Any) -> tuple[jax.Array, jax.Array]:
        log_q = jnp.asarray(log_density(condition(problem.guide, z), (), {}, params)[0])
        log_p = jnp.asarray(log_density(condition(problem.model, z), (), {}, params)[0])
        return log_q, log_p - temperature * log_q

    return jax.vmap(joint)(configurations(problem))


def exact_elbo(problem: Problem, params: Any, temperature: float = 1.0) -> jax.Array:
    log_q, weight = log_weights(problem, params, temperature)
    return jnp.sum(jnp.exp(log_q) * weight)


def exact_two_particle_bound(problem: Problem, params: Any) -> jax.Array:
    """E[log ½(w₁ + w₂)] over all pairs; the caller sees to it that the problem is one data point."""
    log_q, weight = log_weights(problem, params)
    pairs = jnp.logaddexp(weight[:, None], weight[None, :]) - jnp.log(2.0)
    return jnp.sum(jnp.exp(log_q[:, None] + log_q[None, :]) * pairs)


def assert_unbiased(loss: Callable[[Any, Any], Any], params: Any, expected: Any, value: Any) -> None:
    """The mean over 10⁵ draws of loss and gradient lies within 4 standard errors of the truth, for every parameter."""
    draw = jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))
    losses, grads = draw(params, jax.random.split(jax.random.key(1), DRAWS))
    expected = {**expected, "the value itself": value}
    for name, draws in {**grads, "the value itself": losses}.items():
        error = np.std(draws, axis=0) / np.sqrt(DRAWS)
        gap = np.abs(np.mean(np.asarray(draws, np.float64), axis=0) - expected[name])
        assert np.all(gap <= 4 * error + 1e-6), (name, gap / error)


def as_arrays(params: Any) -> Any:
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


@pytest.fixture(autouse=True)
def allow_rank_promotion() -> Any:
    with jax.numpy_rank_promotion("allow"):
        yield


EASIER = ("one layer, plate", "one layer, subsampled plate", "two layers, plate")  # than "two layers, subsampled plate"


but_for_the_easier = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in EASIER else ()) for name in PROBLEMS]
)


@pytest.mark.slow
@but_for_the_easier
def test_leave_one_out_gradient_is_unbiased(name: str) -> None:
    problem, elbo = PROBLEMS[name], proxvi.LeaveOneOutELBO(3)
    params = as_arrays(problem.params)
    value, expected = jax.value_and_grad(lambda p: -exact_elbo(problem, p))(params)
    assert_unbiased(
        lambda p, key: elbo.loss(key, p, problem.model, problem.guide, problem.subsample_size), params, expected, value
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("one layer", "two layers, subsampled plate") else pytest.mark.nightly)
        for name in PROBLEMS
    ],
)
def test_annealed_gradient_is_unbiased_for_the_tempered_elbo(name: str) -> None:
    problem, temperature = PROBLEMS[name], 2.5
    annealed = proxvi.AnnealedELBO(proxvi.LeaveOneOutELBO(3), temperature, relative=False)
    params = as_arrays(problem.params)
    value, expected = jax.value_and_grad(lambda p: -exact_elbo(problem, p, temperature))(params)

    def tempered(p: Any, key: Any) -> Any:
        _, guide = annealed.objective_at(problem.model, problem.guide, jnp.zeros((), int), jnp.zeros(()))
        return annealed.elbo.loss(key, p, problem.model, guide, problem.subsample_size)

    assert_unbiased(tempered, params, expected, value)


@pytest.mark.slow
@pytest.mark.parametrize("elbo", [Trace_ELBO(50_000), TraceMeanField_ELBO(50_000)], ids=["sampled", "closed"])
def test_warm_up_weighs_the_divergence_and_nothing_else(elbo: Any) -> None:
    """A normal model and guide, for which E log p(x | z) and the divergence are closed."""
    x, weight = 1.5, 0.3

    def model() -> None:
        with numpyro.handlers.scale(scale=2.0):
            numpyro.sample("x", dist.Normal(numpyro.sample("z", dist.Normal(0.0, 1.0)), 0.5), obs=x)

    def guide() -> None:
        with numpyro.handlers.scale(scale=2.0):
            numpyro.sample("z", dist.Normal(numpyro.param("mean", 0.7), numpyro.param("scale", 0.8)))

    def exact(p: Any) -> Any:
        likelihood = dist.Normal(p["mean"], 0.5).log_prob(x) - 0.5 * p["scale"] ** 2 / 0.25
        divergence = 0.5 * (p["mean"] ** 2 + p["scale"] ** 2 - 1) - jnp.log(p["scale"])
        return 2.0 * (likelihood - weight * divergence)

    params = {"mean": jnp.array(0.7), "scale": jnp.array(0.8)}
    warm = proxvi.WarmUpELBO(elbo, lambda step: weight * step / 4)
    pair = warm.objective_at(model, guide, jnp.asarray(4), jnp.zeros(()))
    loss, slopes = jax.value_and_grad(lambda p: warm.elbo.loss(jax.random.key(0), p, *pair))(params)
    expected, expected_slopes = jax.value_and_grad(exact)(params)
    np.testing.assert_allclose(-loss, expected, rtol=0.01)
    for name, slope in slopes.items():
        np.testing.assert_allclose(-slope, expected_slopes[name], rtol=0.05)
    assert abs(-elbo.loss(jax.random.key(0), params, model, guide) - expected) > 0.1


@pytest.mark.slow
@but_for_the_easier
def test_vimco_gradient_is_that_of_the_multi_sample_bound(name: str) -> None:
    problem, elbo = PROBLEMS[name], proxvi.VimcoELBO(2)
    params = as_arrays(problem.params)
    points = [None] if "plate" not in name else [0, 1, 2]

    def bound(p: Any) -> jax.Array:
        """The sum over data points, each enumerated on its own."""
        total = jnp.zeros(())
        for point in points:
            alone = problem
            if point is not None:
                factory = one_layer_in_a_plate if "one" in name else two_layers_in_a_plate
                alone = single_point(factory, point)
            total = total + exact_two_particle_bound(alone, p)
        return total

    value, expected = jax.value_and_grad(lambda p: -bound(p))(params)
    assert_unbiased(
        lambda p, key: elbo.loss(key, p, problem.model, problem.guide, problem.subsample_size), params, expected, value
    )


def single_point(factory: Callable[[], Problem], point: int) -> Problem:
    """The plated problem with only the `point`-th element switched on."""
    problem = factory()
    only = jnp.arange(3) == point
    masked = [numpyro.handlers.mask(f, mask=only) for f in (problem.model, problem.guide)]
    # The masked elements add 0 to both log densities; fixing them at 0 counts each assignment once.
    latents = dict.fromkeys(problem.latents, ())

    def place(f: Any) -> Callable[..., Any]:
        def run() -> Any:
            return f()

        return run

    def widen(f: Any) -> Callable[..., Any]:
        class At(primitives.Messenger):
            def process_message(self, msg: Any) -> None:
                if msg["type"] == "sample" and msg["name"] in latents and msg["value"] is not None:
                    msg["value"] = jnp.where(only, msg["value"], 0)

        return At(place(f))

    model, guide = (widen(f) for f in masked)
    return Problem(model, guide, latents, problem.params)


@pytest.mark.parametrize(("elbo", "largest"), [(proxvi.LeaveOneOutELBO(5), 1e-3), (proxvi.VimcoELBO(5), 1.0)])
def test_baselines_take_out_what_a_sample_does_not_change(elbo: Any, largest: float) -> None:
    """The first row's cost is large and the same for both values of z, so its score must count for nothing.

    Of VIMCO −mean ∇log q is left, which is at most 1. Without a baseline, or with the cost of the second row in it, the
    gradient would be unbiased, too, and some fifty times as large.
    """

    def model() -> None:
        with numpyro.plate("rows", 2):
            z = numpyro.sample("z", dist.Bernoulli(jnp.full(2, 0.5)))
            numpyro.sample("x", dist.Normal(jnp.array([0.0, 9.0]) * z, 1.0), obs=jnp.array([10.0, 9.0]))

    def guide() -> None:
        with numpyro.plate("rows", 2):
            numpyro.sample("z", dist.Bernoulli(logits=numpyro.param("q", jnp.zeros(2))))

    slope = jax.jit(jax.vmap(jax.grad(lambda q, key: elbo.loss(key, {"q": q}, model, guide)), in_axes=(None, 0)))
    slopes = slope(jnp.zeros(2), jax.random.split(jax.random.key(0), 100))
    assert np.max(np.abs(slopes[:, 0])) <= largest
    assert np.max(np.abs(slopes[:, 1])) > 5 * largest  # where z matters, it is told


@pytest.mark.slow
def test_vimco_takes_guides_that_are_reparameterised() -> None:
    """The bound of an importance-weighted autoencoder, which needs no score; here that of a closed likelihood."""
    x = jnp.array([0.5, -1.0, 2.0])

    def model() -> None:
        with numpyro.plate("rows", 3):
            numpyro.sample("x", dist.Normal(numpyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=x)

    def guide() -> None:
        with numpyro.plate("rows", 3):
            numpyro.sample("z", dist.Normal(param("slope", 0.5) * x, 0.75**0.5))

    elbos = (Trace_ELBO(2_000), proxvi.VimcoELBO(2_000))
    params = {"slope": jnp.array(0.5)}
    losses = [jnp.asarray(elbo.loss(jax.random.key(0), params, model, guide)) for elbo in elbos]
    exact = -float(jnp.sum(dist.Normal(0.0, 2**0.5).log_prob(x)))
    assert losses[1] == pytest.approx(exact, abs=0.05)
    assert losses[0] > exact + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("plated", [False, True], ids=["no plate", "a plate to the left"])
def test_leave_one_out_gradient_with_weights_along_an_axis_that_is_no_plate(plated: bool) -> None:
    """Weights of units, such as a temperature for each."""
    weights, elbo = jnp.array([1.0, 4.0, 0.5]), proxvi.LeaveOneOutELBO(3)

    def around() -> Any:
        return numpyro.plate("row", 1, dim=-2) if plated else nullcontext()

    def model() -> None:
        with around(), numpyro.handlers.scale(scale=weights):
            z = numpyro.sample("z", dist.Bernoulli(jnp.full(3, 0.3)))
            numpyro.sample("x", dist.Normal(2.0 * z, 1.0), obs=DATA)

    def guide() -> None:
        with around(), numpyro.handlers.scale(scale=weights):
            numpyro.sample("z", dist.Bernoulli(logits=numpyro.param("q", jnp.zeros(3))))

    def exact(p: Any) -> jax.Array:
        """Units are independent, so their weights may be taken outside."""
        on = jax.nn.sigmoid(p["q"])

        def weight(z: float) -> jax.Array:
            log_q = dist.Bernoulli(logits=p["q"]).log_prob(jnp.full(3, z))
            return dist.Normal(2.0 * z, 1.0).log_prob(DATA) + dist.Bernoulli(0.3).log_prob(jnp.full(3, z)) - log_q

        return -jnp.sum(weights * (on * weight(1.0) + (1 - on) * weight(0.0)))

    params = {"q": jnp.array([0.3, -0.2, 0.4])}
    value, expected = jax.value_and_grad(exact)(params)
    assert_unbiased(lambda p, key: elbo.loss(key, p, model, guide), params, expected, value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [float, jnp.asarray, np.float32, None], ids=["float", "jax", "numpy", "traced"])
def test_what_scales_all_sites_alike_scales_the_bound_of_vimco(kind: Any) -> None:
    problem, elbo = PROBLEMS["one layer, subsampled plate"], proxvi.VimcoELBO(20)
    params = as_arrays(problem.params)

    def loss(scale: Any) -> Any:
        pair = tuple(numpyro.handlers.scale(f, scale=scale) for f in (problem.model, problem.guide))
        return jax.value_and_grad(lambda p: elbo.loss(jax.random.key(0), p, *pair, problem.subsample_size))(params)

    third = None if kind is None else kind(1 / 3)
    scaled = jax.jit(loss)(1 / 3) if kind is None else jax.jit(lambda: loss(third))()
    whole = jax.jit(lambda: loss(1.0))()
    jax.tree.map(lambda one, part: np.testing.assert_allclose(one / 3, part, rtol=1e-5), whole, scaled)


@pytest.mark.slow
def test_rows_of_vimco_may_have_weights() -> None:
    """Each row has a bound of its own, which its weight multiplies."""
    problem, elbo = PROBLEMS["one layer, plate"], proxvi.VimcoELBO(3)
    params = as_arrays(problem.params)

    def loss(weights: Any) -> Any:
        pair = (numpyro.handlers.scale(f, scale=weights) for f in (problem.model, problem.guide))
        value = elbo.loss(jax.random.key(0), params, *pair)
        assert value.shape == ()
        return value

    apart = [loss(jnp.full(3, 1e-6).at[i].set(1.0)) for i in range(3)]
    np.testing.assert_allclose(loss(jnp.array([1.0, 2.0, 5.0])), apart[0] + 2 * apart[1] + 5 * apart[2], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [proxvi.LeaveOneOutELBO, proxvi.VimcoELBO])
def test_what_chooses_the_rows_chooses_nothing_else(estimator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off CPU, NumPyro draws rows by bits that a particle seeded with the same key would draw its latents from."""
    problem = PROBLEMS["one layer, subsampled plate"]
    seeds, choices, draw = [], [], primitives._subsample_fn

    def seed(fn: Any, key: Any) -> Any:
        seeds.append(tuple(jax.random.key_data(key).tolist()))
        return numpyro.handlers.seed(fn, key)

    def choose(size: int, count: int, rng_key: Any) -> Any:
        choices.append(tuple(jax.random.key_data(rng_key).tolist()))
        return draw(size, count, rng_key)

    def one_after_the_other(particle: Any, keys: Any) -> Any:
        return jax.tree.map(lambda *values: jnp.stack(values), *map(particle, keys))

    handlers = SimpleNamespace(seed=seed, substitute=numpyro.handlers.substitute)
    monkeypatch.setattr(score_function, "numpyro", SimpleNamespace(handlers=handlers))
    monkeypatch.setattr(primitives, "_subsample_fn", choose)
    elbo = estimator(3)
    elbo.vectorize_particles_fn = one_after_the_other
    elbo.loss(jax.random.key(0), as_arrays(problem.params), problem.model, problem.guide, problem.subsample_size)
    assert choices
    assert len(seeds) == len(set(seeds)) == 2 * (1 + 3)  # model and guide, for the rows and for each particle
    assert not set(seeds) & set(choices)


@pytest.mark.slow
def test_reparameterised_sites_take_the_pathwise_gradient() -> None:
    """On a Gaussian guide the gradient is that of Trace_ELBO for the same keys, to rounding."""

    def model() -> None:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(z, 0.5), obs=1.0)

    def guide() -> None:
        numpyro.sample("z", dist.Normal(numpyro.param("loc", 0.3), numpyro.param("scale", 0.8)))

    params, key = {"loc": jnp.array(0.3), "scale": jnp.array(0.8)}, jax.random.key(0)
    ours, theirs = (
        jax.grad(lambda p, elbo=elbo: elbo.loss(key, p, model, guide))(params)
        for elbo in (proxvi.LeaveOneOutELBO(4), Trace_ELBO(4))
    )
    for name in params:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


@pytest.mark.slow
def test_a_subsampled_plate_outside_of_which_sites_lie_is_refused_by_vimco() -> None:
    def model() -> None:
        w = numpyro.sample("w", dist.Bernoulli(0.5))
        with numpyro.plate("data", 3, subsample_size=2) as index:
            numpyro.sample("x", dist.Normal(w, 1.0), obs=DATA[index])

    def guide() -> None:
        numpyro.sample("w", dist.Bernoulli(logits=numpyro.param("q", 0.1)))

    with pytest.raises(ValueError, match=r"subsampled plates to hold every site.*LeaveOneOutELBO"):
        proxvi.VimcoELBO(2).loss(jax.random.key(0), {"q": jnp.array(0.1)}, model, guide)


@pytest.mark.parametrize(
    "elbo", [TraceMeanField_ELBO(), TraceGraph_ELBO(), proxvi.VimcoELBO(2)], ids=lambda e: type(e).__name__
)
def test_annealing_refuses_estimators_whose_gradient_would_be_wrong(elbo: ELBO) -> None:
    with pytest.raises(TypeError, match=r"`elbo` must be LeaveOneOutELBO or Trace_ELBO, got"):
        proxvi.AnnealedELBO(elbo, 1.0)


@pytest.mark.parametrize("elbo", [TraceGraph_ELBO(), proxvi.LeaveOneOutELBO(2)], ids=lambda e: type(e).__name__)
def test_warm_up_refuses_score_functions_and_numbers(elbo: ELBO) -> None:
    with pytest.raises(TypeError, match=r"`elbo` must be Trace_ELBO or TraceMeanField_ELBO, got"):
        proxvi.WarmUpELBO(elbo, lambda step: 1.0)
    with pytest.raises(TypeError, match=r"`weight` must be an Optax schedule, got 0\.5"):
        proxvi.WarmUpELBO(Trace_ELBO(), 0.5)


def test_the_bound_of_vimco_is_finite_if_any_particle_has_weight() -> None:
    """Here w is 1 where z = 1, and 0 elsewhere."""

    def model() -> None:
        z = jnp.asarray(numpyro.sample("z", dist.Bernoulli(0.5)))
        numpyro.factor("must be on", jnp.where(z == 1, 0.0, -jnp.inf))

    def guide() -> None:
        numpyro.sample("z", dist.Bernoulli(logits=param("logit", 0.0)))

    def loss(key: jax.Array, params: Any) -> Any:
        return proxvi.VimcoELBO(5).loss(key, params, model, guide)

    keys = jax.random.split(jax.random.key(0), 100)
    both = jax.jit(jax.vmap(jax.value_and_grad(loss, argnums=1), (0, None)))
    losses, slopes = both(keys, {"logit": jnp.zeros(())})
    possible = [-np.log(on / 5) for on in range(1, 6)]  # of five particles, but for none
    assert {round(float(x), 3) for x in losses if jnp.isfinite(x)} == {round(x, 3) for x in possible}
    assert np.sum(~np.isfinite(losses)) < 10  # all five are off in 1 of 32 cases
    np.testing.assert_array_equal(np.isfinite(slopes["logit"]), np.isfinite(losses))


def test_one_particle_has_no_others() -> None:
    for estimator in (proxvi.LeaveOneOutELBO, proxvi.VimcoELBO):
        with pytest.raises(ValueError, match="`num_particles` must be an integer of at least 2, got 1"):
            estimator(1)
