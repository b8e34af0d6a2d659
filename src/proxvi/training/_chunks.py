"""The compiled steps of one run of `fit`, on one device or many."""

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from proxvi._validation import common_length
from proxvi.svi import ProximitySVI, guarded_update, stays_finite, warn_if_unweighted
from proxvi.training._batches import Arrays, Stream, digest, is_key, local, signature


class Run:
    """The compiled steps of one run, and the state that they move."""

    def __init__(
        self,
        svi: ProximitySVI,
        key: Any,
        data: tuple[Any, ...],
        batch_size: int | None,
        longest: int,
        mesh: Mesh | None,
    ) -> None:
        # Shardings are XLA's to propagate, whatever type the axes of the caller's mesh have.
        self.svi, self._mesh = svi, None if mesh is None else Mesh(mesh.devices, mesh.axis_names)
        init_key, data_key, self._validation_key = (jax.random.fold_in(key, i) for i in range(3))
        self._key = key
        if len(data) == 1 and isinstance(data[0], tuple):
            raise TypeError(
                f"`data` must be what the model takes, one argument after the other, got a tuple of {len(data[0])}; "
                "write `fit(svi, key, num_steps, x, y)`, or make a list of what is to be a stream of batches."
            )
        streamed = (
            len(data) == 1 and not isinstance(data[0], dict) and not _is_array(data[0]) and hasattr(data[0], "__iter__")
        )
        if streamed:
            if batch_size is not None:
                raise ValueError(
                    f"`batch_size` must be None where `data` is an iterable, got {batch_size}; the iterable makes its "
                    "own batches."
                )
            self.source: Arrays | Stream = Stream(data[0], longest, self._spread_stack)
        else:
            self.source = Arrays(self.place(data), batch_size, data_key, longest, self._shard)
            if mesh is not None and (size := batch_size or 0) % mesh.devices.shape[0]:
                raise ValueError(
                    f"`batch_size` must be a multiple of the {mesh.devices.shape[0]} devices along the first axis of "
                    f"`mesh`, got {size}; change one of them."
                )
        self._first = self.source.first()
        if jax.process_count() > 1:  # all start from what process 0 sees
            self._first = multihost_utils.broadcast_one_to_all(self._first)
        self.state = self.place(svi.init(init_key, *self._first))
        if batch_size is not None:
            warn_if_unweighted(svi, self.state, common_length("data", data, "it is the rows' axis"), self._first)
        options: dict[str, Any] = {} if mesh is None else {"out_shardings": self._everywhere()}
        self._plain = jax.jit(lambda *args: self._advance(svi.update, *args), **options)
        self._guarded = jax.jit(lambda *args: self._advance(partial(guarded_update, svi), *args), **options)
        self._evaluate = jax.jit(lambda state, key, data: -svi.evaluate(state._replace(rng_key=key), *data))

    def _advance(
        self, update: Any, before: Any, feed: Any, first: Any, skip: Any, length: Any, measure: Any
    ) -> tuple[Any, Any, Any]:
        """`length` steps, their losses and whether all that was finite still is; one program for any length.

        If `measure`, the state also tells the share of the constraints.
        """

        def body(i: Any, carry: Any) -> Any:
            state, losses = carry
            state, loss = update(state, *self.source.pick(feed, first + skip + i, skip + i))
            return state, losses.at[i].set(loss)

        state, losses = jax.lax.fori_loop(0, length, body, (before, jnp.zeros(self.source.longest)))
        last = jnp.maximum(skip + length - 1, 0)
        batch = self.source.pick(feed, first + last, last)
        measured = jax.lax.cond(measure, lambda: self.svi.measure_share(state, *batch), lambda: state)
        return measured, losses, stays_finite(before, state)

    def steps(self, step: int, limit: int, pace: int, report_every: int, num_steps: int) -> tuple[int, np.ndarray]:
        """Take up to `limit` steps from `step` on; returns how many, and their losses. `pace` is for the next time."""
        feed, length = self.source.feed(step, limit)
        after = step + length
        measure = after % report_every == 0 or after == num_steps
        state, losses, finite = self._call(self._plain, self.state, feed, step, 0, length, measure)
        self.source.ahead(after, min(report_every - after % report_every, num_steps - after, pace))
        losses = np.asarray(losses)[:length]  # waits; sliced here, because each length would compile a slice of its own
        if not (finite and np.all(np.isfinite(losses))):
            state, losses = self._leave_out(feed, step, length, measure)
        self.state = state
        return length, losses

    def _leave_out(self, feed: Any, step: int, length: int, measure: bool) -> tuple[Any, np.ndarray]:
        """The same steps without the bad ones.

        Only the bad ones go through the guarded program, which rounds differently: the others have the bits that they
        would have in any other chunk.
        """
        state, done, losses = self.state, 0, np.empty(length, jnp.result_type(float))
        while done < length:
            after, now, finite = self._call(self._plain, state, feed, step, done, length - done, measure)
            now = np.asarray(now)[: length - done]
            losses[done:] = now
            if finite and np.all(np.isfinite(now)):
                return after, losses
            # All is well after `fine` steps from here, and not after `bad` of them; mostly these are neighbours.
            fine, bad = 0, len(now) if np.all(np.isfinite(now)) else int(np.argmin(np.isfinite(now))) + 1
            probe = bad - 1
            while bad - fine > 1:
                _, _, finite = self._call(self._plain, state, feed, step, done, probe, False)
                fine, bad = (probe, bad) if finite else (fine, probe)
                probe = (fine + bad) // 2
            after, _, _ = self._call(self._plain, state, feed, step, done, fine, False)
            done += fine
            state, left_out, _ = self._call(self._guarded, after, feed, step, done, 1, measure and done + 1 == length)
            losses[done] = left_out[0]
            done += 1
            # Here the run stops: a good step would reset the count before anybody has looked.
            if jax.device_get(state.skipped.in_a_row) >= self.svi.max_skipped_in_a_row:
                break
        return state, losses

    def _call(self, program: Any, state: Any, feed: Any, step: int, skip: int, length: int, measure: bool) -> Any:
        """`length` steps from the `skip`-th of a feed that begins at `step`."""
        return program(state, feed, *map(jnp.asarray, (step, skip, length, measure)))

    def resume(self, step: int, state: Any, source: Any) -> None:
        """Go on from a checkpoint."""
        self.state = self.place(state)
        self.source.seek(step, source)

    def evaluate(self, validation: tuple[Any, ...]) -> float:
        """The true ELBO of held-out data, with the same random numbers every time."""
        return float(self._evaluate(self.state, self._validation_key, validation))

    def telemetry(self) -> dict[str, Any]:
        """What the constraints did, and how many steps were left out."""
        reports = [jax.device_get(c.telemetry) for c in self.state.constraints]
        values = {name: [float(getattr(r, name)) for r in reports] for name in ("magnitude", "distance", "share")}
        told = {name: v[0] if len(v) == 1 else v for name, v in values.items() if v}
        return {**told, "skipped": int(self.state.skipped.total)}

    def describe(self) -> dict[str, Any]:
        """What a checkpoint must agree with: data, key, constraints, estimator, and the program of a step."""
        constraints = [
            {
                "statistic": _name_and_code(c.statistic),
                "distance": _name_and_code(c.distance),
                "relative": c.relative,
            }
            for c in self.svi.constraints
        ]
        program = jax.make_jaxpr(self.svi.update)(jax.tree.map(local, self.state), *self._first)
        return {
            **self.source.describe(),
            "key": np.asarray(jax.random.key_data(self._key)).tolist(),
            "constraints": constraints,
            "loss": type(self.svi.loss).__name__,
            "devices": 1 if self._mesh is None else self._mesh.size,
            "jax": jax.__version__,
            # Learning rate, schedules, architecture are in the program: what is computed, though not of which of
            # several alike, because an ELBO may add up its sites in another order in each process.
            "program": hashlib.sha256("\n".join(sorted(_equations(program))).encode()).hexdigest(),
        }

    # -- devices ------------------------------------------------------------------------------------------------------

    def _everywhere(self) -> NamedSharding:
        assert self._mesh is not None
        return NamedSharding(self._mesh, PartitionSpec())

    def place(self, tree: Any) -> Any:
        """A copy on every device of the mesh."""
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        everywhere = self._everywhere()

        def one(x: Any) -> Any:
            if is_key(x):
                return jax.random.wrap_key_data(one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
            return jax.make_array_from_process_local_data(everywhere, np.asarray(local(x)), np.shape(x))

        return jax.tree.map(one, tree)

    def _shard(self, batch: Any) -> Any:
        if self._mesh is None:
            return batch
        spread = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names[0]))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spread), batch)

    def _spread_stack(self, stack: Any) -> Any:
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, stack)
        spread = NamedSharding(self._mesh, PartitionSpec(None, self._mesh.axis_names[0]))
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(spread, x), stack)


