"""A constraint that sets itself: a statistic may fall only slowly, and the optimiser's update is changed for that."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from proxvi._distributions import ranges_of_entropies
from proxvi._typing import Float, ParamTree, Scalar, Statistic, Tree
from proxvi._validation import check_number
from proxvi.constraints._inner_product import inner_product, inner_products
from proxvi.statistics import entropy

__all__ = ["LimitState", "LimitTelemetry", "SpeedLimit"]

TOLERANCE = 0.05  # of the range: a unit that lacks as much is held with full weight
RETURN = 0.05  # of what a unit lacks is won back in a step
LONGEST_PULL = 2.0  # in lengths of the optimiser's update; 1 cancels any fall to first order (Cauchy-Schwarz)
NOISE = 0.01  # of the range: batches are averaged until the noise of the statistic is as small as this
MEMORY = 100  # steps over which the noise is measured
LONGEST_AVERAGE = 1 / 250  # of `over`
END = 2  # times `over`: from then on the optimiser is alone
TINY = 1e-30


class LimitTelemetry(NamedTuple):
    """What a speed limit did. It is for people: no later step reads it.

    Attributes:
        shortfall: how far the worst unit is below its floor, as a part of the range of the statistic; 0 after the end.
        pull: length of the change of the latest update, in lengths of that update; 0 after the end.
        active: the share of all steps so far in which the update was changed.

    Example:
        >>> LimitTelemetry(shortfall=0.02, pull=0.5, active=0.1).pull
        0.5
    """

    shortfall: Float[Array, "*starts"] | float
    pull: Float[Array, "*starts"] | float
    active: Float[Array, "*starts"] | float

    @classmethod
    def unmeasured(cls) -> "LimitTelemetry":
        """Before the first step."""
        return cls(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))


class LimitState(NamedTuple):
    """What the next step of a speed limit cannot recompute.

    Attributes:
        step: how many were taken.
        over: the number of steps over which the whole range may be lost; 0 means no limit, None not yet known.
        active: the number of steps in which the update was changed.
        latest: the statistic at the step before.
        change: by how much it had changed there.
        noise: the mean product of two changes in a row: minus the variance of noise, and positive on a trend.
        average: the statistic, smoothed.
        floor: the limit: it follows `average`, but not faster than the range over `over` steps.
    """

    step: Array
    over: Array | None
    active: Array
    latest: Tree
    change: Tree
    noise: Tree
    average: Tree
    floor: Tree


@dataclass(frozen=True)
class SpeedLimit:
    """A statistic of the approximation, such as its entropy, may fall only slowly. There is no strength to tune.

        find the update nearest to the optimiser's   with   f_i(λ + u) − f_i(λ) ≥ −R_i / over   for every unit i

    `R` is the range of the statistic. The limit is one-sided: what rises may rise at once. It is kept by a floor that
    follows the statistic by at most R / over a step, so what has just risen may fall back. An update that keeps to the
    limit is left as it is, to the bit. Nothing is added to the gradient, so the optimiser's moments never see the
    constraint, and its strength is in units of the optimiser's own step. After 2 `over` steps the limit ends: from then
    on the updates are the optimiser's alone.

    Attributes:
        statistic: `f`, a function whose value may not fall fast.
        over: the number of steps over which the whole range may be lost. None is a third of the run, whose length
            `run` and `fit` know, so that the last third is free. 0 is no limit. Counted in steps of the limit, so one
            that was not finite, or was taken before there was a limit, does not count.
        range: `R`, a number for all units. None is the range of the entropy: the logarithm of the number of values of
            a discrete unit, 5 nats for a continuous one. A statistic that is not made of entropies must name it.

    Example:
        >>> import proxvi
        >>> SpeedLimit()
        SpeedLimit(entropy)
        >>> SpeedLimit(proxvi.kl_to_prior, range=2.0, over=5_000)
        SpeedLimit(kl_to_prior, over=5000, range=2.0)
    """

    statistic: Statistic = entropy
    over: int | float | Array | None = None
    range: int | float | None = None

    def __post_init__(self) -> None:
        if not callable(self.statistic):
            raise TypeError(
                f"`statistic` must be a function, got {self.statistic!r}; pass for example `proxvi.entropy`, without "
                "calling it."
            )
        if self.over is not None:
            remedy = "a third of the steps of the run is a good choice, and 0 is no limit"
            check_number("over", self.over, at_least=0.0, remedy=remedy)
        if self.range is not None:
            remedy = "it is the difference between the largest and the smallest value of the statistic"
            check_number("range", self.range, above=0.0, remedy=remedy)

    def __repr__(self) -> str:
        given = {"over": self.over, "range": self.range}
        name = getattr(self.statistic, "__name__", repr(self.statistic))
        return f"SpeedLimit({', '.join([name, *(f'{k}={v!r}' for k, v in given.items() if v is not None)])})"

    @property
    def is_off(self) -> bool:
        """Whether there is no limit: then `ProximitySVI` leaves it out of the program."""
        return self.over is not None and not isinstance(self.over, Tracer) and bool(self.over == 0)

    def ranges(self, statistic: Callable[[], Tree]) -> Tree:
        """`R` for every unit; it depends on the kinds of distributions alone, and costs nothing in a compiled step."""
        if (given := self.range) is not None:
            return jax.tree.map(lambda x: jnp.full(x.shape, given, jnp.result_type(float)), jax.eval_shape(statistic))
        with ranges_of_entropies() as taken:
            ranges = statistic()
        if taken != {"entropy"}:
            raise ValueError(
                f"`range` must be given for a statistic that is not an entropy, or is compiled by `jax.jit`, got None "
                f"for {self!r}; pass the difference between its largest and its smallest value, as in "
                "`SpeedLimit(kl_to_prior, range=2.0)`, or the function that is not compiled."
            )
        # Minus an entropy has the range of the entropy. A unit that is masked everywhere has none.
        return jax.tree.map(lambda r: jnp.where(r == 0.0, 1.0, jnp.abs(r)), ranges)

    def init(self, describe: Callable[[], Tree]) -> LimitState:
        """The state before the first step; `describe()` gives the shapes of the statistic."""
        # Five arrays, not one five times: a loop may donate the state.
        units = (jax.tree.map(lambda x: jnp.zeros(x.shape), describe()) for _ in range(5))
        over = None if self.over is None else jnp.asarray(self.over, jnp.result_type(float))
        return LimitState(jnp.zeros((), jnp.int32), over, jnp.zeros((), jnp.int32), *units)

    def limit(
        self,
        state: LimitState,
        result: ParamTree,
        updates: Callable[[], ParamTree],
        value: Tree,
        slope: Callable[[Tree], ParamTree],
        ranges: Tree,
    ) -> tuple[ParamTree, LimitState, LimitTelemetry]:
        """Change the optimiser's update by the least that keeps to the limit.

            f̄ ← f̄ + (f − f̄) / h                          the statistic, smoothed; h = 1 where there is no noise
            φ ← φ + clip(f̄ − φ, −R / over, R / over)      the floor
            s = (φ − f̄) / R,   w = clip(s / 0.05, 0, 1)   what a unit lacks, and how much it counts
            G = Σ w ∇f / R,    e = Σ w² / Σ w             how far those that are held are held
            u ← (1 − e) u   where u G < 0                 slow down what makes the statistic fall
            u ← u + e max(0, Σ w (0.05 s − 1 / over) − G·u) G / |G|²,   at most 2 |u|

        From step 2 `over` on nothing lacks anything: s = 0.

        Args:
            state: from `init`, or from the step before.
            result: what the optimiser gave, the update itself or the parameters after it.
            updates: gives `u`, of the parameters that the statistic depends on. Called only where the limit is active.
            value: `f(λ)`.
            slope: maps weights `w` to `Σ w ∇f`, the vector-Jacobian product of the statistic.
            ranges: `R`, shaped as `value`.

        Returns:
            `result` with the change of the update added to it, the next state, and what was done.
        """
        over = state.over
        assert over is not None, "`update` refuses a limit that does not know it"
        after = self._advance(state, over, value, ranges)
        # Without an end, noise would hold up for ever what the loss pulls down only weakly: below its floor a unit is
        # pulled up, above it is not pulled down.
        holds = state.step < END * over
        lacks = jax.tree.map(
            lambda floor, mean, r: jnp.where(holds, (floor - mean) / r, 0.0), after.floor, after.average, ranges
        )
        weights = jax.tree.map(lambda s: jnp.clip(s / TOLERANCE, 0.0, 1.0), lacks)
        active = jnp.any(jnp.stack([jnp.any(w > 0.0) for w in jax.tree.leaves(weights)]))

        def slope_of(weights: Tree) -> ParamTree:
            return slope(jax.tree.map(lambda w, f: w.astype(f.dtype), weights, value))

        def changed() -> tuple[ParamTree, Scalar]:
            change, pull = _change(updates(), weights, lacks, ranges, slope_of, 1.0 / over)
            return jax.tree.map(lambda x, c: (x + c).astype(x.dtype), result, change), pull

        limited, pull = jax.lax.cond(active, changed, lambda: (result, jnp.zeros(())))
        after = after._replace(active=state.active + active.astype(state.active.dtype))
        shortfall = jnp.max(jnp.stack([jnp.max(s) for s in jax.tree.leaves(lacks)]))
        share = (after.active / after.step).astype(pull.dtype)
        return limited, after, LimitTelemetry(shortfall, pull, share)

    def _advance(self, state: LimitState, over: Array, value: Tree, ranges: Tree) -> LimitState:
        """The average and the floor with this value in them."""
        first, at_least_one = state.step == 0, jnp.maximum(over, 1.0)

        def unit(latest: Array, change: Array, noise: Array, average: Array, floor: Array, f: Array, r: Array) -> Any:
            f = jnp.where(jnp.isfinite(f), f.astype(latest.dtype), latest)
            moved = jnp.where(first, 0.0, f - latest)
            # The noise of a batch comes and goes, so two changes in a row have opposite signs: their mean product is
            # minus its variance σ². An average over h steps has the variance σ² / 2h.
            noise = noise + (moved * change - noise) / jnp.minimum(state.step + 1.0, MEMORY)
            steps = jnp.clip(-noise / (2.0 * (NOISE * r) ** 2), 1.0, jnp.maximum(LONGEST_AVERAGE * at_least_one, 1.0))
            average = jnp.where(first, f, average + (f - average) / steps)
            fastest = r / at_least_one
            floor = jnp.where(first, f, floor + jnp.clip(average - floor, -fastest, fastest))
            return f, moved, noise, average, floor

        each = (state.latest, state.change, state.noise, state.average, state.floor, value, ranges)
        leaves = [unit(*arrays) for arrays in zip(*(jax.tree.leaves(tree) for tree in each), strict=True)]
        structure = jax.tree.structure(state.floor)
        trees = [jax.tree.unflatten(structure, arrays) for arrays in zip(*leaves, strict=True)]
        return LimitState(state.step + 1, over, state.active, *trees)


def _change(
    updates: ParamTree, weights: Tree, lacks: Tree, ranges: Tree, slope: Callable[[Tree], ParamTree], pace: Scalar
) -> tuple[ParamTree, Scalar]:
    """The change that makes an update keep to the limit, and its length, in lengths of the update."""
    ascent = slope(jax.tree.map(lambda w, r: w / r, weights, ranges))
    held = _sum(lambda w: w * w, weights) / jnp.maximum(_sum(lambda w: w, weights), TINY)
    shortened = jax.tree.map(lambda u, g: jnp.where(u * g < 0.0, (1.0 - held) * u, u), updates, ascent)
    squares = inner_products(ascent, ascent)
    square = jnp.maximum(_sum(lambda g: g, squares), TINY)
    # Only of what the statistic depends on: the rest of the parameters is none of the limit's business.
    length = jnp.sqrt(_sum(lambda u, g: jnp.where(g > 0.0, u, 0.0), inner_products(updates, updates), squares))
    wanted = _sum(lambda w, s: w * (RETURN * s - pace), weights, lacks)
    needed = jnp.maximum(wanted - inner_product(ascent, shortened), 0.0) / square
    scale = held * jnp.minimum(needed, LONGEST_PULL * length / jnp.sqrt(square))
    change = jax.tree.map(lambda new, u, g: new + scale * g - u, shortened, updates, ascent)
    return change, jnp.sqrt(inner_product(change, change)) / jnp.maximum(length, TINY)


def _sum(function: Callable[..., Array], *trees: Tree) -> Scalar:
    return sum((jnp.sum(x) for x in jax.tree.leaves(jax.tree.map(function, *trees))), start=jnp.zeros(()))
