"""What `ProximitySVI` does with features of NumPyro, Optax and JAX: the table of `docs/features.md`, cell by cell.

`python tests/svi/test_feature_matrix.py` writes that page again.
"""

# ruff: noqa: ARG001 (a guide takes the arguments of the model)

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import Array
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.module import eqx_module, flax_module, nnx_module
from numpyro.contrib.stochastic_support.sdvi import SDVI
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO, autoguide
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from numpyro.infer.reparam import LocScaleReparam, TransformReparam
from numpyro.primitives import mutable

import proxvi

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
KEY = jax.random.key(0)
X = jnp.array([[1.0, -2.0], [3.0, 0.5], [2.0, 1.0], [0.5, -1.0]])
STEPS = 2  # at the first a constraint is 0
STATISTICS: dict[str, Any] = {
    "entropy": proxvi.entropy,
    "kl_to_prior": proxvi.kl_to_prior,
    "mean_variance": proxvi.mean_variance,
}
COLUMNS = (*STATISTICS, "annealing", "()")


@dataclass(frozen=True)
class Problem:
    """What `ProximitySVI` and NumPyro's `SVI` are made of; an autoguide must be new for each."""

    model: Any
    guide: Any
    loss: Any = field(default_factory=Trace_ELBO, kw_only=True)
    optim: Any = field(default_factory=lambda: optax.adam(0.05), kw_only=True)
    args: tuple[Any, ...] = field(default=(X,), kw_only=True)


@dataclass(frozen=True)
class Refused:
    """Our own error; `argument` is in backticks in its message."""

    argument: str
    reason: str


@dataclass(frozen=True)
class NotMeaningful:
    """It runs, and the parameters are those of NumPyro's SVI to the last bit."""

    reason: str


type Steps = Callable[[SVI, Problem], tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Feature:
    """One row: `build` makes the problem, `steps` runs it, within `context`; `status` is what does not work."""

    group: str
    build: Callable[[], Problem]
    status: dict[str, Refused | NotMeaningful]
    steps: Steps
    context: Callable[[], AbstractContextManager[Any]]


FEATURES: dict[str, Feature] = {}


def updates(svi: SVI, problem: Problem, steps: int = STEPS, **options: Any) -> tuple[Any, Any, Any]:
    """Parameters before and after a few steps, and their losses; not compiled, which mostly takes longer."""
    state: Any = svi.init(KEY, *problem.args)
    before, losses = svi.get_params(state), []
    for _ in range(steps):
        state, loss = svi.update(state, *problem.args, **options)
        losses.append(loss)
    return before, svi.get_params(state), losses


def compiled(svi: SVI, problem: Problem, **options: Any) -> tuple[Any, Any, Any]:
    state: Any = svi.init(KEY, *problem.args)
    before, losses = jax.device_get(svi.get_params(state)), []
    update = jax.jit(svi.update, **options)
    for _ in range(STEPS):
        state, loss = update(state, *problem.args)
        losses.append(loss)
    return before, svi.get_params(state), losses


def feature(
    group: str,
    name: str,
    *,
    status: dict[str, Refused | NotMeaningful] | None = None,
    steps: Steps = updates,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[Callable[[], Problem]], Callable[[], Problem]]:
    def add(build: Callable[[], Problem]) -> Callable[[], Problem]:
        FEATURES[name] = Feature(group, build, status or {}, steps, context)
        return build

    return add


def gaussian(x: Array) -> None:
    mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def scaled(x: Array) -> None:
    """Two latents, one of them positive."""
    mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, scale).to_event(1), obs=x)


def binary(x: Array) -> None:
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(0.4 * jnp.ones(2)).to_event(1))
        numpyro.sample("x", dist.Normal(2.0 * jnp.asarray(z), 1.0).to_event(1), obs=x)


def binary_guide(x: Array) -> None:
    kernel = jnp.asarray(numpyro.param("kernel", 0.1 * jnp.eye(2)))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("z", dist.Bernoulli(logits=x @ kernel + 0.1).to_event(1))


def local(x: Array) -> None:
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("x", dist.Normal(jnp.asarray(z), 1.0).to_event(1), obs=x)


