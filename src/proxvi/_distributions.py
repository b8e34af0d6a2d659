"""Entropy, moments and divergence of NumPyro distributions, one number for each latent unit.

NumPyro sums over event axes, because a log density is about whole events. A proximity statistic is about single units
(the entropy of each of 200 Bernoullis, not of the layer), averaged over the batch. So everything here has the shape

    d.batch_shape + latent axes,

where the latent axes are those that `to_event` turned from batch into event axes.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import gammaln
from jax.typing import ArrayLike
from numpyro.distributions import transforms
from numpyro.distributions.util import binary_cross_entropy_with_logits

from proxvi._typing import Distribution, Float, Tree
from proxvi._validation import check_integer, named_leaves

NATS_OF_A_DIMENSION = 5.0  # what a continuous unit may lose in a run, by default: its scale falls to 1 / 150

_WRAPPERS = (dist.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)

# A Monte Carlo estimate takes a key and a number of samples; closed forms ignore both.
Measure = Callable[..., Tree]  # (distribution, key, num_samples) or (distribution, another one, key, num_samples)


def measure_leaves(
    measure: Measure,
    q: Tree,
    *others: Tree,
    name: str,
    key: Array | None,
    num_samples: int,
    total: bool = False,
) -> Tree:
    """Apply `measure` to each distribution of a tree, with a key of its own; add it all up if `total`.

    `others` are trees of the same structure, whose distributions are handed to `measure` beside those of `q`.
    """
    leaves, structure = jax.tree.flatten(q, is_leaf=is_distribution)
    if not isinstance(num_samples, int) or num_samples < 2:
        remedy = "the score-function estimate takes its baseline from the other samples"
        check_integer("num_samples", num_samples, at_least=2, remedy=remedy)
    if not leaves:
        raise ValueError(
            f"`q` must hold at least one distribution, got {q!r}; name the sites to measure, and use a guide that is "
            "spread out (AutoNormal for AutoDelta): a point mass has nothing to keep close."
        )
    if not all(is_distribution(leaf) for leaf in leaves):
        at, leaf = next(pair for pair in named_leaves(q) if not is_distribution(pair[1]))
        raise TypeError(
            f"`{name}` measures distributions, got {type(leaf).__name__} at {at}; to `ProximitySVI` pass "
            f"`{name}` itself or `lambda q: {name}(q['site'])`, to `proximity` build the distribution from the "
            f"parameters first, `lambda params: {name}(dist.Normal(params['loc'], params['scale']).to_event(1))`."
        )
    keys = [None] * len(leaves) if key is None else list(jax.random.split(key, len(leaves)))
    beside = [jax.tree.leaves(other, is_leaf=is_distribution) for other in others]
    values = [measure(*both, k, num_samples) for *both, k in zip(leaves, *beside, keys, strict=True)]
    if total:
        result = _sum_of(values)
        parents = next((p for d in leaves if (p := sampled_parents(d)) is not None), None)
        if parents is not None:
            parents.terms[id(result)] = result, _sum_of([parents.of_value(value) for value in values])
        return result
    return jax.tree.unflatten(structure, values)


def _sum_of(values: list[Tree]) -> Array:
    return sum((jnp.sum(value) for value in values), start=jnp.zeros(()))


def average_entropy(d: Distribution, key: Array | None, num_samples: int) -> Float[Array, "*units"]:
    """Entropy of each latent unit, averaged over the batch."""
    return average_over_batch(d, lambda base: entropy(base, key, num_samples))


def average_moments(
    d: Distribution, key: Array | None, num_samples: int
) -> tuple[Float[Array, "*units"], Float[Array, "*units"]]:
    """Mean and variance of each latent unit, averaged over the batch."""

    def moment(index: int) -> Array:
        return average_over_batch(d, lambda base: mean_and_variance(base, key, num_samples)[index], keeps_event=True)

    return moment(0), moment(1)


def average_divergence(
    d: Distribution, other: Distribution, key: Array | None = None, num_samples: int = 0
) -> Float[Array, "*units"]:
    """Divergence `KL(d ‖ other)` of each latent unit, averaged over the batch; of all together if `other` says so."""
    _asks_for_range("divergence")
    if isinstance(other, KnownAtSample):  # KL = −H(d) − E[log p], and its density is that of the whole batch
        return -jnp.sum(average_entropy(d, key, num_samples)) - jnp.mean(other.log_density) / _num_elements(d)
    p = innermost(other)
    return average_over_batch(d, lambda base: kl(base, p, key, num_samples))


def is_distribution(node: Any) -> bool:
    """Whether `node` is a NumPyro distribution (a pytree itself, so JAX takes it for a leaf only if told)."""
    return isinstance(node, Distribution)


class KnownAtSample(dist.Distribution):
    """A density of several latents together, known only at the sample that the guide drew.

    Args:
        log_density: there, differentiable in the sample.
    """

    pytree_data_fields = ("log_density",)

    def __init__(self, log_density: Array) -> None:
        self.log_density = log_density
        super().__init__(validate_args=False)


class SampledParents(NamedTuple):
    """The score of the samples that a distribution depends on, for samples that carry no gradient themselves.

    The mean of a function `h` of such samples has the gradient `E[∇h] + E[(h − b) ∇log q(parents)]`. The second term is
    added as something of value 0 with that slope. The baseline `b` is the mean of `h` over the other particles.

    Attributes:
        parents: 0 with the slope of `log q` of the parents; it broadcasts to the batch axes of the distribution.
        everything: the same of all samples of the particle, a scalar.
        particles: how many particles there are.
        axis: the name of the particles' axis within `vmap`. None means that there is no such axis, as with one
            particle, and then there is no baseline.
        terms: by the identity of an average over the batch (or of a sum of such), that average and its term, which is
            the mean of those of the elements. It holds for the average itself, and not for functions of it.
    """

    parents: Array
    everything: Array
    particles: int
    axis: str | None
    terms: dict[int, tuple[Array, Array]]

    def of_batch(self, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """`(h − b) · score` for each element of the batch, whose axes come first."""
        missing = tuple(range(self.parents.ndim, value.ndim))
        return self._signal(value) * jnp.expand_dims(self.parents, missing)

    def of_value(self, value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The term of what a statistic returns; with the score of everything it is right, but has all its noise."""
        known = self.terms.get(id(value))
        return self._signal(value) * self.everything if known is None else known[1]

    def _signal(self, value: Array) -> Array:
        value = jax.lax.stop_gradient(value)
        if self.axis is None:
            return value
        return value - (jax.lax.psum(value, self.axis) - value) / (self.particles - 1)


