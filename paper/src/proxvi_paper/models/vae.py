"""The variational autoencoder, the paper's second case study."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from numpyro.contrib.module import nnx_module

from proxvi._typing import Params
from proxvi_paper.models.bernoulli import Bernoulli, softplus
from proxvi_paper.models.model_and_guide import ModelAndGuide, each_row

__all__ = ["autoencoder", "encoder_weights"]


def autoencoder(
    key: Array, *, pixels: int = 784, latents: int = 100, hidden: Sequence[int] = (200, 200)
) -> ModelAndGuide:
    """Variational autoencoder of binary images, with networks of Flax NNX.

        model: z ~ Normal(0, I),  x ~ Bernoulli(σ(decoder(z)))
        guide: z ~ Normal(m, diag(s²)),  (m, softplus⁻¹ s) = encoder(x)

    Both take a batch of rows of 0 and 1, of any number type; the ELBO is that of one row. The weights of the encoder
    start orthogonal, those of the decoder as Glorot & Bengio (2010) have them.

    The sites are `z` and `x`; the parameters `encoder$params` and `decoder$params`, trees.

    Args:
        key: for the initial weights.
        pixels: in a row.
        latents: dimensions of `z`.
        hidden: units of the hidden layers, rectified linear; those of the decoder are the same in reverse.

    Returns:
        The model and the guide.

    Example:
        >>> import jax, numpy as np, optax, proxvi
        >>> from numpyro.infer import TraceMeanField_ELBO
        >>> x = np.random.default_rng(0).integers(0, 2, (100, 6), dtype=np.uint8)
        >>> networks = autoencoder(jax.random.key(0), pixels=6, latents=2, hidden=(4,))
        >>> constraint = proxvi.Proximity(
        ...     lambda q, params: proxvi.orthogonal(encoder_weights(params)), magnitude=1e-2, relative=False
        ... )
        >>> svi = proxvi.ProximitySVI(*networks, optax.adam(1e-3), TraceMeanField_ELBO(), constraint)
        >>> state = svi.init(jax.random.key(1), x)
        >>> [weights.shape for weights in encoder_weights(svi.get_params(state))]
        [(6, 4), (4, 4)]
    """
    encoder_key, decoder_key = jax.random.split(key)
    encoder = _network(encoder_key, (pixels, *hidden, 2 * latents), jax.nn.initializers.orthogonal())
    decoder = _network(decoder_key, (latents, *reversed(hidden), pixels), jax.nn.initializers.glorot_uniform())

    def model(x: ArrayLike) -> None:
        decode = nnx_module("decoder", decoder)
        with each_row(x, pixels):
            shape = (jnp.shape(x)[0], latents)
            z = numpyro.sample("z", dist.Normal(jnp.zeros(shape), jnp.ones(shape)).to_event(1))
            numpyro.sample("x", Bernoulli(decode(z)).to_event(1), obs=jnp.asarray(x))

    def guide(x: ArrayLike) -> None:
        encode = nnx_module("encoder", encoder)
        with each_row(x, pixels):
            mean, scale = jnp.split(encode(jnp.asarray(x, jnp.float32)), 2, axis=-1)
            numpyro.sample("z", dist.Normal(mean, softplus(scale)).to_event(1))

    return ModelAndGuide(model, guide)


def encoder_weights(params: Params) -> list[Array]:
    """The weight matrices of the inference network, from the data up, for the orthogonal statistic."""
    return [leaf for leaf in jax.tree.leaves(params["encoder$params"]) if jnp.ndim(leaf) == 2]


def _network(key: Array, sizes: Sequence[int], weights: jax.nn.initializers.Initializer) -> Any:
    rngs = nnx.Rngs(key)
    layers: list[Any] = []
    for size_in, size_out in pairwise(sizes):
        layers += [nnx.Linear(size_in, size_out, kernel_init=weights, rngs=rngs), nnx.relu]
    return nnx.Sequential(*layers[:-1])