def width(shape: tuple[int, ...] = (2,)) -> Any:
    return numpyro.param("width", jnp.ones(shape), constraint=dist.constraints.positive)


def amortised(x: Array, mean: Any) -> None:
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("z", dist.Normal(mean, width()).to_event(1))


# Guides

POINT = "a point mass has no entropy, no moments and no divergence to keep close; use a guide that is spread out"
NO_LOG_Q = NotMeaningful("the temperature is on `log q`, and a point mass has none")
OF_A_POINT: dict[str, Refused | NotMeaningful] = dict.fromkeys(STATISTICS, Refused("q", POINT))

for kind in (
    "AutoNormal",
    "AutoDiagonalNormal",
    "AutoMultivariateNormal",
    "AutoLowRankMultivariateNormal",
    "AutoIAFNormal",
    "AutoBNAFNormal",
):
    feature("Guides", kind)(lambda kind=kind: Problem(scaled, getattr(autoguide, kind)(scaled)))


CHAIN = "the guide samples a start and momenta of a chain, and the density of where that ends is not known"
NO_DENSITY: dict[str, Refused | NotMeaningful] = {"kl_to_prior": Refused("statistic", CHAIN)}


@feature("Guides", "AutoDAIS", status=NO_DENSITY, steps=compiled)
def _() -> Problem:
    return Problem(scaled, autoguide.AutoDAIS(scaled))


@feature("Guides", "AutoDelta", status={**OF_A_POINT, "annealing": NO_LOG_Q})
def _() -> Problem:
    return Problem(scaled, AutoDelta(scaled))


@feature("Guides", "AutoLaplaceApproximation", status=OF_A_POINT)  # its `log q` is that of the constraint's Jacobian
def _() -> Problem:
    return Problem(scaled, autoguide.AutoLaplaceApproximation(scaled))


@feature("Guides", "AutoSemiDAIS", status=NO_DENSITY, steps=compiled)
def _() -> Problem:
    def of_all() -> Any:
        return numpyro.sample("mean", dist.Normal(jnp.zeros(2), 2.0).to_event(1))

    def of_each(mean: Any) -> None:
        with numpyro.plate("data", 4, subsample_size=2):
            z = numpyro.sample("z", dist.Normal(mean, 1.0).to_event(1))
            numpyro.sample("x", dist.Normal(jnp.asarray(z), 1.0).to_event(1), obs=X[:2])

    def model() -> None:
        of_each(of_all())

    return Problem(model, autoguide.AutoSemiDAIS(model, of_each, AutoNormal(of_all)), args=())


@feature("Guides", "AutoSurrogateLikelihoodDAIS", status=NO_DENSITY, steps=compiled)
def _() -> Problem:
    def surrogate() -> None:
        mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
        weights: Any = numpyro.param("weights", 2.0 * jnp.ones(2), constraint=dist.constraints.positive)
        with numpyro.plate("points", 2), handlers.scale(scale=weights):
            numpyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=X[:2])

    return Problem(gaussian, autoguide.AutoSurrogateLikelihoodDAIS(gaussian, surrogate))


@feature("Guides", "AutoGuideList, one part AutoDelta, by `handlers.block`")
def _() -> Problem:
    guide = AutoGuideList(scaled)
    guide.append(AutoNormal(handlers.block(scaled, hide=["scale"])))
    guide.append(AutoDelta(handlers.block(scaled, expose=["scale"])))
    return Problem(scaled, guide)


@feature("Guides", "hand-written, discrete")
def _() -> Problem:
    return Problem(binary, binary_guide, loss=proxvi.LeaveOneOutELBO(3))


@feature("Guides", "hand-written, two discrete layers")
def _() -> Problem:
    def model(x: Array) -> None:
        with numpyro.plate("data", x.shape[0]):
            top = jnp.asarray(numpyro.sample("top", dist.Bernoulli(0.3 * jnp.ones(2)).to_event(1)))
            z = jnp.asarray(numpyro.sample("z", dist.Bernoulli(logits=top - 0.2).to_event(1)))
            numpyro.sample("x", dist.Normal(2.0 * z, 1.0).to_event(1), obs=x)

    def guide(x: Array) -> None:
        kernel = jnp.asarray(numpyro.param("kernel", 0.1 * jnp.eye(2)))
        upper = jnp.asarray(numpyro.param("upper", 0.3 * jnp.eye(2)))
        with numpyro.plate("data", x.shape[0]):
            z = jnp.asarray(numpyro.sample("z", dist.Bernoulli(logits=x @ kernel + 0.1).to_event(1)))
            numpyro.sample("top", dist.Bernoulli(logits=z @ upper + 0.1).to_event(1))

    return Problem(model, guide, loss=proxvi.LeaveOneOutELBO(3))


