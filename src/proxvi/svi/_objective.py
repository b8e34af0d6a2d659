"""The objective of `ProximitySVI`, `−ELBO + Σ k d`, with its statistics read off the guide."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer import ELBO, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.primitives import Messenger

from proxvi import _distributions
from proxvi._arguments import Arguments
from proxvi._typing import Distance, Distribution, Guide, Int, Model, Params, Scalar, Trace, Tree
from proxvi._validation import check_statistic
from proxvi.constraints import LimitTelemetry, Proximity, SpeedLimit, Telemetry
from proxvi.estimators import (
    LeaveOneOutELBO,
    MultiParticleELBO,
    OrderedTraceELBO,
    ScheduledELBO,
    VimcoELBO,
    scores_of_parents,
)
from proxvi.transforms import ProximityState

# These run the guide through `vectorize_particles_fn`, once a particle, so that its distributions can be read there.
OBSERVABLE = (Trace_ELBO, OrderedTraceELBO, TraceGraph_ELBO, TraceMeanField_ELBO, LeaveOneOutELBO, VimcoELBO)
FROM_THE_GUIDE = ("prior", "params", "key")  # what a statistic may take beside the distributions
PARTICLES = "particles"  # the name of their axis


class StepInputs(NamedTuple):
    """What one step depends on, beside the parameters."""

    key: Array
    args: tuple[Any, ...]  # of the model and the guide
    kwargs: dict[str, Any]
    mutable_state: Params | None
    step: Int[Array, ""]
    constraints: tuple[ProximityState, ...] = ()
    first_loss: Scalar | float = 0.0


class StepOutputs(NamedTuple):
    """What one step computes beside its gradient: the true −ELBO, and the next states."""

    loss: Array
    mutable_state: Params | None
    constraints: tuple[ProximityState, ...]


class Observation(NamedTuple):
    """A statistic of the guide's distributions at one sample of it, or the mean over particles.

    Attributes:
        value: the statistic.
        score: 0 with the slope of `log q` of the sample, if the value holds distributions that depend on a sample that
            carries no gradient: their distance then needs it. An array has the score term in it.
    """

    value: Tree
    score: Array | None


@dataclass(frozen=True)
class Objective:
    """`−ELBO(λ) + Σ k_t d(f(λ̃_t), f(λ))` of one model and guide.

    Attributes:
        model: NumPyro's.
        guide: NumPyro's.
        loss: the estimator of the ELBO.
        constraints: those of the sum, and speed limits, which are not in it.
        taken: what the statistic of each constraint takes beside the distributions.
        constrain: maps unconstrained parameters, which everything here takes, to what model and guide ask for.
        guide_params: names of the guide's parameters, which alone the constraints move.
        latent_sites: names of the guide's sites, without point masses.
        latent_plates: names of the model's plates in which nothing is observed: their elements are units, not data.
        has_sampled_parents: whether a distribution may depend on a sample that carries no gradient.
        active: which constraints are in the sum. Without any, the step compiles to NumPyro's own, bit for bit.
        limits: which are speed limits.
    """

    model: Model
    guide: Guide
    loss: ScheduledELBO
    constraints: tuple[Proximity | SpeedLimit, ...]
    taken: tuple[tuple[str, ...], ...]
    constrain: Callable[[Params], Params]
    guide_params: tuple[str, ...] = ()
    latent_sites: tuple[str, ...] = ()
    latent_plates: tuple[str, ...] = ()
    has_sampled_parents: bool = False
    active: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()

    def bind(self, params: Params, inputs: StepInputs) -> "Objective":
        """The same with the last six attributes, found by a trace of the guide and of the model."""
        on = {i: c for i, c in enumerate(self.constraints) if not c.is_off}
        found: dict[str, Any] = {
            "active": tuple(i for i, c in on.items() if isinstance(c, Proximity)),
            "limits": tuple(i for i, c in on.items() if isinstance(c, SpeedLimit)),
        }

        def look(key: Array) -> None:
            constrained = self._constrained(params, inputs)
            trace = self._guide_trace(key, constrained, inputs)
            model = self._model_trace(key, constrained, inputs, trace)
            observed = {f.name for s in model.values() if s.get("is_observed") for f in s["cond_indep_stack"]}
            plates = {name for name, site in model.items() if site["type"] == "plate"}
            found["guide_params"] = tuple(sorted(n for n, s in trace.items() if s["type"] == "param" and n in params))
            found["latent_sites"] = tuple(name for name, site in trace.items() if _is_spread_out(site))
            found["latent_plates"] = tuple(sorted(plates - observed))
            takes_prior = any("prior" in taken for taken in self.taken)  # which may be known at the sample only
            parents, _ = scores_of_parents(trace, found["latent_sites"], any_order=True, known_at_sample=takes_prior)
            found["has_sampled_parents"] = bool(parents)

        jax.eval_shape(look, inputs.key)
        return replace(self, **found)

    def init(self, params: Params, inputs: StepInputs) -> tuple[ProximityState, ...]:
        """The constraints' states before the first step."""
        own, states = self._of_guide(params), []
        for i, constraint in enumerate(self.constraints):
            observe = self._observation(i, params, inputs)
            shapes = jax.eval_shape(lambda p, observe=observe: observe(p).value, own)
            check_statistic(shapes)
            if isinstance(constraint, SpeedLimit) and _holds_distributions(shapes):
                raise TypeError(
                    f"`statistic` of a SpeedLimit must return arrays, got distributions from {constraint!r}; use "
                    "`entropy`."
                )
            if isinstance(constraint, SpeedLimit):
                states.append(
                    ProximityState(constraint.init(lambda shapes=shapes: shapes), LimitTelemetry.unmeasured())
                )
            else:
                state = constraint.init(own, lambda shapes=shapes: shapes)
                states.append(ProximityState(state, Telemetry.unmeasured()))
        return tuple(states)

    def __call__(self, params: Params, inputs: StepInputs) -> tuple[Array, StepOutputs]:
        """`−ELBO + Σ k d`, to be differentiated."""
        objective, mutable_state, seen = self._loss_and_statistics(params, inputs)
        values = None if seen is None else seen.values
        loss: Any = objective
        if self.loss.changes_gradient:  # report the true loss, of the same samples
            loss = self._true_loss(params, inputs, {} if seen is None else seen.draws)
        total, states = jnp.zeros(()), list(inputs.constraints)
        # The barrier keeps the loss itself in the shape that NumPyro compiles it to, to the last bit.
        unit = jax.lax.optimization_barrier(jax.lax.stop_gradient(loss))
        for i in self.active:
            distance, magnitude, after = self.constraint_step(i, params, inputs, unit, values)
            total = total + magnitude * distance
            states[i] = ProximityState(after, Telemetry(distance, magnitude, states[i].telemetry.share))
        return objective + total, StepOutputs(loss, mutable_state, tuple(states))

    def constraint_step(
        self, i: int, params: Params, inputs: StepInputs, loss: Array, values: dict[int, Observation] | None = None
    ) -> tuple[Array, Array, Any]:
        """Distance, magnitude and next state of the `i`-th constraint; `values` are the statistics, where known."""
        observe = self._observation(i, jax.lax.stop_gradient(params), inputs)
        own, constraint = self._of_guide(params), self.constraints[i]
        assert isinstance(constraint, Proximity)
        value, score = observe(own) if values is None else values[i]
        if _holds_distributions(value):
            constraint = replace(constraint, distance=_over_particles(constraint.distance, self._particles, score))
        return constraint.step(inputs.constraints[i].constraint, own, value, lambda p: observe(p)[0], loss)

    def limit_step(self, i: int, before: Params, after: Params, inputs: StepInputs) -> tuple[Params, ProximityState]:
        """The parameters after a step that keeps to the `i`-th speed limit, and its next state.

        Args:
            i: number of the constraint.
            before: the parameters before the step.
            after: those to which the optimiser has led.
            inputs: of the step.
        """
        limit, old, new = self.constraints[i], self._of_guide(before), self._of_guide(after)
        assert isinstance(limit, SpeedLimit)
        observe = self._observation(i, before, inputs)
        value, slope = jax.vjp(lambda own: observe(own).value, old)
        kept, state, done = limit.limit(
            inputs.constraints[i].constraint,
            new,
            lambda: jax.tree.map(jnp.subtract, new, old),
            value,
            lambda weights: slope(weights)[0],
            limit.ranges(lambda: observe(old).value),
        )
        return {**after, **kept}, ProximityState(state, done)

    def _loss_and_statistics(self, params: Params, inputs: StepInputs) -> tuple[Any, Any, "_Seen | None"]:
        """−ELBO, the mutable state, and what could be read off the runs of the guide that the ELBO made."""
        constrained = self._constrained(params, inputs)
        elbo, model, guide = self.loss.elbo, self.model, self.guide
        if self.loss.changes_gradient:
            model, guide = self.loss.objective_at(model, guide, inputs.step, inputs.first_loss)

        # Particles run in turn to save memory: the draws of all of them would have to be kept.
        shares_draws = self.loss.changes_gradient and (elbo.num_particles == 1 or elbo.vectorize_particles is True)

        def observe(guide_trace: Trace, key: Array) -> _Seen:
            values = {i: self._observe(i, guide_trace, constrained, key, inputs) for i in self.active}
            return _Seen(values, _draws(guide_trace) if shares_draws else {})

        # Their runs of the guide keep the path of a sample that has a score.
        keeps_path = self.has_sampled_parents and isinstance(elbo, Trace_ELBO | TraceMeanField_ELBO)
        observable = type(elbo) in OBSERVABLE and not self._several_samples and not keeps_path
        observer = None
        if observable and (self.active or shares_draws):
            observer = _Observer(elbo, guide, observe)
            elbo, guide = observer.elbo, observer.guide
        if jax.tree.leaves(inputs.mutable_state):
            result = elbo.loss_with_mutable_state(inputs.key, constrained, model, guide, *inputs.args, **inputs.kwargs)
            loss, mutable_state = result["loss"], result["mutable_state"]
        else:
            loss = elbo.loss(inputs.key, constrained, model, guide, *inputs.args, **inputs.kwargs)
            mutable_state = inputs.mutable_state
        return loss, mutable_state, None if observer is None else observer.seen(inputs.key)

    def _true_loss(self, params: Params, inputs: StepInputs, draws: "_Draws") -> Any:
        """−ELBO where the objective is another; `draws` are those of the objective's guide, where known."""
        constrained = self._constrained(jax.lax.stop_gradient(params), inputs)
        elbo, guide = self.loss.elbo, self.guide
        if draws:
            guide = _DrawnAgain(elbo, guide, jax.lax.stop_gradient(draws))
            elbo = guide.elbo
        return elbo.loss(inputs.key, constrained, self.model, guide, *inputs.args, **inputs.kwargs)

    def _observation(self, i: int, params: Params, inputs: StepInputs) -> Callable[[Params], Observation]:
        """The `i`-th statistic as a function of the guide's parameters, by a run of the guide alone."""
        elbo = self.loss.elbo

        def at(own: Params) -> Observation:
            cast = {name: jax.tree.map(lambda x, p: x.astype(p.dtype), own[name], params[name]) for name in own}
            constrained = self._constrained({**params, **cast}, inputs)
            plates = {}

            def particle(key: Array) -> Observation:
                values = {**constrained, **plates}
                return self._observe(i, self._guide_trace(key, values, inputs), values, key, inputs)

            if isinstance(elbo, MultiParticleELBO):
                pair = self.model, self.guide
                plates = elbo.draw_plates(inputs.key, constrained, *pair, inputs.args, inputs.kwargs)
            if elbo.num_particles == 1:
                return particle(inputs.key)
            keys = jax.random.split(inputs.key, elbo.num_particles)  # as the ELBO splits it
            return _average_particles(_map_particles(elbo)(particle, keys))

        return at

    def _observe(self, i: int, guide_trace: Trace, constrained: Params, key: Array, inputs: StepInputs) -> Observation:
        """The `i`-th statistic, of the distributions in a trace of the guide."""
        params = self._of_guide(constrained)
        sites = {name: guide_trace[name] for name in self.latent_sites}
        q: dict[str, Any] = {
            name: _with_latent_axes(site, self.latent_plates, self._several_samples) for name, site in sites.items()
        }
        # JAX's `split` is a `fold_in` of small numbers, and the first two are the model's and the guide's.
        extra: dict[str, Any] = {"params": params, "key": jax.random.fold_in(key, 2 + i)}
        if "prior" in self.taken[i]:
            # A constraint moves the guide alone. The samples of it, on which priors may depend, have their gradient.
            fixed = jax.lax.stop_gradient(constrained)
            model_trace = self._model_trace(key, fixed, inputs, guide_trace)
            extra["prior"] = _priors(q, guide_trace, model_trace, several_samples=self._several_samples)
        magnitude = getattr(self.constraints[i], "magnitude", 0.0)  # a speed limit has none
        if inputs.constraints and not isinstance(magnitude, int | float):
            # A slope that is not finite times a magnitude of 0 is not 0: the slope has to go.
            now = magnitude(inputs.constraints[i].constraint.step) if callable(magnitude) else magnitude
            q, extra = _without_slope_where(jnp.asarray(now) <= 0.0, (q, extra))
        known_at_sample = any(isinstance(p, _distributions.KnownAtSample) for p in extra.get("prior", {}).values())
        if "prior" in extra:
            extra["prior"] = {name: _distributions.of_model(p) for name, p in extra["prior"].items()}
        scores: dict[str, _distributions.SampledParents] = {}
        if self.has_sampled_parents:
            parents, everything = scores_of_parents(
                guide_trace, tuple(sites), any_order="prior" in self.taken[i], known_at_sample=known_at_sample
            )
            axis = PARTICLES if self._particles > 1 and self.loss.elbo.vectorize_particles is True else None
            rest = everything, self._particles, axis, {}
            scores = {name: _distributions.SampledParents(score, *rest) for name, score in parents.items()}
            q = {name: _distributions.with_parents(d, scores[name]) if name in scores else d for name, d in q.items()}
        try:
            value = self.constraints[i].statistic(q, **{name: extra[name] for name in self.taken[i]})
        except KeyError as error:
            raise ValueError(
                f"`statistic` must ask for what is there, got the key {error}; the guide has the sites {sorted(q)}, "
                f"and, for `lambda q, params: ...`, the parameters {sorted(params)}."
            ) from error
        if not scores:
            return Observation(value, None)
        score = next(iter(scores.values()))
        if _holds_distributions(value):
            return Observation(value, score.everything)
        return Observation(jax.tree.map(lambda x: x + score.of_value(x), value), None)

    def _guide_trace(self, key: Array, constrained: Params, inputs: StepInputs) -> Trace:
        """The guide's trace; the key is split as in `Trace_ELBO`."""
        _, guide_key = jax.random.split(key)
        guide = numpyro.handlers.substitute(numpyro.handlers.seed(self.guide, guide_key), data=constrained)
        with _SamplesWithoutPath():
            return numpyro.handlers.trace(guide).get_trace(*inputs.args, **inputs.kwargs)

    def _model_trace(self, key: Array, constrained: Params, inputs: StepInputs, guide_trace: Trace) -> Trace:
        """The model's trace at a sample of the guide; the key is split as in `Trace_ELBO`."""
        model_key, _ = jax.random.split(key)
        model = numpyro.handlers.seed(self.model, model_key)
        if self._several_samples:  # the model sees them one at a time
            latents = {n: s["value"][0] for n, s in guide_trace.items() if s["type"] == "sample" and s["value"].size}
            model = numpyro.handlers.substitute(model, data=latents)
        else:
            model = numpyro.handlers.replay(model, guide_trace)  # pyright: ignore[reportArgumentType]
        model = numpyro.handlers.substitute(model, data=constrained)
        return numpyro.handlers.trace(model).get_trace(*inputs.args, **inputs.kwargs)

    def model_trace(self, params: Params, inputs: StepInputs) -> Trace:
        """The model's trace at a sample of the guide; within `jax.eval_shape` nothing is computed."""
        constrained = self._constrained(params, inputs)
        return self._model_trace(inputs.key, constrained, inputs, self._guide_trace(inputs.key, constrained, inputs))

    def _constrained(self, params: Params, inputs: StepInputs) -> Params:
        constrained = dict(self.constrain(params))
        if inputs.mutable_state:
            constrained.update(jax.lax.stop_gradient(inputs.mutable_state))
        return constrained

    @property
    def _several_samples(self) -> bool:
        """Whether the guide itself draws several samples, along a first axis of every site."""
        return getattr(self.loss.elbo, "multi_sample_guide", False)

    @property
    def _particles(self) -> int:
        return self.loss.elbo.num_particles

    def _of_guide(self, params: Params) -> Params:
        return {name: params[name] for name in self.guide_params}


