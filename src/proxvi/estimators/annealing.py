"""Deterministic annealing and KL warm-up: other objectives on the way to the ELBO, which PVI is compared with."""

import copy
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import optax
from jax import Array
from numpyro.infer import ELBO, Trace_ELBO, TraceMeanField_ELBO
from numpyro.primitives import Messenger

from proxvi._typing import Bool, Guide, Int, Model, Params, Scalar
from proxvi._validation import check_number, first_value
from proxvi.estimators.score_function import LeaveOneOutELBO

__all__ = ["AnnealedELBO", "ScheduledELBO", "WarmUpELBO", "as_scheduled", "with_elbo"]


class ScheduledELBO(ELBO):
    """An ELBO whose gradient is that of another objective, which may change from step to step; its value is the ELBO's.

    `ProximitySVI` knows the step; NumPyro's `SVI` does not tell it to an ELBO. In NumPyro's `SVI` a constant objective
    works. One that changes is replaced by the plain ELBO, with a warning.

    Attributes:
        elbo: the true ELBO.
        relative: whether the schedule is in units of the first loss.
        changes_gradient: whether the gradient is not that of `elbo`.
    """

    relative = False
    changes_gradient = True

    def __init__(self, elbo: ELBO) -> None:
        super().__init__(elbo.num_particles, elbo.vectorize_particles)
        self.elbo = elbo
        self.can_infer_discrete = elbo.can_infer_discrete
        self.multi_sample_guide = getattr(elbo, "multi_sample_guide", False)  # `SVI.init` asks for it

    def objective_at(
        self, model: Model, guide: Guide, step: Int[Array, ""], first_loss: Scalar | float
    ) -> tuple[Model, Guide]:
        """The model and the guide whose ELBO is maximised at `step`; they draw what those given would draw."""
        raise NotImplementedError

    def needs_step(self) -> bool:
        """Whether the objective depends on the step or on the first loss."""
        return True

    def is_over(self, step: Int[Array, ""], first_loss: Scalar | float) -> Bool[Array, ""] | bool:  # noqa: ARG002
        """Whether the objective no longer changes from `step` on; a schedule that does not know is never over."""
        return False

    def loss(self, rng_key: Array, param_map: Params, model: Model, guide: Guide, *args: Any, **kwargs: Any) -> Any:
        """Minus the true ELBO, with the gradient of the objective if that never changes."""
        if self.needs_step():
            name = type(self).__name__
            warnings.warn(
                f"`{name}` must be told the step to change its objective, got a call from elsewhere, such as NumPyro's "
                f"SVI: this is the plain ELBO. Write `proxvi.ProximitySVI(model, guide, optim, {name}(...), ())`.",
                stacklevel=2,
            )
            return self.elbo.loss(rng_key, param_map, model, guide, *args, **kwargs)
        pair = self.objective_at(model, guide, jnp.zeros((), jnp.int32), 1.0)
        objective: Any = self.elbo.loss(rng_key, param_map, *pair, *args, **kwargs)
        true: Any = self.elbo.loss(rng_key, jax.lax.stop_gradient(param_map), model, guide, *args, **kwargs)
        return true + (objective - jax.lax.stop_gradient(objective))


class _Unscheduled(ScheduledELBO):
    """Any other ELBO, which is its own objective at every step."""

    changes_gradient = False

    def needs_step(self) -> bool:
        """No."""
        return False


def as_scheduled(loss: ELBO) -> ScheduledELBO:
    """The loss itself if it is scheduled, else one whose objective never changes: every loss has a true ELBO."""
    return loss if isinstance(loss, ScheduledELBO) else _Unscheduled(loss)


def with_elbo(loss: ELBO, elbo: ELBO) -> ELBO:
    """The same loss with another estimator of the true ELBO."""
    if not isinstance(loss, ScheduledELBO):
        return elbo
    other = copy.copy(loss)
    other.elbo = elbo
    return other


