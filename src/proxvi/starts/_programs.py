"""The compiled programs of lanes."""

import copy
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuide, AutoGuideList

from proxvi._typing import Batch, Guide, Tree
from proxvi.constraints import Proximity, SpeedLimit
from proxvi.estimators import as_scheduled
from proxvi.svi import ProximitySVI, ProximitySVIState, is_finite, with_params
from proxvi.training import Arrays, ordered, program_digest

__all__ = ["Programs", "programs_of", "renewed"]

_Carry = tuple[ProximitySVIState, Array, Array, Array]
_known: WeakKeyDictionary[SVI, dict[Any, "Programs"]] = WeakKeyDictionary()


def programs_of(
    svi: SVI,
    constraints: tuple[Proximity | SpeedLimit, ...],
    mesh: Mesh,
    at_once: int,
    blocks: int,
    source: Arrays,
) -> "Programs":
    """The programs for an `SVI`, compiled once for all calls with it that differ in the key or the data alone."""
    shapes = jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), source.first())
    # A constraint may hold an array, which has no hash. The programs hold the constraint, so its `id` stays its own.
    key = (tuple(map(id, constraints)), mesh, at_once, blocks, source.rows, source.batch_size, str(shapes))
    of_svi = _known.setdefault(svi, {})
    if key not in of_svi or not of_svi[key].is_current(svi, source):
        of_svi[key] = Programs(svi, constraints, mesh, at_once, blocks, source)
    return of_svi[key]


class Programs:
    """What is compiled. It holds neither the data nor the `SVI` that it was made for.

    Args:
        svi: whose parts are used.
        constraints: in place of those of `svi`.
        mesh: of the devices.
        at_once: lanes that a device takes at once.
        blocks: of as many lanes, on each device.
        source: of the batches.
    """

    def __init__(
        self,
        svi: SVI,
        constraints: tuple[Proximity | SpeedLimit, ...],
        mesh: Mesh,
        at_once: int,
        blocks: int,
        source: Arrays,
    ) -> None:
        self._made_of = _parts(svi)
        self._constructor = svi.model, svi.optim, ordered(svi.loss), constraints, dict(svi.static_kwargs)
        self._at_once, self._blocks = at_once, blocks
        self._source = copy.copy(source)
        self._source.arrays = ()
        self.svi = self._with_guide(svi.guide)
        # The steps use the guide itself, which is then ready for the results. Within `jit`, where each lane is
        # initialised, a guide would be left with traced values: there it is a copy.
        state = self.svi.tell_length(self.svi.init(source.key, *source.first()), 1)  # each run tells its own
        self._state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        self._digests = self._trace(source)
        split, whole = PartitionSpec("lanes"), PartitionSpec()
        self.advance = jax.jit(
            jax.shard_map(
                self._of_device,
                mesh=mesh,
                in_specs=(split, split, whole, whole, whole, whole),
                out_specs=(split, split),
                check_vma=False,
            )
        )
        self.start = jax.jit(self._start)
        self.elbos = jax.jit(self._elbos)
        self.params = jax.jit(jax.vmap(self.svi.get_params))
        self.renew = jax.jit(jax.vmap(self._renew))

    def is_current(self, svi: SVI, source: Arrays) -> bool:
        """Whether a start and a step are still what they were.

        Parts of the `SVI` may have been replaced, and global variables that its model uses may have changed.
        """
        return list(map(id, self._made_of)) == list(map(id, _parts(svi))) and self._digests == self._trace(source)

    def _trace(self, source: Arrays) -> tuple[str, str]:
        """Digests of a start and of a step, constants included."""
        first = source.first()
        start = jax.make_jaxpr(self._start)(source.key[None], first)
        return program_digest(start), program_digest(jax.make_jaxpr(self.svi.update)(self._state, *first))

    def _with_guide(self, guide: Guide) -> ProximitySVI:
        model, optim, loss, constraints, static = self._constructor
        return ProximitySVI(model, guide, optim, loss, constraints, **static)

    def _start(self, keys: Array, batch: Batch) -> ProximitySVIState:
        return jax.lax.map(lambda key: self._with_guide(renewed(self.svi.guide)).init(key, *batch), keys)

    def _of_device(
        self, states: ProximitySVIState, blocks: Array, feed: Tree, first: Array, length: Array, decay: Array
    ) -> tuple[ProximitySVIState, Array]:
        """Advance the lanes of one device, block by block."""

        def lane(state: ProximitySVIState) -> tuple[ProximitySVIState, Array]:
            """The next state, and the mean of the losses that are finite; infinite if the lane is lost at the end."""

            def step(i: Array, carry: _Carry) -> _Carry:
                before, mean, skipped, _ = carry
                state, loss = self.svi.update(before, *self._source.pick(feed, first + i, i))
                now = mean + (loss - mean) / (i + 1 - skipped)
                finite = jnp.isfinite(now)  # and not that of the loss: one more use of it would change its rounding
                mean, skipped = jnp.where(finite, now, mean), skipped + ~finite
                return self._shortened(before, state, first + i, decay), mean, skipped, finite

            none = jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.array(True)
            state, mean, _, finite = jax.lax.fori_loop(0, length, step, (state, *none))
            alive = finite & is_finite(self.svi.optim.get_params(state.optim_state))
            return state, jnp.where(alive, mean, jnp.inf)

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
        try:
            return after._replace(optim_state=with_params(after.optim_state, new, between))
        except TypeError as error:
            raise TypeError(
                "`optim` must keep the parameters in its state as they are, which `luck` and `race` read and change, "
                "got one that does not; use an Optax optimiser, such as `optax.adam(1e-3)`."
            ) from error

    def _renew(self, optim_state: Any) -> Any:
        """An optimiser that remembers nothing, but for the step of a scheduled loss: a warm-up must not begin again."""
        new = self.svi.optim.init(self.svi.optim.get_params(optim_state))
        # Optax counts its own steps, which begin again; NumPyro's optimisers have no other count than this one.
        return (optim_state[0], new[1]) if as_scheduled(self.svi.loss).changes_gradient else new

    def _elbos(self, states: ProximitySVIState, keys: Array, data: Batch) -> Array:
        def lane(state: ProximitySVIState) -> Array:
            return jax.lax.map(lambda key: -self.svi.evaluate(state._replace(rng_key=key), *data), keys)

        return jax.lax.map(lane, states)


def _parts(svi: SVI) -> list[Any]:
    """What programs are made of."""
    return [svi.model, svi.guide, svi.optim, svi.loss, *svi.static_kwargs, *svi.static_kwargs.values()]


def renewed(guide: Guide) -> Guide:
    """The guide as it was before its first call: an autoguide remembers where it started then, whatever the key."""
    if not isinstance(guide, AutoGuide):
        return guide
    guide = copy.copy(guide)
    guide.prototype_trace = None
    if isinstance(guide, AutoGuideList):
        guide._guides = [renewed(part) for part in guide._guides]
    return guide