class _SamplesWithoutPath(Messenger):
    """A sample whose score carries the gradient has none of its own, as in NumPyro's `get_importance_trace`."""

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and not msg["is_observed"] and not msg["fn"].has_rsample:
            msg["value"], msg["intermediates"] = jax.lax.stop_gradient(msg["value"]), None


_Draws = dict[str, tuple[Any, Any]]  # by site: the value, and the intermediate results of its transforms


class _Seen(NamedTuple):
    """What is read off one run of a guide, or off one a particle."""

    values: dict[int, Observation]  # the statistics, averaged over particles
    draws: _Draws  # of each particle


class _Observer:
    """Reads statistics and draws off the runs of the guide that an ELBO makes.

    One backward pass then covers both the ELBO and the constraint, instead of one for each.
    """

    def __init__(self, elbo: ELBO, guide: Guide, observe: Callable[[Trace, Array], _Seen]) -> None:
        self._traces: list[Trace] = []
        self._guide, self._observe = guide, observe
        self._seen: _Seen | None = None
        self.elbo = copy.copy(elbo)
        self._map_particles = _map_particles(elbo)
        self.elbo.vectorize_particles_fn = self._each_particle

    def seen(self, key: Array) -> _Seen:
        """What was seen. `key` is the step's, for an ELBO of one particle."""
        return self._of_first_run(key) if self._seen is None else self._seen

    def guide(self, *args: Any, **kwargs: Any) -> Any:
        """The guide, which notes its traces."""
        with numpyro.handlers.trace() as trace:
            result = self._guide(*args, **kwargs)
        self._traces.append(trace)
        return result

    def _of_first_run(self, key: Array) -> _Seen:
        # An ELBO may run it again for its own purposes; the first run is the particle's.
        return self._observe(self._traces[0], key)

    def _each_particle(self, function: Callable[[Array], Any], keys: Array) -> Any:
        def run(key: Array) -> tuple[Any, _Seen]:
            self._traces.clear()
            both = function(key), self._of_first_run(key)
            self._traces.clear()  # what is traced here must not be held beyond it
            return both

        result, (values, draws) = self._map_particles(run, keys)
        self._seen = _Seen({i: _average_particles(statistic) for i, statistic in values.items()}, draws)
        return result