class AnnealedELBO(ScheduledELBO):
    """Deterministic annealing: a temperature on `log q` that falls to 1, the paper's baseline.

        ELBO_t = E[log p(x, z) − max(1, k_t) · log q(z)]

    Only the gradient is tempered; the losses are those of the true ELBO. Use it in `ProximitySVI`, which knows the
    step. NumPyro's `SVI` takes it with a constant temperature and `relative=False`.

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

    def __init__(self, elbo: ELBO, temperature: optax.ScalarOrSchedule, *, relative: bool = True) -> None:
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

    def needs_step(self) -> bool:
        """Whether the temperature is a schedule or in units of the first loss."""
        return callable(self.temperature) or self.relative

    def objective_at(
        self, model: Model, guide: Guide, step: Int[Array, ""], first_loss: Scalar | float
    ) -> tuple[Model, Guide]:
        """The model, and the guide with its log density multiplied by the temperature."""
        return model, numpyro.handlers.scale(guide, scale=self._temperature_at(step, first_loss))

    def is_over(self, step: Int[Array, ""], first_loss: Scalar | float) -> Bool[Array, ""] | bool:
        """Whether the temperature is 1, or a number, which stays."""
        return not callable(self.temperature) or self._temperature_at(step, first_loss) == 1.0

    def _temperature_at(self, step: Int[Array, ""], first_loss: Scalar | float) -> Array:
        temperature: Any = self.temperature(step) if callable(self.temperature) else self.temperature
        if self.relative:
            temperature = temperature * first_loss
        return jnp.maximum(1.0, temperature)


class WarmUpELBO(ScheduledELBO):
    """KL warm-up, as users of autoencoders do it: a weight on the KL divergence to the prior that rises to 1.

        ELBO_t = E[log p(x | z)] − w_t · KL(q(z) ‖ p(z))

    Only the gradient is weighted; the losses are those of the true ELBO. Use it in `ProximitySVI`, which knows the
    step.

    Args:
        elbo: the estimator of the ELBO, `Trace_ELBO` or `TraceMeanField_ELBO`, for guides that can be reparameterised.
        weight: `w`, an Optax schedule of the step that ends at 1.

    Example:
        Without a constraint, the last argument of `ProximitySVI` is `()`:

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax, proxvi
        >>> from numpyro.infer import TraceMeanField_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> warm = WarmUpELBO(TraceMeanField_ELBO(), optax.linear_schedule(0.0, 1.0, 1_000))
        >>> svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.05), warm, ())
        >>> result = svi.run(jax.random.key(0), 2_000, jnp.array(3.0), progress_bar=False)
        >>> bool(abs(result.params["mean_auto_loc"] - 3.0) < 0.2)
        True
    """

    def __init__(self, elbo: ELBO, weight: optax.ScalarOrSchedule) -> None:
        if type(elbo) not in (Trace_ELBO, TraceMeanField_ELBO):
            # The score-function estimators do not allow a weight of 0.
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

    def objective_at(
        self,
        model: Model,
        guide: Guide,
        step: Int[Array, ""],
        first_loss: Scalar | float,  # noqa: ARG002
    ) -> tuple[Model, Guide]:
        """Both with the log densities of latent variables multiplied by the weight."""
        weight = jnp.asarray(self.weight(step))
        return _ScaleLatent(model, weight), _ScaleLatent(guide, weight)

    def is_over(self, step: Int[Array, ""], first_loss: Scalar | float) -> Bool[Array, ""]:  # noqa: ARG002
        """Whether the weight is 1."""
        return jnp.asarray(self.weight(step)) == 1.0


class _ScaleLatent(Messenger):
    """Multiply the log densities of sites that are not observed."""

    def __init__(self, fn: Model, scale: Array | float) -> None:
        super().__init__(fn)
        self.scale = scale

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and not msg["is_observed"]:
            msg["scale"] = self.scale if msg.get("scale") is None else msg["scale"] * self.scale
