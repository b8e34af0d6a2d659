"""The objective of `ProximitySVI`, `−ELBO + Σ k d`, of one model and guide: how it is put together at one step."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import Array

from proxvi._arguments import Arguments
from proxvi.constraints import Proximity, Telemetry
from proxvi.estimators import MultiParticleELBO, TemperedELBO
from proxvi.svi._guides import OBSERVABLE, Observer, holds_distributions, latent_sites, over_particles
from proxvi.transforms import ProximityState


class Penalised:
    """`−ELBO(λ) + Σ k_t d(f(λ̃_t), f(λ))`, and what the constraints see of the guide.

    Parameters are the unconstrained ones; `constrain` maps them to what the model and guide ask for.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        loss: Any,
        constraints: tuple[Proximity, ...],
        static_kwargs: dict[str, Any],
    ) -> None:
        self.model, self.guide, self.static_kwargs = model, guide, static_kwargs
        self.constraints = constraints
        self.loss = loss
        self._constrain: Callable[[Any], Any] | None = None
        # A magnitude that is the number 0 switches a constraint off: the step compiles to NumPyro's own, bit for bit.
        self.active = [i for i, c in enumerate(constraints) if not _is_zero(c.magnitude)]
        self._arguments = tuple(Arguments.of(c.statistic, None) for c in constraints)
        for arguments in self._arguments:
            unknown = set(arguments.required) - {"prior", "params", "key"}
            if unknown:
                raise TypeError(
                    f"`statistic` may take `prior`, `params` and `key` beside the guide's distributions, got "
                    f"{sorted(unknown)}; close over anything else."
                )

    def with_loss(self, loss: Any) -> "Penalised":
        """The same with another ELBO."""
        other = copy.copy(self)
        other.loss = loss
        return other

    @property
    def estimator(self) -> Any:
        """The ELBO itself, without a temperature."""
        return self.loss.elbo if isinstance(self.loss, TemperedELBO) else self.loss

    def bind(self, constrain: Callable[[Any], Any], params: dict[str, Any], state: Any, args: Any, kwargs: Any) -> None:
        """Find out which parameters are the guide's: the constraints' gradient goes to those only."""
        self._constrain = constrain
        key = jax.random.key(0)  # only names are asked for
        trace, _ = self._traces(key, self._constrained(params, state), args, kwargs, prior=False)
        self._guide_params = sorted(name for name, site in trace.items() if site["type"] == "param" and name in params)

    def start(self, params: dict[str, Any], mutable_state: Any, args: Any, kwargs: Any) -> tuple[ProximityState, ...]:
        """The constraints' states before the first step."""
        own, key = self._of_guide(params), jax.random.key(0)  # only shapes are asked for
        states = []
        for i, constraint in enumerate(self.constraints):
            at = self._statistic(i, params, mutable_state, key, args, kwargs)
            start = constraint.init(own, lambda at=at: jax.eval_shape(at, own))
            states.append(ProximityState(start, Telemetry.unmeasured()))
        return tuple(states)

    def unweighted(
        self, params: dict[str, Any], mutable_state: Any, batch: Any, size: int
    ) -> tuple[list[str], list[str]]:
        """Latent variables that all rows share, and observations of rows that stand for those of the batch alone."""
        shared, unweighted = [], []

        def look(key: Array) -> None:
            _, trace = self._traces(key, self._constrained(params, mutable_state), batch, {}, prior=True)
            for name, site in trace.items():
                if site["type"] == "sample":
                    of_rows = size in jnp.shape(site["value"])
                    if not site["is_observed"] and not of_rows:
                        shared.append(name)
                    elif site["is_observed"] and of_rows and site["scale"] is None:
                        unweighted.append(name)

        jax.eval_shape(look, jax.random.key(0))
        return shared, unweighted

    def __call__(
        self, params: dict[str, Any], svi_state: Any, key: Any, args: Any, kwargs: Any
    ) -> tuple[Array, tuple[Array, Any, tuple[ProximityState, ...]]]:
        """`−ELBO + Σ k d`, with `(−ELBO, mutable state, the constraints' next states)` beside it."""
        objective, mutable_state, values = self._loss_and_values(params, svi_state, key, args, kwargs)
        loss = objective
        if isinstance(self.loss, TemperedELBO):  # the loss to report is the true one; the samples are the same
            constrained = self._constrained(jax.lax.stop_gradient(params), svi_state.mutable_state)
            loss = self.estimator.loss(key, constrained, self.model, self.guide, *args, **kwargs, **self.static_kwargs)
        total, states = jnp.zeros(()), list(svi_state.constraints)
        # The barrier keeps the loss itself in the shape that NumPyro compiles it to, to the last bit.
        seen = jax.lax.optimization_barrier(jax.lax.stop_gradient(loss))
        for i in self.active:
            state = states[i]
            magnitude, first_loss = self.constraints[i].strength(state.constraint, seen)
            value = None if values is None else values[i]
            distance, reference = self.distance(i, params, svi_state, key, args, kwargs, value)
            total = total + magnitude * distance
            states[i] = ProximityState(
                self.constraints[i].advance(state.constraint, first_loss, reference),
                Telemetry(distance, magnitude, state.telemetry.share),
            )
        return objective + total, (loss, mutable_state, tuple(states))

    def distance(
        self, i: int, params: dict[str, Any], svi_state: Any, key: Any, args: Any, kwargs: Any, value: Any = None
    ) -> tuple[Array, Any]:
        """The `i`-th distance and the next reference; `value` is the statistic, if it is known already."""
        at = self._statistic(i, jax.lax.stop_gradient(params), svi_state.mutable_state, key, args, kwargs)
        own, constraint = self._of_guide(params), self.constraints[i]
        value = at(own) if value is None else value
        if self.estimator.num_particles > 1 and holds_distributions(value):
            constraint = replace(constraint, distance=_each_particle(constraint.distance))
        return constraint.measure(svi_state.constraints[i].constraint, own, value, at)

    def _loss_and_values(
        self, params: dict[str, Any], svi_state: Any, key: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any, dict[int, Any] | None]:
        """−ELBO, the mutable state, and the statistics, read off the very runs of the guide that the ELBO made."""
        constrained = self._constrained(params, svi_state.mutable_state)
        kwargs = {**kwargs, **self.static_kwargs}
        own = self._of_guide(constrained)
        elbo, model, guide = self.estimator, self.model, self.guide
        if isinstance(self.loss, TemperedELBO):
            model, guide = self.loss.tempered(model, guide, svi_state.optim_state[0], svi_state.first_loss)

        def observe(guide_trace: Any, model_trace: Any, particle_key: Array) -> dict[int, Any]:
            return {i: self._observe(i, guide_trace, model_trace, own, particle_key) for i in self.active}

        observer = None
        if type(elbo) in OBSERVABLE and self.active:
            observer = Observer(elbo, model, guide, observe)
            elbo, model, guide = observer.elbo, observer.model, observer.guide
        if jax.tree.leaves(svi_state.mutable_state):
            result = elbo.loss_with_mutable_state(key, constrained, model, guide, *args, **kwargs)
            loss, mutable_state = result["loss"], result["mutable_state"]
        else:
            loss = elbo.loss(key, constrained, model, guide, *args, **kwargs)
            mutable_state = svi_state.mutable_state
        return loss, mutable_state, None if observer is None else observer.values(key)

    def _statistic(
        self, i: int, params: dict[str, Any], mutable_state: Any, key: Any, args: Any, kwargs: Any
    ) -> Callable[[dict[str, Any]], Any]:
        """The `i`-th statistic as a function of the guide's unconstrained parameters, by a run of the guide alone."""
        prior = self._arguments[i].asks_for("prior")

        def at(own: dict[str, Any]) -> Any:
            cast = {name: jax.tree.map(lambda x, p: x.astype(p.dtype), own[name], params[name]) for name in own}
            constrained = self._constrained({**params, **cast}, mutable_state)
            plates = {}

            def particle(key: Array) -> Any:
                traces = self._traces(key, {**constrained, **plates}, args, kwargs, prior=prior)
                return self._observe(i, *traces, self._of_guide(constrained), key)

            if isinstance(self.estimator, MultiParticleELBO):
                everything = {**kwargs, **self.static_kwargs}
                plates = self.estimator.draw_plates(key, constrained, self.model, self.guide, args, everything)
            if self.estimator.num_particles == 1:
                return particle(key)
            keys = jax.random.split(key, self.estimator.num_particles)  # as the ELBO splits it
            return over_particles(self.estimator.vectorize_particles_fn(particle, keys))

        return at

    def _observe(self, i: int, guide_trace: Any, model_trace: Any, params: Any, key: Any) -> Any:
        """The `i`-th statistic, of the distributions in a trace of the guide."""
        q = latent_sites(guide_trace)
        # JAX's `split` is a `fold_in` of small numbers, and the first two are the model's and the guide's.
        extra: dict[str, Any] = {"params": params, "key": jax.random.fold_in(key, 2 + i)}
        if self._arguments[i].asks_for("prior"):
            prior = {name: model_trace[name]["fn"] for name in q if name in model_trace}
            extra["prior"] = jax.lax.stop_gradient(prior)  # a constraint moves the guide alone
        try:
            return self.constraints[i].statistic(q, **self._arguments[i].chosen(extra))
        except KeyError as error:
            raise ValueError(
                f"`statistic` must ask for what is there, got the key {error}; the guide has the sites {sorted(q)}, "
                f"and, for `lambda q, params: ...`, the parameters {sorted(params)}."
            ) from error

    def _traces(
        self, key: Any, constrained: dict[str, Any], args: Any, kwargs: Any, *, prior: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The guide's trace, and the model's replayed against it if `prior`; keys as `Trace_ELBO` would split them."""
        kwargs = {**kwargs, **self.static_kwargs}
        model_key, guide_key = jax.random.split(key)
        guide = numpyro.handlers.substitute(numpyro.handlers.seed(self.guide, guide_key), data=constrained)
        guide_trace = numpyro.handlers.trace(guide).get_trace(*args, **kwargs)
        if not prior:
            return guide_trace, {}
        model = numpyro.handlers.replay(numpyro.handlers.seed(self.model, model_key), guide_trace)
        model = numpyro.handlers.substitute(model, data=constrained)
        return guide_trace, numpyro.handlers.trace(model).get_trace(*args, **kwargs)

    def _constrained(self, params: dict[str, Any], mutable_state: Any) -> dict[str, Any]:
        if self._constrain is None:
            raise ValueError(
                "`svi_state` must come from `init` or `run` of this ProximitySVI, got one before either was called; "
                "call `init` first."
            )
        constrained = dict(self._constrain(params))
        if mutable_state:
            constrained.update(jax.lax.stop_gradient(mutable_state))
        return constrained

    def _of_guide(self, params: dict[str, Any]) -> dict[str, Any]:
        return {name: params[name] for name in self._guide_params}


def _each_particle(distance: Callable[[Any, Any], Array]) -> Callable[[Any, Any], Array]:
    """The mean of the distances of each particle; the distributions of a unit differ with the samples it is given."""
    return lambda reference, current: jnp.mean(jax.vmap(distance)(reference, current))


def _is_zero(magnitude: Any) -> bool:
    return isinstance(magnitude, int | float) and magnitude == 0