class _DrawnAgain(Messenger):
    """Gives a guide the draws of another run with the same keys, for an ELBO that would draw the same.

    Within a loop over steps, XLA would otherwise draw twice, and compute twice what depends on the draws.
    """

    def __init__(self, elbo: ELBO, guide: Guide, draws: _Draws) -> None:
        super().__init__(guide)
        self._draws, self._map_particles = draws, _map_particles(elbo)
        self._of_particle: _Draws = draws if elbo.num_particles == 1 else {}
        self.elbo = copy.copy(elbo)
        self.elbo.vectorize_particles_fn = self._each_particle

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] in self._of_particle:
            if msg["value"] is None and msg["kwargs"]["rng_key"] is None:
                numpyro.prng_key()  # the site's: the sites after it draw what they would
            msg["value"], msg["intermediates"] = self._of_particle[msg["name"]]

    def _each_particle(self, function: Callable[[Array], Any], keys: Array) -> Any:
        def run(key_and_draws: tuple[Array, _Draws]) -> Any:
            key, self._of_particle = key_and_draws
            result = function(key)
            self._of_particle = {}  # what is traced here must not be held beyond it
            return result

        return self._map_particles(run, (keys, self._draws))


def _draws(guide_trace: Trace) -> _Draws:
    # Not of mixtures of point masses: where these lie follows from the other draws, and at a value with another last
    # bit the density would be 0.
    sites = {name: site for name, site in guide_trace.items() if _is_spread_out(site) and not _has_points(site["fn"])}
    return {name: (site["value"], site["intermediates"]) for name, site in sites.items()}


