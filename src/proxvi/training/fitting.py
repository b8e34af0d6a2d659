"""`fit`: the loop of a long run."""

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult

from proxvi._typing import Metrics, Tree
from proxvi._validation import check_inference, check_integer, check_key, check_number
from proxvi.svi import steers, warn_after_run, with_limits_of
from proxvi.training._chunks import ChunkPacer, ChunkRunner
from proxvi.training._devices import agree, gather, local
from proxvi.training._progress import LINE, MetricsLog, Progress, postfix, progress_bar
from proxvi.training._run_fingerprint import digest
from proxvi.training.checkpoints import STOPPING, Checkpoints
from proxvi.training.options import Checkpointing, Reporting, Validation

__all__ = ["fit"]

LOG = logging.getLogger("proxvi")


def fit(
    svi: SVI,
    key: Array,
    num_steps: int,
    *data: Tree,
    batch_size: int | None = None,
    checkpointing: Checkpointing | None = None,
    reporting: Reporting = Reporting(),
    validation: Validation | None = None,
    stop_within: float | None = None,
    mesh: Mesh | None = None,
) -> SVIRunResult:
    """Train for `num_steps` steps. Call it again with the same arguments after a crash, and it resumes.

        state_{t+1} = svi.update(state_t, batch_t),   batch_t a function of the key and of t alone

    The same key gives the same bits on the same JAX version, CPU type and number of devices, even if the run was
    interrupted. Steps that are not finite are skipped and counted. After `svi.max_skipped_in_a_row` of them the run
    stops, and the error names the step and the parameter. With `checkpointing`, it saves before it exits because of
    SIGTERM, SIGHUP, Ctrl-C or an exception, such as one of a callback.

    Args:
        svi: a `ProximitySVI`, or NumPyro's `SVI`.
        key: for the initial parameters, the samples and the order of the data.
        num_steps: in all, including those before a restart. A run may be made longer; a `SpeedLimit` without an `over`
            keeps the one of the first length, and ends after two thirds of that.
        data: the arguments of the model: arrays, or, if they do not fit into memory, one iterable of batches (a Grain
            loader, for example). With several processes, the iterable of each yields its own part of the batch.
            Settings of the model that are not data go into `ProximitySVI(..., name=value)`, as in NumPyro's `SVI`.
        batch_size: rows of the arrays in a batch, shuffled without replacement in each epoch; None for all of them.
        checkpointing: where and how often to save; None saves nothing.
        reporting: what to report, how often, and where to.
        validation: held-out data, and when to stop early.
        stop_within: stop at a report if doubling the steps so far would probably gain less than this many nats, judged
            from the noisy losses. Not while a constraint, annealing or KL warm-up is active. None takes all steps.
        mesh: devices; each batch is sharded along its first axis. It may span processes (`jax.distributed`). None uses
            one device.

    Returns:
        NumPyro's `SVIRunResult`: parameters, state, and the loss of every step, including those before a restart.

    Raises:
        FloatingPointError: after too many steps in a row that were not finite.
        ConfigurationError: if the checkpoints in the folder belong to another run.
        OSError: if a checkpoint cannot be written; earlier ones are intact.

    Warns:
        UserWarning: for a constraint, as `ProximitySVI.run` does; if a checkpoint is damaged and an older one is
            loaded; if all rows share a latent variable, and the likelihood of a batch is not scaled to all rows.

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

        The same with a checkpoint every minute and a report every 100 steps::

            proxvi.fit(
                svi, jax.random.key(0), 2_000, x, batch_size=100,
                checkpointing=proxvi.Checkpointing("runs/mine", every=60.0),
                reporting=proxvi.Reporting(every=100, metrics_file="runs/mine.jsonl"),
            )
    """
    check_inference("svi", svi)
    check_key(key)
    check_integer("num_steps", num_steps)
    if stop_within is not None:
        check_number("stop_within", stop_within, above=0.0, remedy="2 nats are a good choice, and None takes all steps")
    patience = None if validation is None else validation.patience
    pacer = ChunkPacer(reporting.every, num_steps, adapts=checkpointing is not None or jax.process_count() == 1)
    runner = ChunkRunner(svi, key, data, batch_size, pacer, mesh)
    log = MetricsLog(reporting.metrics_file, reporting.callback)
    checkpoints, stop = None, False

    with ExitStack() as stack:
        if checkpointing is not None:
            checkpoints = stack.enter_context(closing(checkpointing.open(runner.describe())))
        progress = Progress(np.empty(num_steps, jnp.result_type(float)))
        if checkpoints is not None:
            if validation is not None:
                progress.held_out = gather(digest(jax.tree.map(local, validation.data)))
            _resume(checkpoints, runner, progress)
        log.start(progress.step)
        bar = stack.enter_context(progress_bar(reporting.progress, num_steps, progress.step))
        if checkpoints is not None and progress.step and jax.process_index() == 0:
            message = f"resumed at step {progress.step} of {num_steps} from {checkpoints.location}"
            LOG.info(message) if reporting.progress is False else bar.write(message, file=sys.stderr)
        received = stack.enter_context(_stop_signals(caught=checkpoints is not None))

        def converged() -> bool:  # a function of the progress alone: a run that has stopped stays so when called again
            step = progress.step
            if stop_within is None or not step or not pacer.reports_at(step):
                return False
            return progress.has_converged(pacer.report_before(step), stop_within)

        with _saved_if_interrupted(checkpoints, runner, progress, received):
            while progress.step < num_steps and not converged() and (patience is None or progress.waited < patience):
                losses = runner.run(progress.step, pacer)
                progress.add(losses)
                bar.update(len(losses))
                if pacer.reports_at(progress.step):
                    metrics = _measure(runner, progress, pacer, reporting, validation)
                    log.report(progress.step, metrics)
                    bar.set_postfix_str(postfix(metrics), refresh=False)
                if checkpoints is not None:
                    log.saved(checkpoints.saved())
                    stop, due, pacer.pace = agree(bool(received), checkpoints.is_due(), pacer.pace)
                    if stop or due:
                        _save(checkpoints, runner, progress, log)
                    if stop:
                        break

        if checkpoints is not None:
            _finish_saving(checkpoints, runner, progress, log)
            if stop or received:
                number = signal.Signals(received[0] if received else signal.SIGTERM)
                reason = f"received {number.name}" if received else "another process received a signal"
                LOG.warning("%s: saved step %d of %d to %s", reason, progress.step, num_steps, checkpoints.location)
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
    warn_after_run(
        runner.svi.constraints,
        runner.state.constraints,
        progress.losses_so_far,
        ended_itself=progress.step < num_steps,
    )
    return SVIRunResult(runner.svi.get_params(runner.state), runner.state, jnp.asarray(progress.losses_so_far))


