"""The compiled steps of a run, in chunks."""

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpyro.infer import ELBO, SVI, Trace_ELBO

from proxvi._typing import Batch, Json, Metrics, Tree
from proxvi._validation import common_length
from proxvi.constraints import LimitState
from proxvi.estimators import OrderedTraceELBO, as_scheduled, with_elbo
from proxvi.svi import (
    ProximitySVI,
    ProximitySVIState,
    batch_sites,
    check_statistics_of_batches,
    guarded_update,
    raise_if_stopped,
    stays_finite,
    with_loss,
)
from proxvi.training._batches import make_source
from proxvi.training._devices import Placement, from_process_zero
from proxvi.training._run_fingerprint import describe

PARAMETERS = "['state'].optim_state[1][0]"  # where an Optax optimiser has them
Update = Callable[..., tuple[ProximitySVIState, Array]]
Chunk = tuple[ProximitySVIState, Array, Array]  # the state after it, its losses, and whether all stayed finite


class ChunkPacer:
    """Chunks of about a second, which end where a report is due.

    Several processes must take the same number of steps. If they do not agree on a pace, every chunk goes up to the
    next report.

    Attributes:
        pace: the steps of a chunk.
    """

    def __init__(self, report_every: int, num_steps: int, *, adapts: bool = True) -> None:
        self._report_every, self.num_steps = int(report_every), int(num_steps)  # JSON takes none of NumPy's
        self.longest = min(self._report_every, self.num_steps)
        self._adapts, self._has_compiled = adapts, False
        self.pace = 1 if adapts else self.longest  # a step may take seconds
        self._steps, self._seconds = 0, 0.0

    def limit(self, step: int) -> int:
        """The most steps that the chunk after `step` may take."""
        return min(self._report_every - step % self._report_every, self.num_steps - step, self.pace)

    def record(self, length: int, seconds: float, loaded: int = 0, loading: float = 0.0) -> None:
        """Adapt to the time that a chunk took.

        Args:
            length: its steps.
            seconds: in all.
            loaded: batches of the next chunk, which were loaded meanwhile.
            loading: the part of the seconds that this took.
        """
        self._steps, self._seconds = self._steps + length, self._seconds + seconds
        if self._adapts and self._has_compiled:
            # Computing and loading go on at the same time, so this is at least half of what a step takes.
            of_a_step = max((seconds - loading) / length, loading / max(loaded, 1), 1e-9)
            # A loader may have a few batches ready, and be slow after them: so it grows step by step.
            self.pace = max(1, min(self.longest, 2 * self.pace, int(1.0 / of_a_step)))
        self._has_compiled = True

    def take_rate(self) -> float:
        """Steps a second since this was asked the last time."""
        rate = self._steps / max(self._seconds, 1e-9)
        self._steps, self._seconds = 0, 0.0
        return rate

    def reports_at(self, step: int) -> bool:
        """Whether a report is due after `step` steps."""
        return step % self._report_every == 0 or step == self.num_steps

    def report_before(self, step: int) -> int:
        """The step of the last report before that of `step`; 0 if there was none."""
        return (step - 1) // self._report_every * self._report_every