def _has_points(d: Distribution) -> bool:
    leaves = jax.tree.leaves(d, is_leaf=lambda node: isinstance(node, dist.Delta))
    return any(isinstance(leaf, dist.Delta) for leaf in leaves)


def statistic_arguments(constraints: tuple[Proximity | SpeedLimit, ...]) -> tuple[tuple[str, ...], ...]:
    """What each statistic takes beside the distributions, by the names in its signature."""
    taken = []
    for constraint in constraints:
        arguments = Arguments.of(constraint.statistic)
        if unknown := set(arguments.required) - set(FROM_THE_GUIDE):
            raise TypeError(
                f"`statistic` may take `prior`, `params` and `key` beside the guide's distributions, got "
                f"{sorted(unknown)}; close over anything else."
            )
        taken.append(tuple(name for name in FROM_THE_GUIDE if arguments.takes(name)))
    return tuple(taken)


def _is_spread_out(site: dict[str, Any]) -> bool:
    """Whether this is a latent variable that is no point mass."""
    if site["type"] != "sample" or site["is_observed"]:
        return False
    return not isinstance(_distributions.innermost(site["fn"]), dist.Delta | dist.Unit)


def _with_latent_axes(site: dict[str, Any], latent_plates: tuple[str, ...], several_samples: bool) -> Distribution:
    """Make event axes of the batch axes to the right of every plate of data, and of an axis of samples.

    So a vector of latents need not say `to_event`, and weights in a plate of features are the same as expanded ones.
    """
    plates = [-frame.dim for frame in site["cond_indep_stack"] if frame.name not in latent_plates]
    q = site["fn"]
    return q.to_event(min([*plates, len(q.batch_shape) + (0 if several_samples and q.batch_shape else 1)]) - 1)


