"""`fit`: long runs at the speed of a compiled loop, which can be watched, killed and resumed."""

import copy
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.svi import SVIRunResult

from proxvi._validation import check_integer
from proxvi.estimators import OrderedTraceELBO, ScheduledELBO
from proxvi.svi import ACTIVE, ProximitySVI, raise_if_stopped, warn_if_held
from proxvi.training._chunks import Run
from proxvi.training._watch import Clock, Record, agree, signals
from proxvi.training.checkpoints import Checkpoints

__all__ = ["fit"]

LOG = logging.getLogger("proxvi")
SHOWN = {"elbo": ".5g", "validation_elbo": ".5g", "magnitude": ".1e", "distance": ".2g"}  # in the progress bar


def fit(
    svi: SVI,
    key: Any,
    num_steps: int,
    *data: Any,
    batch_size: int | None = None,
    report_every: int = 1_000,
    progress: bool | None = None,
    measure: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    callback: Callable[[int, dict[str, Any]], None] | None = None,
    metrics_file: str | os.PathLike[str] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    checkpoint_every: float = 300.0,
    keep: int = 3,
    configuration: dict[str, Any] | None = None,
    validation: Any = None,
    patience: int | None = None,
    mesh: Mesh | None = None,
) -> SVIRunResult:
    """Train for `num_steps` steps; start it again after a crash with the same arguments, and it goes on.

        state_{t+1} = svi.update(state_t, batch_t),   batch_t a function of the key and of t alone

    The same key gives the same bits, whether the run was interrupted or not and wherever, on the same JAX, CPU type
    and number of devices. Steps that are not finite are left out and counted; after `svi.max_skipped_in_a_row` of them
    the run stops with the step and the parameter named. On SIGTERM or Ctrl-C it saves first and exits then.

    Args:
        svi: a `ProximitySVI`, or NumPyro's `SVI`.
        key: for the initial parameters, the samples and the order of the data.
        num_steps: in all, those before a restart included.
        data: what the model takes: arrays, or one iterable of batches (a Grain loader, for example) if they do not fit
            into memory. In several processes an iterable yields each one's own part of the batch. What is no data goes
            into `ProximitySVI(..., name=value)`, as in NumPyro's `SVI`.
        batch_size: rows of the arrays in a batch, shuffled without replacement in each epoch; None for all of them.
        report_every: steps between two reports, that is: calls of `callback`, lines of `metrics_file`, validations.
        progress: whether to show a progress bar; None does on a terminal.
        measure: metrics of your own at each report, a function of the parameters that returns a dictionary of numbers.
        callback: called with the step and the metrics: `elbo` (mean since the last report), `magnitude`, `distance`
            and `share` of the constraint (lists, if there are several), `skipped`, `steps_per_second`, `seconds`
            (those before a restart included), and `validation_elbo`.
        metrics_file: the same as JSON lines, null for what is not finite, and a line for each checkpoint that is safely
            on disk.
        checkpoints: a folder to save to and to resume from; needs the extra `checkpoint`.
        checkpoint_every: seconds between two checkpoints; 0 saves as often as it can.
        keep: how many checkpoints to keep.
        configuration: what else must agree with the checkpoint, such as your own settings; JSON.
        validation: held-out data, as the model takes it (a tuple for several arguments); its true ELBO is reported.
        patience: stop after so many reports without a better `validation_elbo`, counted only while no constraint makes
            up more than 1% of the gradient.
        mesh: devices, along whose first axis each batch is split; may span processes (`jax.distributed`).

    Returns:
        NumPyro's `SVIRunResult`: parameters, state, and the loss of every step, those before a restart included.

    Raises:
        FloatingPointError: after too many steps in a row that were not finite.
        ConfigurationError: if the checkpoints in the folder are of another run.
        OSError: if a checkpoint cannot be written; those before it are intact.

    Warns:
        UserWarning: if a constraint still makes up more than 1% of the gradient at the end; if a checkpoint was
            damaged and an older one was taken; if a model has latent variables that all rows share, and a batch is not
            weighted to stand for all rows.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax, proxvi
        >>> from numpyro.infer import Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("data", 1_000, subsample_size=x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> x = 3.0 + jax.random.normal(jax.random.key(1), (1_000,))
        >>> constraint = proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 1_000, 1e-10))
        >>> svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO(), constraint)
        >>> result = proxvi.fit(svi, jax.random.key(0), 2_000, x, batch_size=100)
        >>> bool(abs(result.params["mean_auto_loc"] - 3.0) < 0.2)
        True

        TensorBoard, Weights & Biases and MLflow take the metrics of one constraint as they are::

            writer = tensorboardX.SummaryWriter()
            callback = lambda step, metrics: [writer.add_scalar(k, v, step) for k, v in metrics.items()]

            callback = lambda step, metrics: wandb.log(metrics, step=step)

            callback = lambda step, metrics: mlflow.log_metrics(metrics, step=step)
    """
    for name, number in {"num_steps": num_steps, "report_every": report_every, "keep": keep}.items():
        check_integer(name, number)
    if patience is not None:
        check_integer("patience", patience, remedy="None never stops early")
    if patience is not None and validation is None:
        raise ValueError(f"`patience` must come with `validation`, got {patience} without; pass held-out data.")
    validation = validation if isinstance(validation, tuple) or validation is None else (validation,)
    run = Run(_reproducible(svi), key, data, batch_size, min(report_every, num_steps), mesh)
    if run.svi is not svi:  # so that the caller's own reads the result, and can go on with it
        svi.constrain_fn = run.svi.constrain_fn
        if isinstance(svi, ProximitySVI):
            from dataclasses import replace

            from proxvi.estimators import as_scheduled

            svi._initialised = replace(run.svi.objective, loss=as_scheduled(svi.loss))
    clock, record = Clock(report_every), Record(metrics_file, callback)
    losses = np.empty(num_steps, jnp.result_type(float))
    step, stop, notes = 0, False, {"best": None, "waited": 0, "seconds": 0.0}

    with ExitStack() as stack:
        folder = None
        if checkpoints is not None:
            folder = Checkpoints(checkpoints, {**run.describe(), "user": configuration}, keep)
            stack.enter_context(closing(folder))
            restored = folder.restore(lambda at: {"state": run.state, "losses": np.empty(at, losses.dtype)})
            if restored is not None:
                step, notes = restored.step, notes | restored.notes["fit"]
                if step > num_steps:
                    raise ValueError(
                        f"`num_steps` must be at least {step}, which the run in {folder.folder} has reached already, "
                        f"got {num_steps}; use another folder to start anew."
                    )
                run.resume(step, restored.tree["state"], restored.notes["data"])
                losses[:step] = restored.tree["losses"]
        record.resume(step)
        shown = (sys.stderr.isatty() if progress is None else progress) and jax.process_index() == 0
        bar = stack.enter_context(
            tqdm.tqdm(total=num_steps, initial=step, disable=not shown, unit="step", dynamic_ncols=True)
        )
        if step and shown:
            bar.write(f"resumed at step {step} of {num_steps} from {folder and folder.folder}", file=sys.stderr)
        told = stack.enter_context(signals(folder is not None))

        began = time.monotonic() - notes["seconds"]

        def save() -> None:
            assert folder is not None
            notes["seconds"] = time.monotonic() - began
            tree = {"state": run.state, "losses": losses[:step]}
            record.saved(folder.wait())
            folder.save(step, tree, {"fit": notes, "data": run.source.state(step)})
            clock.saved()

        while step < num_steps and (patience is None or notes["waited"] < patience):
            limit = min(report_every - step % report_every, num_steps - step, clock.length)
            with clock.timed() as timed:
                length, losses_now = run.steps(step, limit, clock.length, report_every, num_steps)
                timed(length)
            losses[step : step + length] = losses_now
            step += length
            bar.update(length)
            raise_if_stopped(run.svi, run.state)
            if step % report_every == 0 or step == num_steps:
                since = (step - 1) // report_every * report_every
                metrics = {"elbo": -_mean(losses[since:step]), **run.telemetry(), "steps_per_second": clock.rate}
                metrics["seconds"] = time.monotonic() - began
                if validation is not None:
                    metrics["validation_elbo"] = run.evaluate(validation)
                    _wait_for_better(notes, metrics)
                if measure is not None:
                    own = measure(run.svi.get_params(run.state))
                    metrics |= {name: float(value) for name, value in own.items()}
                record.report(step, metrics)
                shown_now = {k: f"{metrics[k]:{how}}" for k, how in SHOWN.items() if isinstance(metrics.get(k), float)}
                bar.set_postfix_str(" ".join(f"{k} {v}" for k, v in shown_now.items()), refresh=False)
            if folder is not None:
                record.saved(folder.saved())
                stop, due = agree(bool(told), clock.since_save() >= checkpoint_every)
                if stop or due:
                    save()
                if stop:
                    break
        if folder is not None:
            record.saved(folder.wait())
            if folder.latest() != step:
                save()
                record.saved(folder.wait())
            if stop or told:
                LOG.warning("told to stop: saved step %d of %d to %s", step, num_steps, folder.folder)
                raise KeyboardInterrupt if signal.SIGINT in told else SystemExit(128 + signal.SIGTERM)
    warn_if_held(run.svi, run.state)
    return SVIRunResult(run.svi.get_params(run.state), run.state, jnp.asarray(losses[:step]))


