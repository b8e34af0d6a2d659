"""Score-function estimators, for guides whose samples carry no gradient (discrete latents): leave-one-out and VIMCO."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from numpyro.infer import ELBO, Trace_ELBO
from numpyro.infer.util import get_importance_trace
from numpyro.util import check_model_guide_match

from proxvi import _distributions
from proxvi._typing import Float, Guide, Model, Params, Scalar, Trace
from proxvi._validation import check_integer

__all__ = ["LeaveOneOutELBO", "VimcoELBO"]


# Plates by name and axis from the right (different plates may have the same axis, and even the same length).
# The value is the weight of an element: above 1 where the plate is subsampled.
Plates = dict[tuple[str, int], float]


class _Term(NamedTuple):
    """One site's log probability, summed over all axes but those of its plates."""

    log_prob: Array  # times `scale`
    plates: Plates
    scale: ArrayLike  # of the plates, and of any handler around the site
    sign: float
    # `log q` of the elements, without any scale, if this is a latent of the guide whose samples carry no gradient.
    score: Array | None


class OrderedTraceELBO(Trace_ELBO):
    """NumPyro's `Trace_ELBO`, with the sites added up in the same order in every process.

    NumPyro's own iterates over a Python set of their names. Its order differs from process to process, and with it the
    last bit of the loss (not of its gradient).
    """

    def loss_with_mutable_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        by_site = copy.copy(self)
        by_site.sum_sites = False
        result = Trace_ELBO.loss_with_mutable_state(by_site, *args, **kwargs)
        losses: Any = result["loss"]
        return {**result, "loss": sum(losses[name] for name in sorted(losses))}


class MultiParticleELBO(ELBO):
    """Base of the estimators below: several particles, independent of each other, that see the same data."""

    can_infer_discrete = True

    def __init__(self, num_particles: int = 5, vectorize_particles: bool | Callable[..., Any] = True) -> None:
        remedy = "each particle's baseline comes from the others"
        check_integer("num_particles", num_particles, at_least=2, remedy=remedy)
        super().__init__(num_particles, vectorize_particles)

    def loss(self, rng_key: Array, param_map: Params, model: Model, guide: Guide, *args: Any, **kwargs: Any) -> Scalar:
        """Return the negative bound, whose gradient is the estimator's."""
        plates = self.draw_plates(rng_key, param_map, model, guide, args, kwargs)
        model, guide = (numpyro.handlers.substitute(f, data=plates) for f in (model, guide))

        def particle(key: Array) -> Any:
            model_key, guide_key = jax.random.split(key)
            model_trace, guide_trace = get_importance_trace(
                numpyro.handlers.seed(model, model_key),
                numpyro.handlers.seed(guide, guide_key),
                args,
                kwargs,
                param_map,
            )
            check_model_guide_match(model_trace, guide_trace)
            return self._particle(_terms(model_trace, guide_trace))

        keys = jax.random.split(rng_key, self.num_particles)
        return -self._bound(self.vectorize_particles_fn(particle, keys))

    def draw_plates(
        self,
        rng_key: Array,
        param_map: Params,
        model: Model,
        guide: Guide,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, Array]:
        """The indices of the subsampled plates. All particles share them, because they must see the same data."""
        # A key of its own: the samples must be independent of which data they are drawn for.
        model_key, guide_key = jax.random.split(jax.random.fold_in(rng_key, self.num_particles))
        model, guide = numpyro.handlers.seed(model, model_key), numpyro.handlers.seed(guide, guide_key)
        traces = get_importance_trace(model, guide, args, kwargs, param_map)
        return {
            name: site["value"]
            for trace in traces
            for name, site in trace.items()
            if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0])
        }

    def _particle(self, terms: list[_Term]) -> Any:
        raise NotImplementedError

    def _bound(self, particles: Any) -> Scalar:
        raise NotImplementedError


