"""What this library relies on inside NumPyro. A release that breaks one of these fails here by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.optim
import optax
import pytest
from numpyro.infer import ELBO, SVI, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoGuideList, AutoNormal
from numpyro.infer.elbo import TraceEnum_ELBO

from proxvi.starts._lanes import renewed
from proxvi.svi._objective import OBSERVABLE

KEY = jax.random.key(0)


def model() -> None:
    numpyro.sample("y", dist.Normal(jnp.asarray(numpyro.sample("x", dist.Normal(0.0, 1.0))), 1.0), obs=2.0)


@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO])
def test_an_elbo_maps_its_particles_by_vectorize_particles_fn(elbo: type[ELBO]) -> None:
    """`ProximitySVI` replaces it on a copy of the ELBO, to read statistics off each particle."""
    mapped = []
    loss: Any = elbo(num_particles=3)
    before = loss.vectorize_particles_fn

    def recorded(function: Any, keys: jax.Array) -> Any:
        mapped.append(keys.shape)
        return before(function, keys)

    loss.vectorize_particles_fn = recorded
    guide = AutoNormal(model)
    params = SVI(model, guide, optax.sgd(0.1), Trace_ELBO()).run(KEY, 1, progress_bar=False).params
    loss.loss(KEY, params, model, guide)
    assert mapped == [(3,)]
    assert elbo in OBSERVABLE
    assert loss.vectorize_particles is True


def test_an_elbo_that_is_not_listed_is_one_that_enumerates() -> None:
    """A new ELBO of NumPyro is not in `OBSERVABLE`: then the guide is run once more, which is slower, not wrong."""
    known = {e for e in vars(numpyro.infer).values() if isinstance(e, type) and issubclass(e, ELBO) and e is not ELBO}
    assert {e for e in known if e not in OBSERVABLE} <= {TraceEnum_ELBO, numpyro.infer.RenyiELBO}


@pytest.mark.parametrize("optim", [optax.adam(0.1), numpyro.optim.Adam(0.1)], ids=["Optax", "NumPyro"])
def test_the_state_of_an_optimiser_begins_with_the_number_of_steps(optim: Any) -> None:
    """`optim_state[0]` is the step, for schedules and for messages."""
    svi = SVI(model, AutoNormal(model), optim, Trace_ELBO())
    state = svi.init(KEY)
    assert int(state.optim_state[0]) == 0
    state, _ = svi.update(state)
    assert int(state.optim_state[0]) == 1


@pytest.mark.parametrize("optim", [optax.adam(0.1), numpyro.optim.Adam(0.1)], ids=["Optax", "NumPyro"])
def test_the_state_of_an_optimiser_holds_the_parameters_themselves(optim: Any) -> None:
    """A speed limit replaces them there."""
    svi = SVI(model, AutoNormal(model), optim, Trace_ELBO())
    state = svi.init(KEY)
    inside = {id(leaf) for leaf in jax.tree.leaves(state.optim_state)}
    assert all(id(leaf) in inside for leaf in jax.tree.leaves(svi.optim.get_params(state.optim_state)))


def test_a_masked_distribution_has_its_mask() -> None:
    """`d._mask`: NumPyro has no public name for it."""
    mask = jnp.array([True, False])
    np.testing.assert_array_equal(dist.Normal(jnp.zeros(2), 1.0).mask(mask)._mask, mask)


def test_an_autoguide_without_a_prototype_starts_anew() -> None:
    """`guide.prototype_trace`: a guide that was used before would start where it did then."""
    guide: Any = AutoNormal(model)
    params = [SVI(model, g, optax.sgd(0.1), Trace_ELBO()).init(KEY) for g in (guide,)]
    assert guide.prototype_trace is not None
    again = SVI(model, renewed(guide), optax.sgd(0.1), Trace_ELBO())
    other = SVI(model, guide, optax.sgd(0.1), Trace_ELBO())
    starts = [float(svi.get_params(svi.init(jax.random.key(1)))["x_auto_loc"]) for svi in (again, other)]
    first = float(other.get_params(params[0])["x_auto_loc"])
    assert starts[1] == pytest.approx(first)
    assert starts[0] != pytest.approx(first)


def test_a_list_of_autoguides_keeps_its_parts() -> None:
    """`AutoGuideList._guides`."""
    guides: Any = AutoGuideList(model)
    guides.append(AutoNormal(numpyro.handlers.block(numpyro.handlers.seed(model, rng_seed=0), hide=["y"])))
    assert [type(part) for part in guides._guides] == [AutoNormal]
