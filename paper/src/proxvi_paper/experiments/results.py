"""Result files: the settings of a trial, its figures, and all that is needed to run it again."""

import hashlib
import json
import os
import platform
import re
import shlex
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

__all__ = ["command", "cores", "is_current", "load", "name", "read", "save"]

PROTOCOL = 1  # raise it when a change of the code changes figures: result files of another protocol are ignored
VERSIONS = ("proxvi", "jax", "numpyro", "optax", "numpy", "scipy", "flax", "arviz-stats", "scikit-learn")


def name(title: str, settings: dict[str, Any]) -> str:
    """A file name for these settings: the title, and a hash of the settings in their order."""
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^a-z0-9]+', '-', title.lower())}-{digest}"


def command() -> str:
    """The command line of this process."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def save(
    path: Path, settings: dict[str, Any], figures: dict[str, Any], *, seconds: float, command: str
) -> dict[str, Any]:
    """Write a result file, whole or not at all.

    Args:
        path: of the file.
        settings: of the trial.
        figures: what it measured.
        seconds: how long that took.
        command: that ran it.

    Returns:
        The figures as they are in the file, so that the first report equals later ones.
    """
    devices = f"{cores()} cores, {jax.device_count()} {jax.default_backend()} devices"
    record = {
        "protocol": PROTOCOL,
        "settings": settings,
        "figures": figures,
        "command": command,
        "seconds": round(seconds, 1),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in VERSIONS},
        "hardware": f"{_processor()}, {devices}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")  # another process may save the same
    text = json.dumps(record, default=_plain)
    new.write_text(text + "\n")
    new.replace(path)
    return json.loads(text)["figures"]


def read(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of a result file; None if there is no file of the same settings and protocol."""
    record = load(path) if path.exists() else None
    if record is None:
        return None
    same = record["settings"] == json.loads(json.dumps(settings, default=_plain))
    return record["figures"] if same and is_current(record) else None


def load(path: Path) -> dict[str, Any] | None:
    """A result file; None with a warning, if it is something else, such as a file that a full disk cut off."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        record = None
    if isinstance(record, dict) and {"settings", "figures"} <= record.keys():
        return record
    warnings.warn(f"{path} is no result file and is ignored; remove it, or run its trial again.", stacklevel=2)
    return None


def is_current(record: dict[str, Any]) -> bool:
    """Whether this code would make the same figures again."""
    return record.get("protocol", 1) == PROTOCOL


def _plain(x: Any) -> Any:
    """Arrays as lists of numbers with 6 digits, which is more than any figure here is accurate to."""
    x = np.asarray(x)
    if x.ndim:
        return [_plain(row) for row in x]
    return float(f"{x:.6g}") if x.dtype.kind == "f" else x.item()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