@feature("Guides", "hand-written, with an auxiliary site")
def _() -> Problem:
    def guide(x: Array) -> None:
        loc: Any = numpyro.param("loc", jnp.zeros(2))
        side = numpyro.sample("side", dist.Normal(loc, 1.0).to_event(1), infer={"is_auxiliary": True})
        numpyro.sample("mean", dist.Normal(0.5 * jnp.asarray(side), width()).to_event(1))

    return Problem(gaussian, guide)


# Losses

ONLY_TWO = "it is defined for `Trace_ELBO` and `LeaveOneOutELBO`; the others would weigh `log q` twice, or not at all"
NO_ANNEALING: dict[str, Refused | NotMeaningful] = {"annealing": Refused("elbo", ONLY_TWO)}


@feature("Losses", "Trace_ELBO, 3 particles")
def _() -> Problem:
    return Problem(gaussian, AutoNormal(gaussian), loss=Trace_ELBO(3))


@feature("Losses", "Trace_ELBO, 3 particles, vectorize_particles=False")
def _() -> Problem:
    return Problem(gaussian, AutoNormal(gaussian), loss=Trace_ELBO(3, vectorize_particles=False))


@feature("Losses", "Trace_ELBO, multi_sample_guide=True")
def _() -> Problem:
    def guide(x: Array) -> None:
        loc: Any = numpyro.param("loc", jnp.zeros(2))
        numpyro.sample("mean", dist.Normal(loc, width()).expand([5, 2]).to_event(1))

    return Problem(gaussian, guide, loss=Trace_ELBO(multi_sample_guide=True))


@feature(
    "Losses",
    "Trace_ELBO, sum_sites=False",
    status=dict.fromkeys(COLUMNS, Refused("loss", "it is no number but one for each site, which has no gradient")),
)
def _() -> Problem:
    return Problem(gaussian, AutoNormal(gaussian), loss=Trace_ELBO(sum_sites=False))


@feature("Losses", "TraceMeanField_ELBO", status=NO_ANNEALING)
def _() -> Problem:
    return Problem(gaussian, AutoNormal(gaussian), loss=TraceMeanField_ELBO())


@feature("Losses", "TraceGraph_ELBO", status=NO_ANNEALING)
def _() -> Problem:
    return Problem(binary, binary_guide, loss=TraceGraph_ELBO())