def _measure(
    runner: ChunkRunner, progress: Progress, pacer: ChunkPacer, reporting: Reporting, validation: Validation | None
) -> Metrics:
    """The metrics of a report; a validation is counted for early stopping."""
    since = pacer.report_before(progress.step)
    metrics: Metrics = {
        "elbo": progress.mean_elbo(since),
        **runner.telemetry(),
        "steps_per_second": pacer.take_rate(),
        "seconds": progress.seconds,
    }
    active = steers(metrics) or runner.was_scheduled(progress.step - since)
    held = progress.hold(active, runner.limited_updates())
    if validation is not None:
        metrics["validation_elbo"] = elbo = runner.evaluate(validation.data)
        progress.validate(elbo, held=held)
    if reporting.measure is not None:
        own = reporting.measure(runner.svi.get_params(runner.state))
        if taken := sorted(own.keys() & {*metrics, *LINE}):
            raise ValueError(
                f"`measure` must name its figures by words that `fit` does not use, got {', '.join(map(repr, taken))}; "
                "choose another name."
            )
        metrics |= {name: float(value) for name, value in own.items()}
    return metrics


def _save(checkpoints: Checkpoints, runner: ChunkRunner, progress: Progress, log: MetricsLog) -> None:
    """Begin to save the run, once the save before it is complete."""
    log.saved(checkpoints.wait())
    tree = {"state": runner.state, "losses": progress.losses_so_far}
    checkpoints.save(progress.step, tree, {"fit": progress.notes(), "data": runner.source.state(progress.step)})


