"""Statistics of a unit whose discrete parents are sampled: their gradient reaches the parents' parameters, too."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import Array
from numpyro.infer import ELBO, Trace_ELBO, TraceGraph_ELBO

import proxvi
from proxvi._typing import Params, Statistic

X = jnp.array([-0.5, 0.2, 1.0])  # three data points, two units a layer
DRAWS = 100_000
DOWN = jnp.array([[2.0, -1.0], [-1.5, 3.0]])  # weights from layer to layer


def bernoullis(logits: Array) -> Any:
    return dist.Bernoulli(logits=logits).to_event(1)


def logits_of(layer: int, params: Params, above: Array | None) -> Array:
    """Logits of a layer, one row for each data point."""
    own = params[f"bias{layer}"]
    if above is None:
        return own[None, :] + X[:, None]
    return jnp.broadcast_to(own, above.shape) + above @ DOWN


def initial(layers: int) -> Params:
    return {f"bias{i}": jnp.array([0.3, -0.4]) - 0.5 * i for i in range(layers)}


def guide_of(layers: int) -> Callable[[], None]:
    def guide() -> None:
        above = None
        params: Params = {name: numpyro.param(name, value) for name, value in initial(layers).items()}
        with numpyro.plate("data", len(X)):
            for i in range(layers):
                above = 1.0 * jnp.asarray(numpyro.sample(f"z{i}", bernoullis(logits_of(i, params, above))))

    return guide


def model_of(layers: int) -> Callable[[], None]:
    def model() -> None:
        """The last layer of the guide is the top of the model: each prior depends on a later site of the guide."""
        below = None
        with numpyro.plate("data", len(X)):
            for i in reversed(range(layers)):
                logits = jnp.full((len(X), 2), -0.2) if below is None else below @ DOWN.T
                below = 1.0 * jnp.asarray(numpyro.sample(f"z{i}", bernoullis(logits)))
            numpyro.sample("x", dist.Normal(0.0, 1.0), obs=X)  # makes the plate one of data

    return model


def pair_of(layers: int) -> tuple[Any, Any]:
    return model_of(layers), guide_of(layers)


def sampled_gradient(
    pair: tuple[Any, Any], statistic: Statistic, loss: ELBO, draws: int, **options: Any
) -> tuple[Params, Params]:
    """Mean and standard error of the gradient that the constraint adds, over many steps from one start."""
    free = proxvi.Reference(
        init=lambda params, describe: jnp.zeros(()),
        update=lambda state, params, value, step: state,
        value=lambda state, statistic, value, step: value,
    )
    distance = options.get("distance", lambda _, now: jnp.sum(jnp.stack([jnp.sum(x) for x in jax.tree.leaves(now)])))
    constraint = proxvi.Proximity(statistic, distance=distance, magnitude=1.0, relative=False, reference=free)
    held = proxvi.ProximitySVI(*pair, optax.sgd(1.0), loss, constraint)
    plain = proxvi.ProximitySVI(*pair, optax.sgd(1.0), loss, ())

    def gradient(key: Array) -> Params:
        after = [svi.get_params(svi.update(state._replace(rng_key=key))[0]) for svi, state in states]
        return jax.tree.map(lambda with_it, without: without - with_it, *after)

    states = [(svi, svi.init(jax.random.key(0))) for svi in (held, plain)]
    gradients = jax.jit(jax.vmap(gradient))(jax.random.split(jax.random.key(1), draws))
    mean = jax.tree.map(lambda g: np.mean(np.asarray(g, np.float64), axis=0), gradients)
    error = jax.tree.map(lambda g: np.std(np.asarray(g, np.float64), axis=0) / np.sqrt(draws), gradients)
    return mean, error


def expected(layers: int, value: Callable[[list[Array], list[Array], Params], Array], params: Params) -> Array:
    """`E[value]`, by a sum over all states of all units of a data point, averaged over the data points."""
    states = jnp.array(list(itertools.product((0.0, 1.0), repeat=2 * layers))).reshape(-1, layers, 2)

    def weighted(state: Array) -> Array:
        z = [jnp.broadcast_to(s, (len(X), 2)) for s in state]
        logits = [logits_of(i, params, z[i - 1] if i else None) for i in range(layers)]
        log_q = sum(jnp.sum(-jax.nn.softplus((1.0 - 2.0 * a) * b), axis=-1) for a, b in zip(z, logits, strict=True))
        return jnp.exp(log_q) * value(z, logits, params)

    return jnp.mean(jnp.sum(jax.vmap(weighted)(states), axis=0))


def entropy_of_last(_: list[Array], logits: list[Array], __: Params) -> Array:
    return jnp.sum(dist.Bernoulli(logits=logits[-1]).entropy(), axis=-1)


def entropy_of_all(_: list[Array], logits: list[Array], __: Params) -> Array:
    return sum((jnp.sum(dist.Bernoulli(logits=x).entropy(), axis=-1) for x in logits), start=jnp.zeros(len(X)))


def probability_of_last(_: list[Array], logits: list[Array], __: Params) -> Array:
    return jnp.sum(jax.nn.sigmoid(logits[-1]) ** 2, axis=-1)


def divergence_of_all(z: list[Array], logits: list[Array], _: Params) -> Array:
    """Of each layer from the model's distribution given the layer that the guide samples after it."""
    above = [below @ DOWN.T for below in z[1:]] + [jnp.full((len(X), 2), -0.2)]
    pairs = zip(logits, above, strict=True)
    ours = sum(jax.nn.sigmoid(q) * (q - p) - jax.nn.softplus(q) + jax.nn.softplus(p) for q, p in pairs)
    return jnp.sum(ours, axis=-1)