@feature("Losses", "TraceEnum_ELBO, enumerated in the model", status=NO_ANNEALING)
def _() -> Problem:
    def model(x: Array) -> None:
        mean: Any = numpyro.sample("mean", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
        with numpyro.plate("data", 4):
            z = jnp.asarray(numpyro.sample("z", dist.Bernoulli(0.4), infer={"enumerate": "parallel"}))
            numpyro.sample("x", dist.Normal(mean + z[..., None], 1.0).to_event(1), obs=x)

    def guide(x: Array) -> None:
        loc: Any = numpyro.param("loc", jnp.zeros(2))
        numpyro.sample("mean", dist.Normal(loc, width()).to_event(1))

    return Problem(model, guide, loss=TraceEnum_ELBO(max_plate_nesting=1))


@feature("Losses", "TraceEnum_ELBO, enumerated in the guide", status=NO_ANNEALING)
def _() -> Problem:
    def model(x: Array) -> None:
        with numpyro.plate("data", 4):
            z = jnp.asarray(numpyro.sample("z", dist.Bernoulli(0.4), infer={"enumerate": "parallel"}))
            numpyro.sample("x", dist.Normal(z[..., None] * jnp.ones(2), 1.0).to_event(1), obs=x)

    def guide(x: Array) -> None:
        logits = numpyro.param("logits", 0.1 * jnp.ones(4))
        with numpyro.plate("data", 4):
            numpyro.sample("z", dist.Bernoulli(logits=logits), infer={"enumerate": "parallel"})

    return Problem(model, guide, loss=TraceEnum_ELBO(max_plate_nesting=1))


@feature("Losses", "RenyiELBO", status=NO_ANNEALING)
def _() -> Problem:
    return Problem(gaussian, AutoNormal(gaussian), loss=RenyiELBO(0.5, num_particles=3))


@feature("Losses", "LeaveOneOutELBO, vectorize_particles=False")
def _() -> Problem:
    return Problem(binary, binary_guide, loss=proxvi.LeaveOneOutELBO(3, vectorize_particles=False))


@feature("Losses", "VimcoELBO", status=NO_ANNEALING)
def _() -> Problem:
    return Problem(binary, binary_guide, loss=proxvi.VimcoELBO(3))


# Reparameterisation, handlers and control flow


@feature("Models", "LocScaleReparam")
def _() -> Problem:
    model = handlers.reparam(gaussian, config={"mean": LocScaleReparam(0)})
    return Problem(model, AutoNormal(model))


@feature("Models", "LocScaleReparam, learnt")
def _() -> Problem:
    model = handlers.reparam(gaussian, config={"mean": LocScaleReparam(None)})
    return Problem(model, AutoNormal(model))


@feature("Models", "TransformReparam")
def _() -> Problem:
    def affine(x: Array) -> None:
        to = dist.transforms.AffineTransform(0.0, 2.0)
        prior = dist.TransformedDistribution(dist.Normal(jnp.zeros(2), 1.0).to_event(1), to)
        mean = numpyro.sample("mean", prior)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

    model = handlers.reparam(affine, config={"mean": TransformReparam()})
    return Problem(model, AutoNormal(model))


@feature("Models", "contrib.stochastic_support: a straight-line program of SDVI")
def _() -> Problem:
    def branching(x: Array) -> None:
        if numpyro.sample("wide", dist.Bernoulli(0.5), infer={"branching": True}) == 0:
            mean: Any = numpyro.sample("one", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        else:
            mean = numpyro.sample("two", dist.Normal(jnp.zeros(2), 9.0).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

    programs = SDVI(branching, optax.adam(0.1), num_slp_samples=20)._find_slps(KEY, X)
    assert sorted(programs) == ["0", "1"]
    model = handlers.condition(branching, dict(programs["1"]))
    return Problem(model, AutoNormal(model))


@feature("Models", "handlers.mask")
def _() -> Problem:
    def model(x: Array) -> None:
        with handlers.mask(mask=jnp.arange(4) < 2):
            local(x)

    def guide(x: Array) -> None:
        with handlers.mask(mask=jnp.arange(4) < 2):
            amortised(x, x @ jnp.asarray(numpyro.param("kernel", 0.1 * jnp.eye(2))))

    return Problem(model, guide)


@feature("Models", "handlers.scale")
def _() -> Problem:
    model = handlers.scale(gaussian, scale=0.1)
    return Problem(model, handlers.scale(AutoNormal(gaussian), scale=0.1))


@feature("Models", "handlers.lift")
def _() -> Problem:
    def with_param(x: Array) -> None:
        mean: Any = numpyro.param("mean", jnp.zeros(2))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

    model = handlers.lift(with_param, prior={"mean": dist.Normal(jnp.zeros(2), 2.0).to_event(1)})
    return Problem(model, AutoNormal(model))


@feature("Models", "handlers.block")
def _() -> Problem:
    model = handlers.block(handlers.seed(scaled, 0), hide=["scale"])
    return Problem(model, AutoNormal(model))


@feature("Models", "handlers.do")
def _() -> Problem:
    model = handlers.do(scaled, data={"scale": jnp.array(0.7)})
    return Problem(model, AutoNormal(model))


@feature("Models", "scan with a plate inside", steps=compiled)
def _() -> Problem:
    def step(before: Any, x: Any) -> tuple[Any, None]:
        with numpyro.plate("pair", 2):
            now = numpyro.sample("now", dist.Normal(0.5 * before, 1.0))
            numpyro.sample("x", dist.Normal(now, 1.0), obs=x)
        return now, None

    def model(x: Array) -> None:
        scan(step, jnp.zeros(2), x)

    def guide(x: Array) -> None:
        loc: Any = numpyro.param("loc", jnp.zeros((4, 2)))
        scale = width(())

        def step(before: Any, loc: Any) -> tuple[Any, None]:
            with numpyro.plate("pair", 2):
                now = numpyro.sample("now", dist.Normal(loc + 0.1 * before, scale))
            return now, None

        scan(step, jnp.zeros(2), loc)

    return Problem(model, guide)


@feature("Models", "scan with a plate inside, discrete", steps=compiled)
def _() -> Problem:
    def model(x: Array) -> None:
        def step(before: Any, x: Any) -> tuple[Any, None]:
            with numpyro.plate("pair", 2):
                now = jnp.asarray(numpyro.sample("now", dist.Bernoulli(logits=0.5 * before)), float)
                numpyro.sample("x", dist.Normal(now, 1.0), obs=x)
            return now, None

        scan(step, jnp.zeros(2), x)

    def guide(x: Array) -> None:
        weight: Any = numpyro.param("weight", jnp.array(0.1))

        def step(before: Any, x: Any) -> tuple[Any, None]:
            with numpyro.plate("pair", 2):
                now = jnp.asarray(numpyro.sample("now", dist.Bernoulli(logits=weight * (x + before))), float)
            return now, None

        scan(step, jnp.zeros(2), x)

    return Problem(model, guide, loss=proxvi.LeaveOneOutELBO(3))


@feature("Models", "a subsampled plate")
def _() -> Problem:
    def model(x: Array) -> None:
        mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
        with numpyro.plate("data", 4, subsample_size=2) as rows:
            numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x[rows])

    return Problem(model, AutoNormal(model))


@feature("Models", "an improper prior")
def _() -> Problem:
    def model(x: Array) -> None:
        mean = numpyro.sample("mean", dist.ImproperUniform(dist.constraints.real_vector, (), (2,)))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

    def guide(x: Array) -> None:
        loc: Any = numpyro.param("loc", jnp.zeros(2))
        numpyro.sample("mean", dist.Normal(loc, width()).to_event(1))

    return Problem(model, guide)


# Networks and their state


def counting(x: Array) -> None:
    initial: Any = {"n": jnp.zeros(())}
    count: Any = mutable("count", initial)
    count["n"] = count["n"] + 1.0
    gaussian(x)


@feature("Networks", "numpyro.mutable")
def _() -> Problem:
    return Problem(counting, AutoNormal(gaussian))


SEVERAL = "NumPyro keeps mutable state for one particle alone; use `Trace_ELBO()`"


@feature(
    "Networks",
    "numpyro.mutable, 3 particles",
    status=dict.fromkeys(COLUMNS, Refused("loss", SEVERAL)),
)
def _() -> Problem:
    return Problem(counting, AutoNormal(gaussian), loss=Trace_ELBO(3))


class _Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.BatchNorm(use_running_average=False)(nn.Dense(2)(x))


@feature("Networks", "flax_module (linen) with batch norm")
def _() -> Problem:
    def guide(x: Array) -> None:
        net: Any = flax_module("net", _Encoder(), mutable=["batch_stats"], input_shape=(4, 2))
        amortised(x, net(x))

    return Problem(local, guide)


@feature("Networks", "nnx_module with batch norm")
def _() -> Problem:
    class Encoder(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)

        def __call__(self, x: Array) -> Array:
            return self.norm(self.linear(x))

    encoder = Encoder(nnx.Rngs(0))

    def guide(x: Array) -> None:
        amortised(x, nnx_module("net", encoder)(x))

    return Problem(local, guide)


@feature("Networks", "eqx_module with batch norm")
def _() -> Problem:
    class Encoder(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key: Array) -> None:
            self.linear = eqx.nn.Linear(2, 2, key=key)
            self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")

        def __call__(self, x: Array, state: Any) -> tuple[Array, Any]:
            return self.norm(self.linear(x), state)

    encoder, first = eqx.nn.make_with_state(Encoder)(KEY)

    def guide(x: Array) -> None:
        net: Any = eqx_module("net", encoder)
        initial: Any = {"state": first}
        holder: Any = mutable("net$state", initial)
        mean, holder["state"] = jax.vmap(net, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(
            x, holder["state"]
        )
        amortised(x, mean)

    return Problem(local, guide)


# Optimisers

LOOKAHEAD = "it wants its parameters in pairs, fast and slow, which no SVI gives it"


def with_optimiser(optim: Callable[[], Any]) -> Callable[[], Problem]:
    return lambda: Problem(gaussian, AutoNormal(gaussian), optim=optim())


def refused_everywhere(argument: str, reason: str) -> dict[str, Refused | NotMeaningful]:
    return dict.fromkeys(COLUMNS, Refused(argument, reason))


OPTIMISERS: dict[str, Callable[[], Any]] = {
    "numpyro.optim.Adam": lambda: numpyro.optim.Adam(0.05),
    "numpyro.optim.ClippedAdam": lambda: numpyro.optim.ClippedAdam(0.05),
    "optax.inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.05),
    "optax.apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.05), 3),
    "optax.contrib.schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.05), 0.05),
    "optax.contrib.reduce_on_plateau": lambda: optax.chain(optax.adam(0.05), optax.contrib.reduce_on_plateau()),
}
for kind, make in OPTIMISERS.items():
    feature("Optimisers", kind)(with_optimiser(make))

feature(
    "Optimisers",
    "optax.MultiSteps, its gradient_transformation()",
    steps=functools.partial(updates, steps=4),  # every other one moves
)(with_optimiser(lambda: optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation()))
feature(
    "Optimisers",
    "numpyro.optim.Minimize",
    status=refused_everywhere("optim", "it runs to the end within one step, so there is no past to keep close to"),
)(with_optimiser(numpyro.optim.Minimize))
feature("Optimisers", "optax.lookahead", status=refused_everywhere("optim", LOOKAHEAD))(
    with_optimiser(lambda: optax.lookahead(optax.adam(0.05), 5, 0.5))
)
feature(
    "Optimisers",
    "optax.MultiSteps itself",
    status=refused_everywhere("optim", "it is no gradient transformation; its `gradient_transformation()` is"),
)(with_optimiser(lambda: optax.MultiSteps(optax.adam(0.05), 2)))
feature(
    "Optimisers",
    "optax.lbfgs",
    status=refused_everywhere("optim", "its line search evaluates the loss elsewhere, which an SVI does not offer"),
)(with_optimiser(optax.lbfgs))


# JAX


@feature("JAX", "jax.checkpoint in the model")
def _() -> Problem:
    @jax.checkpoint
    def decode(z: Any, kernel: Any) -> Array:
        return jnp.tanh(z @ kernel)

    def model(x: Array) -> None:
        mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
        kernel = numpyro.param("kernel", jnp.eye(2))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", dist.Normal(decode(mean, kernel), 1.0).to_event(1), obs=x)

    return Problem(model, AutoNormal(model))


@feature("JAX", "float64", context=lambda: jax.enable_x64(True))
def _() -> Problem:
    return Problem(gaussian, AutoNormal(gaussian), args=(np.asarray(X, np.float64),))


@feature("JAX", "bfloat16 parameters")
def _() -> Problem:
    def guide(x: Array) -> None:
        loc = numpyro.param("loc", jnp.zeros(2, jnp.bfloat16))
        log_scale: Any = numpyro.param("log_scale", jnp.zeros(2, jnp.bfloat16))
        numpyro.sample("mean", dist.Normal(loc, jnp.exp(log_scale)).to_event(1))

    return Problem(gaussian, guide)


def on_mesh(kind: jax.sharding.AxisType) -> Callable[[], Problem]:
    def build() -> Problem:
        mesh = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(kind, kind))
        split = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))  # noqa: E731
        x = jax.device_put(jnp.arange(32.0).reshape(4, 8) / 10.0, split("rows", "columns"))
        kernel = jax.device_put(0.1 * jnp.eye(8), split(None, "columns"))

        def model(x: Array) -> None:
            with numpyro.plate("data", 4):
                z = numpyro.sample("z", dist.Normal(jnp.zeros(8), 1.0).to_event(1))
                numpyro.sample("x", dist.Normal(jnp.asarray(z), 1.0).to_event(1), obs=x)

        def guide(x: Array) -> None:
            weight: Any = numpyro.param("weight", kernel)
            mean = jnp.einsum("ri,ij->rj", x, weight, out_sharding=jax.P("rows", "columns") if explicit else None)
            with numpyro.plate("data", 4):
                numpyro.sample("z", dist.Normal(mean, width((8,))).to_event(1))

        explicit = kind == jax.sharding.AxisType.Explicit
        return Problem(model, guide, args=(x,))

    return build