def _finish_saving(checkpoints: Checkpoints, runner: ChunkRunner, progress: Progress, log: MetricsLog) -> None:
    """Wait until the newest step is saved."""
    log.saved(checkpoints.wait())
    if checkpoints.latest() != progress.step:
        _save(checkpoints, runner, progress, log)
        log.saved(checkpoints.wait())


@contextmanager
def _saved_if_interrupted(
    checkpoints: Checkpoints | None, runner: ChunkRunner, progress: Progress, received: list[int]
) -> Iterator[None]:
    """Save before an exception ends the run, unless a second signal has raised it."""
    try:
        yield
    except BaseException as error:
        # Several processes save together, and the others do not know of this exception.
        of_signal = bool(received) and not isinstance(error, Exception)
        if checkpoints is not None and progress.step and jax.process_count() == 1 and not of_signal:
            with suppress(OSError):
                checkpoints.wait()  # an earlier one, which may have failed
            try:
                _finish_saving(checkpoints, runner, progress, MetricsLog(None))  # its disk may be the reason
            except Exception as failure:
                LOG.warning("%s ended the run, and step %d was not saved: %s", repr(error), progress.step, failure)
            else:
                LOG.warning("%s ended the run: saved step %d to %s", repr(error), progress.step, checkpoints.location)
        raise


def _resume(checkpoints: Checkpoints, runner: ChunkRunner, progress: Progress) -> None:
    """Resume from the newest checkpoint, if there is one."""
    restored = checkpoints.restore(
        lambda step: {"state": runner.state, "losses": np.empty(step, progress.losses.dtype)}, runner.part_of_state
    )
    if restored is None:
        return
    if restored.step > len(progress.losses):
        raise ValueError(
            f"`num_steps` must be at least {restored.step}, the step of the checkpoint in {checkpoints.location}, got "
            f"{len(progress.losses)}; use another folder to start again."
        )
    if restored.changed or restored.fresh:
        LOG.warning(
            "checkpoint %d in %s was made by a run with another %s. This run continues from it and %s",
            restored.step,
            checkpoints.location,
            ", ".join(f"`{name}`" for name in restored.changed) or "shape of its state",
            f"starts the {' and the '.join(restored.fresh)} afresh" if restored.fresh else "keeps all of its state",
        )
    state = restored.tree["state"]
    if "over" in restored.changed:
        state = with_limits_of(state, runner.state)
    runner.resume(restored.step, state, restored.notes["data"], accept_changes=checkpoints.accept_changes)
    progress.resume(restored.step, restored.tree["losses"], restored.notes["fit"])


@contextmanager
def _stop_signals(*, caught: bool) -> Iterator[list[int]]:
    """A list to which received signals are added; a second one of the same kind ends the run without another save.

    Python allows only the main thread to catch signals. In any other thread the list stays empty, and the log says so.

    Args:
        caught: whether to catch them at all.
    """
    received: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    if caught and not in_main:
        LOG.warning(
            "`fit` runs outside of the main thread, where a signal cannot make it save; to stop it, raise an exception "
            "in `Reporting.callback`: then it saves first"
        )
    if not caught or not in_main:
        yield received
        return
    numbers = [getattr(signal, name) for name in STOPPING if hasattr(signal, name)]
    # `nohup` has SIGHUP ignored, and a shell's `&` Ctrl-C; None is a handler that is not Python's.
    handlers = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}

    def exit_with(number: int, _: FrameType | None) -> None:  # and not at once: a save under way is completed
        sys.exit(128 + number)

    def on_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        handler = before[signal.Signals(number)]
        signal.signal(number, exit_with if handler is signal.SIG_DFL else handler)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
