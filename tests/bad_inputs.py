"""A hundred bad inputs, each of which must be refused by an error that names the argument.

    python tests/bad_inputs.py

This is a script and no test module: the tests check annotations at run time, which users do not.
"""

import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi

KEY = jax.random.key(0)
ROWS = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
NUMBERS = [0, -1, 2.5, "3", True, math.nan, [1]]  # none is a number of steps, rows, starts, …
# Without their types, which would not let a bad value pass.
checkpointing: Any = proxvi.Checkpointing
reporting: Any = proxvi.Reporting
validation: Any = proxvi.Validation
EXPECTED = (ValueError, TypeError, OSError)


def model(x: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(jnp.zeros(3), 10.0).to_event(1))
    with numpyro.plate("data", 20, subsample_size=x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def by_row(x: Any) -> None:
    with numpyro.plate("data", len(x)):
        z: Any = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(z[:, None], 1.0).to_event(1), obs=x)


def guide_by_row(x: Any) -> None:
    slope: Any = numpyro.param("slope", 0.3)
    with numpyro.plate("data", len(x)):
        numpyro.sample("z", dist.Normal(slope * x.sum(1), 0.5))


def svi() -> SVI:
    return SVI(model, AutoNormal(model), optax.adam(0.05), Trace_ELBO())


def fit(inference: Any = None, key: Any = KEY, num_steps: Any = 3, *data: Any, **options: Any) -> Any:
    return proxvi.fit(inference or svi(), key, num_steps, *(data or (ROWS,)), **options)


def luck(inference: Any = None, key: Any = KEY, num_steps: Any = 3, *data: Any, **options: Any) -> Any:
    options = {"starts": 2, "progress_bar": False, **options}
    return proxvi.luck(inference or svi(), key, num_steps, *(data or (ROWS,)), **options)


def race(inference: Any = None, key: Any = KEY, num_steps: Any = 200, *data: Any, **options: Any) -> Any:
    options = {"starts": 4, "progress_bar": False, **options}
    return proxvi.race(inference or svi(), key, num_steps, *(data or (ROWS,)), **options)


def speed_limit(**options: Any) -> Any:
    return proxvi.speed_limit(lambda params: params, range=1.0, **options)


def evaluate(**options: Any) -> Any:
    arguments = {"key": KEY, "model": by_row, "guide": guide_by_row, "params": {"slope": 0.3}, "data": ROWS}
    return proxvi.evaluate(**{**arguments, "num_samples": 10, **options})