def _equations(program: Any) -> Iterator[str]:
    """What a program is made of, whatever the order in which it was written down and the names of its variables."""
    for constant in getattr(program, "consts", ()):
        yield f"{signature(constant)} {digest(constant)}"
    for equation in getattr(program, "jaxpr", program).eqns:
        constants = [str(x.val) for x in equation.invars if hasattr(x, "val")]
        settings = []
        for name, value in equation.params.items():
            inner = [x for x in jax.tree.leaves(value, is_leaf=_is_program) if _is_program(x)]
            for each in inner:
                yield from _equations(each)
            if not inner and not callable(value):
                settings.append(f"{name}={value}")
        results = [str(x.aval) for x in equation.outvars]
        yield re.sub(r"0x[0-9a-f]+", "", f"{equation.primitive} {constants} {results} {settings}")


def _name_and_code(function: Any) -> str:
    """What a function is called, and a digest of what it does; `lambda q: entropy(q["a"])` is not that of `q["b"]`."""

    def parts(code: Any) -> Iterator[str]:
        yield f"{code.co_code.hex()} {code.co_names}"
        for constant in code.co_consts:
            yield from parts(constant) if hasattr(constant, "co_code") else (repr(constant),)

    name = getattr(function, "__qualname__", type(function).__name__)
    if not hasattr(function, "__code__"):
        return name
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    closed_over = [repr(x) for x in cells if isinstance(x, str | int | float | bool)]
    return f"{name} {hashlib.sha256(' '.join([*parts(function.__code__), *closed_over]).encode()).hexdigest()[:8]}"


def _is_program(x: Any) -> bool:
    return hasattr(x, "eqns")


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
