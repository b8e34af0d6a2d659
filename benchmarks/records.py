"""Records of benchmarks: the rows of a table, with the command, the versions and the hardware, as JSON.

`compare.py` compares two of them.
"""

import argparse
import json
import math
import os
import platform
import shlex
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np

__all__ = ["Row", "add_json_option", "provenance", "write_record"]

PACKAGES = ("proxvi", "jax", "jaxlib", "numpyro", "optax", "numpy")


@dataclass(frozen=True)
class Row:
    """What was measured of one variant.

    Args:
        name: of the variant.
        ratio: to the first variant; the median, if it was measured several times.
        low: the ratio's 10% quantile.
        high: its 90% quantile.
        seconds: the median time, of a step unless `seconds_of` says otherwise.
        seconds_of: what takes this time.
        flop_ratio: the ratio of the FLOPs that XLA counts.
    """

    name: str
    ratio: float
    low: float | None = None
    high: float | None = None
    seconds: float | None = None
    seconds_of: str = "a step"
    flop_ratio: float | None = None

    @classmethod
    def of_ratios(
        cls,
        name: str,
        ratios: np.ndarray,
        *,
        seconds: float,
        seconds_of: str = "a step",
        flop_ratio: float | None = None,
    ) -> Self:
        """The row of a variant that was timed several times."""
        low, high = (float(quantile) for quantile in np.quantile(ratios, [0.1, 0.9]))
        return cls(name, float(np.median(ratios)), low, high, float(seconds), seconds_of, flop_ratio)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option `--json`."""
    parser.add_argument("--json", type=_file, metavar="PATH", help="write the rows here, too, as JSON")


def write_record(path: Path | None, rows: list[Row]) -> None:
    """Write the rows with all that is needed to measure them again; nothing if `path` is None."""
    if path is None:
        return
    record = {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        **provenance(),
        "rows": [{name: _finite(value) for name, value in asdict(row).items()} for row in rows],
    }
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def provenance() -> dict[str, dict[str, Any]]:
    """The versions and the hardware with which something was measured."""
    import jax  # late, because a benchmark sets flags for it first

    return {
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "hardware": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "devices": [device.device_kind for device in jax.devices()],
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        },
    }


def _file(text: str) -> Path:
    """A path that can be written to: better to know before a long benchmark than after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file in a folder that exists")
    return path


def _finite(value: str | float | None) -> str | float | None:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    for line in information.read_text().splitlines() if information.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