class LeaveOneOutELBO(MultiParticleELBO):
    """ELBO whose score-function gradient takes each particle's baseline from the other particles.

        ∇ELBO ≈ 1/S Σ_s Σ_z (c_z^s − mean_{r ≠ s} c_z^r) ∇log q(z^s) + (pathwise gradient of the rest)

    `c_z` is `log p − log q`, summed over what can depend on `z`. Within a plate, each element has its own cost and its
    own baseline, so a data point does not carry the noise of the others. Sites with differentiable samples take the
    pathwise gradient. The paper's experiments use this estimator (Mnih & Rezende 2016).

    Args:
        num_particles: `S`, at least 2.
        vectorize_particles: as in NumPyro.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI
        >>> def model(x):
        ...     z = numpyro.sample("z", dist.Bernoulli(0.5))
        ...     numpyro.sample("x", dist.Normal(3.0 * z, 1.0), obs=x)
        >>> def guide(x):
        ...     numpyro.sample("z", dist.Bernoulli(logits=numpyro.param("logit", 0.1)))
        >>> svi = SVI(model, guide, numpyro.optim.Adam(0.1), LeaveOneOutELBO(num_particles=5))
        >>> result = svi.run(jax.random.key(0), 500, 3.0, progress_bar=False)
        >>> bool(jax.nn.sigmoid(result.params["logit"]) > 0.95)
        True
    """

    def _particle(self, terms: list[_Term]) -> tuple[Array, list[tuple[Array, Array]]]:
        elbo = sum((jnp.sum(term.sign * _without_score(term)) for term in terms), start=jnp.zeros(()))
        sites = []
        for site in terms:
            if site.score is not None:
                log_q = sum_to(site.plates, site.score, site.plates)
                cost = sum(sum_to(site.plates, term.sign * term.log_prob, term.plates) for term in terms)
                sites.append((log_q, jnp.broadcast_to(jnp.asarray(cost), log_q.shape)))
        return elbo, sites

    def _bound(self, particles: tuple[Float[Array, " particles"], list[tuple[Array, Array]]]) -> Scalar:
        elbos, sites = particles
        surrogate = jnp.zeros(())
        for log_q, cost in sites:
            others = (jnp.sum(cost, axis=0, keepdims=True) - cost) / (self.num_particles - 1)
            signal = jax.lax.stop_gradient(cost - others)
            surrogate = surrogate + jnp.sum(slope_only(log_q) * signal) / self.num_particles
        return jnp.mean(elbos) + surrogate


class VimcoELBO(MultiParticleELBO):
    """Multi-sample bound with the VIMCO gradient (Mnih & Rezende 2016).

        L_S = E[log 1/S Σ_s w_s],    w = p(x, z) / q(z),    ELBO ≤ L_S ≤ log p(x)
        ∇L_S ≈ Σ_s (L_S − L_S^{−s}) ∇log q(z^s) + Σ_s (w_s / Σ_r w_r) ∇log w_s

    `L_S^{−s}` is the bound with `w_s` replaced by the geometric mean of the others. In plates that hold every site,
    each element has a bound of its own, and the loss is minus their sum.

    Args:
        num_particles: `S`, at least 2.
        vectorize_particles: as in NumPyro.

    Example:
        >>> VimcoELBO(num_particles=5).num_particles
        5
    """

    def _particle(self, terms: list[_Term]) -> tuple[Array, Array, Array]:
        shared = dict(set.intersection(*(set(term.plates.items()) for term in terms)))
        for term in terms:
            extra = [name for (name, axis), scale in term.plates.items() if (name, axis) not in shared and scale != 1.0]
            if extra:
                raise ValueError(
                    f"`VimcoELBO` needs subsampled plates to hold every site, got the plate {extra[0]!r} that does "
                    "not; put all sites into it, or use `LeaveOneOutELBO`."
                )
        log_weight = jnp.asarray(sum(sum_to(shared, term.sign * term.log_prob, term.plates) for term in terms))
        # The bound is of unscaled weights. A scale that all sites share, such as a mean over data, scales the bound.
        scale = _common_scale([term.scale for term in terms], math.prod(shared.values(), start=1.0), log_weight.shape)
        scores = [sum_to(shared, slope_only(term.score), term.plates) for term in terms if term.score is not None]
        return log_weight / scale, sum(scores, start=jnp.zeros_like(log_weight)), jnp.asarray(scale)

    def _bound(self, particles: tuple[Array, Array, Array]) -> Scalar:
        log_weights, score, scales = particles
        count = self.num_particles
        bound = logsumexp(log_weights, axis=0, keepdims=True) - jnp.log(count)
        fixed = jax.lax.stop_gradient(log_weights)
        # The mean of the other logarithms, but −inf − (−inf) is NaN: weights of 0 are left out of the sum, and counted.
        zero = jnp.isneginf(fixed)
        finite = jnp.where(zero, 0.0, fixed)
        others = (jnp.sum(finite, axis=0, keepdims=True) - finite) / (count - 1)
        others = jnp.where(jnp.sum(zero, axis=0, keepdims=True) > zero, -jnp.inf, others)
        # row s: the weights with w_s replaced by the geometric mean of the others
        replaced = jnp.where(
            jnp.eye(count, dtype=bool).reshape((count, count) + (1,) * (fixed.ndim - 1)), others[:, None], fixed[None]
        )
        without = logsumexp(replaced, axis=1) - jnp.log(count)
        # A baseline must be finite: 0 is as right as any where all other weights are 0.
        signal = jax.lax.stop_gradient(bound) - jnp.where(jnp.isneginf(without), 0.0, without)
        surrogate = jnp.sum(score * signal, axis=0)
        return jnp.sum(scales[0] * (bound[0] + surrogate))


