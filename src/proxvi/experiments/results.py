"""Result files: each holds what was asked, what came out, and all that is needed to make it again."""

import hashlib
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tqdm

__all__ = ["command", "cores", "current", "measured", "name", "read", "save", "say_what_is_known"]

PROTOCOL = 1  # raise it with a change of the code that changes figures: files of another are not taken for results
VERSIONS = ("proxvi", "jax", "numpyro", "optax", "numpy", "scipy", "flax", "arviz-stats", "scikit-learn")


def name(title: str, settings: dict[str, Any]) -> str:
    """What the files of these settings are called: what it is, in words, and a hash of all of it."""
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^a-z0-9]+', '-', title.lower())}-{digest}"


def command() -> str:
    """What this process was started by."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def save(
    path: Path, settings: dict[str, Any], figures: dict[str, Any], *, seconds: float, by: str | None = None
) -> dict[str, Any]:
    """Write a result file, with the command that it is made by (None for that of this process); whole or not at all.

    Returns the figures as they are in the file, so that a second look shows the same.
    """
    devices = f"{cores()} cores, {jax.device_count()} {jax.default_backend()} devices"
    record = {
        "protocol": PROTOCOL,
        "settings": settings,
        "figures": figures,
        "command": command() if by is None else by,
        "seconds": round(seconds, 1),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in VERSIONS},
        "hardware": f"{_processor()}, {devices}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")  # another process may be saving the same
    text = json.dumps(record, default=_plain)
    fresh.write_text(text + "\n")
    fresh.replace(path)
    return json.loads(text)["figures"]


def read(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of a result file, if it is there, of the same settings and protocol."""
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    same = record["settings"] == json.loads(json.dumps(settings, default=_plain))
    return record["figures"] if same and current(record) else None


def measured(folder: Path, trials: Iterable[Any], measure: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each trial, a dataclass with a `method`; those that have no result file yet are measured."""
    every = [(trial, asdict(trial), folder / f"{name(trial.method, asdict(trial))}.json") for trial in trials]
    found: dict[Path, Any] = {path: read(path, settings) for _, settings, path in every}
    say_what_is_known([figures is not None for figures in found.values()], folder)
    with tqdm.tqdm(every, unit="trial", disable=None) as bar:
        for trial, settings, path in bar:
            bar.set_postfix_str(trial.method)
            if found[path] is None:
                began = time.perf_counter()
                found[path] = save(path, settings, measure(trial), seconds=time.perf_counter() - began)
    return [found[path] for _, _, path in every]


def say_what_is_known(known: list[bool], folder: Path) -> None:
    """Say aloud that figures come from files, lest someone take them for a reproduction."""
    if any(known):
        print(
            f"{sum(known)} of {len(known)} results are in {folder} already and are not made again; name another folder "
            "to make them afresh.",
            file=sys.stderr,
        )


def current(record: dict[str, Any]) -> bool:
    """Whether this code would make the same figures again."""
    return record.get("protocol", 1) == PROTOCOL


def _plain(x: Any) -> Any:
    """Arrays as lists of numbers with 6 digits: more than any figure here is good for."""
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