def cases(folder: Path) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """The argument, a description, and the call."""
    notes = folder / "notes.json"
    notes.write_text('{"a": 1}\n')

    def each(values: Any, argument: str, call: Callable[..., Any], name: str = "", **more: Any) -> Any:
        for value in values:
            yield (
                argument,
                f"{call.__name__}({name or argument}={value!r})",
                (lambda value=value: call(**{name or argument: value}, **more)),
            )

    for call in (fit, luck, race):
        yield from each(NUMBERS, "num_steps", call)
        yield from each([0, -1, 2.5, "3", True, 21], "batch_size", call)
        yield "svi" if call is not luck else "inference", f"{call.__name__}: no SVI", lambda call=call: call(model)
        yield "key", f"{call.__name__}: no key", lambda call=call: call(key=7)
        yield "key", f"{call.__name__}: two keys", lambda call=call: call(key=jax.random.split(KEY))
        yield "data", f"{call.__name__}: a tuple", lambda call=call: call(None, KEY, 200, (ROWS, ROWS))
        yield "data", f"{call.__name__}: no rows", lambda call=call: call(None, KEY, 200, ROWS[:0])
        yield (
            "data",
            f"{call.__name__}: no rows, batches",
            lambda call=call: call(None, KEY, 200, ROWS[:0], batch_size=1),
        )
    yield from each([0.0, -1.0, math.nan, math.inf, "2"], "stop_within", fit)
    yield from each([0.0, -1.0, math.nan, "2"], "stop_within", luck)
    yield "data", "fit: an empty list", lambda: fit(None, KEY, 3, [])
    yield "data", "fit: a list of numbers", lambda: fit(None, KEY, 3, [1.0, 2.0])
    yield "data", "fit: a generator that ends", lambda: fit(None, KEY, 30, (ROWS for _ in range(3)))
    yield "data", "fit: batches of two shapes", lambda: fit(None, KEY, 30, [ROWS, ROWS[:5]])
    yield "batch_size", "fit: a stream and batch_size", lambda: fit(None, KEY, 3, [ROWS], batch_size=5)
    for value in (None, -1, "often", math.nan, True):
        yield "every", f"Checkpointing(every={value!r})", lambda value=value: checkpointing(folder, every=value)
    for value in (0, 1.5, None):
        yield "keep", f"Checkpointing(keep={value!r})", lambda value=value: checkpointing(folder, keep=value)
    for value in (None, 3, "s3://bucket/run", "gs://bucket/run"):
        yield "folder", f"Checkpointing({value!r})", lambda value=value: checkpointing(value)
    yield "configuration", "Checkpointing: a set", lambda: checkpointing(folder, configuration={"a": {1}})
    yield (
        "Checkpointing.folder",
        "fit: a file in place of the folder",
        lambda: fit(checkpointing=checkpointing(notes)),
    )
    for value in (0, 1.5, "100", None):
        yield "every", f"Reporting(every={value!r})", lambda value=value: reporting(every=value)
    yield "callback", "Reporting: no function", lambda: reporting(callback=3)
    yield "measure", "Reporting: no function", lambda: reporting(measure="elbo")
    for value in (3, ["a"]):
        yield "metrics_file", f"Reporting({value!r})", lambda value=value: reporting(metrics_file=value)
    for path in (notes, Path("/dev/null"), folder):
        yield (
            "metrics_file",
            f"fit: {path.name}",
            lambda path=path: fit(reporting=reporting(metrics_file=path)),
        )
    for value in (0, 1.5, "2"):
        yield (
            "patience",
            f"Validation(patience={value!r})",
            (lambda value=value: validation(ROWS, patience=value)),
        )
    yield "data", "Validation: nothing", lambda: validation()
    yield from each([1, 0, -3, 2.5, "8"], "starts", luck)
    yield from each([0.0, -1.0, math.nan, "2"], "tolerance", luck)
    yield from each([0, 1.5, None], "particles", luck)
    yield from each([0, 2.5, 4], "average_last", luck)
    yield from each([1, 3, 0, 2.5, "8"], "starts", race)
    yield from each([(), ("fast",), ("plain", "plain")], "methods", race)
    yield from each([0, 1.5], "particles", race)
    yield "num_steps", "race: fewer steps than it needs", lambda: race(num_steps=5)
    yield (
        "accept_changes",
        "race: accept_changes",
        lambda: race(checkpointing=checkpointing(folder / "race", accept_changes=True)),
    )
    yield from each([None, -1, math.nan, "all"], "over", speed_limit)
    yield from each([1, 0, 2.5, None, "10"], "num_samples", evaluate)
    yield from each([0, 1.5, "all"], "chunk", evaluate)
    yield "params", "evaluate: a parameter is missing", lambda: evaluate(params={})
    yield "data", "evaluate: a scalar", lambda: evaluate(data=np.float32(1.0))
    yield "data", "evaluate: two lengths", lambda: evaluate(data=(ROWS, ROWS[:3]))


def outcome(argument: str, call: Callable[[], Any]) -> str | None:
    """What is wrong with the answer; None if nothing is."""
    try:
        call()
    except EXPECTED as error:
        message = str(error)
        if not re.search(rf"`(\w+\.)?{re.escape(argument)}(\.\w+)?`", message):
            return f"does not name `{argument}`: {type(error).__name__}: {message[:200]}"
        return None
    except BaseException as error:
        return f"raw: {type(error).__name__}: {str(error)[:200]}"
    return "was accepted"


def main() -> int:
    numpyro.enable_validation(False)
    with tempfile.TemporaryDirectory() as folder:
        found = [(name, outcome(argument, call)) for argument, name, call in cases(Path(folder))]
    for name, wrong in found:
        if wrong is not None:
            print(f"{name}: {wrong}")
    wrong = sum(wrong is not None for _, wrong in found)
    print(f"{len(found)} bad inputs, {len(found) - wrong} refused by an error that names the argument")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
