"""Bad inputs: each is refused by an error that names the argument, the bound, the value and the remedy."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpyro.distributions as dist
import optax
import pytest

import proxvi

KEY = jax.random.key(0)
PARAMS = jnp.ones(3)
NORMAL = dist.Normal(jnp.zeros(3), 1.0).to_event(1)
FLOW = dist.TransformedDistribution(dist.Normal(0.0, 1.0), dist.transforms.SigmoidTransform())


@pytest.fixture(autouse=True)
def user_without_a_type_checker() -> Iterator[None]:
    """Elsewhere in the tests beartype would refuse the wrong types first; users do not have it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class Bad(NamedTuple):
    """A call that must fail, and what its message must say, in this order."""

    name: str
    call: Callable[[], Any]
    argument: str
    bound: str
    value: str
    remedy: str


def link(statistic: Any = proxvi.identity, **options: Any) -> optax.GradientTransformationExtraArgs:
    example = options.pop("example", None)
    constraint = proxvi.Proximity(statistic, **{"magnitude": 1.0, "relative": False} | options)
    return proxvi.proximity(optax.identity(), constraint, example=example)


def update(
    transformation: optax.GradientTransformationExtraArgs, params: Any = PARAMS, grads: Any = PARAMS, **extra: Any
) -> Any:
    return transformation.update(grads, transformation.init(PARAMS), params, **extra)


def inner(constraint: Any = None, **options: Any) -> optax.GradientTransformationExtraArgs:
    constraint = constraint or proxvi.Proximity(proxvi.identity, magnitude=1.0, relative=False)
    return proxvi.proximity_inner_loop(KEY, options.pop("learning_rate", 0.1), constraint, **options)


def changing() -> Any:
    """A statistic whose shape follows the batch: averaged over, it would not."""
    transformation = link(
        lambda params, batch: batch @ params, reference=proxvi.statistic_average(), example={"batch": jnp.ones((4, 3))}
    )
    return update(transformation, batch=jnp.ones((5, 3)))


def changing_structure() -> Any:
    transformation = link(
        lambda params, batch: dict.fromkeys(batch, params),
        reference=proxvi.statistic_average(),
        example={"batch": {"a": jnp.ones(())}},
    )
    return update(transformation, batch={"b": jnp.ones(())})


def batch_statistic(params: Any, batch: Any) -> Any:
    return batch @ params


DECAY = ("`decay`", "must be a number of at least 0 and below 1")
MAGNITUDE = ("`magnitude`", "finite and of at least 0")
RETURNS = ("`statistic`", "must return")

