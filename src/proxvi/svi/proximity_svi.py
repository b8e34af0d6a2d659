"""`ProximitySVI`: NumPyro's `SVI` with constraints."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array
from jax.core import Tracer
from numpyro.distributions import Unit
from numpyro.infer import ELBO, SVI
from numpyro.infer.svi import SVIRunResult, SVIState
from numpyro.optim import Minimize

from proxvi._typing import Batch, Guide, Model, Params, ParamTree, Scalar, Trace, Tree
from proxvi._validation import check_integer
from proxvi.constraints import LimitState, Proximity, SpeedLimit, as_constraints, share_of_gradient
from proxvi.estimators import as_scheduled
from proxvi.svi._nonfinite import Skipped, guarded_update, is_finite, raise_if_stopped, stays_finite
from proxvi.svi._objective import Objective, StepInputs, StepOutputs, statistic_arguments
from proxvi.svi._run_warnings import warn_after_run
from proxvi.transforms import ProximityState

__all__ = ["ProximitySVI", "ProximitySVIState"]

SHARE_OF_RUN = 1 / 3  # over so many steps a statistic may lose its whole range, if nothing else is said


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

    optim_state: tuple[Array, Any]
    mutable_state: Params | None
    rng_key: Array
    constraints: tuple[ProximityState, ...]
    skipped: Skipped
    first_loss: Scalar


class ProximitySVI(SVI):
    """Stochastic variational inference with proximity constraints; in place of `numpyro.infer.SVI`.

        minimise  −ELBO(λ) + Σ k_t · d(f(λ̃_t), f(λ))

    A statistic is a function of the guide's distributions, a dictionary by site name. Point masses are excluded. Choose
    a site by `lambda q: entropy(q["z"])`. A statistic may take three more arguments, by name: `prior` (the model's
    distributions at the same sites, so `kl_to_prior` works as it is), `params` (the guide's, for `orthogonal`) and
    `key` (for Monte Carlo estimates).

    `losses` and `evaluate` are the true −ELBO (with `VimcoELBO` its own, tighter bound), never the penalised one. In
    `run` and `stable_update` a step whose loss or gradient is not finite is skipped and counted: parameters, optimiser
    and references stay as they were. `run` stops with an error after `max_skipped_in_a_row` of them.

    Args:
        model: as in NumPyro.
        guide: as in NumPyro.
        optim: a NumPyro or an Optax optimiser.
        loss: a NumPyro `ELBO`.
        constraint: one, or several. An empty tuple `()` means no constraint: plain SVI, or annealing if `loss` is an
            `AnnealedELBO`.
        max_skipped_in_a_row: after so many steps in a row that are not finite, `run` and `fit` stop.
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

    def __init__(
        self,
        model: Model,
        guide: Guide,
        optim: Any,
        loss: ELBO,
        constraint: Proximity | SpeedLimit | Sequence[Proximity | SpeedLimit],
        *,
        max_skipped_in_a_row: int = 10,
        **static_kwargs: Any,
    ) -> None:
        remedy = "1 stops at the first step that is not finite"
        check_integer("max_skipped_in_a_row", max_skipped_in_a_row, remedy=remedy)
        try:
            super().__init__(model, guide, optim, loss, **static_kwargs)
        except TypeError as error:
            raise TypeError(
                f"`optim` must be a NumPyro or an Optax optimiser, got {type(optim).__name__}; of `optax.MultiSteps` "
                "pass its `gradient_transformation()`."
            ) from error
        if not getattr(as_scheduled(loss).elbo, "sum_sites", True):
            raise ValueError(
                "`loss` must be one number, got an ELBO with sum_sites=False, which has one for each site; leave "
                "`sum_sites` at True."
            )
        if isinstance(self.optim, Minimize):
            raise TypeError(
                "`optim` must take one gradient step at a time, got Minimize, which runs to the end within one step; "
                "use an Optax optimiser."
            )
        self.constraints: tuple[Proximity | SpeedLimit, ...] = as_constraints(
            constraint,
            (Proximity, SpeedLimit),
            "a SpeedLimit, a Proximity, or a sequence of them",
            "`SpeedLimit()` or `Proximity(proxvi.entropy, magnitude=...)`",
        )
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self._statistic_arguments = statistic_arguments(self.constraints)
        self._initialised: Objective | None = None

    def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, rng_key: Array, *args: Any, init_params: Params | None = None, **kwargs: Any
    ) -> ProximitySVIState:
        """Get the initial state; signature as in NumPyro.

        Warns:
            UserWarning: within `vmap` or `jit`, if the guide is an autoguide that was initialised before: it would
                start where it did then, whatever the key.
        """
        if isinstance(rng_key, Tracer) and getattr(self.guide, "prototype_trace", None) is not None:
            warnings.warn(
                "`guide` must be new where `init` or `run` is mapped over keys, got one that was initialised before, "
                "which starts where it did then, whatever the key; make guide and ProximitySVI within the function "
                "that is mapped.",
                stacklevel=2,
            )
        state = super().init(rng_key, *args, init_params=init_params, **kwargs)
        _check_mutable_state(state, as_scheduled(self.loss).elbo)
        params = self.optim.get_params(state.optim_state)
        inputs = self._inputs(state, jax.random.key(0), args, kwargs)  # only names and shapes are asked for
        loss, constrain = as_scheduled(self.loss), self.constrain_fn
        assert constrain is not None  # `SVI.init` has set it
        objective = Objective(self.model, self.guide, loss, self.constraints, self._statistic_arguments, constrain)
        self._initialised = objective.bind(params, inputs)
        constraints = self._initialised.init(params, inputs)
        first_loss = jnp.abs(self.evaluate(state, *args, **kwargs)) if loss.relative else jnp.zeros(())
        return ProximitySVIState(*state, constraints, Skipped.none(), first_loss)

    @property
    def _objective(self) -> Objective:
        """What `init` has made of the model, the guide, the loss and the constraints."""
        if self._initialised is None:
            raise ValueError(
                "`svi_state` must come from `init` or `run` of this ProximitySVI, got one before either was called; "
                "call `init` first."
            )
        return self._initialised

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, svi_state: ProximitySVIState, *args: Any, forward_mode_differentiation: bool = False, **kwargs: Any
    ) -> tuple[ProximitySVIState, Array]:
        """Take one step, finite or not, as NumPyro's does; signature as in NumPyro."""
        loss, _, state = self._step(svi_state, args, kwargs, forward_mode_differentiation)
        skipped = state.skipped._replace(in_a_row=jnp.zeros_like(state.skipped.in_a_row))
        return state._replace(skipped=skipped), loss

    def stable_update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, svi_state: ProximitySVIState, *args: Any, forward_mode_differentiation: bool = False, **kwargs: Any
    ) -> tuple[ProximitySVIState, Array]:
        """Take one step, unless something is not finite: then all stays as it was, and the step is counted.

        That is: the loss, a gradient, or anything that later steps would read (a moment of the optimiser, say).
        """
        loss, grads, state = self._step(svi_state, args, kwargs, forward_mode_differentiation)
        # Without the barrier XLA computes the whole step again for each array that is selected below: five times as
        # much program to compile.
        loss, grads, state = jax.lax.optimization_barrier((loss, grads, state))
        finite = jnp.array([is_finite(grads[name]) for name in sorted(grads)], bool)
        good = jnp.all(finite) & jnp.isfinite(loss) & stays_finite(svi_state, state)
        kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), state, svi_state)
        step = svi_state.optim_state[0] + svi_state.skipped.total  # the optimiser counts only the good ones
        skipped = svi_state.skipped.count_step(good, step, finite, loss)
        return kept._replace(rng_key=state.rng_key, skipped=skipped, first_loss=state.first_loss), loss

    def _step(
        self, svi_state: ProximitySVIState, args: Batch, kwargs: Params, forward_mode_differentiation: bool
    ) -> tuple[Array, ParamTree, ProximitySVIState]:
        """The true loss, the gradient of the objective, and the next state."""
        self._check_length(svi_state)
        loss, grads, state = self._gradient(svi_state, args, kwargs, forward_mode_differentiation)
        state = state._replace(optim_state=self._apply(grads, svi_state.optim_state, loss))
        if not self._objective.limits:
            return loss, grads, state
        if forward_mode_differentiation:
            raise ValueError(
                "`forward_mode_differentiation` must be False with a SpeedLimit, got True; use a Proximity, or none."
            )
        _, step_key = jax.random.split(svi_state.rng_key)  # as in the gradient
        inputs = self._inputs(svi_state, step_key, args, kwargs)
        before, constraints = self.optim.get_params(svi_state.optim_state), list(state.constraints)
        for i in self._objective.limits:
            after = self.optim.get_params(state.optim_state)
            limited, constraints[i] = self._objective.limit_step(i, before, after, inputs)
            state = state._replace(optim_state=with_params(state.optim_state, after, limited))
        return loss, grads, state._replace(constraints=tuple(constraints))

    def tell_length(self, svi_state: ProximitySVIState, num_steps: int) -> ProximitySVIState:
        """Tell speed limits without an `over` how long the run is; `run` and `fit` do.

        Args:
            svi_state: from `init`. A limit that was told before, or has an `over`, stays as it is.
            num_steps: of the run, or of several runs in a row together.
        """

        def told(state: ProximityState) -> ProximityState:
            limit = state.constraint
            if not isinstance(limit, LimitState) or limit.over is not None:
                return state
            over = jnp.full(limit.step.shape, SHARE_OF_RUN * num_steps, jnp.result_type(float))
            return state._replace(constraint=limit._replace(over=over))

        return svi_state._replace(constraints=tuple(map(told, svi_state.constraints)))

    def _check_length(self, svi_state: ProximitySVIState) -> None:
        """Refuse a speed limit that does not know the length of the run."""
        for constraint, state in zip(self.constraints, svi_state.constraints, strict=True):
            if isinstance(state.constraint, LimitState) and state.constraint.over is None:
                raise ValueError(
                    f"`over` must be given where `update` is called by hand, got None in {constraint!r}; a third of "
                    "the steps is good, as in `SpeedLimit(over=num_steps / 3)`. `run` and `fit` know it by themselves."
                )

    def _apply(self, grads: ParamTree, optim_state: Any, loss: Array) -> Any:
        """One step of the optimiser."""
        try:
            return self.optim.update(grads, optim_state, value=loss)
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"`optim` must need no more than the gradient and the loss of a step, got one that says: {error}; "
                "`optax.lookahead` wants its parameters in pairs and `optax.lbfgs` the loss as a function, so use "
                "another, such as `optax.adam`."
            ) from error

    def _inputs(self, svi_state: ProximitySVIState | SVIState, key: Array, args: Batch, kwargs: Params) -> StepInputs:
        inputs = StepInputs(
            key, args, {**kwargs, **self.static_kwargs}, svi_state.mutable_state, svi_state.optim_state[0]
        )
        if isinstance(svi_state, ProximitySVIState):  # and not yet NumPyro's, as in `init`
            inputs = inputs._replace(constraints=svi_state.constraints, first_loss=svi_state.first_loss)
        return inputs

    def _gradient(
        self, svi_state: ProximitySVIState, args: Batch, kwargs: Params, forward_mode_differentiation: bool
    ) -> tuple[Array, ParamTree, ProximitySVIState]:
        """The true loss, the gradient of the objective, and the next state but for the optimiser's."""
        rng_key, step_key = jax.random.split(svi_state.rng_key)
        params, objective = self.optim.get_params(svi_state.optim_state), self._objective
        inputs = self._inputs(svi_state, step_key, args, kwargs)
        done: StepOutputs
        if forward_mode_differentiation:
            grads, done = jax.jacfwd(lambda p: objective(p, inputs), has_aux=True)(params)
        else:
            (_, done), grads = jax.value_and_grad(lambda p: objective(p, inputs), has_aux=True)(params)
        first_loss = svi_state.first_loss
        if objective.loss.relative:  # of the first batch that has a finite one
            first_loss = jnp.where(jnp.isfinite(first_loss), first_loss, jnp.abs(done.loss))
        state = svi_state._replace(
            mutable_state=done.mutable_state, rng_key=rng_key, constraints=done.constraints, first_loss=first_loss
        )
        return done.loss, grads, state

    def evaluate(self, svi_state: ProximitySVIState | SVIState, *args: Any, **kwargs: Any) -> Array:
        """Minus the true ELBO, with the samples of the next step; signature as in NumPyro."""
        _, key = jax.random.split(svi_state.rng_key)
        # NumPyro's leaves the mutable state out. A network writes into it, so it must be a copy.
        values = self.get_params(svi_state) | jax.tree.map(lambda x: x, svi_state.mutable_state or {})
        elbo: Any = as_scheduled(self.loss).elbo
        return jnp.asarray(elbo.loss(key, values, self.model, self.guide, *args, **kwargs, **self.static_kwargs))

    def measure_share(
        self,
        svi_state: ProximitySVIState,
        *args: Any,
        forward_mode_differentiation: bool = False,
        **kwargs: Any,
    ) -> ProximitySVIState:
        """Measure what share of the gradient each constraint would have in the next step, for the telemetry.

            share = ‖k ∇d‖ / (‖∇(−ELBO)‖ + ‖k ∇d‖)

        It takes one more gradient for each constraint, about the time of a step, so `update` does not do it. `run` does
        it at its end.

        Args:
            svi_state: as in `update`; only its telemetry changes.
            args: as in `update`.
            forward_mode_differentiation: as in `update`.
            kwargs: as in `update`.

        Returns:
            The state, from which `proxvi.telemetry` reads the shares.
        """
        objective = self._objective
        if not objective.active:
            return svi_state
        loss, rest, after = self._gradient(svi_state, args, kwargs, forward_mode_differentiation)
        _, step_key = jax.random.split(svi_state.rng_key)  # as in the step
        inputs = self._inputs(svi_state, step_key, args, kwargs)

        def distance(params: Params, i: int) -> Array:
            return objective.constraint_step(i, params, inputs, loss)[0]

        params = self.optim.get_params(svi_state.optim_state)
        magnitudes = {i: after.constraints[i].telemetry.magnitude for i in objective.active}
        derivative = jax.jacfwd if forward_mode_differentiation else jax.grad
        slopes = {i: derivative(distance)(params, i) for i in magnitudes}
        for i, slope in slopes.items():
            rest = jax.tree.map(lambda g, c, k=magnitudes[i]: g - k * c, rest, slope)
        constraints = list(svi_state.constraints)
        for i, slope in slopes.items():
            share = share_of_gradient(rest, jnp.asarray(magnitudes[i]), slope)
            constraints[i] = constraints[i]._replace(telemetry=constraints[i].telemetry._replace(share=share))
        return svi_state._replace(constraints=tuple(constraints))

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        stable_update: bool = False,
        forward_mode_differentiation: bool = False,
        init_state: ProximitySVIState | SVIState | None = None,
        init_params: Params | None = None,
        **kwargs: Any,
    ) -> SVIRunResult:
        """Run `num_steps` steps in compiled chunks; signature and result as in NumPyro.

        A speed limit keeps the length of the first run, and ends after two thirds of it. For several runs in a row,
        tell it that of all: `init_state=svi.tell_length(svi.init(rng_key, x), all_steps)`. Do so, too, where `run` is
        the body of a `scan`, whose state must not change its structure.

        A chunk in which something was not finite is run again from its start with `stable_update`. So the result is
        finite, and other chunks cost nothing more. `stable_update=True` guards every chunk. Within `vmap` or `jit`
        nothing is shown or raised: look at `result.state.skipped`, and call `measure_share` for the shares.

        Raises:
            FloatingPointError: after `max_skipped_in_a_row` steps in a row that were not finite.

        Warns:
            UserWarning: if a constraint still makes up more than 1% of the gradient at the end, let go in the last
                tenth of the run, or had a unit, the first losses, of next to nothing; if a speed limit has changed
                updates, and has not ended.
        """
        check_integer("num_steps", num_steps, remedy="1 is one step")
        if init_state is not None and not isinstance(init_state, ProximitySVIState):
            raise TypeError(
                f"`init_state` must come from a ProximitySVI, got {type(init_state).__name__}; go on from the "
                "parameters of another SVI by `init_params=svi.get_params(state)`."
            )
        state = init_state
        if state is None:
            state = self.init(rng_key, *args, init_params=init_params, **kwargs)
        state = self.tell_length(state, num_steps)

        options = {"forward_mode_differentiation": forward_mode_differentiation, **kwargs}

        def step(state: ProximitySVIState, _: None) -> tuple[ProximitySVIState, Array]:
            return self.update(state, *args, **options)

        def stable_step(state: ProximitySVIState, _: None) -> tuple[ProximitySVIState, Array]:
            return guarded_update(self, state, *args, **options)

        def run_traced(state: ProximitySVIState) -> SVIRunResult:
            """Within `vmap` or `jit` values are not known: guard every step, and tell by `skipped` afterwards."""
            state, losses = jax.lax.scan(stable_step, state, None, num_steps)
            return SVIRunResult(self.get_params(state), state, losses)

        if _is_traced((state, args, kwargs)):
            return run_traced(state)
        start = int(state.constraints[0].constraint.step) if state.constraints else 0

        # `scan` by itself, as in NumPyro: within `jit` the data would be constants, and round differently.
        size, losses, done = max(num_steps // 20, 1), [], 0
        with tqdm.tqdm(total=num_steps, disable=not progress_bar) as bar:
            while done < num_steps:
                length = min(size, num_steps - done)
                after, chunk_losses = jax.lax.scan(stable_step if stable_update else step, state, None, length)
                if _is_traced(chunk_losses):  # through what the model closes over
                    return run_traced(state)
                if not stable_update and not (np.all(np.isfinite(chunk_losses)) and stays_finite(state, after)):
                    after, chunk_losses = jax.lax.scan(stable_step, state, None, length)
                state = after
                losses.append(chunk_losses)
                done += length
                raise_if_stopped(self, state)
                bar.update(length)
                if progress_bar:
                    bar.set_postfix_str(f"loss: {float(np.nanmean(chunk_losses)):.4f}", refresh=False)
        if self._objective.active:  # compiled, as the steps are
            state, _ = jax.lax.scan(lambda s, _: (self.measure_share(s, *args, **options), None), state, None, 1)
        every_loss = jnp.concatenate(losses)
        warn_after_run(self.constraints, state.constraints, np.asarray(every_loss), start=start)
        return SVIRunResult(self.get_params(state), state, every_loss)


def with_loss(svi: ProximitySVI, loss: ELBO) -> ProximitySVI:
    """An initialised `svi` with another estimator of the ELBO."""
    other = copy.copy(svi)
    other.loss = loss
    other._initialised = replace(svi._objective, loss=as_scheduled(loss))
    return other


def with_limits_of(state: ProximitySVIState, other: ProximitySVIState) -> ProximitySVIState:
    """A state whose speed limits are as slow as those of another."""

    def one(mine: ProximityState, theirs: ProximityState) -> ProximityState:
        limit = mine.constraint
        if not isinstance(limit, LimitState):
            return mine
        return mine._replace(constraint=limit._replace(over=theirs.constraint.over))

    return state._replace(constraints=tuple(map(one, state.constraints, other.constraints)))


def with_params(optim_state: Any, before: Params, after: Params) -> Any:
    """The state of an optimiser with other parameters; in a NumPyro optimiser they lie wherever it put them."""
    replaced = {id(old): new for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)}
    leaves, structure = jax.tree.flatten(optim_state)
    if sum(id(leaf) in replaced for leaf in leaves) != len(replaced):
        raise TypeError(
            "`optim` must keep the parameters in its state as they are, which SpeedLimit changes, got one that does "
            "not; use an Optax optimiser, such as `optax.adam(1e-3)`."
        )
    return jax.tree.unflatten(structure, [replaced.get(id(leaf), leaf) for leaf in leaves])