def mesh_of(kind: jax.sharding.AxisType) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: jax.set_mesh(jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(kind, kind)))


feature("JAX", "2 × 4 mesh of Explicit axes", context=mesh_of(jax.sharding.AxisType.Explicit))(
    on_mesh(jax.sharding.AxisType.Explicit)
)
feature("JAX", "2 × 4 mesh of Auto axes", context=mesh_of(jax.sharding.AxisType.Auto))(
    on_mesh(jax.sharding.AxisType.Auto)
)


def simple() -> Problem:
    return Problem(gaussian, AutoNormal(gaussian))


def hand_written() -> Problem:
    def guide(x: Array) -> None:
        loc: Any = numpyro.param("loc", lambda key: jax.random.normal(key, (2,)))
        numpyro.sample("mean", dist.Normal(loc, width()).to_event(1))

    return Problem(gaussian, guide)


def mapped(svi: SVI, problem: Problem) -> tuple[Any, Any, Any]:
    keys = jax.random.split(KEY, 2)
    state = jax.vmap(lambda key: svi.init(key, *problem.args))(keys)
    before, losses = jax.vmap(svi.get_params)(state), []
    update = jax.jit(jax.vmap(lambda s: svi.update(s, *problem.args)))
    for _ in range(STEPS):
        state, loss = update(state)
        losses.append(loss)
    return before, jax.vmap(svi.get_params)(state), losses


