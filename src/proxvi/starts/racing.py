"""`race`: many starts, the worse half dropped again and again, and the winner finished."""

import itertools
import math
import warnings
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm.auto
from jax import Array
from jax.sharding import Mesh
from numpyro.infer import SVI

from proxvi._typing import Float, Int, Params, Tree
from proxvi._validation import check_inference, check_integer, check_key
from proxvi.constraints import SpeedLimit
from proxvi.starts._lanes import OTHER_STARTS, Lanes, take
from proxvi.svi import ProximitySVIState, is_finite
from proxvi.training import Checkpointing
from proxvi.training.checkpoints import Checkpoints

__all__ = ["Race", "Round", "race"]

FINISH = 0.5  # of the steps are for the winner
SCORED = 0.25  # of a round, at its end, counts for the score
CHUNKS = 20  # of the finish
PLAIN, LIMITED = "plain", "speed limit"
LIMIT = SpeedLimit()  # one for all races: programs are kept for a constraint by its identity


class Round(NamedTuple):
    """One round of a race.

    Attributes:
        lanes: numbers of the lanes that took part.
        steps: how many each of them took.
        scores: the mean ELBO of each at the end of the round.
    """

    lanes: Int[np.ndarray, " lanes"]
    steps: int
    scores: Float[np.ndarray, " lanes"]


@dataclass(frozen=True, eq=False)
class Race:
    """Who won a race. Prints as a summary.

    Attributes:
        params: the winner's, at the end.
        state: the winner's.
        elbo: the winner's, at the end.
        error: standard error of `elbo`.
        lane: the winner's number.
        start: the number of its start.
        method: "plain" or "speed limit".
        rounds: what happened.
        steps: gradient steps in all.

    Example:
        >>> import numpy as np
        >>> first = Round(np.arange(4), 10, np.array([-9.0, -8.0, -7.0, -6.0]))
        >>> rounds = (first, Round(np.array([2, 3]), 20, np.ones(2)))
        >>> print(Race({}, None, -5.0, 0.1, lane=2, start=2, method="plain", rounds=rounds, steps=200))
        ELBO -5.00 ± 0.1, by start 2 (plain), which was number 2 of 4 after the first round; 200 gradient steps in all.
         round   runs  steps each    best ELBO  median ELBO
             1      4          10        -6.00        -7.50
             2      2          20         1.00         1.00
        winner      1         120        -5.00
    """

    params: Params = field(repr=False)
    state: ProximitySVIState | None = field(repr=False)
    elbo: float
    error: float
    lane: int
    start: int
    method: str
    rounds: tuple[Round, ...] = field(repr=False)
    steps: int

    def __str__(self) -> str:
        first = self.rounds[0]
        place = int(np.sum(first.scores > first.scores[list(first.lanes).index(self.lane)])) + 1
        lines = [
            f"ELBO {self.elbo:.2f} ± {self.error:.2g}, by start {self.start} ({self.method}), which was number {place} "
            f"of {len(first.lanes)} after the first round; {self.steps} gradient steps in all.",
            f"{'round':>6} {'runs':>6} {'steps each':>11} {'best ELBO':>12} {'median ELBO':>12}",
        ]
        for number, (lanes, steps, scores) in enumerate(self.rounds, 1):
            elbos = np.where(np.isfinite(scores), scores, -np.inf)  # a run that diverged is the worst
            lines.append(f"{number:6d} {len(lanes):6d} {steps:11d} {np.max(elbos):12.2f} {np.median(elbos):12.2f}")
        finish = self.steps - sum(len(lanes) * steps for lanes, steps, _ in self.rounds)
        lines.append(f"{'winner':>6} {1:6d} {finish:11d} {self.elbo:12.2f}")
        return "\n".join(lines)

    __repr__ = __str__


