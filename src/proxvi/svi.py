"""Door 2: NumPyro's SVI with a proximity constraint."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import tqdm
from jax import Array
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult
from numpyro.optim import Minimize

from proxvi._calls import Arguments
from proxvi._guides import OBSERVABLE, Observer, latent_sites
from proxvi.constraint import SHARE_EVERY, Proximity, Telemetry, share
from proxvi.estimators import AnnealedELBO, MultiParticleELBO
from proxvi.transform import ProximityState

__all__ = ["ProximitySVI", "ProximitySVIState", "Skipped"]


class Skipped(NamedTuple):
    """Steps that were not taken because the loss or a gradient was not finite.

    Attributes:
        total: how many, ever.
        in_a_row: how many, up to the latest step; 0 after a good one.
        step: at which the latest row began, counting from 0 over good and bad.
        parameter: that went bad first then, as an index into the sorted names; −1 if it was the loss.

    Example:
        >>> Skipped(total=3, in_a_row=0, step=17, parameter=-1).total
        3
    """

    total: Any
    in_a_row: Any
    step: Any
    parameter: Any


class ProximitySVIState(NamedTuple):
    """NumPyro's `SVIState`, and what the constraints carry from step to step.

    Attributes:
        optim_state: the optimiser's.
        mutable_state: values of the `mutable` sites.
        rng_key: for the next step.
        constraints: one `ProximityState` for each constraint; `proxvi.telemetry(state)` reads them.
        skipped: steps that were not taken.
        first_loss: `|ELBO_0|`, the unit of the temperature in deterministic annealing.
    """

    optim_state: Any
    mutable_state: Any
    rng_key: Any
    constraints: tuple[ProximityState, ...]
    skipped: Skipped
    first_loss: Any


class ProximitySVI(SVI):
    """Stochastic variational inference with proximity constraints; in place of `numpyro.infer.SVI`.

        minimise  −ELBO(λ) + Σ k_t · d(f(λ̃_t), f(λ))

    A statistic is a function of the guide's distributions, a dictionary by site name; point masses, such as those with
    which autoguides hand values on, are left out. It is given what else its arguments name: `prior` (the model's
    distributions at the same sites, so `kl_to_prior` works as it is), `params` (the guide's, for `orthogonal`) and
    `key` (for Monte Carlo estimates). Choose a site by `lambda q: entropy(q["z"])`.

    `losses` and `evaluate` are the true −ELBO, never the penalised one. In `run` and `stable_update` a step whose loss
    or gradient is not finite leaves parameters, optimiser and references as they were and is counted; `run` stops with
    an error after `max_skipped_in_a_row` of them.

    Args:
        model: as in NumPyro.
        guide: as in NumPyro.
        optim: a NumPyro or an Optax optimiser.
        loss: a NumPyro `ELBO`.
        proximity: one constraint, or several. None of them, `()`, is plain SVI, or annealing with an `AnnealedELBO`.
        static_kwargs: as in NumPyro.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax, proxvi
        >>> from numpyro.infer import Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model(x):
        ...     numpyro.sample("x", dist.Normal(numpyro.sample("mean", dist.Normal(0, 10)), 1), obs=x)
        >>> constraint = proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 1_000, 1e-10))
        >>> svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO(), constraint)
        >>> result = svi.run(jax.random.key(0), 1_000, jnp.array([3.0]), progress_bar=False)
        >>> bool(abs(result.params["mean_auto_loc"] - 3.0) < 0.5)
        True
    """

    max_skipped_in_a_row = 10

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        optim: Any,
        loss: Any,
        proximity: Proximity | Sequence[Proximity],
        **static_kwargs: Any,
    ) -> None:
        super().__init__(model, guide, optim, loss, **static_kwargs)
        constraints = (proximity,) if isinstance(proximity, Proximity) else proximity
        if not isinstance(constraints, Sequence) or not all(isinstance(c, Proximity) for c in constraints):
            raise TypeError(
                f"`proximity` must be a Proximity or a sequence of them, got {proximity!r}; write "
                "`Proximity(proxvi.entropy, magnitude=...)`."
            )
        if isinstance(self.optim, Minimize):
            raise TypeError(
                "`optim` must take one gradient step at a time, got Minimize, which runs to the end within one step; "
                "use an Optax optimiser."
            )
        self.constraints = tuple(constraints)
        # A magnitude that is the number 0 switches a constraint off: the step compiles to NumPyro's own, bit for bit.
        self._active = [i for i, c in enumerate(self.constraints) if not _is_zero(c.magnitude)]
        self._estimator = loss.elbo if isinstance(loss, AnnealedELBO) else loss
        self._arguments = tuple(Arguments.of(c.statistic, None) for c in self.constraints)
        for arguments in self._arguments:
            unknown = set(arguments.required) - {"prior", "params", "key"}
            if unknown:
                raise TypeError(
                    f"`statistic` may take `prior`, `params` and `key` beside the guide's distributions, got "
                    f"{sorted(unknown)}; close over anything else."
                )

    def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, rng_key: Any, *args: Any, init_params: Any = None, **kwargs: Any
    ) -> ProximitySVIState:
        """Get the initial state; signature as in NumPyro."""
        state = super().init(rng_key, *args, init_params=init_params, **kwargs)
        params = self.optim.get_params(state.optim_state)
        key = jax.random.key(0)  # only shapes are asked for
        guide_trace, _ = self._traces(key, self._constrained(params, state.mutable_state), args, kwargs, prior=False)
        self._guide_params = sorted(
            name for name, site in guide_trace.items() if site["type"] == "param" and name in params
        )
        guide_params = {name: params[name] for name in self._guide_params}
        constraints = []
        for i, constraint in enumerate(self.constraints):
            at = self._statistic(i, params, state.mutable_state, key, args, kwargs)
            start = constraint.init(guide_params, lambda at=at: jax.eval_shape(at, guide_params))
            constraints.append(ProximityState(start, Telemetry.zeros()))
        first_loss = jnp.zeros(())
        if isinstance(self.loss, AnnealedELBO) and self.loss.relative:
            first_loss = jnp.abs(self.evaluate(state, *args, **kwargs))
        none = jnp.zeros((), jnp.int32)
        return ProximitySVIState(*state, tuple(constraints), Skipped(none, none, none, none - 1), first_loss)

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, svi_state: Any, *args: Any, forward_mode_differentiation: bool = False, **kwargs: Any
    ) -> tuple[ProximitySVIState, Array]:
        """Take one step, finite or not, as NumPyro's does; signature as in NumPyro."""
        loss, grads, state = self._gradient(svi_state, args, kwargs, forward_mode_differentiation)
        return state._replace(optim_state=self.optim.update(grads, svi_state.optim_state, value=loss)), loss

    def stable_update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, svi_state: Any, *args: Any, forward_mode_differentiation: bool = False, **kwargs: Any
    ) -> tuple[ProximitySVIState, Array]:
        """Take one step, unless its loss or gradient is not finite: then all stays as it was, and it is counted."""
        loss, grads, state = self._gradient(svi_state, args, kwargs, forward_mode_differentiation)
        finite = jnp.stack([_is_finite(grads[name]) for name in sorted(grads)])
        good = jnp.all(finite) & jnp.isfinite(loss)
        optim_state = jax.lax.cond(
            good,
            lambda: self.optim.update(grads, svi_state.optim_state, value=loss),
            lambda: svi_state.optim_state,
        )
        mutable_state, constraints = jax.tree.map(
            lambda new, old: jnp.where(good, new, old),
            (state.mutable_state, state.constraints),
            (svi_state.mutable_state, svi_state.constraints),
        )
        state = state._replace(
            optim_state=optim_state,
            mutable_state=mutable_state,
            constraints=constraints,
            skipped=_counted(svi_state, good, finite),
        )
        return state, loss

    def _gradient(
        self, svi_state: Any, args: Any, kwargs: Any, forward_mode_differentiation: bool
    ) -> tuple[Array, Any, ProximitySVIState]:
        """The true loss, the gradient of the penalised one, and the next state but for the optimiser's."""
        rng_key, step_key = jax.random.split(svi_state.rng_key)
        params = self.optim.get_params(svi_state.optim_state)

        def objective(params: dict[str, Any]) -> tuple[Array, Any]:
            loss, mutable_state, values = self._loss_and_values(step_key, params, svi_state, args, kwargs)
            penalty, constraints = self._penalty(params, loss, values, svi_state, step_key, args, kwargs)
            return loss + penalty, (loss, mutable_state, constraints)

        if forward_mode_differentiation:
            grads, aux = jax.jacfwd(objective, has_aux=True)(params)
        else:
            (_, aux), grads = jax.value_and_grad(objective, has_aux=True)(params)
        loss, mutable_state, constraints = aux
        constraints = self._with_shares(constraints, grads, params, svi_state, step_key, args, kwargs)
        return loss, grads, svi_state._replace(mutable_state=mutable_state, rng_key=rng_key, constraints=constraints)

    def run(
        self,
        rng_key: Any,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        stable_update: bool = False,
        forward_mode_differentiation: bool = False,
        init_state: Any = None,
        init_params: Any = None,
        **kwargs: Any,
    ) -> SVIRunResult:
        """Run `num_steps` steps in compiled chunks; signature and result as in NumPyro.

        A chunk in which something was not finite is run again from its start with `stable_update`, so nothing that is
        not finite gets into the result, and the others cost nothing. `stable_update=True` guards every chunk.

        Raises:
            FloatingPointError: after `max_skipped_in_a_row` steps in a row that were not finite.
        """
        if num_steps < 1:
            raise ValueError(f"`num_steps` must be a positive integer, got {num_steps}; one is one step.")
        state = init_state
        if state is None:
            state = self.init(rng_key, *args, init_params=init_params, **kwargs)

        def step(state: Any, _: None) -> tuple[Any, Array]:
            return self.update(state, *args, forward_mode_differentiation=forward_mode_differentiation, **kwargs)

        def stable_step(state: Any, _: None) -> tuple[Any, Array]:
            return self.stable_update(state, *args, forward_mode_differentiation=forward_mode_differentiation, **kwargs)

        # `scan` by itself, as in NumPyro: within `jit` the data would be constants, and round differently.
        size, losses, done = max(num_steps // 20, 1), [], 0
        with tqdm.tqdm(total=num_steps, disable=not progress_bar) as bar:
            while done < num_steps:
                length = min(size, num_steps - done)
                after, chunk_losses = jax.lax.scan(stable_step if stable_update else step, state, None, length)
                if not stable_update and not (np.all(np.isfinite(chunk_losses)) and bool(_is_finite(after))):
                    after, chunk_losses = jax.lax.scan(stable_step, state, None, length)
                state = after
                losses.append(chunk_losses)
                done += length
                self._check_skipped(state)
                bar.update(length)
                if progress_bar:
                    bar.set_postfix_str(f"loss: {float(np.nanmean(chunk_losses)):.4f}", refresh=False)
        return SVIRunResult(self.get_params(state), state, jnp.concatenate(losses))

    def _check_skipped(self, state: ProximitySVIState) -> None:
        skipped = jax.device_get(state.skipped)
        if skipped.in_a_row >= self.max_skipped_in_a_row:
            names = sorted(self.optim.get_params(state.optim_state))
            what = "the loss" if skipped.parameter < 0 else f"the gradient of `{names[skipped.parameter]}`"
            raise FloatingPointError(
                f"{what} was not finite at step {skipped.step}, nor any step since: {skipped.in_a_row} in a row, where "
                f"`max_skipped_in_a_row` allows {self.max_skipped_in_a_row - 1}. The parameters are as before them. "
                "Lower the learning rate, clip the gradient, or look at the model for a logarithm of 0."
            )

    # -- one step, in pieces ------------------------------------------------------------------------------------------

    def _constrained(self, params: dict[str, Any], mutable_state: Any) -> dict[str, Any]:
        constrained = dict(self.constrain_fn(params))  # pyright: ignore[reportOptionalCall]
        if mutable_state:
            constrained.update(jax.lax.stop_gradient(mutable_state))
        return constrained

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

    def _observe(self, i: int, guide_trace: Any, model_trace: Any, params: Any, key: Any) -> Any:
        """The `i`-th statistic, of the distributions in a trace of the guide."""
        q = latent_sites(guide_trace)
        extra: dict[str, Any] = {"params": params, "key": jax.random.fold_in(key, i)}
        if "prior" in self._arguments[i].required:
            extra["prior"] = {name: model_trace[name]["fn"] for name in q if name in model_trace}
        return self.constraints[i].statistic(q, **self._arguments[i].chosen(extra))

    def _statistic(
        self, i: int, params: dict[str, Any], mutable_state: Any, key: Any, args: Any, kwargs: Any
    ) -> Callable[[dict[str, Any]], Any]:
        """The `i`-th statistic as a function of the guide's unconstrained parameters, by a run of the guide alone."""

        def at(guide_params: dict[str, Any]) -> Any:
            like = {name: params[name] for name in guide_params}
            cast = jax.tree.map(lambda x, p: x.astype(p.dtype), guide_params, like)
            constrained = self._constrained({**params, **cast}, mutable_state)
            prior = "prior" in self._arguments[i].required

            plates = {}

            def particle(key: Array) -> Any:
                traces = self._traces(key, {**constrained, **plates}, args, kwargs, prior=prior)
                return self._observe(i, *traces, {name: constrained[name] for name in guide_params}, key)

            if isinstance(self._estimator, MultiParticleELBO):
                everything = {**kwargs, **self.static_kwargs}
                plates = self._estimator.draw_plates(key, constrained, self.model, self.guide, args, everything)
            if self._estimator.num_particles == 1:
                return particle(key)
            keys = jax.random.split(key, self._estimator.num_particles)  # as the ELBO splits it
            return jax.tree.map(lambda x: jnp.mean(x, axis=0), self._estimator.vectorize_particles_fn(particle, keys))

        return at

    def _loss_and_values(
        self, key: Any, params: dict[str, Any], svi_state: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any, dict[int, Any] | None]:
        """−ELBO, the mutable state, and the statistics, read off the very runs of the guide that the ELBO made."""
        constrained = self._constrained(params, svi_state.mutable_state)
        kwargs = {**kwargs, **self.static_kwargs}
        guide_params = {name: constrained[name] for name in self._guide_params}
        model, guide = self.model, self.guide
        if isinstance(self.loss, AnnealedELBO):
            guide = self.loss.tempered(guide, svi_state.optim_state[0], svi_state.first_loss)

        def observe(guide_trace: Any, model_trace: Any, particle_key: Array) -> dict[int, Any]:
            return {i: self._observe(i, guide_trace, model_trace, guide_params, particle_key) for i in self._active}

        elbo, values = self._estimator, None
        if type(elbo) in OBSERVABLE and self._active:
            observer = Observer(elbo, model, guide, observe)
            elbo, model, guide = observer.elbo, observer.model, observer.guide
        else:
            observer = None
        if jax.tree.leaves(svi_state.mutable_state):
            result = elbo.loss_with_mutable_state(key, constrained, model, guide, *args, **kwargs)
            loss, mutable_state = result["loss"], result["mutable_state"]
        else:
            loss = elbo.loss(key, constrained, model, guide, *args, **kwargs)
            mutable_state = svi_state.mutable_state
        if observer is not None:
            values = observer.values(key)
        return loss, mutable_state, values

    def _penalty(
        self,
        params: dict[str, Any],
        loss: Array,
        values: dict[int, Any] | None,
        svi_state: Any,
        key: Any,
        args: Any,
        kwargs: Any,
    ) -> tuple[Array, tuple[ProximityState, ...]]:
        """`Σ k d`, and the constraints' next states."""
        guide_params = {name: params[name] for name in self._guide_params}
        total, states = jnp.zeros(()), []
        for i, (constraint, state) in enumerate(zip(self.constraints, svi_state.constraints, strict=True)):
            if i not in self._active:
                states.append(state)
                continue
            fixed = jax.lax.stop_gradient(params)
            at = self._statistic(i, fixed, svi_state.mutable_state, key, args, kwargs)
            value = at(guide_params) if values is None else values[i]
            # The barrier keeps the loss itself in the shape that NumPyro compiles it to, to the last bit.
            seen = jax.lax.optimization_barrier(jax.lax.stop_gradient(loss))
            magnitude, first_loss = constraint.strength(state.constraint, seen)
            distance, reference = constraint.measure(state.constraint, guide_params, value, at)
            after = constraint.advance(state.constraint, first_loss, reference)
            total = total + magnitude * distance
            states.append(ProximityState(after, Telemetry(distance, magnitude, state.telemetry.share)))
        return total, tuple(states)

    def _with_shares(
        self,
        constraints: tuple[ProximityState, ...],
        grads: Any,
        params: Any,
        svi_state: Any,
        key: Any,
        args: Any,
        kwargs: Any,
    ) -> tuple[ProximityState, ...]:
        """Measure each constraint's share of the gradient at every 16th step, by a gradient of its own."""
        if not self._active:
            return constraints

        def measured() -> list[Array]:
            def each(params: dict[str, Any], i: int) -> Array:
                guide_params = {name: params[name] for name in self._guide_params}
                at = self._statistic(i, params, svi_state.mutable_state, key, args, kwargs)
                state = svi_state.constraints[i].constraint
                return self.constraints[i].measure(state, guide_params, at(guide_params), at)[0]

            magnitudes = [constraints[i].telemetry.magnitude for i in self._active]
            slopes = [jax.grad(each)(params, i) for i in self._active]
            rest = grads
            for magnitude, slope in zip(magnitudes, slopes, strict=True):
                rest = jax.tree.map(lambda g, c, k=magnitude: g - k * c, rest, slope)
            return [share(rest, k, slope) for k, slope in zip(magnitudes, slopes, strict=True)]

        step = svi_state.constraints[self._active[0]].constraint.step
        before = [constraints[i].telemetry.share for i in self._active]
        shares = jax.lax.cond(step % SHARE_EVERY == 0, measured, lambda: before)
        updated = list(constraints)
        for i, value in zip(self._active, shares, strict=True):
            updated[i] = updated[i]._replace(telemetry=updated[i].telemetry._replace(share=value))
        return tuple(updated)


def _is_zero(magnitude: Any) -> bool:
    return isinstance(magnitude, int | float) and magnitude == 0


def _is_finite(tree: Any) -> Array:
    """Whether all leaves are finite: a sum is not, if one entry is not."""

    def total(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):  # keys and counters
            return jnp.zeros(())
        # A product with ones runs at memory speed on CPU, where a reduction takes ten times as long.
        return jnp.sum(x.reshape(-1, x.shape[-1]) @ jnp.ones(x.shape[-1], x.dtype)) if x.ndim else x

    return jnp.isfinite(sum((total(x) for x in jax.tree.leaves(tree)), start=jnp.zeros(())))


def _counted(svi_state: Any, good: Array, finite: Array) -> Skipped:
    before = svi_state.skipped
    step = svi_state.optim_state[0] + before.total  # good steps, which the optimiser counts, and bad ones
    begins = ~good & (before.in_a_row == 0)
    parameter = jnp.where(jnp.all(finite), -1, jnp.argmin(finite))
    return Skipped(
        before.total + ~good,
        jnp.where(good, 0, before.in_a_row + 1),
        jnp.where(begins, step, before.step).astype(before.step.dtype),
        jnp.where(begins, parameter, before.parameter).astype(before.parameter.dtype),
    )