def _check_mutable_state(state: SVIState, elbo: ELBO) -> None:
    """Refuse mutable sites where the ELBO would lose or not update them."""
    keeps_it = type(elbo).loss_with_mutable_state is not ELBO.loss_with_mutable_state and elbo.num_particles == 1
    if jax.tree.leaves(state.mutable_state) and not keeps_it:
        raise ValueError(
            f"`loss` must be an ELBO of one particle that keeps mutable state, such as `Trace_ELBO()`, got "
            f"{type(elbo).__name__} of {elbo.num_particles}, with the mutable sites {sorted(state.mutable_state)}; use "
            "a network without running statistics for several particles."
        )


def _is_traced(tree: Tree) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


class BatchSites(NamedTuple):
    """The sites of a model, by what they know of a batch.

    Attributes:
        shared: latent ones that all rows share.
        unweighted: observed ones of the rows whose likelihood counts the batch only.
        factors: the same, but they are factors, which may have weights inside.
        weighted: observed ones of the rows that are weighted to stand for all rows.
    """

    shared: list[str]
    unweighted: list[str]
    factors: list[str]
    weighted: list[str]


def batch_sites(svi: ProximitySVI, state: ProximitySVIState, batch: Batch) -> BatchSites:
    """Look at the sites of the model for one batch; those of the rows have another shape in a batch of another size."""
    params, found = svi.optim.get_params(state.optim_state), BatchSites([], [], [], [])

    def sites(batch: Batch) -> Trace:
        traces: list[Trace] = []

        def look(key: Array, batch: Batch) -> None:
            traces.append(svi._objective.model_trace(params, svi._inputs(state, key, batch, {})))
            for site in traces[0].values():
                if site["type"] == "sample":
                    site["fn"].log_prob(site["value"])  # an error if a plate of fixed size does not fit the rows

        jax.eval_shape(look, jax.random.key(0), batch)
        return traces[0]

    size, larger = np.shape(jax.tree.leaves(batch)[0])[0], _with_one_row_more(sites, batch) or {}
    for name, site in sites(batch).items():
        if site["type"] == "sample":
            shape = jnp.shape(site["value"])
            # A model that takes one size only does not tell; then a length does.
            of_rows = jnp.shape(larger[name]["value"]) != shape if name in larger else size in shape
            if not site["is_observed"] and not of_rows:
                found.shared.append(name)
            elif site["is_observed"] and of_rows and site["scale"] is not None:
                found.weighted.append(name)
            elif site["is_observed"] and of_rows:
                (found.factors if isinstance(site["fn"], Unit) else found.unweighted).append(name)
    return found


