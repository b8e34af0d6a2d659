"""An inference that gives the same bits in every process."""

import jax.numpy as jnp
from jax import Array
from numpyro.infer import ELBO, SVI, Trace_ELBO

from proxvi._typing import Batch
from proxvi.estimators import OrderedTraceELBO, as_scheduled, with_elbo
from proxvi.svi import ProximitySVI, ProximitySVIState, with_loss


def start_reproducibly(svi: SVI, key: Array, batch: Batch) -> tuple[ProximitySVI, ProximitySVIState]:
    """The same inference, whose losses have the same bits in every process, and its first state.

    The caller's `svi` is initialised too, so it can read the result and go on with it.
    """
    given = _as_proximity_svi(svi)
    state = given.init(key, *batch)
    svi.constrain_fn = given.constrain_fn  # of NumPyro's SVI, which `init` has not seen
    loss = ordered(given.loss)
    if loss is given.loss:
        return given, state
    inference = with_loss(given, loss)  # copies what `init` has found out
    if as_scheduled(loss).relative:
        state = state._replace(first_loss=jnp.abs(inference.evaluate(state, *batch)))  # `init` has another order
    return inference, state


def _as_proximity_svi(svi: SVI) -> ProximitySVI:
    """Without a constraint it takes the steps of NumPyro's SVI, and leaves out those that are not finite."""
    if type(svi) is SVI:
        return ProximitySVI(svi.model, svi.guide, svi.optim, svi.loss, (), **svi.static_kwargs)
    if not isinstance(svi, ProximitySVI):
        raise TypeError(f"`svi` must be a ProximitySVI or NumPyro's SVI, got {type(svi).__name__}; make one of it.")
    return svi


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
