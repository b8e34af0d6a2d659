"""A reader who follows one step should cross few boundaries between modules."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi

SOURCE = str(Path(proxvi.__file__).parent)


def model(x: jax.Array) -> None:
    numpyro.sample("x", dist.Normal(numpyro.sample("mean", dist.Normal(0.0, 10.0)), 1.0), obs=x)


def module_of(frame: FrameType | None) -> str | None:
    """The nearest of our modules up the stack."""
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
        frame = frame.f_back
    return None if frame is None else frame.f_code.co_filename.removeprefix(SOURCE)


@pytest.mark.parametrize("reference", [proxvi.parameter_average(), proxvi.statistic_average()], ids=["params", "f"])
def test_one_step_enters_few_modules_and_none_more_than_twice(reference: proxvi.Reference) -> None:
    magnitude = optax.exponential_decay(1.0, 100, 1e-10)
    constraint = proxvi.Proximity(proxvi.entropy, magnitude=magnitude, reference=reference)
    svi = proxvi.ProximitySVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO(), constraint)
    state = jax.eval_shape(svi.init, jax.random.key(0), x := jnp.array([3.0]))
    entered: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            module = module_of(frame)
            if module is not None and module != module_of(frame.f_back):
                entered.append(module)

    sys.setprofile(look)
    try:
        jax.make_jaxpr(svi.update)(state, x)
    finally:
        sys.setprofile(None)
    assert 5 <= len(entered) <= 10, " ".join(entered)
    assert max(Counter(entered).values()) <= 2, entered
