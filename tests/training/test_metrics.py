"""The metrics log."""

import json
from pathlib import Path

import optax
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import proxvi

from . import faults
from .common import KEY, ROWS

# Many runs here are too short to let go of the constraint.
pytestmark = pytest.mark.filterwarnings("ignore:the constraint on:UserWarning")


@pytest.mark.slow
def test_metrics_of_several_constraints_are_lists_and_two_checkpoints_are_kept(tmp_path: Path) -> None:
    constraints = [
        proxvi.Proximity(proxvi.entropy, magnitude=optax.exponential_decay(1.0, 100, 1e-10)),
        proxvi.Proximity(proxvi.mean_variance, magnitude=0.0),
    ]
    svi = proxvi.ProximitySVI(faults.model, AutoNormal(faults.model), optax.adam(0.01), Trace_ELBO(), constraints)
    file = tmp_path / "metrics.jsonl"
    proxvi.fit(
        svi,
        KEY,
        100,
        ROWS,
        batch_size=100,
        checkpointing=proxvi.Checkpointing(tmp_path / "checkpoints", every=0.0, keep=2),
        reporting=proxvi.Reporting(every=20, metrics_file=file),
        validation=proxvi.Validation(ROWS),
    )
    lines = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    shares = [line["share"] for line in lines if "share" in line]
    assert len(shares) == 5
    assert shares[0][0] > 0.01
    assert all(off is None for _, off in shares)  # NaN is no JSON
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit())
    assert len(kept) == 2
    assert kept[-1] == 100