def _wait_for_better(notes: dict[str, Any], metrics: dict[str, Any]) -> None:
    elbo, shares = metrics["validation_elbo"], np.atleast_1d(metrics.get("share", 0.0))
    better = bool(np.isfinite(elbo)) and (notes["best"] is None or elbo > notes["best"])
    # While a constraint steers, the ELBO may well stand still or fall: that is no reason to stop.
    notes["waited"] = 0 if better or np.any(shares > ACTIVE) else notes["waited"] + 1
    notes["best"] = elbo if better else notes["best"]


def _reproducible(svi: Any) -> ProximitySVI:
    """The same inference as a `ProximitySVI` that gives the same bits in every process."""
    if type(svi) is SVI:
        # Without a constraint it takes the same steps, and knows in addition to leave out those that are not finite.
        svi = ProximitySVI(svi.model, svi.guide, svi.optim, svi.loss, (), **svi.static_kwargs)
    if not isinstance(svi, ProximitySVI):
        raise TypeError(f"`svi` must be a ProximitySVI or NumPyro's SVI, got {type(svi).__name__}; make one of it.")
    loss = svi.loss.elbo if isinstance(svi.loss, ScheduledELBO) else svi.loss
    if type(loss) is not Trace_ELBO or not loss.sum_sites:
        return svi
    ordered = copy.copy(loss)
    ordered.__class__ = OrderedTraceELBO
    if isinstance(svi.loss, ScheduledELBO):
        tempered = copy.copy(svi.loss)
        tempered.elbo = ordered
        ordered = tempered
    svi = copy.copy(svi)
    svi.loss = ordered
    return svi


def _mean(losses: np.ndarray) -> float:
    finite = losses[np.isfinite(losses)]
    return float(finite.mean(dtype=np.float64)) if finite.size else float("nan")