def with_parents(d: Distribution, parents: SampledParents) -> Distribution:
    """A copy of `d` that knows which samples it depends on; `average_over_batch` asks."""
    d = copy.copy(d)
    d._sampled_parents = parents  # pyright: ignore[reportAttributeAccessIssue]
    return d


def sampled_parents(d: Distribution) -> SampledParents | None:
    """What `with_parents` has told; `to_event` hides it, and leaves the axes where they were."""
    while (found := getattr(d, "_sampled_parents", None)) is None and isinstance(d, dist.Independent):
        d = d.base_dist
    return found


def of_model(p: Distribution) -> Distribution:
    """A copy of a prior. Its gradient flows to the guide's samples, not to the model's parameters."""
    p = copy.copy(p)
    if isinstance(p, _WRAPPERS):
        p.base_dist = of_model(p.base_dist)
    else:
        p._is_of_model = True  # pyright: ignore[reportAttributeAccessIssue]
    return p


def without_gradient(p: Distribution) -> Distribution:
    """A prior that a constraint does not move."""
    inside = p
    while isinstance(inside, _WRAPPERS):
        inside = inside.base_dist
    known = isinstance(inside, KnownAtSample) or getattr(inside, "_is_of_model", False)
    return p if known else jax.lax.stop_gradient(p)