def _priors(
    q: dict[str, Any], guide_trace: Trace, model_trace: Trace, *, several_samples: bool
) -> dict[str, Distribution]:
    """The model's distributions at the sites of the guide.

    A guide may sample all latents at once, as AutoMultivariateNormal does, and hand them on as point masses whose
    density is that of the change of variables. Their prior is then known at the sample only. So is one whose events
    are not those of the guide, such as a MultivariateNormal of what AutoNormal samples one by one.
    """

    def at_sample(names: list[str], d: Distribution) -> _distributions.KnownAtSample:
        log_density = jnp.zeros(())
        for name in names:
            log_density = log_density + jnp.sum(_distributions.log_density(model_trace[name]))
            if name in guide_trace and name not in q:
                log_density = log_density - jnp.sum(_distributions.log_density(guide_trace[name]))
        # The model has seen one of several samples; their axis is one of the batch.
        samples = d.batch_shape[0] if several_samples and d.batch_shape else 1
        return _distributions.KnownAtSample(samples * log_density)

    prior: dict[str, Distribution] = {}
    for name, d in q.items():
        if name in model_trace:
            p = model_trace[name]["fn"]
            alike = _distributions.innermost(p).event_shape == _distributions.innermost(d).event_shape
            prior[name] = p if alike else at_sample([name], d)
    alone = [name for name in q if name not in model_trace]
    rest = [n for n, s in model_trace.items() if s["type"] == "sample" and not s["is_observed"] and n not in q]
    if rest and len(alone) > 1:
        raise ValueError(
            f"`statistic` takes the prior of {rest}, which the guide must sample by these names, or all of them at one "
            f"site of its own, got the sites {sorted(q)}; constrain `entropy`, which needs no prior."
        )
    if rest and alone:  # without such a site, the rest are point masses or enumerated, and no divergence is theirs
        prior[alone[0]] = at_sample(rest, q[alone[0]])
    return prior


