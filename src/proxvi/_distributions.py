"""What can be computed of a NumPyro distribution, one number for each latent unit.

NumPyro sums over event axes, because a log density is about whole events. A proximity statistic wants the units
apart (the entropy of each of 200 Bernoullis, not of the layer) and the batch averaged, so everything here keeps

    d.batch_shape + latent axes,

where the latent axes are those that `to_event` turned from batch into event axes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import transforms


def is_distribution(node: Any) -> bool:
    """Whether `node` is a NumPyro distribution (a pytree itself, so `is_leaf` needs to be told)."""
    return isinstance(node, dist.Distribution)


def leaves_with_names(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, distributions whole, each with a name fit for an error message."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_distribution)
    return [(jax.tree_util.keystr(path) or "the tree itself", leaf) for path, leaf in leaves]


def average_over_batch(d: dist.Distribution, measure: Callable[[dist.Distribution], Array]) -> Array:
    """Average `measure` over the batch axes of `d`, keeping its latent axes.

    Args:
        d: a distribution, wrapped in Independent, masked and expanded layers in any order.
        measure: called with the distribution inside the wrappers; its result begins with that one's batch axes.

    Returns:
        The mean over the batch axes. Elements that a mask leaves out do not count, so that a padded batch has the
        statistic of the batch without padding; a unit that is masked everywhere gives 0.
    """
    value, mask = _unwrapped(d, measure)
    axes = tuple(range(len(d.batch_shape)))
    if mask is None:
        return jnp.mean(value, axis=axes)
    mask = jnp.broadcast_to(mask, value.shape)
    total = jnp.sum(jnp.where(mask, value, 0.0), axis=axes)
    return total / jnp.maximum(jnp.sum(mask, axis=axes), 1)


def _unwrapped(d: dist.Distribution, measure: Callable[[dist.Distribution], Array]) -> tuple[Array, Array | None]:
    """`measure` of the innermost distribution, shaped `d.batch_shape + latent axes`, and the mask that goes with it."""
    match d:
        case dist.Independent():
            return _unwrapped(d.base_dist, measure)
        case dist.ExpandedDistribution():
            value, mask = _unwrapped(d.base_dist, measure)
            shape = d.batch_shape + value.shape[len(d.base_dist.batch_shape) :]
            return jnp.broadcast_to(value, shape), mask
        case dist.MaskedDistribution():
            value, mask = _unwrapped(d.base_dist, measure)
            own = jnp.broadcast_to(d._mask, d.batch_shape)
            own = jnp.expand_dims(own, tuple(range(len(d.batch_shape), value.ndim)))
            return value, own if mask is None else own & mask
        case _:
            return jnp.asarray(measure(d)), None


def innermost(d: dist.Distribution) -> dist.Distribution:
    """`d` without its Independent, masked and expanded layers."""
    while isinstance(d, dist.Independent | dist.MaskedDistribution | dist.ExpandedDistribution):
        d = d.base_dist
    return d


def entropy(d: dist.Distribution, key: Array | None, num_samples: int) -> Array:
    """Entropy `H = −E[log q(z)]` of an unwrapped distribution, shaped as its batch."""
    if isinstance(d, dist.Delta):
        raise TypeError(
            "`q` must be spread out to have an entropy, got a Delta (a point mass); use a guide with a scale "
            "(AutoNormal for AutoDelta), or constrain `mean_variance`."
        )
    try:
        if isinstance(d, dist.TransformedDistribution) and _has_linear_log_jacobian(d.transforms):
            return _transformed_entropy(d)
        return d.entropy()
    except NotImplementedError:
        pass
    if d.has_enumerate_support:
        return _enumerate(d, lambda z: -_log_prob(d, z))
    return expectation(d, lambda z: -_log_prob(d, z), key, num_samples, "entropy")


def mean_and_variance(d: dist.Distribution, key: Array | None, num_samples: int) -> tuple[Array, Array]:
    """Mean `E[z]` and variance `E[(z − E[z])²]` of an unwrapped distribution, shaped as its batch and event."""
    if isinstance(d, dist.Cauchy | dist.HalfCauchy):
        raise TypeError(
            f"`q` must have moments for `mean_variance`, got a {type(d).__name__}, whose integral diverges; "
            "constrain `entropy` instead."
        )
    try:
        return jnp.asarray(d.mean), jnp.asarray(d.variance)
    except NotImplementedError:
        pass
    if isinstance(d, dist.TransformedDistribution) and all(
        isinstance(t, transforms.AffineTransform) for t in d.transforms
    ):
        mean, variance = jnp.asarray(d.base_dist.mean), jnp.asarray(d.base_dist.variance)
        for transform in d.transforms:
            scale = transform.scale  # pyright: ignore[reportAttributeAccessIssue]
            mean, variance = jnp.asarray(transform(mean)), variance * scale**2
        return mean, variance
    mean = expectation(d, lambda z: z, key, num_samples, "mean")
    square = expectation(d, lambda z: (z - jax.lax.stop_gradient(mean)) ** 2, key, num_samples, "variance")
    return mean, square


def kl(q: dist.Distribution, p: dist.Distribution, key: Array | None, num_samples: int) -> Array:
    """Divergence `KL(q ‖ p) = E_q[log q(z) − log p(z)]` of unwrapped distributions, shaped as the batch of `q`."""
    if isinstance(q, dist.Delta):
        raise TypeError(
            "`q` must be spread out to have a KL divergence, got a Delta (a point mass); use a guide with a scale "
            "(AutoNormal for AutoDelta)."
        )
    if q.event_shape != p.event_shape:
        raise ValueError(
            f"`q` and the distribution it is compared with must have the same event shape, got {q.event_shape} and "
            f"{p.event_shape}; call `to_event` on both alike."
        )
    divergence = _kl(q, p, key, num_samples)
    if divergence.shape != q.batch_shape:
        raise ValueError(
            f"the distribution that `q` is compared with must broadcast to the shape of `q`, got "
            f"{p.batch_shape} for {q.batch_shape}; expand `q` or drop axes of the other."
        )
    return divergence


def _kl(q: dist.Distribution, p: dist.Distribution, key: Array | None, num_samples: int) -> Array:
    if isinstance(q, _BERNOULLI) and isinstance(p, _BERNOULLI):
        # NumPyro has no closed form for this pair, and its log density has the wrong slope where a logit is 0
        # (that of a clip and of an absolute value, 1 where 1/2 is right), so no sum over the support either.
        ours, theirs = jnp.asarray(q.logits), jnp.asarray(p.logits)
        return jax.nn.sigmoid(ours) * (ours - theirs) - jax.nn.softplus(ours) + jax.nn.softplus(theirs)
    if _same_bijection(q, p):  # KL does not change under a bijection of z
        q, p = q.base_dist, p.base_dist  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return jnp.asarray(dist.kl_divergence(q, p))
    except NotImplementedError:
        pass
    if q.has_enumerate_support:
        return _enumerate(q, lambda z: _log_prob(q, z) - _log_prob(p, z))
    return expectation(q, lambda z: _log_prob(q, z) - _log_prob(p, z), key, num_samples, "KL divergence")


def expectation(
    d: dist.Distribution,
    function: Callable[[Array], Array],
    key: Array | None,
    num_samples: int,
    name: str,
) -> Array:
    """Monte Carlo estimate of `E_d[h(z)]`, unbiased in value and in gradient.

    Where samples are differentiable the gradient is the pathwise one. Elsewhere (Poisson, negative binomial) the
    samples carry no gradient and the score function does,

        ∇E[h] = E[∇h] + E[(h − b) ∇log q],    b: the mean of h over the other samples.
    """
    if key is None:
        raise NotImplementedError(
            f"`key` must be a PRNG key because {type(d).__name__} has no closed form for its {name}, got None; "
            "pass `key=` for a Monte Carlo estimate (in an Optax chain: `lambda params, key: ...` and "
            "`update(..., key=key)`)."
        )
    keys = jax.random.split(key, num_samples)
    # One sample at a time under `vmap`, so that nothing relies on ranks being promoted.
    if d.has_rsample:
        return jnp.mean(jax.vmap(lambda k: function(jnp.asarray(d.rsample(k))))(keys), axis=0)
    samples = jnp.asarray(jax.lax.stop_gradient(jax.vmap(d.sample)(keys)))
    value = jnp.asarray(jax.vmap(function)(samples), dtype=jnp.result_type(float))
    log_q = jnp.asarray(jax.vmap(d.log_prob)(samples))
    log_q = jnp.expand_dims(log_q, tuple(range(log_q.ndim, value.ndim)))
    others = (jnp.sum(value, axis=0, keepdims=True) - value) / (num_samples - 1)
    score = log_q - jax.lax.stop_gradient(log_q)  # 0, with the slope of log q
    return jnp.mean(value + jax.lax.stop_gradient(value - others) * score, axis=0)


def _log_prob(d: dist.Distribution, z: Array) -> Array:
    return jnp.asarray(d.log_prob(z))


def _enumerate(d: dist.Distribution, function: Callable[[Array], Array]) -> Array:
    """`E_d[h(z)]` exactly, as a sum over the support; what has probability 0 adds 0, also where `h` is infinite."""
    support = d.enumerate_support(expand=True)
    probability = jnp.exp(jax.vmap(d.log_prob)(support))
    return jnp.sum(probability * jnp.where(probability > 0, jax.vmap(function)(support), 0.0), axis=0)


_BERNOULLI = (dist.BernoulliLogits, dist.BernoulliProbs)
_AFFINE = (
    transforms.AffineTransform,
    transforms.IdentityTransform,
    transforms.LowerCholeskyAffine,
    transforms.PermuteTransform,
)


def _has_linear_log_jacobian(chain: list[transforms.Transform]) -> bool:
    """Whether `log |dy/dx|` of the whole chain is linear in x: affine maps, and at most one exponential."""
    exponentials = sum(isinstance(t, transforms.ExpTransform) for t in chain)
    return exponentials <= 1 and all(isinstance(t, (*_AFFINE, transforms.ExpTransform)) for t in chain)


def _transformed_entropy(d: dist.TransformedDistribution) -> Array:
    """`H(y) = H(x) + E[log |dy/dx|(x)]`; the last term is `log |dy/dx|(E[x])`, because it is linear in x."""
    entropy = d.base_dist.entropy()
    x = jnp.broadcast_to(jnp.asarray(d.base_dist.mean), d.base_dist.shape())
    for transform in d.transforms:
        y = transform(x)
        log_jacobian = transform.log_abs_det_jacobian(x, y, None)
        event_axes = tuple(range(transform.codomain.event_dim - d.event_dim, 0))
        entropy = entropy + jnp.sum(log_jacobian, axis=event_axes)
        x = y
    return entropy


def _same_bijection(q: dist.Distribution, p: dist.Distribution) -> bool:
    """Whether both are one parameter-free bijection (exp, sigmoid, …) of something simpler."""
    return (
        isinstance(q, dist.TransformedDistribution)
        and isinstance(p, dist.TransformedDistribution)
        and not jax.tree.leaves(q.transforms)
        and jax.tree.structure(q.transforms) == jax.tree.structure(p.transforms)
    )