def log_density(site: dict[str, Any]) -> Array:
    """Log density of a site's value, without the scales around the site that NumPyro multiplies it by."""
    if type(innermost(site["fn"])) is dist.BernoulliLogits:  # a subclass may know better
        return _bernoulli_log_density(site["fn"], site["value"])
    intermediates = (site["intermediates"],) if site["intermediates"] else ()
    return jnp.asarray(site["fn"].log_prob(site["value"], *intermediates))


def average_over_batch(
    d: Distribution, measure: Callable[[Distribution], Array], *, keeps_event: bool = False
) -> Array:
    """Average `measure` over the batch axes of `d`, keeping its latent axes.

    Args:
        d: a distribution, wrapped in Independent, masked and expanded layers in any order.
        measure: called with the distribution inside the wrappers; its result broadcasts to that one's batch axes.
        keeps_event: whether the event axes of the distribution inside follow them.

    Returns:
        The mean over the batch axes. Masked elements do not count, so a padded batch has the statistic of the batch
        without padding. A unit that is masked everywhere gives 0.
    """
    value, mask, latent = _unwrapped(d, measure, keeps_event)
    shape = d.batch_shape + latent
    if jnp.broadcast_shapes(value.shape, shape) != shape:
        raise ValueError(
            f"the distribution that `q` is compared with must broadcast to the shape of `q`, got {value.shape} for "
            f"{shape}; expand `q` or drop axes of the other."
        )
    value = jnp.broadcast_to(value, shape)
    axes = tuple(range(len(d.batch_shape)))

    def average(value: Array) -> Array:
        if mask is None:
            return jnp.mean(value, axis=axes)
        counts = jnp.broadcast_to(mask, shape)
        total = jnp.sum(jnp.where(counts, value, 0.0), axis=axes)
        return total / jnp.maximum(jnp.sum(counts, axis=axes), 1)

    whole = average(value)
    if (parents := sampled_parents(d)) is not None:
        parents.terms[id(whole)] = whole, average(parents.of_batch(value))
    return whole


def _unwrapped(
    d: Distribution, measure: Callable[[Distribution], Array], keeps_event: bool
) -> tuple[Array, Array | None, tuple[int, ...]]:
    """`measure` inside the wrappers, shaped `d.batch_shape + latent axes`; the mask with it; the latent axes."""
    d = _axes_outside(d)
    match d:
        case dist.Independent():
            value, mask, latent = _unwrapped(d.base_dist, measure, keeps_event)
            return value, mask, d.base_dist.batch_shape[len(d.batch_shape) :] + latent
        case dist.ExpandedDistribution():
            value, mask, latent = _unwrapped(d.base_dist, measure, keeps_event)
            # A value of more axes than the distribution keeps them, as in NumPyro.
            return jnp.broadcast_to(value, jnp.broadcast_shapes(value.shape, d.batch_shape + latent)), mask, latent
        case dist.MaskedDistribution():
            value, mask, latent = _unwrapped(d.base_dist, measure, keeps_event)
            own = jnp.broadcast_to(d._mask, d.batch_shape)
            own = jnp.expand_dims(own, tuple(range(-len(latent), 0)))
            return value, own if mask is None else own & mask, latent
        case _:
            latent = d.event_shape if keeps_event else ()
            return jnp.asarray(measure(d)), None, latent


def _mask_of(d: Distribution) -> tuple[Array | None, tuple[int, ...]]:
    """The mask of the wrappers, and the latent axes."""
    _, mask, latent = _unwrapped(d, lambda _: jnp.zeros(()), keeps_event=False)
    return mask, latent


def _num_elements(d: Distribution) -> Array | int:
    """How many elements of the batch count."""
    mask, latent = _mask_of(d)
    if mask is None:
        return math.prod(d.batch_shape)
    counts = jnp.broadcast_to(mask, d.batch_shape + latent)
    return jnp.maximum(jnp.sum(jnp.any(counts, axis=tuple(range(-len(latent), 0)))), 1)


def innermost(d: Distribution) -> Distribution:
    """`d` without its Independent, masked and expanded layers."""
    while isinstance(d := _axes_outside(d), _WRAPPERS):
        d = d.base_dist
    return d


