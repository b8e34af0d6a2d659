"""The sigmoid belief network: layers of binary units, the paper's first case study."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.typing import ArrayLike

from proxvi._validation import check_number
from proxvi_paper.models.bernoulli import Bernoulli
from proxvi_paper.models.model_and_guide import ModelAndGuide, each_row

__all__ = ["BAD", "GOOD", "Start", "belief_network"]


class Start(NamedTuple):
    """Initialisation of the generative network. Its biases and the inference network always start the same way.

    Attributes:
        prior: probability that a unit of the top layer is on.
        weights: initialiser of the weight matrices, as in `jax.nn.initializers`.

    Example:
        >>> import jax
        >>> Start(prior=0.1, weights=jax.nn.initializers.zeros).prior
        0.1
    """

    prior: float
    weights: jax.nn.initializers.Initializer


_GLOROT = jax.nn.initializers.glorot_uniform()  # the "normalized initialization" of Glorot & Bengio (2010)

GOOD = Start(prior=0.5, weights=_GLOROT)
BAD = Start(prior=0.001, weights=jax.nn.initializers.constant(-100.0))


def belief_network(mean: ArrayLike, *, units: Sequence[int] = (200,), start: Start = GOOD) -> ModelAndGuide:
    """Sigmoid belief network, and an inference network that mirrors it layer by layer.

        model: z_L ~ Bernoulli(σ(a)),  z_{l−1} ~ Bernoulli(σ(z_l W_l + b_l)),  x = z_0
        guide: z_1 ~ Bernoulli(σ((x − mean) V_1 + c_1)),  z_l ~ Bernoulli(σ(z_{l−1} V_l + c_l))

    Both take a batch of rows of 0 and 1, of any number type. The ELBO is that of one row, the mean over the batch, so
    that it, and a magnitude or temperature in units of it, are the same for any batch size. Everything is learned, the
    prior's logits `a` included. Initial parameters are drawn with the key that `init`, `run` or `proxvi.fit` is given.

    The sites are `z1` (next to the data) to `zL` and `x`; the parameters `prior`, `decoder1_weights`, `decoder1_bias`,
    `encoder1_weights`, `encoder1_bias` and so on.

    Args:
        mean: of the training data, a number for each pixel; the inference network sees the data minus it.
        units: in each layer, from the data up; `(200, 200, 200)` is the paper's network of 3 layers.
        start: `GOOD` or `BAD`, the paper's two initialisations, or one of your own. `GOOD` has prior probabilities of
            0.5 and the weights of Glorot & Bengio (2010); `BAD` has 0.001 and generative weights of −100, which
            switches off every unit. Biases start at 0.

    Returns:
        The model and the guide.

    Example:
        >>> import jax, numpy as np, optax, proxvi
        >>> x = np.random.default_rng(0).integers(0, 2, (100, 6), dtype=np.uint8)
        >>> network = belief_network(x.mean(0), units=(3, 2))
        >>> constraint = proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 100, 1e-10))
        >>> svi = proxvi.ProximitySVI(*network, optax.adam(1e-3, eps=1e-6), proxvi.LeaveOneOutELBO(5), constraint)
        >>> result = proxvi.fit(svi, jax.random.key(0), 200, x, batch_size=20)
        >>> result.params["decoder1_weights"].shape
        (3, 6)
    """
    mean = np.asarray(mean)
    if mean.ndim != 1 or not mean.size or not np.issubdtype(mean.dtype, np.number) or not np.all(np.isfinite(mean)):
        raise ValueError(
            f"`mean` must be a vector of finite numbers, one for each pixel, got {mean!r:.80}; take the mean of the "
            "training data over its rows, `x.mean(0)`."
        )
    if not units or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in units):
        raise ValueError(f"`units` must be positive integers, one for each layer, got {units!r}; (200,) is one layer.")
    check_number("start.prior", start.prior, above=0.0, below=1.0, remedy="0.5 is no preference")
    sizes = (mean.size, *(int(n) for n in units))
    layers = range(1, len(sizes))
    top = float(np.log(start.prior) - np.log1p(-start.prior))
    centre = mean.astype(np.float32)

    def model(x: ArrayLike) -> None:
        logits: Any = numpyro.param("prior", jnp.full(sizes[-1], top))
        with each_row(x, sizes[0]):
            for layer in reversed(layers):
                z = numpyro.sample(f"z{layer}", Bernoulli(logits).to_event(1))
                logits = _affine(f"decoder{layer}", z, sizes[layer], sizes[layer - 1], start.weights)
            numpyro.sample("x", Bernoulli(logits).to_event(1), obs=jnp.asarray(x))

    def guide(x: ArrayLike) -> None:
        with each_row(x, sizes[0]):
            z: Any = jnp.asarray(x) - centre[None]
            for layer in layers:
                logits = _affine(f"encoder{layer}", z, sizes[layer - 1], sizes[layer], _GLOROT)
                z = numpyro.sample(f"z{layer}", Bernoulli(logits).to_event(1))

    return ModelAndGuide(model, guide)


def _affine(
    name: str, inputs: ArrayLike, size_in: int, size_out: int, weights: jax.nn.initializers.Initializer
) -> Array:
    W: Any = numpyro.param(f"{name}_weights", lambda key: weights(key, (size_in, size_out)))
    b: Any = numpyro.param(f"{name}_bias", jnp.zeros(size_out))
    return jnp.asarray(inputs, W.dtype) @ W + b[None]