CASES = [
    # the averages
    Bad("decay 1", lambda: proxvi.parameter_average(1.0), *DECAY, "got 1.0", "0 keeps close to the previous"),
    Bad("decay above 1", lambda: proxvi.parameter_average(1.5), *DECAY, "got 1.5", "0 keeps close"),
    Bad("decay negative", lambda: proxvi.parameter_average(-0.1), *DECAY, "got -0.1", "0 keeps close"),
    Bad("decay nan", lambda: proxvi.parameter_average(float("nan")), *DECAY, "got nan", "0 keeps close"),
    Bad("decay infinite", lambda: proxvi.parameter_average(float("inf")), *DECAY, "got inf", "0 keeps close"),
    Bad("statistic decay 1", lambda: proxvi.statistic_average(1.0), *DECAY, "got 1.0", "0 keeps close"),
    Bad("statistic decay negative", lambda: proxvi.statistic_average(-1), *DECAY, "got -1", "0 keeps close"),
    # the magnitude
    Bad("magnitude negative", lambda: link(magnitude=-1.0), *MAGNITUDE, "got -1.0", "0 switches"),
    Bad("magnitude nan", lambda: link(magnitude=float("nan")), *MAGNITUDE, "got nan", "0 switches"),
    Bad("magnitude infinite", lambda: link(magnitude=float("inf")), *MAGNITUDE, "got inf", "0 switches"),
    Bad("magnitude string", lambda: link(magnitude="big"), *MAGNITUDE, "got 'big'", "0 switches"),
    Bad("magnitude none", lambda: link(magnitude=None), *MAGNITUDE, "got None", "0 switches"),
    Bad(
        "magnitude that is no schedule yet",
        lambda: link(magnitude=optax.exponential_decay),
        "`magnitude`",
        "function of the step alone",
        "exponential_decay",
        "make a schedule",
    ),
    Bad("magnitude true", lambda: link(magnitude=True), *MAGNITUDE, "got True", "0 switches"),
    Bad("magnitude complex", lambda: link(magnitude=1j), *MAGNITUDE, "got 1j", "0 switches"),
    Bad("magnitude vector", lambda: link(magnitude=jnp.ones(2)), *MAGNITUDE, "got Array([1., 1.]", "0 switches"),
    Bad("magnitude list", lambda: link(magnitude=[1.0]), *MAGNITUDE, "got [1.0]", "0 switches"),
    Bad("schedule negative", lambda: link(magnitude=lambda _: -2.0), *MAGNITUDE, "got -2.0", "0 switches"),
    Bad("schedule nan", lambda: link(magnitude=lambda _: jnp.nan), *MAGNITUDE, "got nan", "0 switches"),
    Bad("schedule vector", lambda: link(magnitude=lambda _: jnp.ones(2)), *MAGNITUDE, "got Array", "0 switches"),
    Bad(
        "magnitude vector under vmap",
        lambda: jax.vmap(lambda k: update(link(magnitude=k)))(jnp.ones((2, 2))),
        "`magnitude`",
        "must be a scalar",
        "got shape (2,)",
        "use `vmap`",
    ),
    # the other parts of the definition
    Bad("statistic none", lambda: link(None), "`statistic`", "must be a function", "got None", "proxvi.entropy"),
    Bad("statistic name", lambda: link("entropy"), "`statistic`", "must be a function", "'entropy'", "without calling"),
    Bad(
        "statistic called", lambda: link(proxvi.entropy(NORMAL)), "`statistic`", "function", "Array", "without calling"
    ),
    Bad("distance name", lambda: link(distance="kl"), "`distance`", "must be a function", "'kl'", "inverse_huber"),
    Bad("distance none", lambda: link(distance=None), "`distance`", "must be a function", "None", "inverse_huber"),
    Bad("reference name", lambda: link(reference="ema"), "`reference`", "Reference", "'ema'", "parameter_average()"),
    Bad("reference number", lambda: link(reference=0.9), "`reference`", "Reference", "0.9", "statistic_average()"),
    Bad(
        "reference not called",
        lambda: link(reference=proxvi.parameter_average),
        "`reference`",
        "must be a Reference",
        "<function parameter_average",
        "call `parameter_average()`",
    ),
    Bad("relative number", lambda: link(relative=1.0), "`relative`", "True or False", "1.0", "first loss"),
    Bad("relative none", lambda: link(relative=None), "`relative`", "True or False", "None", "first loss"),
    # the arguments of the statistic
    Bad(
        "parameters by keyword only",
        lambda: link(lambda *, params: params),
        "`statistic`",
        "first positional argument",
        "<function",
        "`lambda params: ...`",
    ),
    Bad("example list", lambda: link(example=[1]), "`example`", "dictionary", "list", "example={'batch': batch}"),
    Bad(
        "example of no argument",
        lambda: link(example={"x": 1}),
        "`example`",
        "may name only",
        "['x']",
        "rename or drop",
    ),
    Bad(
        "statistic average without example",
        lambda: link(batch_statistic, reference=proxvi.statistic_average()).init(PARAMS),
        "`example`",
        "must hold ['batch']",
        "got []",
        "jax.ShapeDtypeStruct",
    ),
    Bad(
        "missing batch",
        lambda: update(link(batch_statistic)),
        "`statistic`",
        "takes ['batch']",
        "got []",
        "optimizer.update(grads, state, params, batch=...)",
    ),
    Bad(
        "batch under another name",
        lambda: update(link(batch_statistic), data=PARAMS),
        "`statistic`",
        "takes ['batch']",
        "got ['data']",
        "batch=...",
    ),
    # the call
    Bad(
        "missing params",
        lambda: update(link(), None),
        "`params`",
        "must be given",
        "got None",
        "update(grads, state, params)",
    ),
    Bad(
        "missing params, inner", lambda: update(inner(), None), "`params`", "must be given", "got None", "update(grads"
    ),
    Bad("empty params", lambda: link().init({}), "`params`", "at least one array", "got {}", "variational parameters"),
    Bad(
        "none params",
        lambda: link().init(None),  # pyright: ignore[reportArgumentType]
        "`params`",
        "at least one array",
        "got None",
        "variational parameters",
    ),
    Bad(
        "integer params",
        lambda: link().init({"n": jnp.arange(3)}),
        "`params`",
        "real floating-point",
        "int32 at ['n']",
        "optax.masked",
    ),
    Bad(
        "boolean params",
        lambda: link().init(jnp.ones(2, bool)),
        "`params`",
        "real floating-point",
        "bool",
        "optax.masked",
    ),
    Bad(
        "complex params",
        lambda: link().init(jnp.ones(2, complex)),
        "`params`",
        "real floating-point",
        "complex64",
        "optax.masked",
    ),
    Bad("key params", lambda: link().init(KEY), "`params`", "real floating-point", "key", "optax.masked"),
    Bad(
        "text params",
        lambda: link().init({"a": "b"}),  # pyright: ignore[reportArgumentType]
        "`params`",
        "real floating-point",
        "str",
        "optax.masked",
    ),
    Bad(
        "integer params later",
        lambda: update(link(), jnp.arange(3)),
        "`params`",
        "real floating-point",
        "int32",
        "optax.masked",
    ),
    Bad(
        "gradients of another structure",
        lambda: update(link(), grads={"a": PARAMS}),
        "`updates`",
        "structure of `params`",
        "{'a': *}",
        "gradient of the loss with respect to `params`",
    ),
    Bad(
        "missing value",
        lambda: update(link(relative=True)),
        "`value`",
        "must be the loss",
        "got None",
        "relative=False",
    ),
    Bad(
        "missing value, inner",
        lambda: update(inner(proxvi.Proximity(proxvi.identity, magnitude=1.0))),
        "`value`",
        "must be the loss",
        "got None",
        "relative=False",
    ),
    Bad(
        "vector value",
        lambda: update(link(relative=True), value=PARAMS),
        "`value`",
        "must be a scalar",
        "shape (3,)",
        "differentiated",
    ),
    # what the statistic and the distance return
    Bad("statistic of integers", lambda: update(link(jnp.argmax)), *RETURNS, "int32", "no gradient"),
    Bad("statistic of booleans", lambda: update(link(lambda p: p > 0)), *RETURNS, "bool", "no gradient"),
    Bad("statistic complex", lambda: update(link(lambda p: p * 1j)), *RETURNS, "complex64", "no gradient"),
    Bad("statistic of nothing", lambda: update(link(lambda p: None)), *RETURNS, "got None", "kept close"),
    Bad("statistic of no leaves", lambda: update(link(lambda p: {})), *RETURNS, "got {}", "kept close"),
    Bad(
        "statistic changes shape",
        changing,
        "`statistic`",
        "same structure and shapes",
        "(5,)",
        "average over the batch",
    ),
    Bad(
        "statistic changes structure",
        changing_structure,
        "`statistic`",
        "same structure and shapes",
        "'b'",
        "average over",
    ),
    Bad(
        "distance of a vector",
        lambda: update(link(distance=lambda x, y: x - y)),
        "`distance`",
        "real scalar",
        "shape (3,)",
        "sum over",
    ),
    Bad(
        "distance of an integer",
        lambda: update(link(distance=lambda x, y: jnp.int32(0))),
        "`distance`",
        "real scalar",
        "int32",
        "sum over",
    ),
    # distances
    Bad(
        "squared of distributions",
        lambda: proxvi.squared(NORMAL, NORMAL),
        "`squared`",
        "compares arrays",
        "Independent",
        "`kl`",
    ),
    Bad(
        "huber of distributions",
        lambda: update(link(lambda p: dist.Normal(p, 1.0))),
        "`inverse_huber`",
        "compares arrays",
        "Normal",
        "`kl`",
    ),
    Bad("kl of arrays", lambda: proxvi.kl(PARAMS, PARAMS), "`kl`", "compares distributions", "Array", "inverse_huber"),
    Bad(
        "kl without closed form",
        lambda: proxvi.kl(FLOW, dist.Normal(0.0, 1.0)),
        "`kl`",
        "closed form",
        "TransformedDistribution",
        "constrain a statistic",
    ),
    Bad(
        "different structures",
        lambda: proxvi.squared({"a": 1.0}, {"b": 1.0}),
        "`squared`",
        "one structure",
        "{'b': *}",
        "same structure at every step",
    ),
    Bad(
        "different shapes",
        lambda: proxvi.squared(jnp.ones(2), jnp.ones(3)),
        "`squared`",
        "equal shapes",
        "(2,)",
        "same shape at every step",
    ),
    Bad(
        "nothing to compare",
        lambda: proxvi.squared({}, {}),
        "`squared`",
        "at least one leaf",
        "empty tree",
        "return something",
    ),
    # statistics
    Bad(
        "entropy of arrays",
        lambda: proxvi.entropy(PARAMS),
        "`entropy`",
        "measures distributions",
        "Array",
        "build the distribution",
    ),
    Bad(
        "entropy of nothing", lambda: proxvi.entropy({}), "`q`", "at least one distribution", "got {}", "name the sites"
    ),
    Bad("entropy of a point mass", lambda: proxvi.entropy(dist.Delta(0.0)), "`q`", "spread out", "Delta", "AutoNormal"),
    Bad(
        "entropy without closed form",
        lambda: proxvi.entropy(dist.Poisson(1.0)),
        "`key`",
        "PRNG key",
        "Poisson",
        "Monte Carlo",
    ),
    Bad(
        "moments of a flow",
        lambda: proxvi.mean_variance(FLOW),
        "`key`",
        "PRNG key",
        "TransformedDistribution",
        "Monte Carlo",
    ),
    Bad(
        "moments of a Cauchy",
        lambda: proxvi.mean_variance(dist.Cauchy(0.0, 1.0)),
        "`q`",
        "moments",
        "Cauchy",
        "entropy",
    ),
    Bad(
        "one sample", lambda: proxvi.entropy(NORMAL, num_samples=1), "`num_samples`", "at least 2", "got 1", "baseline"
    ),
    Bad(
        "no samples",
        lambda: proxvi.mean_variance(NORMAL, num_samples=0),
        "`num_samples`",
        "at least 2",
        "got 0",
        "baseline",
    ),
    Bad(
        "prior of another structure",
        lambda: proxvi.kl_to_prior(NORMAL, {"a": NORMAL}),
        "`prior`",
        "structure of `q`",
        "{'a': *}",
        "its prior",
    ),
    Bad(
        "prior not a distribution",
        lambda: proxvi.kl_to_prior(NORMAL, 1.0),
        "`prior`",
        "distributions",
        "float",
        "wrap it",
    ),
    Bad(
        "prior of another event",
        lambda: proxvi.kl_to_prior(dist.MultivariateNormal(jnp.zeros(3), scale_tril=jnp.eye(3)), NORMAL),
        "`q`",
        "same event shape",
        "(3,) of MultivariateNormal and () of Normal",
        "of one kind",
    ),
    Bad(
        "prior larger than q",
        lambda: proxvi.kl_to_prior(dist.Normal(0.0, 1.0), dist.Normal(PARAMS, 1.0)),
        "`q`",
        "must broadcast",
        "(3,) for ()",
        "expand `q`",
    ),
    Bad(
        "kl of a point mass",
        lambda: proxvi.kl_to_prior(dist.Delta(0.0), dist.Normal(0.0, 1.0)),
        "`q`",
        "spread out",
        "Delta",
        "AutoNormal",
    ),
    Bad(
        "orthogonal of biases",
        lambda: proxvi.orthogonal({"b": PARAMS}),
        "`weights`",
        "two or more axes",
        "{\"['b']\": (3,)}",
        "kernels",
    ),
    Bad(
        "orthogonal of a distribution",
        lambda: proxvi.orthogonal(NORMAL),
        "`orthogonal`",
        "weight matrices",
        "Independent",
        "pass the parameters",
    ),
    # Algorithm 1
    Bad("noise negative", lambda: inner(noise=-1.0), "`noise`", "at least 0", "got -1.0", "current parameters"),
    Bad("noise nan", lambda: inner(noise=float("nan")), "`noise`", "at least 0", "got nan", "current parameters"),
    Bad("learning rate zero", lambda: inner(learning_rate=0.0), "`learning_rate`", "above 0", "got 0.0", "1e-3"),
    Bad("learning rate negative", lambda: inner(learning_rate=-0.1), "`learning_rate`", "above 0", "got -0.1", "1e-3"),
    Bad(
        "inner learning rate zero",
        lambda: inner(inner_learning_rate=0.0),
        "`inner_learning_rate`",
        "above 0",
        "got 0.0",
        "None takes",
    ),
    Bad("tolerance negative", lambda: inner(tolerance=-1e-3), "`tolerance`", "at least 0", "got -0.001", "the cap"),
    Bad(
        "no iterations", lambda: inner(max_iterations=0), "`max_iterations`", "at least 1", "got 0", "one gradient step"
    ),
]


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_bad_input_is_refused_by_name(bad: Bad) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        bad.call()
    message = str(caught.value)
    for part in (bad.argument, bad.bound, bad.value, bad.remedy):
        assert part in message, message


def test_there_are_at_least_sixty_cases_and_no_name_twice() -> None:
    assert len({bad.name for bad in CASES}) == len(CASES) >= 60