def _axes_outside(d: Distribution) -> Distribution:
    """`d` with `to_event` outside of transforms of single elements; for a positive vector AutoNormal has it inside."""
    if not isinstance(d, dist.TransformedDistribution) or not isinstance(d.base_dist, dist.Independent):
        return d
    inside: Any = d.base_dist
    elementwise = [_of_elements(t) for t in d.transforms]
    if any(t.domain.event_dim or t.codomain.event_dim for t in elementwise):
        return d
    return dist.TransformedDistribution(inside.base_dist, elementwise).to_event(inside.reinterpreted_batch_ndims)


def _of_elements(transform: Any) -> Any:
    return (
        _of_elements(transform.base_transform) if isinstance(transform, transforms.IndependentTransform) else transform
    )


_taken: ContextVar[set[str] | None] = ContextVar("taken", default=None)  # what a statistic took, while ranges are asked


@contextmanager
def ranges_of_entropies() -> Iterator[set[str]]:
    """Within this context the entropy of a distribution is the largest there can be, and not its own.

    So the range of any statistic that is made of entropies is found by calling it.

    Yields:
        What was taken: "entropy", "moments", "divergence".
    """
    token = _taken.set(found := set())
    try:
        yield found
    finally:
        _taken.reset(token)


def _asks_for_range(what: str) -> bool:
    """Whether ranges are asked for; notes what was taken."""
    if (taken := _taken.get()) is None:
        return False
    taken.add(what)
    return True


def _largest_entropy(d: Distribution) -> float:
    """Logarithm of the number of values. Where these are not finitely many, there is no largest: some nats."""
    if isinstance(d, _CATEGORICAL):
        return math.log(jnp.asarray(d.logits).shape[-1])
    if isinstance(d, _BERNOULLI):
        return math.log(2.0)
    try:
        if d.has_enumerate_support:
            return math.log(len(d.enumerate_support(expand=False)))
    except (NotImplementedError, jax.errors.ConcretizationTypeError):  # binomials of unequal or traced counts
        pass
    return NATS_OF_A_DIMENSION * math.prod(d.event_shape)


def entropy(d: Distribution, key: Array | None, num_samples: int) -> Array:
    """Entropy `H = −E[log q(z)]` of an unwrapped distribution, shaped as its batch."""
    if _asks_for_range("entropy"):
        return jnp.full(d.batch_shape, _largest_entropy(d))
    if isinstance(d, dist.Delta):
        raise TypeError(
            "`q` must be spread out to have an entropy, got a Delta (a point mass); use a guide with a scale "
            "(AutoNormal for AutoDelta), or constrain `mean_variance`."
        )
    if isinstance(d, _BERNOULLI):
        return _bernoulli_entropy(jnp.asarray(d.logits))
    if isinstance(d, _CATEGORICAL):
        return _categorical_entropy(jnp.asarray(d.logits))
    try:
        if isinstance(d, dist.TransformedDistribution) and not _is_folded(d):
            return _transformed_entropy(d, key, num_samples)
        return d.entropy()
    except NotImplementedError:
        pass
    return _sum_or_sample(d, lambda _, log_q: -log_q, key, num_samples, "entropy")