def race(
    svi: SVI,
    key: Array,
    num_steps: int,
    *data: Tree,
    starts: int = 64,
    methods: Sequence[str] = (PLAIN,),
    batch_size: int | None = None,
    particles: int = 100,
    mesh: Mesh | None = None,
    executor: Executor | None = None,
    checkpointing: Checkpointing | None = None,
    progress_bar: bool = True,
) -> Race:
    """Run many starts side by side, drop the worse half again and again, and finish the winner.

        round r:  n / 2^r lanes, all with the same random numbers;   score = mean ELBO over the last quarter of it

    Half of the steps go to `log2(n)` rounds of equal cost. The other half go to the winner, with a fresh optimiser
    whose steps become smaller by a cosine. At least one plain lane is in the last round. Use a constant learning rate:
    a schedule would begin again with the winner, and may end before it.

    Args:
        svi: NumPyro's `SVI`, or a `ProximitySVI`, whose constraint is not used.
        key: for the starts and the samples.
        num_steps: gradient steps of all lanes together.
        data: the arguments of the model.
        starts: how many starts; with each method, so there are `starts × len(methods)` lanes, a power of 2.
        methods: "plain", "speed limit", or both. The second is `SpeedLimit()`, on the mean entropy over the rows of a
            plate. On the benchmark it changed next to nothing beside plain lanes.
        batch_size: rows of the arrays in a batch; None for all of them. The final ELBO is that of all rows, so the
            model must take these, too.
        particles: samples for the final ELBO.
        mesh: devices to spread the lanes over; None takes all of them.
        executor: whose workers advance the starts, such as Dask's `client.get_executor()`; None for this process.
        checkpointing: where and how often to save; call it again with the same arguments, and it resumes.
        progress_bar: whether to show one.

    Returns:
        The winner's parameters, and what happened.

    Raises:
        FloatingPointError: if the winner's parameters are not finite.

    Warns:
        UserWarning: if a sample of the final ELBO is not finite.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax, proxvi
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model(y):
        ...     frequency = numpyro.sample("frequency", dist.Uniform(0, 3))
        ...     numpyro.sample("y", dist.Normal(jnp.sin(frequency * jnp.arange(50)), 0.5), obs=y)
        >>> y = jnp.sin(1.3 * jnp.arange(50))
        >>> svi = SVI(model, AutoNormal(model), optax.adam(0.02), Trace_ELBO())
        >>> result = proxvi.race(svi, jax.random.key(0), 6_000, y, starts=16, progress_bar=False)
        >>> print(svi.guide.median(result.params)["frequency"].round(2))
        1.3
    """
    check_inference("svi", svi)
    check_key(key)
    check_integer("num_steps", num_steps, remedy="they are those of all lanes together")
    check_integer("starts", starts, remedy="64 is the default")
    check_integer("particles", particles, at_least=2, remedy="the ELBO is a mean over samples")
    if checkpointing is not None and checkpointing.accept_changes:
        raise ValueError("`accept_changes` must be False in a race, got True; a changed race starts in another folder.")
    unknown = [name for name in methods if name not in (PLAIN, LIMITED)]
    if unknown or not methods or len(set(methods)) < len(methods):
        raise ValueError(f"`methods` must name {PLAIN!r}, {LIMITED!r}, or both, got {list(methods)}; leave it out.")
    count = starts * len(methods)
    if count < 2 or count & (count - 1):
        raise ValueError(
            f"`starts` must give a power of 2 runs with {len(methods)} methods, got {starts}; take 64, for example."
        )
    stages = schedule(num_steps, count)
    limits = (LIMIT,) if LIMITED in methods else ()
    lanes = Lanes(svi, jax.random.fold_in(key, 0), data, batch_size, count, mesh, limits, executor)
    # Lane i is start i % starts with method i // starts.
    start_keys = jnp.concatenate([jax.random.split(jax.random.fold_in(key, 1), starts)] * len(methods))
    states = lanes.start(start_keys, sum(stage.length for stage in stages))
    if starts > 1 and lanes.are_alike(states):
        raise ValueError(
            f"`svi` must begin at another point for each key, got {starts} starts with the same parameters, which see "
            f"the same random numbers; {OTHER_STARTS}."
        )
    is_plain = np.repeat([name == PLAIN for name in methods], starts)
    if limits:
        states = _without_limit(states, jnp.asarray(is_plain))
    alive, rounds, first = np.arange(count), [], 0
    with ExitStack() as stack:
        checkpoints: Checkpoints | None = None
        if checkpointing is not None:
            settings = {"num_steps": num_steps, "starts": starts, "methods": list(methods)}
            checkpoints = stack.enter_context(closing(checkpointing.open({**lanes.describe(states), **settings})))
            # A later step than the last is of another run, which `restore` refuses by name.
            restored = checkpoints.restore(
                lambda step: take(states, np.arange(stages[min(step, len(stages)) - 1].lanes_after))
            )
            if restored is not None:
                first, states, alive = restored.step, restored.tree, np.array(restored.notes["alive"])
                rounds = [Round(np.array(lane), n, np.array(s)) for lane, n, s in restored.notes["rounds"]]
        bar = stack.enter_context(
            tqdm.auto.tqdm(
                total=num_steps,
                initial=sum(stage.lanes * stage.length for stage in stages[:first]),
                disable=not progress_bar,
                unit="step",
                dynamic_ncols=True,
            )
        )
        for number, stage in enumerate(stages[first:], first + 1):
            states, loss = _advance(lanes, states, stage, jax.random.fold_in(key, 1 + number))
            best = -float(np.nanmin(loss)) if np.any(np.isfinite(loss)) else math.nan
            if stage.decay is None:
                rounds.append(Round(alive, stage.length, -loss))
                kept = better_half(-loss, is_plain[alive])
                states, alive = take(states, kept), alive[kept]
            if stage.lanes == 2:  # one is left
                states = lanes.with_fresh_optimizer(states)
            bar.update(stage.lanes * stage.length)
            bar.set_postfix_str(f"{len(alive)} runs left, best ELBO {best:.5g}", refresh=False)
            if checkpoints is not None and (checkpoints.is_due() or stage is stages[-1]):
                notes = [[r.lanes.tolist(), r.steps, r.scores.tolist()] for r in rounds]
                checkpoints.save(number, states, {"alive": alive.tolist(), "rounds": notes})
                if stage is stages[-1]:
                    checkpoints.wait()
    estimates = lanes.elbos(states, jax.random.fold_in(key, 2 + len(rounds)), particles).astype(np.float64)
    winner, params = int(alive[0]), take(lanes.params(states), 0)
    if not is_finite(params):
        raise FloatingPointError(
            f"the race has no winner: the parameters of the best start, {winner % starts}, are not finite; look at the "
            "model, and lower the learning rate."
        )
    if lost := int(np.sum(~np.isfinite(estimates))):
        warnings.warn(
            f"the ELBO of the winner is not finite, for {lost} of its {particles} samples are not; its parameters are. "
            "Look at the model where a density is 0.",
            stacklevel=2,
        )
    with np.errstate(invalid="ignore"):
        elbo, spread = float(estimates.mean()), float(estimates.std(ddof=1))
    return Race(
        params=params,
        state=take(states, 0),
        elbo=elbo,
        error=spread / math.sqrt(particles),
        lane=winner,
        start=winner % starts,
        method=methods[winner // starts],
        rounds=tuple(rounds),
        steps=num_steps,
    )


class Stage(NamedTuple):
    """A part of a race.

    Attributes:
        lanes: how many take part.
        begin: the number of the first step of a lane.
        length: how many steps.
        decay: for the winner alone, the steps between which its updates become smaller.
    """

    lanes: int
    begin: int
    length: int
    decay: tuple[int, int] | None = None

    @property
    def lanes_after(self) -> int:
        """How many are left."""
        return max(self.lanes // 2, 1)


def schedule(num_steps: int, count: int) -> list[Stage]:
    """The rounds, each of about the same cost, and the parts in which the winner is finished."""
    rounds = int(math.log2(count))
    each = int(num_steps * (1 - FINISH)) // rounds
    if each < count:
        raise ValueError(
            f"`num_steps` must be at least {math.ceil(count * rounds / (1 - FINISH))}, one step for each of {count} "
            f"runs, got {num_steps}; take more steps, or fewer starts."
        )
    stages, done = [], 0
    for lanes in (count >> r for r in range(rounds)):
        stages.append(Stage(lanes, done, each // lanes))
        done += each // lanes
    end = done + num_steps - sum(stage.lanes * stage.length for stage in stages)
    ends = np.unique(np.linspace(done, end, CHUNKS + 1).astype(int)).tolist()
    return stages + [Stage(1, a, b - a, (done, end)) for a, b in itertools.pairwise(ends)]


def _advance(lanes: Lanes, states: ProximitySVIState, stage: Stage, key: Array) -> tuple[ProximitySVIState, Any]:
    """Take the steps of a stage; the loss of a round is that of its last part."""
    if stage.decay is not None:
        return lanes.advance(states, stage.begin, stage.length, decay=stage.decay)
    states, scored = _with_key(states, key), max(int(stage.length * SCORED), 1)
    if stage.length > scored:
        states, _ = lanes.advance(states, stage.begin, stage.length - scored)
    return lanes.advance(states, stage.begin + stage.length - scored, scored)


def better_half(scores: np.ndarray, is_plain: np.ndarray) -> np.ndarray:
    """Positions of the better half, the best first; a plain one among them, until one is left."""
    order = np.argsort(np.where(np.isfinite(scores), -scores, np.inf), kind="stable")
    half = len(order) // 2
    kept = order[:half]
    if half > 1 and is_plain.any() and not is_plain[kept].any():
        kept[-1] = next(i for i in order if is_plain[i])
    return kept


def _without_limit(states: ProximitySVIState, is_plain: Array) -> ProximitySVIState:
    """Speed limits that hold nothing, in the lanes that are plain."""
    (limit,) = states.constraints
    over = jnp.where(is_plain, 0.0, limit.constraint.over)
    return states._replace(constraints=(limit._replace(constraint=limit.constraint._replace(over=over)),))


def _with_key(states: ProximitySVIState, key: Array) -> ProximitySVIState:
    """The same random numbers in every lane, so that a better score is a better start."""
    lanes = states.rng_key.shape[0]
    return states._replace(rng_key=jnp.stack([key] * lanes))