def _terms(model_trace: Trace, guide_trace: Trace) -> list[_Term]:
    terms = []
    for sign, trace in ((1.0, model_trace), (-1.0, guide_trace)):
        for site in trace.values():
            if site["type"] == "sample":
                plates = plates_of(site, trace)
                scale = 1.0 if site["scale"] is None else site["scale"]
                log_density = _distributions.log_density(site)
                score = _sum_within(plates, log_density) if sign < 0 and samples_have_no_gradient(site) else None
                terms.append(_Term(_sum_within(plates, scale * log_density), plates, scale, sign, score))
    return terms


def scores_of_parents(
    guide_trace: Trace, sites: tuple[str, ...], *, any_order: bool, known_at_sample: bool = False
) -> tuple[dict[str, Array], Array]:
    """The scores of the samples that the distributions at `sites` may depend on, where those carry no gradient.

    Args:
        guide_trace: of one particle.
        sites: names.
        any_order: whether later samples count, too: the model's distribution at a site may depend on them.
        known_at_sample: whether the model's density at a site may be known only at its own sample, which then counts
            even where there is no other.

    Returns:
        By site, if it has such parents: 0, with the slope of their `log q`, shaped as the batch axes of the site, along
        each plate that it shares with them. And the same of all such samples, a scalar.
    """
    scores = [
        (
            name,
            plates := plates_of(site, guide_trace),
            slope_only(_sum_within(plates, _distributions.log_density(site))),
        )
        for name, site in guide_trace.items()
        if samples_have_no_gradient(site)
    ]
    order = list(guide_trace)
    parents: dict[str, Array] = {}
    has_any = len(sites) > 1 or known_at_sample or any(_is_in_scan(guide_trace[name]) for name in sites)
    for name in sites if has_any else ():
        site = guide_trace[name]
        plates, axes = plates_of(site, guide_trace), len(site["fn"].batch_shape)
        for other, of_other, score in scores:
            # Within `scan` a site stands for the samples of all times, some of which are its own parents.
            if any_order or order.index(other) < order.index(name) or (other == name and _is_in_scan(site)):
                score = sum_to(plates, score, of_other)
                score = score.reshape((1,) * (axes - score.ndim) + score.shape)
                parents[name] = parents[name] + score if name in parents else score
    return parents, sum((jnp.sum(score) for _, _, score in scores), start=jnp.zeros(()))


def _is_in_scan(site: dict[str, Any]) -> bool:
    return site.get("_control_flow_done", False)


def plates_of(site: dict[str, Any], trace: Trace) -> Plates:
    """The plates around a site, and the weight of an element of each."""
    plates = {}
    for frame in site["cond_indep_stack"]:
        # A plate within `scan` is not in the trace. Its elements count as they are; `site["scale"]` has their weight.
        size, subsample = trace[frame.name]["args"] if frame.name in trace else (1, None)
        plates[frame.name, frame.dim] = 1.0 if subsample is None else size / subsample
    return plates


def samples_have_no_gradient(site: dict[str, Any]) -> bool:
    """Whether this is a latent variable whose samples carry no gradient, so that their score must."""
    return site["type"] == "sample" and not site["is_observed"] and not site["fn"].has_rsample


def _sum_within(plates: Plates, log_prob: Array | float) -> Array:
    """Sum over the axes that belong to no plate."""
    log_prob, kept = jnp.asarray(log_prob), {axis for _, axis in plates}
    within = tuple(axis for axis in range(-log_prob.ndim, 0) if axis not in kept)
    return jnp.sum(log_prob, axis=within, keepdims=True)


def sum_to(target: Plates, value: Array, plates: Plates) -> Array:
    """Sum over the plates that are not in `target`, and keep the axes of `target`, some perhaps of length 1.

    An element of a plate can influence every element of a plate that it does not share, wherever its axis is.
    """
    gone = tuple(axis for name, axis in plates if (name, axis) not in target and -axis <= value.ndim)
    value = jnp.sum(value, axis=gone, keepdims=True)
    depth = max((-axis for _, axis in target), default=0)
    return value.reshape(value.shape[max(0, value.ndim - depth) :])


def _common_scale(scales: list[ArrayLike], of_plates: float, shape: tuple[int, ...]) -> ArrayLike:
    """The scale that all sites share, a number or one for each element of the shared plates; else the plates' own."""
    first = scales[0]
    if all(isinstance(scale, int | float) for scale in scales):
        return first if all(scale == first for scale in scales) else of_plates
    if any(jnp.broadcast_shapes(jnp.shape(scale), shape) != shape for scale in scales):
        return of_plates
    # Scales may be traced, and their factors multiplied in another order.
    alike = jnp.stack([jnp.all(jnp.isclose(scale, first, rtol=1e-5, atol=0.0)) for scale in scales])
    return jnp.where(jnp.all(alike), first, of_plates)


def _without_score(term: _Term) -> Array:
    """Drop `∇log q` where samples carry no gradient: its mean is 0, so it is only noise."""
    return term.log_prob if term.score is None else jax.lax.stop_gradient(term.log_prob)


def slope_only(log_prob: Array) -> Array:
    """0, with the slope of `log_prob`."""
    return log_prob - jax.lax.stop_gradient(log_prob)