def mean_and_variance(d: Distribution, key: Array | None, num_samples: int) -> tuple[Array, Array]:
    """Mean `E[z]` and variance `E[(z − E[z])²]` of an unwrapped distribution, shaped as its batch and event."""
    _asks_for_range("moments")
    if isinstance(d, dist.Cauchy | dist.HalfCauchy | dist.CategoricalLogits | dist.CategoricalProbs):
        raise TypeError(
            f"`q` must have moments for `mean_variance`, got a {type(d).__name__}, which has none; constrain `entropy` "
            "instead."
        )
    try:
        if isinstance(d, dist.TransformedDistribution) and all(
            isinstance(t, transforms.AffineTransform) for t in d.transforms
        ):
            mean, variance = jnp.asarray(d.base_dist.mean), jnp.asarray(d.base_dist.variance)
            for transform in d.transforms:
                scale = transform.scale  # pyright: ignore[reportAttributeAccessIssue]
                mean, variance = jnp.asarray(transform(mean)), variance * scale**2
            return mean, variance
        return jnp.asarray(d.mean), jnp.asarray(d.variance)
    except NotImplementedError:
        pass
    mean = expectation(d, lambda z, _: z, key, num_samples, "mean")
    centre = mean
    if not d.has_rsample:
        # What multiplies the slope of a sample's log density must not hold that sample: the centre is that of others.
        assert key is not None  # or there would be no mean
        centre = expectation(d, lambda z, _: z, jax.random.fold_in(key, 1), num_samples, "mean")
    fixed = jax.lax.stop_gradient(centre)
    square = expectation(d, lambda z, _: (z - fixed) ** 2, key, num_samples, "variance")
    if d.has_rsample:
        return mean, square * num_samples / (num_samples - 1)  # the mean is that of the same samples
    # The mean of others misses E[z] by Var[z] / n in square, which adds to the value, and by 0 on average, which is all
    # that the slope sees.
    return mean, square - jax.lax.stop_gradient(square) / (num_samples + 1)


def kl(q: Distribution, p: Distribution, key: Array | None, num_samples: int) -> Array:
    """Divergence `KL(q ‖ p) = E_q[log q(z) − log p(z)]` of unwrapped distributions, their batches broadcast."""
    if isinstance(q, dist.Delta):
        raise TypeError(
            "`q` must be spread out to have a KL divergence, got a Delta (a point mass); use a guide with a scale "
            "(AutoNormal for AutoDelta)."
        )
    if q.event_shape != p.event_shape:
        raise ValueError(
            f"`q` and the distribution it is compared with must have the same event shape, got {q.event_shape} of "
            f"{type(q).__name__} and {p.event_shape} of {type(p).__name__}, apart from `to_event`; make both of "
            "one kind."
        )
    return _kl(q, p, key, num_samples)


def _kl(q: Distribution, p: Distribution, key: Array | None, num_samples: int) -> Array:
    if isinstance(q, _BERNOULLI) and isinstance(p, _BERNOULLI):
        # NumPyro has no closed form for this pair, and its log density has the wrong slope where a logit is 0
        # (that of a clip and of an absolute value, 1 where 1/2 is right), so no sum over the support either.
        ours, theirs = jnp.asarray(q.logits), jnp.asarray(p.logits)
        on = jax.nn.sigmoid(ours)
        certain = (on == 0.0) | (on == 1.0)  # then the logit may be infinite, and KL is −log p of the one value
        impossible = jnp.isinf(theirs)  # one of the values: then KL is infinite, unless the other one is certain
        ours, finite = jnp.where(certain, 0.0, ours), jnp.where(impossible, 0.0, theirs)
        uncertain = jax.nn.sigmoid(ours) * (ours - finite) - jax.nn.softplus(ours) + jax.nn.softplus(finite)
        uncertain = jnp.where(impossible, jnp.inf, uncertain)
        return jnp.where(certain, jax.nn.softplus(jnp.where(on == 1.0, -theirs, theirs)), uncertain)
    if _same_bijection(q, p):  # KL does not change under a bijection of z
        q, p = q.base_dist, p.base_dist  # pyright: ignore[reportAttributeAccessIssue]
    try:
        if not _is_folded(q):  # which NumPyro takes for a bijection
            return jnp.asarray(dist.kl_divergence(q, p))
    except NotImplementedError:
        pass
    return _sum_or_sample(q, lambda z, log_q: log_q - _log_prob(p, z), key, num_samples, "KL divergence")


def _sum_or_sample(
    d: Distribution, function: Callable[[Array, Array], Array], key: Array | None, num_samples: int, name: str
) -> Array:
    """`E_d[h(z, log q(z))]`, exactly if the support can be enumerated, else by samples."""
    try:
        if d.has_enumerate_support:
            return _enumerate(d, function)
    except (NotImplementedError, jax.errors.ConcretizationTypeError):  # binomials of unequal or traced counts
        pass
    return expectation(d, function, key, num_samples, name)


