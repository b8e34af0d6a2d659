"""The options of `fit` refuse bad values by name."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import proxvi


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: proxvi.Checkpointing("f", every=-1.0),
            ValueError,
            "`every` must be a number of seconds of at least 0",
        ),
        (lambda: proxvi.Checkpointing("f", every=math.nan), ValueError, "`every` must be .* got nan"),
        (lambda: proxvi.Checkpointing("f", keep=0), ValueError, "`keep` must be an integer of at least 1, got 0"),
        (lambda: proxvi.Checkpointing("f", configuration={"a": {1}}), TypeError, "`configuration` must be JSON, got"),
        (lambda: proxvi.Reporting(every=0), ValueError, "`every` must be an integer of at least 1, got 0; 1 reports"),
        (lambda: proxvi.Validation(np.ones(3), patience=0), ValueError, "`patience` must be an integer of at least 1"),
        (lambda: proxvi.Validation(patience=2), TypeError, "`data` must be the arguments of the model, .* got nothing"),
        (lambda: proxvi.Validation((1, 2)), TypeError, "`data` must be .* got a tuple of 2; write `Validation"),
    ],
)
def test_bad_values_are_refused_by_name(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_options_cannot_be_changed(tmp_path: Path) -> None:
    for options in (proxvi.Checkpointing(tmp_path), proxvi.Reporting(), proxvi.Validation(np.ones(3))):
        with pytest.raises(AttributeError):
            options.every = 5  # pyright: ignore[reportAttributeAccessIssue]
    assert proxvi.Checkpointing(tmp_path, every=math.inf).every == math.inf  # saves at the end only
