"""Door 2: NumPyro's SVI with a proximity constraint."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array
from jax.core import Tracer
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult
from numpyro.optim import Minimize

from proxvi._validation import check_integer
from proxvi.constraints import Proximity, share
from proxvi.estimators import TemperedELBO
from proxvi.svi._penalised import Penalised
from proxvi.transforms import ProximityState

__all__ = ["ProximitySVI", "ProximitySVIState", "Skipped"]

ACTIVE = 0.01  # a constraint with a larger share of the gradient still steers


class Skipped(NamedTuple):
    """Steps that were not taken because the loss or a gradient was not finite.

    Attributes:
        total: how many, ever.
        in_a_row: how many, up to the latest step; 0 after a good one.
        step: at which the latest row began, counting from 0 over good and bad.
        parameter: that went bad first then, as an index into the sorted names; −1 if it was the loss, −2 if it was the
            state of the optimiser or of a constraint.

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

    `losses` and `evaluate` are the true −ELBO (with `VimcoELBO` its own, tighter bound), never the penalised one. In
    `run` and `stable_update` a step whose loss or gradient is not finite leaves parameters, optimiser and references as
    they were and is counted; `run` stops with an error after `max_skipped_in_a_row` of them.

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
        self._objective = Penalised(model, guide, loss, self.constraints, static_kwargs)

    def with_loss(self, loss: Any) -> "ProximitySVI":
        """The same with another ELBO."""
        other = copy.copy(self)
        other.loss = loss
        other._objective = self._objective.with_loss(loss)
        return other

    def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, rng_key: Any, *args: Any, init_params: Any = None, **kwargs: Any
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
        params = self.optim.get_params(state.optim_state)
        self._objective.bind(cast(Any, self.constrain_fn), params, state.mutable_state, args, kwargs)
        constraints = self._objective.start(params, state.mutable_state, args, kwargs)
        first_loss = jnp.zeros(())
        if isinstance(self.loss, TemperedELBO) and self.loss.relative:
            first_loss = jnp.abs(self.evaluate(state, *args, **kwargs))
        none = jnp.zeros((), jnp.int32)
        return ProximitySVIState(*state, constraints, Skipped(none, none, none, none - 1), first_loss)

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, svi_state: Any, *args: Any, forward_mode_differentiation: bool = False, **kwargs: Any
    ) -> tuple[ProximitySVIState, Array]:
        """Take one step, finite or not, as NumPyro's does; signature as in NumPyro."""
        loss, grads, state = self._gradient(svi_state, args, kwargs, forward_mode_differentiation)
        optim_state = self.optim.update(grads, svi_state.optim_state, value=loss)
        skipped = state.skipped._replace(in_a_row=jnp.zeros_like(state.skipped.in_a_row))
        return state._replace(optim_state=optim_state, skipped=skipped), loss

    def stable_update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, svi_state: Any, *args: Any, forward_mode_differentiation: bool = False, **kwargs: Any
    ) -> tuple[ProximitySVIState, Array]:
        """Take one step, unless something is not finite: then all stays as it was, and it is counted.

        That is: the loss, a gradient, or anything that later steps would read (a moment of the optimiser, say).
        """
        loss, grads, state = self._gradient(svi_state, args, kwargs, forward_mode_differentiation)
        state = state._replace(optim_state=self.optim.update(grads, svi_state.optim_state, value=loss))
        finite = jnp.stack([_is_finite(grads[name]) for name in sorted(grads)])
        good = jnp.all(finite) & jnp.isfinite(loss) & stays_finite(svi_state, state)
        kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), state, svi_state)
        skipped = _counted(svi_state, good, finite, loss)
        return kept._replace(rng_key=state.rng_key, skipped=skipped, first_loss=state.first_loss), loss

    def guarded_update(self, svi_state: Any, *args: Any, **kwargs: Any) -> tuple[ProximitySVIState, Array]:
        """`stable_update`, until `max_skipped_in_a_row` steps were bad: from then on nothing changes any more."""
        stopped = svi_state.skipped.in_a_row >= self.max_skipped_in_a_row
        after, loss = self.stable_update(svi_state, *args, **kwargs)
        return jax.tree.map(lambda new, old: jnp.where(stopped, old, new), after, svi_state), loss

    def _gradient(
        self, svi_state: Any, args: Any, kwargs: Any, forward_mode_differentiation: bool
    ) -> tuple[Array, Any, ProximitySVIState]:
        """The true loss, the gradient of the penalised one, and the next state but for the optimiser's."""
        rng_key, step_key = jax.random.split(svi_state.rng_key)
        params = self.optim.get_params(svi_state.optim_state)

        def objective(params: dict[str, Any]) -> tuple[Array, Any]:
            return self._objective(params, svi_state, step_key, args, kwargs)

        if forward_mode_differentiation:
            grads, aux = jax.jacfwd(objective, has_aux=True)(params)
        else:
            (_, aux), grads = jax.value_and_grad(objective, has_aux=True)(params)
        loss, mutable_state, constraints = aux
        first_loss = svi_state.first_loss
        if isinstance(self.loss, TemperedELBO) and self.loss.relative:  # of the first batch, or the first that has one
            first_loss = jnp.where(jnp.isfinite(first_loss), first_loss, jnp.abs(loss))
        state = svi_state._replace(
            mutable_state=mutable_state, rng_key=rng_key, constraints=constraints, first_loss=first_loss
        )
        return loss, grads, state

    def evaluate(self, svi_state: Any, *args: Any, **kwargs: Any) -> Array:
        """Minus the true ELBO, with the samples of the next step; signature as in NumPyro."""
        plain = copy.copy(self)
        plain.loss = self._objective.estimator
        return SVI.evaluate(plain, svi_state, *args, **kwargs)

    def measure_share(
        self,
        svi_state: ProximitySVIState,
        *args: Any,
        forward_mode_differentiation: bool = False,
        **kwargs: Any,
    ) -> ProximitySVIState:
        """Fill in the telemetry what share of the gradient each constraint would have in the next step.

            share = ‖k ∇d‖ / (‖∇(−ELBO)‖ + ‖k ∇d‖)

        It takes a gradient for each constraint apart, about another step each, so `update` does not do it; `run` does
        at its end.

        Args:
            svi_state: as in `update`; nothing but the telemetry changes.
            args: as in `update`.
            forward_mode_differentiation: as in `update`.
            kwargs: as in `update`.

        Returns:
            The state; `proxvi.telemetry` reads the shares off it.
        """
        if not self._objective.active:
            return svi_state
        _, rest, after = self._gradient(svi_state, args, kwargs, forward_mode_differentiation)
        _, step_key = jax.random.split(svi_state.rng_key)  # as in the step

        def distance(params: dict[str, Any], i: int) -> Array:
            return self._objective.distance(i, params, svi_state, step_key, args, kwargs)[0]

        params = self.optim.get_params(svi_state.optim_state)
        strengths = {i: after.constraints[i].telemetry.magnitude for i in self._objective.active}
        derivative = jax.jacfwd if forward_mode_differentiation else jax.grad
        slopes = {i: derivative(distance)(params, i) for i in strengths}
        for i, slope in slopes.items():
            rest = jax.tree.map(lambda g, c, k=strengths[i]: g - k * c, rest, slope)
        constraints = list(svi_state.constraints)
        for i, slope in slopes.items():
            report = constraints[i].telemetry._replace(share=share(rest, strengths[i], slope))
            constraints[i] = constraints[i]._replace(telemetry=report)
        return svi_state._replace(constraints=tuple(constraints))

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
        not finite gets into the result, and the others cost nothing. `stable_update=True` guards every chunk. Within
        `vmap` or `jit` nothing is shown or raised: look at `result.state.skipped` and `telemetry(result.state)`.

        Raises:
            FloatingPointError: after `max_skipped_in_a_row` steps in a row that were not finite.

        Warns:
            UserWarning: if a constraint still makes up more than 1% of the gradient at the end.
        """
        check_integer("num_steps", num_steps, remedy="1 is one step")
        state = init_state
        if state is None:
            state = self.init(rng_key, *args, init_params=init_params, **kwargs)

        options = {"forward_mode_differentiation": forward_mode_differentiation, **kwargs}

        def step(state: Any, _: None) -> tuple[Any, Array]:
            return self.update(state, *args, **options)

        def stable_step(state: Any, _: None) -> tuple[Any, Array]:
            return self.guarded_update(state, *args, **options)

        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, args, kwargs))):
            # Within `vmap` or `jit` nobody can look at a value: every step is guarded, and `skipped` tells afterwards.
            state, losses = jax.lax.scan(stable_step, state, None, num_steps)
            return SVIRunResult(self.get_params(state), self.measure_share(state, *args, **options), losses)

        # `scan` by itself, as in NumPyro: within `jit` the data would be constants, and round differently.
        size, losses, done = max(num_steps // 20, 1), [], 0
        with tqdm.tqdm(total=num_steps, disable=not progress_bar) as bar:
            while done < num_steps:
                length = min(size, num_steps - done)
                after, chunk_losses = jax.lax.scan(stable_step if stable_update else step, state, None, length)
                if not stable_update and not (np.all(np.isfinite(chunk_losses)) and stays_finite(state, after)):
                    after, chunk_losses = jax.lax.scan(stable_step, state, None, length)
                state = after
                losses.append(chunk_losses)
                done += length
                self.check_skipped(state)
                bar.update(length)
                if progress_bar:
                    bar.set_postfix_str(f"loss: {float(np.nanmean(chunk_losses)):.4f}", refresh=False)
        if self._objective.active:  # compiled, as the steps are
            state, _ = jax.lax.scan(lambda s, _: (self.measure_share(s, *args, **options), None), state, None, 1)
        self.warn_if_held(state)
        return SVIRunResult(self.get_params(state), state, jnp.concatenate(losses))

    def warn_if_held(self, state: ProximitySVIState) -> None:
        """Say so if a constraint, when its share was last measured, made up more than 1% of the gradient."""
        for constraint, kept in zip(self.constraints, state.constraints, strict=True):
            report = jax.device_get(kept.telemetry)
            if report.share > ACTIVE:
                name = getattr(constraint.statistic, "__name__", "statistic")
                warnings.warn(
                    f"the constraint on `{name}` still makes up {100 * report.share:.0f}% of the gradient at the end, "
                    f"at magnitude {report.magnitude:.2g}: this is not yet an optimum of the ELBO. Let `magnitude` "
                    "decay to nothing within the run, as `optax.exponential_decay(1.0, num_steps, 1e-10)` does.",
                    stacklevel=3,
                )

    def warn_if_unweighted(self, state: ProximitySVIState, rows: int, *batch: Any) -> None:
        """Say aloud if the prior of what all rows share meets the likelihood of a batch that does not stand for all."""
        size = np.shape(jax.tree.leaves(batch)[0])[0]
        if size == rows:
            return
        params = self.optim.get_params(state.optim_state)
        shared, unweighted = self._objective.unweighted(params, state.mutable_state, batch, size)
        if shared and unweighted:
            warnings.warn(
                f"`batch_size` is {size} of {rows} rows, but the likelihood of {unweighted[0]!r} counts those of a "
                f"batch only, beside the whole prior of {shared[0]!r}, which all rows share: the posterior will be too "
                f"wide. Put {unweighted[0]!r} into `numpyro.plate('rows', {rows}, subsample_size=x.shape[0])`.",
                stacklevel=4,
            )

    def check_skipped(self, state: ProximitySVIState) -> None:
        """Raise `FloatingPointError` if the latest `max_skipped_in_a_row` steps were not finite."""
        skipped = jax.device_get(state.skipped)
        if skipped.in_a_row >= self.max_skipped_in_a_row:
            names = sorted(self.optim.get_params(state.optim_state))
            what = {-1: "the loss", -2: "the state of the optimiser"}.get(int(skipped.parameter))
            what = what or f"the gradient of `{names[skipped.parameter]}`"
            raise FloatingPointError(
                f"{what} was not finite at step {skipped.step}, nor any step since: {skipped.in_a_row} in a row, where "
                f"`max_skipped_in_a_row` allows {self.max_skipped_in_a_row - 1}. The parameters are as before them. "
                "Lower the learning rate, clip the gradient, or look at the model for a logarithm of 0."
            )


def stays_finite(before: ProximitySVIState, after: ProximitySVIState) -> Array:
    """Whether no array that later steps read has become not finite; a best loss so far is infinite to begin with."""
    became = [
        _is_finite(old) & ~_is_finite(new)
        for old, new in zip(*(jax.tree.leaves(_read_later(state)) for state in (before, after)), strict=True)
    ]
    return ~jnp.any(jnp.stack(became))


def _read_later(state: ProximitySVIState) -> Any:
    return state.optim_state, state.mutable_state, [c.constraint for c in state.constraints]


def _is_finite(tree: Any) -> Array:
    """Whether all leaves are finite: a sum is not, if one entry is not."""

    def total(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:  # keys and counters
            return jnp.zeros(())
        # A product with ones runs at memory speed on CPU, where a reduction takes ten times as long.
        rows = jnp.reshape(x, (-1, x.shape[-1] if x.ndim else 1))
        wide = jnp.promote_types(x.dtype, jnp.float32)  # the sum of finite float16 may not be finite
        return jnp.sum(jnp.matmul(rows, jnp.ones(rows.shape[-1], x.dtype), preferred_element_type=wide))

    return jnp.isfinite(sum((total(x) for x in jax.tree.leaves(tree)), start=jnp.zeros(())))


def _counted(svi_state: Any, good: Array, finite: Array, loss: Array) -> Skipped:
    before = svi_state.skipped
    step = svi_state.optim_state[0] + before.total  # good steps, which the optimiser counts, and bad ones
    begins = ~good & (before.in_a_row == 0)
    elsewhere = jnp.where(jnp.isfinite(loss), -2, -1)
    parameter = jnp.where(jnp.all(finite), elsewhere, jnp.argmin(finite))
    return Skipped(
        before.total + ~good,
        jnp.where(good, 0, before.in_a_row + 1),
        jnp.where(begins, step, before.step).astype(before.step.dtype),
        jnp.where(begins, parameter, before.parameter).astype(before.parameter.dtype),
    )