def expectation(
    d: Distribution,
    function: Callable[[Array, Array], Array],
    key: Array | None,
    num_samples: int,
    name: str,
) -> Array:
    """Monte Carlo estimate of `E_d[h(z, log q(z))]`, unbiased in value and in gradient.

    Where samples are differentiable the gradient is the pathwise one. Elsewhere (Poisson, negative binomial) the
    samples carry no gradient and the score function does,

        ∇E[h] = E[∇h] + E[(h − b) ∇log q],    b: the mean of h over the other samples.
    """
    if key is None:
        raise NotImplementedError(
            f"`key` must be a PRNG key because {type(d).__name__} has no closed form for its {name}, got None; "
            "pass `key=` for a Monte Carlo estimate (in an Optax loop: `lambda params, key: ...` and "
            "`update(..., key=key)`)."
        )

    def draw(key: Array) -> tuple[Array, Array]:
        # With the intermediates, as in NumPyro's ELBO: many flows cannot be inverted, or not accurately.
        z, intermediates = d.sample_with_intermediates(key)
        z = jnp.asarray(z)
        if not d.has_rsample:
            z, intermediates = jax.lax.stop_gradient(z), None
        if _is_folded(d):  # which takes none
            intermediates = None
        return z, jnp.asarray(d.log_prob(z, intermediates)) if intermediates else _log_prob(d, z)

    # One sample at a time under `vmap`, so that nothing relies on ranks being promoted.
    samples, log_q = jax.vmap(draw)(jax.random.split(key, num_samples))
    value = jax.vmap(function)(samples, log_q)
    if d.has_rsample:
        return jnp.mean(value, axis=0)
    value = value.astype(log_q.dtype)
    log_q = jnp.expand_dims(log_q, tuple(range(log_q.ndim, value.ndim)))
    others = (jnp.sum(value, axis=0, keepdims=True) - value) / (num_samples - 1)
    score = log_q - jax.lax.stop_gradient(log_q)  # 0, with the slope of log q
    return jnp.mean(value + jax.lax.stop_gradient(value - others) * score, axis=0)


def _log_prob(d: Distribution, z: Array) -> Array:
    if isinstance(d, dist.BinomialLogits):  # NumPyro's has the wrong slope at a logit of 0; see `_kl`
        n, logits = jnp.asarray(d.total_count), jnp.asarray(d.logits)
        log_choices = gammaln(n + 1.0) - gammaln(z + 1.0) - gammaln(n - z + 1.0)
        return z * logits - n * jax.nn.softplus(logits) + log_choices
    return jnp.asarray(d.log_prob(z))


def _enumerate(d: Distribution, function: Callable[[Array, Array], Array]) -> Array:
    """`E_d[h(z, log q(z))]` exactly, as a sum over the support; what has probability 0 adds 0, whatever `h` is."""
    support = jnp.asarray(d.enumerate_support(expand=True))
    log_q = jax.vmap(lambda z: _log_prob(d, z))(support)
    probability = jnp.exp(log_q)
    return jnp.sum(probability * jnp.where(probability > 0, jax.vmap(function)(support, log_q), 0.0), axis=0)


@jax.custom_jvp
def _bernoulli_log_prob(logits: ArrayLike, value: ArrayLike) -> Array:
    """NumPyro's `log q(z)`, with the slope `z − σ(l)` at every logit `l`; at 0 NumPyro's is `z`."""
    return -binary_cross_entropy_with_logits(logits, value)


_bernoulli_log_prob.defjvps(
    lambda tangent, _, logits, value: (value - jax.nn.sigmoid(logits)) * tangent,
    lambda tangent, _, logits, value: logits * tangent,
)