class ChunkRunner:
    """Takes steps in compiled chunks, and skips those that are not finite.

    Attributes:
        svi: the given one, changed so that its losses have the same bits in every process.
        state: of the inference, after the steps taken.
        source: of the batches.
    """

    def __init__(
        self,
        svi: SVI,
        key: Array,
        data: tuple[Tree, ...],
        batch_size: int | None,
        pacer: ChunkPacer,
        mesh: Mesh | None,
    ) -> None:
        self._key, self._placement = key, Placement(mesh)
        self._placement.connect()
        init_key, data_key, self._validation_key = (jax.random.fold_in(key, i) for i in range(3))
        self.source = make_source(data, batch_size, data_key, pacer.longest, self._placement)
        self._first = from_process_zero(self.source.first())
        self.svi, state = start_reproducibly(svi, init_key, self._first)
        self.state = self._placement.replicate(self.svi.tell_length(state, pacer.num_steps))
        if batch_size is not None:
            self._check_batches(batch_size, common_length("data", data, "it is the rows' axis"))
        self._plain = self._compiled(self.svi.update)
        self._guarded = self._compiled(partial(guarded_update, self.svi))
        self._evaluate = jax.jit(lambda state, key, data: -self.svi.evaluate(state._replace(rng_key=key), *data))

    def _check_batches(self, size: int, rows: int) -> None:
        """Refuse a statistic of single rows.

        Warn if the prior of variables that all rows share meets the likelihood of one batch, which is too small.
        """
        check_statistics_of_batches(self.svi, self.state, self._first)
        if size == rows:
            return
        sites = batch_sites(self.svi, self.state, self._first)
        if sites.shared and (observed := [*sites.unweighted, *sites.factors]):
            warnings.warn(
                f"`batch_size` is {size} of {rows} rows, but the likelihood of {observed[0]!r} counts those of a batch "
                f"only, beside the whole prior of {sites.shared[0]!r}, which all rows share: the posterior will be too "
                f"wide. Put {observed[0]!r} into `numpyro.plate('rows', {rows}, subsample_size=x.shape[0])`.",
                stacklevel=4,
            )

    def _compiled(self, update: Update) -> Callable[..., Chunk]:
        """A program that takes `length` steps, from the `skip`-th of a feed that begins at step `first`.

        There is one program for all lengths. With `measure` the state also holds the share of the constraints.
        """

        def advance(
            before: ProximitySVIState, feed: Tree, first: Array, skip: Array, length: Array, measure: Array
        ) -> Chunk:
            def body(i: Array, carry: tuple[ProximitySVIState, Array]) -> tuple[ProximitySVIState, Array]:
                state, losses = carry
                state, loss = update(state, *self.source.pick(feed, first + skip + i, skip + i))
                return state, losses.at[i].set(loss)

            state, losses = jax.lax.fori_loop(0, length, body, (before, jnp.zeros(self.source.longest)))
            last = jnp.maximum(skip + length - 1, 0)
            batch = self.source.pick(feed, first + last, last)
            measured = jax.lax.cond(measure, lambda: self.svi.measure_share(state, *batch), lambda: state)
            return measured, losses, stays_finite(before, state)

        replicated = self._placement.replicated
        return jax.jit(advance) if replicated is None else jax.jit(advance, out_shardings=replicated)

    def run(self, step: int, pacer: ChunkPacer) -> np.ndarray:
        """Take the chunk of steps after `step`; returns their losses.

        Raises:
            FloatingPointError: if too many steps in a row were not finite. The state is that before the chunk.
        """
        started = time.perf_counter()
        feed, length = self.source.feed(step, pacer.limit(step))
        after = step + length
        measure = pacer.reports_at(after)
        state, losses, finite = self._plain(self.state, feed, step, 0, length, measure)
        began = time.perf_counter()
        loaded = self.source.fetch_ahead(after, pacer.limit(after))
        loading = time.perf_counter() - began
        losses = np.asarray(losses)[:length]  # waits; sliced here, because each length would compile a slice of its own
        if not (finite and np.all(np.isfinite(losses))):
            state, losses = self._skip_bad_steps(feed, step, length, measure)
            raise_if_stopped(self.svi, state)
        self.state = state
        pacer.record(length, time.perf_counter() - started, loaded, loading)
        return losses

    def _skip_bad_steps(
        self, feed: Tree, step: int, length: int, measure: bool
    ) -> tuple[ProximitySVIState, np.ndarray]:
        """Take the same steps, and skip those that are not finite.

        Only those go through the guarded program, which rounds differently. So the good steps have the same bits as in
        any other chunk.
        """
        state, done, losses = self.state, 0, np.empty(length, jnp.result_type(float))
        while done < length:
            after, now, finite = self._plain(state, feed, step, done, length - done, measure)
            now = np.asarray(now)[: length - done]
            losses[done:] = now
            if finite and np.all(np.isfinite(now)):
                return after, losses
            # After `good` steps from here all is finite, after `bad` of them it is not. Mostly these are neighbours.
            good, bad = 0, len(now) if np.all(np.isfinite(now)) else int(np.argmin(np.isfinite(now))) + 1
            probe = bad - 1
            while bad - good > 1:
                _, _, finite = self._plain(state, feed, step, done, probe, False)
                good, bad = (probe, bad) if finite else (good, probe)
                probe = (good + bad) // 2
            after, _, _ = self._plain(state, feed, step, done, good, False)
            done += good
            state, skipped_loss, _ = self._guarded(after, feed, step, done, 1, measure and done + 1 == length)
            losses[done] = skipped_loss[0]
            done += 1
            # The run stops here; a good step after it would reset the count.
            if jax.device_get(state.skipped.in_a_row) >= self.svi.max_skipped_in_a_row:
                break
        return state, losses

    def resume(self, step: int, state: ProximitySVIState, source_state: Tree, *, accept_changes: bool) -> None:
        """Go on from a checkpoint; a stream that yields something else now is refused, unless changes are accepted."""
        self.state = self._placement.replicate(state)
        self.source.seek(step, source_state, accept_changes=accept_changes)

    def part_of_state(self, leaf: str) -> str | None:
        """The part to which a leaf of `{"state": self.state}` belongs; None if it must not start afresh."""
        if leaf.startswith("['state'].constraints"):
            return "constraints"
        optim_state: Any = self.state.optim_state
        # An Optax optimiser keeps the parameters by themselves. One of NumPyro's has them between its moments.
        separate = isinstance(optim_state[1], tuple) and optim_state[1][0] is self.svi.optim.get_params(optim_state)
        # The count of steps before it is the clock of schedules of the ELBO, too.
        if separate and leaf.startswith("['state'].optim_state[1]") and not leaf.startswith(PARAMETERS):
            return "optimiser"
        return None

    def evaluate(self, data: Batch) -> float:
        """The true ELBO of held-out data, with the same random numbers every time."""
        return float(self._evaluate(self.state, self._validation_key, self._placement.reach(data)))

    def telemetry(self) -> Metrics:
        """What the constraints did, and how many steps were skipped."""
        reports, skipped = jax.device_get(([c.telemetry for c in self.state.constraints], self.state.skipped.total))
        values: dict[str, list[float]] = {}
        for report in reports:
            for name, value in report._asdict().items():
                values.setdefault(name, []).append(float(value))
        found = {name: v[0] if len(v) == 1 else v for name, v in values.items()}
        return {**found, "skipped": int(skipped)}

    def limited_updates(self) -> int:
        """How many updates speed limits have changed."""
        limits = [c.constraint for c in self.state.constraints if isinstance(c.constraint, LimitState)]
        return sum(int(limit.active) for limit in limits)

    def was_scheduled(self, steps: int) -> bool:
        """Whether annealing or KL warm-up was still on its way to the ELBO so many steps ago."""
        loss, then = as_scheduled(self.svi.loss), self.state.optim_state[0] - steps
        return loss.needs_step() and not bool(loss.is_over(then, self.state.first_loss))

    def describe(self) -> Json:
        """What a checkpoint must agree with."""
        return {
            **self.source.describe(),
            **describe(self.svi, self._key, self.state, self._first),
            "devices": self._placement.num_devices,
        }