def _without_slope_where(off: Array, tree: Tree) -> Tree:
    """The same values; where `off`, without a gradient."""

    def gate(x: Any) -> Any:
        is_real = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        return jnp.where(off, jax.lax.stop_gradient(x), x) if is_real else x

    return jax.tree.map(gate, tree)


def _map_particles(elbo: ELBO) -> Callable[..., Any]:
    """As the ELBO maps a function over its particles; within `vmap` their axis has a name."""
    if elbo.vectorize_particles is True:
        return lambda function, keys: jax.vmap(function, axis_name=PARTICLES)(keys)
    return elbo.vectorize_particles_fn


def _average_particles(observation: Observation) -> Observation:
    """The mean over particles of arrays; distributions have none, and stay separate along the first axis."""
    if _holds_distributions(observation.value):
        return observation
    return Observation(jax.tree.map(lambda x: jnp.mean(x, axis=0), observation.value), None)


def _over_particles(distance: Distance, particles: int, score: Array | None) -> Distance:
    """The mean of the distances of each particle: distributions of a unit differ with the sample above it."""

    def mean(reference: Tree, current: Tree) -> Array:
        each = jax.vmap(distance)(reference, current) if particles > 1 else distance(reference, current)
        if score is not None:
            others = (jnp.sum(each) - each) / max(particles - 1, 1)
            each = each + jax.lax.stop_gradient(each - others) * score
        return jnp.mean(each)

    return mean if particles > 1 or score is not None else distance


def _holds_distributions(tree: Tree) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Distribution))
    return any(isinstance(leaf, Distribution) for leaf in leaves)