def _bernoulli_log_density(d: Distribution, value: ArrayLike) -> Array:
    """`log_prob` of Bernoullis within any wrappers."""
    mask, latent = _mask_of(d)
    if mask is not None:  # what is masked may be NaN, whose slope would stay
        value = jnp.where(mask, value, 0)

    def of_elements(base: Distribution) -> Array:
        assert isinstance(base, dist.BernoulliLogits)
        logits = jnp.broadcast_to(base.logits, jnp.broadcast_shapes(jnp.shape(base.logits), jnp.shape(value)))
        return _bernoulli_log_prob(logits, jnp.asarray(value, logits.dtype))

    log_prob, _, _ = _unwrapped(d, of_elements, keeps_event=False)
    if mask is not None:
        log_prob = jnp.where(mask, log_prob, 0.0)
    return jnp.sum(log_prob, axis=tuple(range(-len(latent), 0)))


@jax.custom_jvp
def _bernoulli_entropy(logits: Array) -> Array:
    """`H = log(1 + e) + |l| e / (1 + e)` with `e = exp(−|l|)`, exact for every logit; NumPyro's is NaN below −87.

    `log(u) e / (u − 1)` with `u = 1 + e` is log(1 + e) to the last bits (Kahan), at a fifth of the time that XLA's
    log1p takes on CPU.
    """
    size = jnp.abs(logits)
    odds = jnp.exp(-size)
    u = 1.0 + odds
    log1p = jnp.where(u == 1.0, odds, jnp.log(u) * odds / jnp.where(u == 1.0, 1.0, u - 1.0))
    return log1p + jnp.where(odds == 0.0, 0.0, size) * odds / u  # 0 ∞ = 0: the logit may be infinite


@_bernoulli_entropy.defjvp
def _bernoulli_entropy_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (logits,), (tangent,) = primals, tangents
    odds = jnp.exp(-jnp.abs(logits))
    finite = jnp.where(odds == 0.0, 0.0, logits)
    return _bernoulli_entropy(logits), -finite * odds / (1.0 + odds) ** 2 * tangent  # −l σ(l) σ(−l)


def _categorical_entropy(logits: Array) -> Array:
    """`H = −Σ p log p`, where a class may have probability 0."""
    possible = jnp.isfinite(logits)
    log_p = jnp.where(possible, jax.nn.log_softmax(logits), 0.0)
    return -jnp.sum(jnp.where(possible, jnp.exp(log_p) * log_p, 0.0), axis=-1)


_BERNOULLI = (dist.BernoulliLogits, dist.BernoulliProbs)
_CATEGORICAL = (dist.CategoricalLogits, dist.CategoricalProbs)
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


def _transformed_entropy(d: dist.TransformedDistribution, key: Array | None, num_samples: int) -> Array:
    """`H(y) = H(x) + E[log |dy/dx|(x)]`; the last term is `log |dy/dx|(E[x])` if it is linear in x, else sampled."""
    entropy = d.base_dist.entropy()

    def log_jacobian(x: Array, _: Any = None) -> Array:
        total, event_dim = jnp.zeros(d.batch_shape), d.base_dist.event_dim
        for transform in d.transforms:
            y, intermediates = transform.call_with_intermediates(x)
            each = transform.log_abs_det_jacobian(x, y, intermediates)
            total = total + jnp.sum(each, axis=tuple(range(transform.domain.event_dim - event_dim, 0)))
            event_dim += transform.codomain.event_dim - transform.domain.event_dim
            x = jnp.asarray(y)
        return total

    if _has_linear_log_jacobian(d.transforms):
        return entropy + log_jacobian(jnp.broadcast_to(jnp.asarray(d.base_dist.mean), d.base_dist.shape()))
    return entropy + expectation(d.base_dist, log_jacobian, key, num_samples, "entropy")


def _same_bijection(q: Distribution, p: Distribution) -> bool:
    """Whether both are one parameter-free bijection (exp, sigmoid, …) of something simpler."""
    return (
        isinstance(q, dist.TransformedDistribution)
        and isinstance(p, dist.TransformedDistribution)
        and not _is_folded(q)
        and not jax.tree.leaves(q.transforms)
        and jax.tree.structure(q.transforms) == jax.tree.structure(p.transforms)
    )


def _is_folded(d: Distribution) -> bool:
    return isinstance(d, dist.TransformedDistribution) and any(
        isinstance(t, transforms.AbsTransform) for t in d.transforms
    )
