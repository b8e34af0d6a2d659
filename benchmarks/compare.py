"""Compare two records of a benchmark; exit with 1 if it became slower.

    python benchmarks/cost.py --json before.json
    python benchmarks/cost.py --json after.json
    python benchmarks/compare.py before.json after.json --bound 1.05

A row fails if its ratio or its FLOP ratio grew by more than the bound, or if it is gone. New rows pass.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["main"]


class Ratios(NamedTuple):
    """What is compared of a row."""

    time: float
    flops: float | None


def read_rows(path: Path) -> dict[str, Ratios]:
    """The rows of a record by name; ValueError says what is wrong with the file."""
    try:
        rows = json.loads(path.read_text())["rows"]
        found = {row["name"]: Ratios(_number(row["ratio"]), _number_or_none(row.get("flop_ratio"))) for row in rows}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path} must be a record that a benchmark wrote by --json, got {reason}") from error
    if not rows or len(found) != len(rows):
        raise ValueError(f"{path} must have rows, each with a name of its own")
    return found


def verdict(before: Ratios, after: Ratios | None, bound: float) -> str:
    """What became of a row; empty if it passes."""
    if after is None:
        return "gone"
    if after.time > bound * before.time:
        return "slower"
    if before.flops is not None and after.flops is None:
        return "FLOPs gone"
    if before.flops is not None and after.flops is not None and after.flops > bound * before.flops:
        return "more FLOPs"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns 1 if a row fails, 2 if a file cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--bound", type=_bound, default=1.05, help="how much a ratio may grow; 1.05 is by 5%%")
    given = parser.parse_args(arguments)
    try:
        before, after = read_rows(given.before), read_rows(given.after)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    failed = 0
    width = max(map(len, (*before, *after)))
    print(f"{'':{width}} {'before':>8} {'after':>8} {'growth':>8}")
    for name, old in before.items():
        new = after.get(name)
        numbers = f"{'':8} {'':8}" if new is None else f"{new.time:8.3f} {new.time / old.time:8.3f}"
        problem = verdict(old, new, given.bound)
        failed += bool(problem)
        print(f"{name:{width}} {old.time:8.3f} {numbers} {problem}".rstrip())
    for name in after.keys() - before.keys():
        print(f"{name:{width}} {'':8} {after[name].time:8.3f} {'':8} new")
    print(f"{failed} of {len(before)} rows failed; the bound is {given.bound}")
    return int(failed > 0)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"a ratio of {value!r}, which is no positive number")
    return float(value)


def _number_or_none(value: object) -> float | None:
    return None if value is None else _number(value)


def _bound(text: str) -> float:
    try:
        return _number(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