def by_run(svi: SVI, problem: Problem) -> tuple[Any, Any, Any]:
    before = svi.get_params(svi.init(KEY, *problem.args))
    result = svi.run(KEY, STEPS, *problem.args, progress_bar=False)
    return before, result.params, result.losses


def by_mapped_run(svi: SVI, problem: Problem) -> tuple[Any, Any, Any]:
    keys = jax.random.split(KEY, 2)
    before = jax.vmap(lambda key: svi.get_params(svi.init(key, *problem.args)))(keys)
    result = jax.vmap(lambda key: svi.run(key, STEPS, *problem.args, progress_bar=False)[::2])(keys)
    return before, *result


def by_jitted_run(svi: SVI, problem: Problem) -> tuple[Any, Any, Any]:
    before = svi.get_params(svi.init(KEY, *problem.args))
    params, losses = jax.jit(lambda key: svi.run(key, STEPS, *problem.args, progress_bar=False)[::2])(KEY)
    return before, params, losses


feature("JAX", "update under vmap", steps=mapped)(hand_written)
feature("JAX", "update under jit", steps=compiled)(simple)
feature("JAX", "update with a donated state", steps=functools.partial(compiled, donate_argnums=0))(simple)
feature("JAX", "run", steps=by_run)(simple)
feature("JAX", "run under vmap", steps=by_mapped_run)(hand_written)
feature("JAX", "run under jit", steps=by_jitted_run)(hand_written)
feature("JAX", "forward-mode differentiation", steps=functools.partial(updates, forward_mode_differentiation=True))(
    simple
)


