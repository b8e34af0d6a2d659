"""Proximity statistics `f(λ)` of a variational distribution.

A statistic is a pure function of a tree whose leaves are distributions (`numpyro.distributions`) or arrays. It returns
a tree of arrays. Batch axes (`batch_shape`: one entry for each data point) are averaged. Latent axes (those that
`to_event` made event axes) are kept, so a layer of 200 units gives 200 numbers for any batch size.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from proxvi import _distributions
from proxvi._typing import Distribution, Float, Tree
from proxvi._validation import is_sharded, named_leaves

__all__ = ["entropy", "identity", "kl_to_prior", "mean_variance", "orthogonal"]


def entropy(q: Tree, *, total: bool = False, key: Array | None = None, num_samples: int = 32) -> Tree:
    """Entropy of each latent unit; keeping it close stops `q` from zeroing parts of its support.

        f(λ) = H(q(z; λ)) = −E[log q(z; λ)]

    Args:
        q: a distribution or a tree of distributions.
        total: sum over the latent units and the leaves of the tree, for one scalar.
        key: for the Monte Carlo estimate that families without a closed form need (Poisson, flows).
        num_samples: of that estimate.

    Returns:
        A tree shaped as `q` with an array for each distribution, batch axes averaged; with `total`, a scalar.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> q = dist.Bernoulli(jnp.full((20, 3), 0.5)).to_event(1)  # 20 data points, 3 units
        >>> print(entropy(q).round(4))
        [0.6931 0.6931 0.6931]
        >>> print(entropy(q, total=True).round(4))
        2.0794
    """
    return _distributions.measure_leaves(
        _distributions.average_entropy, q, name="entropy", total=total, key=key, num_samples=num_samples
    )


def mean_variance(q: Tree, *, key: Array | None = None, num_samples: int = 32) -> Tree:
    """Mean and variance of each latent unit; only higher moments may then change fast.

        f(λ) = (E[z], E[(z − E[z])²]) under q(z; λ)

    Of an angle (`VonMises`) they are the circular ones, as in NumPyro.

    Args:
        q: a distribution or a tree of distributions.
        key: for the Monte Carlo estimate that families without closed moments need (flows).
        num_samples: of that estimate.

    Returns:
        A tree shaped as `q` with a pair (mean, variance) for each distribution, batch axes averaged.

    Example:
        >>> import numpyro.distributions as dist
        >>> mean, variance = mean_variance(dist.Normal(1.0, 3.0))
        >>> print(mean, variance)
        1.0 9.0
    """
    return _distributions.measure_leaves(
        _distributions.average_moments, q, name="mean_variance", key=key, num_samples=num_samples
    )


def kl_to_prior(q: Tree, prior: Tree, *, total: bool = False, key: Array | None = None, num_samples: int = 32) -> Tree:
    """Divergence of each latent unit from its prior; keeping it close stops the KL term from winning early.

        f(λ) = KL(q(z; λ) ‖ p(z))

    It is a statistic, not the KL term of an ELBO: the batch is averaged, and no gradient reaches the parameters of the
    prior. Where both are dictionaries, as in `ProximitySVI`, sites of `q` without a prior (auxiliary ones) are left
    out, and the prior of a site may depend on samples of others.

    Args:
        q: a distribution or a tree of distributions.
        prior: one distribution for all leaves of `q`, or a tree of the structure of `q`. It broadcasts against `q`.
            Where `q` is masked, its mask decides.
        total: sum over the latent units and the leaves of the tree, for one scalar.
        key: for the Monte Carlo estimate that pairs without a closed form need.
        num_samples: of that estimate.

    Returns:
        A tree shaped as `q` with an array for each distribution, batch axes averaged; with `total`, a scalar.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> q = dist.Normal(jnp.array([0.0, 2.0]), 1.0).to_event(1)
        >>> print(kl_to_prior(q, dist.Normal(0.0, 1.0)))
        [0. 2.]
    """
    if isinstance(q, dict) and isinstance(prior, dict):
        q = {name: q[name] for name in q if name in prior}
    if isinstance(prior, Distribution):
        prior = jax.tree.map(lambda _: prior, q, is_leaf=_distributions.is_distribution)
    ours, theirs = (jax.tree.structure(tree, is_leaf=_distributions.is_distribution) for tree in (q, prior))
    if ours != theirs:
        raise ValueError(
            f"`prior` must be one distribution or a tree with the structure of `q`, got {theirs} for {ours}; give each "
            "leaf of `q` its prior."
        )
    for name, leaf in named_leaves(prior):
        if not isinstance(leaf, Distribution):
            raise TypeError(
                f"`prior` must hold distributions, got {type(leaf).__name__} at {name}; wrap it, "
                "for example in `numpyro.distributions.Normal`."
            )
    return _distributions.measure_leaves(
        _distributions.average_divergence,
        q,
        jax.tree.map(_distributions.without_gradient, prior, is_leaf=_distributions.is_distribution),
        name="kl_to_prior",
        total=total,
        key=key,
        num_samples=num_samples,
    )


def orthogonal(weights: Tree) -> list[Array]:
    """Gram matrix of each weight matrix; an orthogonal initialisation starts it at the identity.

        f(W) = W Wᵀ   for an m × n matrix with m ≤ n, else  Wᵀ W

    The product is taken on the smaller side, which is where the columns or rows of an orthogonal initialisation are
    orthonormal, and where it is cheap.

    Args:
        weights: an array or a tree of arrays. The last two axes are the matrix and those before them are stacked
            matrices; leaves with fewer than two axes (biases) are left out.

    Returns:
        The list of Gram matrices, in the order of the leaves.

    Example:
        >>> import jax.numpy as jnp
        >>> (gram,) = orthogonal({"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)})
        >>> print(gram)
        [[4. 4.]
         [4. 4.]]
    """
    named = named_leaves(weights)
    for name, leaf in named:
        if isinstance(leaf, Distribution):
            raise TypeError(
                f"`orthogonal` measures weight matrices, got {type(leaf).__name__} at {name}; pass the parameters "
                "of the network, not the distributions that it returns."
            )
    matrices = [jnp.asarray(leaf) for _, leaf in named if jnp.ndim(leaf) >= 2]
    if not matrices:
        shapes = {name: jnp.shape(leaf) for name, leaf in named}
        raise ValueError(
            f"`weights` must hold at least one array with two or more axes, got {shapes}; pass the kernels of the "
            "inference network."
        )
    return [_gram(matrix) for matrix in matrices]


def _gram(matrix: Float[Array, "*stack rows columns"]) -> Float[Array, "*stack side side"]:
    transpose = jnp.swapaxes(matrix, -1, -2)
    left, right = (matrix, transpose) if matrix.shape[-2] <= matrix.shape[-1] else (transpose, matrix)
    if not is_sharded(matrix):
        return left @ right
    # A sum over an axis that is split over devices: the result is the same on all of them.
    return jnp.matmul(left, right, out_sharding=P(*jax.typeof(matrix).sharding.spec[:-2], None, None))


def identity(q: Tree) -> Tree:
    """Whatever is given, itself: parameters for Euclidean proximity, distributions for the distance `kl`.

        f(λ) = λ

    Args:
        q: an array, a distribution or a tree of either.

    Returns:
        `q`, unchanged.

    Example:
        >>> identity({"loc": 1.0})
        {'loc': 1.0}
    """
    return q
