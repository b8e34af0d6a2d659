"""What a run of the guide shows: its distributions, and those that an ELBO's own runs went through."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.infer import Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO

from proxvi import _distributions
from proxvi.estimators import LeaveOneOutELBO, OrderedTraceELBO, VimcoELBO

# Estimators that run the guide through `vectorize_particles_fn`, once a particle, so that it can be watched.
OBSERVABLE = (Trace_ELBO, OrderedTraceELBO, TraceGraph_ELBO, TraceMeanField_ELBO, LeaveOneOutELBO, VimcoELBO)


class Observer:
    """Watches an ELBO run the guide and the model, and hands out what `observe` makes of the traces.

    One backward pass then covers both the ELBO and the constraint, instead of one for each.
    """

    def __init__(self, elbo: Any, model: Any, guide: Any, observe: Callable[[Any, Any, Array], Any]) -> None:
        self._traces: dict[str, list[Any]] = {"model": [], "guide": []}
        self._observe = observe
        self._seen: Any = None
        self.model, self.guide = self._recorded("model", model), self._recorded("guide", guide)
        self.elbo = copy.copy(elbo)
        self.elbo.vectorize_particles_fn = partial(self._each_particle, elbo.vectorize_particles_fn)

    def _recorded(self, name: str, function: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with numpyro.handlers.trace() as trace:
                result = function(*args, **kwargs)
            self._traces[name].append(trace)
            return result

        return run

    def _first(self, key: Array) -> Any:
        # An ELBO may run them again for its own purposes; the first run is the particle's.
        return self._observe(self._traces["guide"][0], self._traces["model"][0], key)

    def _each_particle(self, vectorize: Any, function: Any, keys: Any) -> Any:
        def both(key: Array) -> tuple[Any, Any]:
            for traces in self._traces.values():
                traces.clear()
            return function(key), self._first(key)

        result, seen = vectorize(both, keys)
        self._seen = {i: over_particles(statistic) for i, statistic in seen.items()}
        return result

    def values(self, key: Array) -> Any:
        return self._first(key) if self._seen is None else self._seen


def over_particles(statistic: Any) -> Any:
    """The mean of a statistic over particles; distributions have none, and stay apart along the first axis."""
    return statistic if holds_distributions(statistic) else jax.tree.map(lambda x: jnp.mean(x, axis=0), statistic)


def holds_distributions(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=_distributions.is_distribution)
    return any(_distributions.is_distribution(leaf) for leaf in leaves)


def latent_sites(guide_trace: dict[str, Any]) -> dict[str, Any]:
    """The distributions of a guide, without point masses; what is to the right of every plate is latent, no batch."""
    latent = {
        name: _with_latent_axes(site)
        for name, site in guide_trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    return {
        name: q for name, q in latent.items() if not isinstance(_distributions.innermost(q), dist.Delta | dist.Unit)
    }


def _with_latent_axes(site: Any) -> dist.Distribution:
    """Make event axes of the batch axes to the right of every plate: a vector of latents need not say `to_event`."""
    plates = [-frame.dim for frame in site["cond_indep_stack"]]
    q = site["fn"]
    return q.to_event(min([*plates, len(q.batch_shape) + 1]) - 1)