def start_reproducibly(svi: SVI, key: Array, batch: Batch) -> tuple[ProximitySVI, ProximitySVIState]:
    """An inference whose losses have the same bits in every process, and its first state.

    The caller's `svi` is initialised too, so `svi.get_params` and `svi.update` accept the result.
    """
    if type(svi) is SVI:  # the same steps, but those that are not finite are skipped
        given = ProximitySVI(svi.model, svi.guide, svi.optim, svi.loss, (), **svi.static_kwargs)
    elif isinstance(svi, ProximitySVI):
        given = svi
    else:
        raise TypeError(f"`svi` must be a ProximitySVI or NumPyro's SVI, got {type(svi).__name__}; make one of it.")
    state = given.init(key, *batch)
    svi.constrain_fn = given.constrain_fn  # of NumPyro's SVI, which `init` has not seen
    loss = ordered(given.loss)
    if loss is given.loss:
        return given, state
    inference = with_loss(given, loss)  # copies what `init` has found out
    if as_scheduled(loss).relative:
        state = state._replace(first_loss=jnp.abs(inference.evaluate(state, *batch)))  # `init` has another order
    return inference, state


def ordered(loss: ELBO) -> ELBO:
    """The same ELBO, with its sites added up in one order; NumPyro's `Trace_ELBO` has another in each process."""
    elbo = as_scheduled(loss).elbo
    if type(elbo) is not Trace_ELBO or not elbo.sum_sites:
        return loss
    return with_elbo(
        loss,
        OrderedTraceELBO(
            num_particles=elbo.num_particles,
            vectorize_particles=elbo.vectorize_particles,  # pyright: ignore[reportArgumentType]
            multi_sample_guide=elbo.multi_sample_guide,
        ),
    )
