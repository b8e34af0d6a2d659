"""Other objectives on the way to the ELBO, what PVI is compared with: deterministic annealing and KL warm-up."""

from typing import Any

import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro.infer import ELBO, Trace_ELBO, TraceMeanField_ELBO
from numpyro.primitives import Messenger

from proxvi._validation import check_number, first_value
from proxvi.estimators.score_function import LeaveOneOutELBO

__all__ = ["AnnealedELBO", "TemperedELBO", "WarmUpELBO"]


class TemperedELBO(ELBO):
    """An estimator whose gradients are of another objective, which changes from step to step; its losses are not.

    `ProximitySVI` tells it the step, and takes its losses from `elbo`, the true one.
    """

    relative = False  # whether the schedule is in units of the first loss

    def __init__(self, elbo: ELBO) -> None:
        super().__init__(elbo.num_particles, elbo.vectorize_particles)
        self.elbo = elbo
        self.can_infer_discrete = elbo.can_infer_discrete

    def loss(self, *_: Any, **__: Any) -> Any:
        """Refuse: without the step there is no objective to speak of, and the true ELBO's would be another one."""
        name = type(self).__name__
        raise TypeError(
            f"`{name}` must be given to ProximitySVI, which tells it the step, got a call from elsewhere, such as "
            f"NumPyro's SVI; write `proxvi.ProximitySVI(model, guide, optim, {name}(...), ())`."
        )

    def tempered(self, model: Any, guide: Any, step: Array, first_loss: Array) -> tuple[Any, Any]:
        """The model and the guide whose ELBO is maximised at `step`."""
        raise NotImplementedError


class AnnealedELBO(TemperedELBO):
    """Deterministic annealing: a temperature on `log q` that falls to 1, the paper's baseline.

        ELBO_t = E[log p(x, z) − max(1, k_t) · log q(z)]

    Only the gradients that `ProximitySVI` takes are tempered; losses are of the true ELBO.

    Args:
        elbo: the estimator to temper: `LeaveOneOutELBO`, or `Trace_ELBO` for guides that can be reparameterised.
        temperature: `k`, an Optax schedule of the step or a number.
        relative: whether `temperature` is in units of the first loss, `|ELBO_0|`, as in the paper.

    Example:
        >>> import optax
        >>> annealed = AnnealedELBO(LeaveOneOutELBO(5), optax.exponential_decay(1.0, 10_000, 1e-10))
        >>> annealed.num_particles
        5
    """

    def __init__(self, elbo: ELBO, temperature: Any, *, relative: bool = True) -> None:
        if not isinstance(elbo, LeaveOneOutELBO) and type(elbo) is not Trace_ELBO:
            # TraceGraph_ELBO would multiply its score function by the temperature a second time.
            raise TypeError(
                f"`elbo` must be LeaveOneOutELBO or Trace_ELBO, got {type(elbo).__name__}, whose gradient would not be "
                "that of the tempered ELBO; use LeaveOneOutELBO for discrete variables."
            )
        first = first_value("temperature", temperature)
        check_number("temperature", first, at_least=0.0, remedy="below 1 it counts as 1, which is no annealing")
        super().__init__(elbo)
        self.temperature = temperature
        self.relative = relative

    def tempered(self, model: Any, guide: Any, step: Array, first_loss: Array) -> tuple[Any, Any]:
        """The model, and the guide with its log density multiplied by the temperature."""
        temperature: Any = self.temperature(step) if callable(self.temperature) else self.temperature
        if self.relative:
            temperature = temperature * first_loss
        return model, numpyro.handlers.scale(guide, scale=jnp.maximum(1.0, temperature))


class WarmUpELBO(TemperedELBO):
    """KL warm-up: a weight on the KL divergence to the prior that rises to 1, what users of autoencoders do.

        ELBO_t = E[log p(x | z)] − w_t · KL(q(z) ‖ p(z))

    Only the gradients that `ProximitySVI` takes are of it; losses are of the true ELBO.

    Args:
        elbo: the estimator of the ELBO, `Trace_ELBO` or `TraceMeanField_ELBO`, for guides that can be reparameterised.
        weight: `w`, an Optax schedule of the step that ends at 1.

    Example:
        >>> import optax
        >>> from numpyro.infer import TraceMeanField_ELBO
        >>> warm = WarmUpELBO(TraceMeanField_ELBO(), optax.linear_schedule(0.0, 1.0, 10_000))
        >>> warm.num_particles
        1
    """

    def __init__(self, elbo: ELBO, weight: Any) -> None:
        if type(elbo) not in (Trace_ELBO, TraceMeanField_ELBO):
            # A score function knows no weight of 0.
            raise TypeError(
                f"`elbo` must be Trace_ELBO or TraceMeanField_ELBO, got {type(elbo).__name__}; for discrete variables "
                "there is AnnealedELBO."
            )
        if not callable(weight):
            raise TypeError(
                f"`weight` must be an Optax schedule, got {weight!r}; `optax.linear_schedule(0.0, 1.0, 10_000)` rises "
                "to 1 over ten thousand steps."
            )
        super().__init__(elbo)
        self.weight = weight

    def tempered(self, model: Any, guide: Any, step: Array, first_loss: Array) -> tuple[Any, Any]:  # noqa: ARG002
        """Both with the log densities of latent variables multiplied by the weight."""
        weight = self.weight(step)
        return _ScaleLatent(model, weight), _ScaleLatent(guide, weight)


class _ScaleLatent(Messenger):
    """Multiply the log densities of sites that are not observed."""

    def __init__(self, fn: Any, scale: Any) -> None:
        super().__init__(fn)
        self.scale = scale

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and not msg["is_observed"]:
            msg["scale"] = self.scale if msg.get("scale") is None else msg["scale"] * self.scale
