"""Many runs of one inference, by one compiled program."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuide, AutoGuideList

from proxvi._typing import Batch, Float, Guide, Int, Json, Params, Tree
from proxvi.constraints import Proximity, SpeedLimit
from proxvi.svi import ProximitySVI, ProximitySVIState, with_params
from proxvi.training import Arrays, describe, ordered

__all__ = ["Lanes"]

LONGEST = 1_000  # steps for which the order of the batches is made at once
AT_ONCE = 16  # lanes that an accelerator takes at once, by `vmap`; a CPU takes one after the other


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
    ) -> None:
        self._given = svi
        self._constraints = getattr(svi, "constraints", ()) if constraints is None else constraints
        devices = np.array(jax.devices()) if mesh is None else mesh.devices
        self._mesh = Mesh(devices.reshape(-1), "lanes")
        self._at_once = 1 if devices.flat[0].platform == "cpu" else AT_ONCE
        self._blocks = -(-most // (devices.size * self._at_once))  # on each device
        self.source = Arrays(data, batch_size, key, LONGEST)
        self._first = self.source.first()
        # The steps use the guide itself, which is then ready for the results, and so is `svi`. Within `jit`, where each
        # lane is initialised, a guide would be left with traced values: there it is a copy.
        self.svi = self._with_guide(svi.guide)
        self.svi.init(key, *self._first)
        svi.constrain_fn = self.svi.constrain_fn
        split, whole = PartitionSpec("lanes"), PartitionSpec()
        self._split = NamedSharding(self._mesh, split)
        self._program = jax.jit(
            jax.shard_map(
                self._of_device,
                mesh=self._mesh,
                in_specs=(split, split, whole, whole, whole, whole),
                out_specs=(split, split),
                check_vma=False,
            )
        )
        self._elbos_compiled = jax.jit(self._elbos)

    def _with_guide(self, guide: Guide) -> ProximitySVI:
        given = self._given
        loss = ordered(given.loss)
        return ProximitySVI(given.model, guide, given.optim, loss, self._constraints, **given.static_kwargs)

    def start(self, keys: Array, num_steps: int) -> ProximitySVIState:
        """The states before the first step, one for each key; `num_steps` is what `run` would be told."""

        def init(key: Array, batch: Batch) -> ProximitySVIState:
            svi = self._with_guide(renewed(self._given.guide))
            return svi.tell_length(svi.init(key, *batch), num_steps)

        states = jax.jit(lambda keys, batch: jax.lax.map(lambda key: init(key, batch), keys))(keys, self._first)
        self.svi.tell_length(jax.tree.map(lambda x: x[0], states), num_steps)
        return states

    def advance(
        self, states: ProximitySVIState, step: int, length: int, *, decay: tuple[int, int] | None = None
    ) -> tuple[ProximitySVIState, Float[np.ndarray, " lanes"]]:
        """Take `length` steps in every lane.

        Args:
            states: of the lanes.
            step: the number of the first step.
            length: how many.
            decay: the steps between which updates are shortened from their full length to 0, by a cosine.

        Returns:
            The states, and the mean loss of each lane.
        """
        count = jax.tree.leaves(states)[0].shape[0]
        rows, blocks, where = self._deal(count)
        dealt = jax.device_put(take(states, rows), self._split)
        begin_and_end = jnp.asarray(decay or (0, 0))
        mean, done = np.zeros(len(rows)), 0
        while done < length:
            feed, fits = self.source.feed(step + done, length - done)
            dealt, part = self._program(dealt, blocks, feed, step + done, fits, begin_and_end)
            done += fits
            mean = mean + (np.asarray(part, np.float64) - mean) * (fits / done)
        return take(dealt, where), mean[where]

    def _deal(self, count: int) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " devices"], np.ndarray]:
        """Deal lanes to devices: which lane is in each row, how many blocks a device takes, where each lane is."""
        devices, room = self._mesh.size, self._blocks * self._at_once
        each = -(-count // devices)
        rows = np.zeros((devices, room), int)  # a row that is not used holds lane 0, and is not computed
        where = np.concatenate([d * room + np.arange(each) for d in range(devices)])[:count]
        rows.reshape(-1)[where] = np.arange(count)
        used = np.clip(count - each * np.arange(devices), 0, each)
        return rows.reshape(-1), -(-used // self._at_once), where

    def _of_device(
        self, states: ProximitySVIState, blocks: Array, feed: Tree, first: Array, length: Array, decay: Array
    ) -> tuple[ProximitySVIState, Array]:
        """Advance the lanes of one device, block by block."""

        def lane(state: ProximitySVIState) -> tuple[ProximitySVIState, Array]:
            def step(i: Array, carry: tuple[ProximitySVIState, Array]) -> tuple[ProximitySVIState, Array]:
                before, mean = carry
                state, loss = self.svi.update(before, *self.source.pick(feed, first + i, i))
                return self._shortened(before, state, first + i, decay), mean + (loss - mean) / (i + 1)

            return jax.lax.fori_loop(0, length, step, (state, jnp.zeros(())))

        def block(b: Array, carry: tuple[ProximitySVIState, Array]) -> tuple[ProximitySVIState, Array]:
            if self._at_once == 1:  # without `vmap`, in which both branches of a condition are computed
                new = lane(jax.tree.map(lambda x: x[b], carry[0]))
                return jax.tree.map(lambda all_, one: all_.at[b].set(one), carry, new)
            start = b * self._at_once
            old = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, self._at_once), carry[0])
            return jax.tree.map(
                lambda all_, some: jax.lax.dynamic_update_slice_in_dim(all_, some, start, 0), carry, jax.vmap(lane)(old)
            )

        means = jnp.zeros(self._blocks * self._at_once)
        return jax.lax.fori_loop(0, blocks[0], block, (states, means))

    def _shortened(
        self, before: ProximitySVIState, after: ProximitySVIState, step: Array, decay: Array
    ) -> ProximitySVIState:
        """Go only a part of the way; for an optimiser such as Adam that is a smaller learning rate."""
        begin, end = decay[0], decay[1]
        part = 0.5 + 0.5 * jnp.cos(jnp.pi * (step - begin) / jnp.maximum(end - begin, 1))
        old, new = (self.svi.optim.get_params(state.optim_state) for state in (before, after))
        between = jax.tree.map(lambda x, y: jnp.where(end > begin, x + part * (y - x), y).astype(y.dtype), old, new)
        return after._replace(optim_state=with_params(after.optim_state, new, between))

    def describe(self, states: ProximitySVIState) -> Json:
        """What a checkpoint must agree with."""
        return {
            **self.source.describe(),
            **describe(self.svi, self.source.key, take(states, 0), self._first),
            "devices": self._mesh.size,
        }

    def with_fresh_optimizer(self, states: ProximitySVIState) -> ProximitySVIState:
        """The same parameters, and an optimiser that remembers nothing."""
        optim = self.svi.optim
        renew = jax.jit(jax.vmap(lambda state: optim.init(optim.get_params(state))))
        return states._replace(optim_state=renew(states.optim_state))

    def elbos(self, states: ProximitySVIState, key: Array, particles: int) -> Float[np.ndarray, "particles lanes"]:
        """Estimates of the true ELBO of all rows, with the same random numbers in every lane."""
        return np.asarray(self._elbos_compiled(states, jax.random.split(key, particles), self.source.arrays)).T

    def _elbos(self, states: ProximitySVIState, keys: Array, data: Batch) -> Array:
        def lane(state: ProximitySVIState) -> Array:
            return jax.lax.map(lambda key: -self.svi.evaluate(state._replace(rng_key=key), *data), keys)

        return jax.lax.map(lane, states)

    def params(self, states: ProximitySVIState) -> Params:
        """The constrained parameters of every lane."""
        return jax.jit(jax.vmap(self.svi.get_params))(states)


@jax.jit
def take(tree: Tree, rows: ArrayLike) -> Tree:
    """Rows of every array; compiled as one program, and not array by array."""
    return jax.tree.map(lambda x: x[rows], tree)


def renewed(guide: Guide) -> Guide:
    """The guide as it was before its first call: an autoguide remembers where it started then, whatever the key."""
    if not isinstance(guide, AutoGuide):
        return guide
    guide = copy.copy(guide)
    guide.prototype_trace = None
    if isinstance(guide, AutoGuideList):
        guide._guides = [renewed(part) for part in guide._guides]
    return guide
