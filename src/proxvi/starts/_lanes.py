"""Many runs of one inference, by one compiled program."""

from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from numpyro.infer import SVI

from proxvi._typing import Batch, Float, Int, Json, Params, Tree
from proxvi.constraints import Proximity, SpeedLimit
from proxvi.starts._programs import programs_of, renewed
from proxvi.starts._workers import PARTS, Workers
from proxvi.svi import ProximitySVI, ProximitySVIState, batch_sites, check_statistics_of_batches
from proxvi.training import Arrays, describe

__all__ = ["OTHER_STARTS", "Lanes", "take"]

LONGEST = 1_000  # steps for which the order of the batches is made at once
AT_ONCE = 16  # lanes that an accelerator takes at once, by `vmap`; a CPU takes one after the other
OTHER_STARTS = (
    "pass an autoguide itself, not a function that calls it, with an `init_loc_fn` that is random, and initial values "
    "that depend on the key: `numpyro.param(name, lambda key: ...)`"
)


class Lanes:
    """Runs of one inference. A lane is one run; its state is a row of a `ProximitySVIState`.

    One program advances any number of lanes up to `most`, by any number of steps. Each device loops over its lanes. So
    the bits of a lane depend neither on how many others there are, nor on the number of devices.

    Args:
        svi: a `ProximitySVI`, or NumPyro's `SVI`.
        key: for the order of the data.
        data: the arguments of the model.
        batch_size: rows of the arrays in a batch; None for all of them.
        most: the largest number of lanes.
        mesh: devices to spread the lanes over; None takes all of them.
        constraints: in place of those of `svi`.
        executor: whose workers advance the lanes; None for this process.
    """

    def __init__(
        self,
        svi: SVI,
        key: Array,
        data: Batch,
        batch_size: int | None,
        most: int,
        mesh: Mesh | None = None,
        constraints: tuple[Proximity | SpeedLimit, ...] | None = None,
        executor: Executor | None = None,
    ) -> None:
        if executor is not None and mesh is not None:
            raise ValueError(
                "`mesh` must be None with an `executor`, whose workers use all of their devices, got both; leave one "
                "out."
            )
        if own := _own_methods(svi):
            raise TypeError(
                f"`svi` must have the methods of NumPyro's SVI or of ProximitySVI, got {type(svi).__name__}, whose own "
                f"{own[0]!r} would not be called; pass a function of one start to `luck`."
            )
        held: tuple[Proximity | SpeedLimit, ...] = (
            getattr(svi, "constraints", ()) if constraints is None else constraints
        )
        devices = np.array(jax.devices()) if mesh is None else mesh.devices
        self._mesh = Mesh(devices.reshape(-1), "lanes")
        self._at_once = 1 if devices.flat[0].platform == "cpu" else AT_ONCE
        self._blocks = -(-most // (devices.size * self._at_once))  # on each device
        self.source = Arrays(data, batch_size, key, LONGEST)
        self._first = self.source.first()
        self._programs = programs_of(svi, held, self._mesh, self._at_once, self._blocks, self.source)
        self.svi = self._programs.svi
        svi.constrain_fn = self.svi.constrain_fn  # so that `svi.get_params` works
        self._split = NamedSharding(self._mesh, PartitionSpec("lanes"))
        self._weight = 1.0
        self._workers = None
        if executor is not None:
            parts = (svi.model, renewed(svi.guide), svi.optim, svi.loss, svi.static_kwargs)
            self._workers = Workers(executor, _rebuilt, parts, key, data, batch_size, -(-most // PARTS), held)

    def start(self, keys: Array, num_steps: int) -> ProximitySVIState:
        """The states before the first step, one for each key; `num_steps` is what `run` would be told."""
        states = self.svi.tell_length(self._programs.start(keys, self._first), num_steps)
        size, rows = self.source.batch_size, self.source.rows
        if size is None:
            return states
        one = take(states, 0)
        check_statistics_of_batches(self.svi, one, self._first)
        if size < rows:
            try:
                jax.eval_shape(self.svi.evaluate, one, *self.source.arrays)
            except Exception as error:  # whatever a model may raise
                raise ValueError(
                    f"`batch_size` must be None for a model or a guide that cannot take all {rows} rows, of which the "
                    f"final ELBO is, got {size} and {error!r}; write `numpyro.plate(name, {rows}, "
                    "subsample_size=x.shape[0])` in both, and use a guide whose parameters do not count the rows."
                ) from error
            sites = batch_sites(self.svi, one, self._first)
            if sites.unweighted and not (sites.shared or sites.factors or sites.weighted):
                self._weight = rows / size  # the loss of an autoencoder is that of its batch
        return states

    def are_alike(self, states: ProximitySVIState) -> bool:
        """Whether there are parameters, and they are the same in all lanes."""
        params = jax.tree.leaves(self.svi.optim.get_params(states.optim_state))
        return bool(params) and all(bool(jnp.all(x == x[:1])) for x in params)

    def advance(
        self, states: ProximitySVIState, step: int, length: int, decay: tuple[int, int] | None = None
    ) -> tuple[ProximitySVIState, Float[np.ndarray, " lanes"]]:
        """Take `length` steps in every lane.

        Args:
            states: of the lanes.
            step: the number of the first step.
            length: how many.
            decay: the steps between which updates are shortened from their full length to 0, by a cosine.

        Returns:
            The states, and the mean of the finite losses of each lane, as that of all rows; infinite if its last loss
            or a parameter is not finite.
        """
        if self._workers is not None:
            states, loss = self._workers.advance(states, step, length, decay)
            return states, self._weight * loss
        count = jax.tree.leaves(states)[0].shape[0]
        rows, blocks, where = self._deal(count)
        dealt = jax.device_put(take(states, rows), self._split)
        begin_and_end = jnp.asarray(decay or (0, 0))
        mean, done = np.zeros(len(rows)), 0
        while done < length:
            feed, fits = self.source.feed(step + done, length - done)
            dealt, part = self._programs.advance(dealt, blocks, feed, step + done, fits, begin_and_end)
            done += fits
            part = np.asarray(part, np.float64)
            with np.errstate(invalid="ignore"):
                both = mean + (part - mean) * (fits / done)
            mean = np.where(np.isfinite(both), both, part)  # a lane may come back, or be lost
        return take(dealt, where), self._weight * mean[where]

    def _deal(self, count: int) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " devices"], np.ndarray]:
        """Deal lanes to devices: which lane is in each row, how many blocks a device takes, where each lane is."""
        devices, room = self._mesh.size, self._blocks * self._at_once
        each = -(-count // devices)
        rows = np.zeros((devices, room), int)  # a row that is not used holds lane 0, and is not computed
        where = np.concatenate([d * room + np.arange(each) for d in range(devices)])[:count]
        rows.reshape(-1)[where] = np.arange(count)
        used = np.clip(count - each * np.arange(devices), 0, each)
        return rows.reshape(-1), -(-used // self._at_once), where

    def describe(self, states: ProximitySVIState) -> Json:
        """What a checkpoint must agree with; the number of devices changes no bits."""
        return {**self.source.describe(), **describe(self.svi, self.source.key, take(states, 0), self._first)}

    def with_fresh_optimizer(self, states: ProximitySVIState) -> ProximitySVIState:
        """The same parameters, and an optimiser that remembers nothing; a scheduled loss goes on."""
        return states._replace(optim_state=self._programs.renew(states.optim_state))

    def elbos(self, states: ProximitySVIState, key: Array, particles: int) -> Float[np.ndarray, "particles lanes"]:
        """Estimates of the true ELBO of all rows, with the same random numbers in every lane."""
        return np.asarray(self._programs.elbos(states, jax.random.split(key, particles), self.source.arrays)).T

    def params(self, states: ProximitySVIState) -> Params:
        """The constrained parameters of every lane."""
        return self._programs.params(states)


@jax.jit
def take(tree: Tree, rows: ArrayLike) -> Tree:
    """Rows of every array; compiled as one program, and not array by array."""
    return jax.tree.map(lambda x: x[rows], tree)


def _own_methods(svi: SVI) -> list[str]:
    """What a subclass replaces of the methods of the SVIs that lanes know."""
    known = ProximitySVI.__mro__
    own = {name for kind in type(svi).__mro__ if kind not in known for name in vars(kind)}
    return sorted(name for name in own if hasattr(ProximitySVI, name) and not name.startswith("__"))


def _rebuilt(
    parts: tuple[Any, ...],
    key: Array,
    data: Batch,
    batch_size: int | None,
    most: int,
    constraints: tuple[Proximity | SpeedLimit, ...],
) -> Lanes:
    """The lanes of a worker. An `SVI` that was used holds traced functions, which cannot be sent; its parts can."""
    *positional, static = parts
    return Lanes(SVI(*positional, **static), key, data, batch_size, most, constraints=constraints)
