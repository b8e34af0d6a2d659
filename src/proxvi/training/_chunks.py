"""The compiled steps of a run, in chunks."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpyro.infer import SVI

from proxvi._typing import Batch, Json, Metrics, Tree
from proxvi._validation import common_length
from proxvi.svi import ProximitySVIState, guarded_update, stays_finite, warn_if_unweighted
from proxvi.training._batches import make_source
from proxvi.training._chunk_pacing import ChunkPacer
from proxvi.training._device_placement import Placement
from proxvi.training._processes import from_process_zero
from proxvi.training._reproducible import start_reproducibly
from proxvi.training._run_fingerprint import describe

Update = Callable[..., tuple[ProximitySVIState, Array]]
Chunk = tuple[ProximitySVIState, Array, Array]  # the state after it, its losses, and whether all stayed finite


class ChunkRunner:
    """Takes steps in compiled chunks, and leaves out those that are not finite.

    Args:
        svi: as for `fit`.
        key: as for `fit`.
        data: as for `fit`.
        batch_size: as for `fit`.
        longest: the most steps of a chunk.
        mesh: as for `fit`.

    Attributes:
        svi: the same inference, with the same bits in every process.
        state: of the inference, after the steps taken.
        source: of the batches.
    """

    def __init__(
        self,
        svi: SVI,
        key: Array,
        data: tuple[Tree, ...],
        batch_size: int | None,
        longest: int,
        mesh: Mesh | None,
    ) -> None:
        self._key, self._placement = key, Placement(mesh)
        init_key, data_key, self._validation_key = (jax.random.fold_in(key, i) for i in range(3))
        self.source = make_source(data, batch_size, data_key, longest, self._placement)
        self._first = from_process_zero(self.source.first())
        self.svi, state = start_reproducibly(svi, init_key, self._first)
        self.state = self._placement.copy(state)
        if batch_size is not None:
            rows = common_length("data", data, "it is the rows' axis")
            warn_if_unweighted(self.svi, self.state, rows, self._first)
        self._plain = self._compiled(self.svi.update)
        self._guarded = self._compiled(partial(guarded_update, self.svi))
        self._evaluate = jax.jit(lambda state, key, data: -self.svi.evaluate(state._replace(rng_key=key), *data))

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

        everywhere = self._placement.everywhere
        program = jax.jit(advance) if everywhere is None else jax.jit(advance, out_shardings=everywhere)

        def call(state: ProximitySVIState, feed: Tree, *numbers: int) -> Chunk:
            return program(state, feed, *map(jnp.asarray, numbers))

        return call

    def run(self, step: int, pacer: ChunkPacer) -> np.ndarray:
        """Take the chunk of steps after `step`; returns their losses."""
        feed, length = self.source.feed(step, pacer.limit(step))
        after = step + length
        measure = pacer.reports_at(after)
        state, losses, finite = self._plain(self.state, feed, step, 0, length, measure)
        self.source.fetch_ahead(after, pacer.limit(after))
        losses = np.asarray(losses)[:length]  # waits; sliced here, because each length would compile a slice of its own
        if not (finite and np.all(np.isfinite(losses))):
            state, losses = self._leave_out(feed, step, length, measure)
        self.state = state
        return losses

    def _leave_out(self, feed: Tree, step: int, length: int, measure: bool) -> tuple[ProximitySVIState, np.ndarray]:
        """Take the same steps without the bad ones.

        Only the bad ones go through the guarded program, which rounds differently. So the good ones have the bits that
        they would have in any other chunk.
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
            state, left_out, _ = self._guarded(after, feed, step, done, 1, measure and done + 1 == length)
            losses[done] = left_out[0]
            done += 1
            # The run stops here; a good step after it would reset the count.
            if jax.device_get(state.skipped.in_a_row) >= self.svi.max_skipped_in_a_row:
                break
        return state, losses

    def resume(self, step: int, state: ProximitySVIState, source_state: Tree) -> None:
        """Go on from a checkpoint."""
        self.state = self._placement.copy(state)
        self.source.seek(step, source_state)

    def evaluate(self, data: Batch) -> float:
        """The true ELBO of held-out data, with the same random numbers every time."""
        return float(self._evaluate(self.state, self._validation_key, data))

    def telemetry(self) -> Metrics:
        """What the constraints did, and how many steps were left out."""
        reports = [jax.device_get(c.telemetry) for c in self.state.constraints]
        values = {name: [float(getattr(r, name)) for r in reports] for name in ("magnitude", "distance", "share")}
        found = {name: v[0] if len(v) == 1 else v for name, v in values.items() if v}
        return {**found, "skipped": int(self.state.skipped.total)}

    def describe(self) -> Json:
        """What a checkpoint must agree with."""
        return {
            **self.source.describe(),
            **describe(self.svi, self._key, self.state, self._first),
            "devices": self._placement.num_devices,
        }