CASES: dict[str, tuple[Statistic, Any]] = {
    "entropy of the last layer": (lambda q: proxvi.entropy(q[max(q)]), entropy_of_last),
    "entropy of all": (proxvi.entropy, entropy_of_all),
    "one's own, without ours": (
        lambda q: jnp.mean(jax.nn.sigmoid(q[max(q)].base_dist.logits) ** 2, axis=0),
        probability_of_last,
    ),
    "one's own beside ours": (
        lambda q: (proxvi.entropy(q), jnp.mean(jax.nn.sigmoid(q[max(q)].base_dist.logits) ** 2, axis=0)),
        lambda *args: entropy_of_all(*args) + probability_of_last(*args),
    ),
    "kl_to_prior": (proxvi.kl_to_prior, divergence_of_all),
}


@pytest.mark.slow
@pytest.mark.parametrize("power", [1, 4])
def test_gradient_of_a_power_of_an_entropy_agrees_with_enumeration(power: int) -> None:
    """It is not a mean over data points, so the score of each by itself would be wrong."""
    biases = jnp.array([0.3, -0.4])  # of the parents of two data points

    def model() -> None:
        with numpyro.plate("data", 2):
            parent = numpyro.sample("a", dist.Bernoulli(0.5))
            numpyro.sample("b", dist.Bernoulli(0.5))
            numpyro.sample("x", dist.Normal(jnp.asarray(parent), 1.0), obs=jnp.zeros(2))

    def guide() -> None:
        logits = numpyro.param("bias", biases)
        with numpyro.plate("data", 2):
            parent = jnp.asarray(numpyro.sample("a", dist.Bernoulli(logits=logits)))
            numpyro.sample("b", dist.Bernoulli(logits=4.0 * parent))

    def statistic(q: Any) -> Array:
        return proxvi.entropy(q["b"]) ** power

    def exact(biases: Array) -> Array:
        entropies = dist.Bernoulli(logits=jnp.array([0.0, 4.0])).entropy()
        total = jnp.zeros(())
        for state in itertools.product((0, 1), repeat=2):
            signs = 2.0 * jnp.array(state) - 1.0
            total += jnp.prod(jax.nn.sigmoid(signs * biases)) * jnp.mean(entropies[jnp.array(state)]) ** power
        return total

    mean, error = sampled_gradient((model, guide), statistic, proxvi.LeaveOneOutELBO(2), DRAWS)
    np.testing.assert_array_less(np.abs(mean["bias"] - jax.grad(exact)(biases)), 4 * error["bias"] + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradient_of_a_statistic_agrees_with_enumeration(name: str, layers: int) -> None:
    statistic, value = CASES[name]
    mean, error = sampled_gradient(pair_of(layers), statistic, proxvi.LeaveOneOutELBO(5), DRAWS)
    exact = jax.jit(jax.grad(lambda params: expected(layers, value, params)))(initial(layers))
    for site, slope in exact.items():
        np.testing.assert_array_less(np.abs(mean[site] - slope), 4 * error[site] + 1e-6, err_msg=site)
    assert np.abs(exact["bias0"]).min() > 1e-3  # the parents have a slope to be found


@pytest.mark.parametrize(
    "loss",
    [
        proxvi.LeaveOneOutELBO(5),
        *(
            pytest.param(loss, marks=pytest.mark.slow)
            for loss in (proxvi.VimcoELBO(4), TraceGraph_ELBO(), TraceGraph_ELBO(3))
        ),
    ],
)
def test_every_estimator_of_discrete_latents_has_the_score_term(loss: ELBO) -> None:
    mean, error = sampled_gradient(pair_of(2), lambda q: proxvi.entropy(q["z1"]), loss, 20_000)
    exact = jax.jit(jax.grad(lambda params: expected(2, entropy_of_last, params)))(initial(2))
    for site, slope in exact.items():
        np.testing.assert_array_less(np.abs(mean[site] - slope), 4 * error[site] + 1e-6, err_msg=site)


@pytest.mark.slow
def test_distance_between_distributions_has_the_score_term() -> None:
    """`KL(Bernoulli(0.3) ‖ q)`, the mean of it over the sampled parents."""

    def distance(_: Any, now: Any) -> Array:
        logits = now["z1"].base_dist.logits
        return jnp.sum(jnp.mean(jax.nn.softplus(logits) - 0.3 * logits, axis=0))

    mean, error = sampled_gradient(pair_of(2), proxvi.identity, proxvi.LeaveOneOutELBO(5), 20_000, distance=distance)

    def value(_: list[Array], logits: list[Array], __: Params) -> Array:
        return jnp.sum(jax.nn.softplus(logits[1]) - 0.3 * logits[1], axis=-1)

    exact = jax.jit(jax.grad(lambda params: expected(2, value, params)))(initial(2))
    for site, slope in exact.items():
        np.testing.assert_array_less(np.abs(mean[site] - slope), 4 * error[site] + 1e-6, err_msg=site)


class OwnELBO(proxvi.LeaveOneOutELBO):
    """The statistic is not read off a subclass, but off a run of the guide beside it, as for a speed limit."""


@pytest.mark.slow
def test_a_continuous_parent_without_reparameterisation_does_not_count_twice() -> None:
    logits = jnp.array([2.0, 0.0])

    def model() -> None:
        numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("w", dist.Normal(0.0, 1.0))

    def guide() -> None:
        parts = dist.Normal(jnp.asarray(numpyro.param("means", jnp.array([-1.0, 1.0]))), 1.0)
        z = jnp.asarray(numpyro.sample("z", dist.MixtureSameFamily(dist.Categorical(logits=logits), parts)))
        numpyro.sample("w", dist.Normal(0.0, jnp.exp(z)))  # its entropy is z and a constant

    for loss in (proxvi.LeaveOneOutELBO(5), OwnELBO(5), Trace_ELBO(5)):
        mean, error = sampled_gradient((model, guide), lambda q: proxvi.entropy(q["w"]), loss, 20_000)
        exact = jax.nn.softmax(logits)  # ∇E[z]
        np.testing.assert_array_less(np.abs(mean["means"] - exact), 4 * error["means"] + 1e-6)


@pytest.mark.slow
def test_the_prior_of_a_single_site_that_is_known_at_its_sample_only_has_the_score_term() -> None:
    def prior() -> Any:
        return dist.MixtureSameFamily(dist.Categorical(logits=jnp.zeros(2)), bernoullis(DOWN))

    def model() -> None:
        numpyro.sample("z", prior())

    def guide() -> None:
        numpyro.sample("z", bernoullis(jnp.asarray(numpyro.param("logits", jnp.array([1.0, -0.5])))))

    states = jnp.array(list(itertools.product((0, 1), repeat=2)))

    def divergence(logits: Array) -> Array:
        log_q = jax.vmap(bernoullis(logits).log_prob)(states)
        return jnp.sum(jnp.exp(log_q) * (log_q - jax.vmap(prior().log_prob)(states)))

    mean, error = sampled_gradient((model, guide), proxvi.kl_to_prior, proxvi.LeaveOneOutELBO(5), 20_000)
    exact = jax.grad(divergence)(jnp.array([1.0, -0.5]))
    np.testing.assert_array_less(np.abs(mean["logits"] - exact), 4 * error["logits"] + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statistic", "by_row"),
    [
        (lambda q: proxvi.entropy(q["z1"]), False),
        (lambda q: proxvi.entropy(q["z1"], total=True), False),
        (lambda q: proxvi.entropy(q["z1"].to_event(1)), True),
    ],
    ids=["mean over rows", "total", "by row"],
)
def test_each_data_point_has_a_baseline_of_its_own(statistic: Statistic, by_row: bool) -> None:
    """The noise of our statistics is below that of the same statistic written by hand, whose parts are not known."""

    def by_hand(q: dict[str, Any]) -> Array:
        logits = q["z1"].base_dist.logits
        entropies = jax.nn.softplus(logits) - jax.nn.sigmoid(logits) * logits
        return entropies if by_row else jnp.mean(entropies, axis=0)

    loss = proxvi.LeaveOneOutELBO(5)
    (ours, error), (theirs, noisier) = (
        sampled_gradient(pair_of(2), statistic, loss, 5_000) for statistic in (statistic, by_hand)
    )
    np.testing.assert_allclose(ours["bias0"], theirs["bias0"], atol=5 * np.max(noisier["bias0"]))
    assert np.max(error["bias0"]) < 0.75 * np.min(noisier["bias0"])