def check_statistics_of_batches(svi: ProximitySVI, state: ProximitySVIState, batch: Batch) -> None:
    """Refuse a statistic with a value for each row of a batch: its past would be that of other data points."""
    params = svi.optim.get_params(state.optim_state)

    def shapes(batch: Batch) -> list[Any]:
        def init(key: Array, batch: Batch) -> tuple[ProximityState, ...]:
            return svi._objective.init(params, svi._inputs(state, key, batch, {}))

        return [jax.tree.map(jnp.shape, s) for s in jax.eval_shape(init, jax.random.key(0), batch)]

    larger = _with_one_row_more(shapes, batch)
    if larger is None:
        return
    for constraint, one, another in zip(svi.constraints, shapes(batch), larger, strict=True):
        if one != another and not constraint.is_off:
            raise ValueError(
                f"`statistic` must be averaged over the rows of a batch, got one value for each row from "
                f"{constraint!r}: row i of the next batch is another data point. Put the rows into a `numpyro.plate`, "
                "without `to_event` in the statistic, or use `batch_size=None`."
            )


def _with_one_row_more[T](look: Callable[[Batch], T], batch: Batch) -> T | None:
    """What `look` finds in a larger batch, by its shapes; None for a model or a guide that takes one size only."""
    larger = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] + 1, *x.shape[1:]), jnp.result_type(x)), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody has asked for that size
        try:
            return look(larger)
        except Exception:  # whatever a model may raise
            return None