def proximity_svi(problem: Problem, column: str, off: tuple[str, ...] = ()) -> proxvi.ProximitySVI:
    """With the constraint of `column`, and those of `off` at magnitude 0."""
    loss, constraints = problem.loss, [proxvi.Proximity(STATISTICS[name], magnitude=0.0) for name in off]
    if column == "annealing":
        loss = proxvi.AnnealedELBO(loss, optax.exponential_decay(0.5, 100, 0.1))
    elif column in STATISTICS:
        constraints.append(proxvi.Proximity(STATISTICS[column], magnitude=1.0))
    return proxvi.ProximitySVI(problem.model, problem.guide, problem.optim, loss, constraints)


@functools.cache
def of_numpyro(name: str) -> tuple[Any, Any, Any]:
    row = FEATURES[name]
    problem = row.build()
    return row.steps(SVI(problem.model, problem.guide, problem.optim, problem.loss), problem)


def ours(name: str, column: str, off: tuple[str, ...] = ()) -> tuple[Any, Any, Any]:
    problem = FEATURES[name].build()
    return FEATURES[name].steps(proximity_svi(problem, column, off), problem)


def same_bits(one: Any, two: Any) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def is_finite(tree: Any) -> bool:
    return all(np.all(np.isfinite(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree))


@pytest.fixture(autouse=True)
def ranks_are_numpyros_business() -> Any:
    with jax.numpy_rank_promotion("allow"):
        yield


QUICK = (
    "AutoNormal",
    "AutoDelta",
    "Trace_ELBO, multi_sample_guide=True",
    "numpyro.mutable, 3 particles",
    "optax.lookahead",
)
CELLS = [
    pytest.param(name, column, marks=() if name in QUICK else pytest.mark.nightly, id=f"{name}-{column}")
    for name in FEATURES
    for column in COLUMNS
]


@pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")  # so few steps
@pytest.mark.parametrize(("name", "column"), CELLS)
def test_each_cell_is_what_the_table_says(name: str, column: str) -> None:
    row = FEATURES[name]
    status = row.status.get(column)
    with row.context():
        if isinstance(status, Refused):
            with pytest.raises((TypeError, ValueError), match=f"`{status.argument}`.*; ") as caught:
                ours(name, column)
            assert "proxvi" in str(caught.traceback[-1].path)
            return
        before, after, losses = ours(name, column)
        assert is_finite(losses)
        assert is_finite(after)
        assert not same_bits(before, after)
        silent = column == "()" or isinstance(status, NotMeaningful)
        assert same_bits(after, of_numpyro(name)[1]) == silent
        if column == "()":
            off = tuple(statistic for statistic in STATISTICS if statistic not in row.status)
            assert same_bits(ours(name, "()", off)[1], after)


INTRODUCTION = """\
# What works with what

`ProximitySVI` stands in for `numpyro.infer.SVI`. This is what it does with {features} features of NumPyro, Optax and
JAX. The columns are the paper's constraint, `Proximity`, on one of three statistics, deterministic annealing
(`AnnealedELBO`), and no constraint, `()`. Not in this table: `SpeedLimit` (which refuses forward-mode differentiation),
`luck` and `race`.

- works: a few steps have finite losses and finite parameters, and the constraint changes them. With `()`, and with
  every magnitude at 0, the parameters are those of NumPyro's `SVI`, bit for bit.
- refused: an error of this library names the argument and a remedy.
- *not meaningful*: it runs, and there is nothing to act on: the parameters are those of NumPyro's `SVI`.

`tests/svi/test_feature_matrix.py` checks each of the {cells} cells and makes this page from the same table."""


def features_page() -> str:
    """The text of `docs/features.md`."""
    lines = [INTRODUCTION.format(features=len(FEATURES), cells=len(FEATURES) * len(COLUMNS))]
    notes: dict[str, int] = {}
    for group in dict.fromkeys(row.group for row in FEATURES.values()):
        columns = (f"`{column}`" if column != "annealing" else column for column in COLUMNS)
        lines += ["", f"## {group}", "", f"| | {' | '.join(columns)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        for name, row in FEATURES.items():
            if row.group == group:
                cells_of_row = (_cell(row.status.get(column), notes) for column in COLUMNS)
                lines.append(f"| {name} | {' | '.join(cells_of_row)} |")
    lines += ["", "## Why", "", *(f"{number}. {note[0].upper()}{note[1:]}." for note, number in notes.items())]
    return "\n".join(lines) + "\n"


def _cell(status: Refused | NotMeaningful | None, notes: dict[str, int]) -> str:
    if status is None:
        return "works"
    number = notes.setdefault(status.reason, len(notes) + 1)
    return f"refused: `{status.argument}` ({number})" if isinstance(status, Refused) else f"*not meaningful* ({number})"


def test_the_page_is_made_of_the_table() -> None:
    assert PAGE.read_text() == features_page()
    assert len(CELLS) >= 60


if __name__ == "__main__":
    PAGE.write_text(features_page())
