"""Ratios of times that mean something on a shared machine: the variants take turns, and the median counts.

Two compiled copies of one program differ by a few percent, by where their buffers happen to lie. So every variant is
built several times over, the first of them once more as a control, and the control's ratio tells how far to trust the
others.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from records import Row, add_json_option, write_record


def flops(function: Callable[..., Any], *args: Any) -> float:
    """What XLA counts for one call; both branches of a conditional are in it."""
    return (jax.jit(function).lower(*args).compile().cost_analysis() or {})["flops"]


def compare(
    variants: dict[str, Callable[[], Callable[[], Any]]], *, rounds: int, steps: int, copies: int = 3
) -> dict[str, tuple[float, np.ndarray]]:
    """Time each variant against the first.

    Args:
        variants: builders by name; each builds a function that runs `steps` steps, anew at every call.
        rounds: how often all take their turn.
        steps: to divide the time by.
        copies: how often each is built.

    Returns:
        For each name the median seconds of a step, and the ratios to the first variant, of all rounds and copies.
    """
    first = next(iter(variants))
    builders = {**variants, f"{first}, again": variants[first]}
    runs = [(name, build()) for _ in range(copies) for name, build in builders.items()]
    for _, run in runs:
        jax.block_until_ready(run())  # compiles
    seconds = {name: [] for name in builders}
    for _ in range(rounds):
        for name, run in runs:
            started = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append((time.perf_counter() - started) / steps)
    by_round = {name: np.array(times).reshape(rounds, copies) for name, times in seconds.items()}
    base = np.median(by_round[first], axis=1, keepdims=True)
    return {name: (float(np.median(times)), (times / base).ravel()) for name, times in by_round.items()}


def line(row: Row) -> str:
    """One line of a table under `HEADER`."""
    milliseconds = 1e3 * (row.seconds or 0.0)
    more = "" if row.flop_ratio is None else f"{row.flop_ratio:.3f}"
    return f"{row.name:34} {milliseconds:9.2f} {row.ratio:7.3f} {f'{row.low:.2f} to {row.high:.2f}':>14} {more:>7}"


HEADER = f"{'':34} {'ms a step':>9} {'ratio':>7} {'10% to 90%':>14} {'FLOPs':>7}"


def scan(step: Callable[..., Any], start: Any, steps: int, batch: Any) -> tuple[Callable[[], Any], float]:
    """A run of `steps` steps, compiled here, so that what is patched meanwhile is in it; and the FLOPs of one."""
    run = jax.jit(lambda start, batch: jax.lax.scan(lambda s, _: step(s, batch), start, length=steps))
    compiled = run.lower(start, batch).compile()
    return lambda: compiled(start, batch), flops(step, start, batch)


def training_speeds(title: str, makers: dict[str, Callable[..., Any]], batch: Any, iterations: int) -> None:
    """Print a table of training steps over the first of them, with the hours that `iterations` take.

    Args:
        title: for `--help`.
        makers: functions of the number of steps and the batch that return what `scan` does.
        batch: of data.
        iterations: of a whole run.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40, help="steps of each variant in a round")
    parser.add_argument("--copies", type=int, default=3, help="how often each variant is compiled")
    add_json_option(parser)
    arguments = parser.parse_args()
    work = {}

    def builder(name, make):
        def build():
            run, work[name] = make(arguments.steps, batch)
            return run

        return build

    variants = {name: builder(name, make) for name, make in makers.items()}
    results = compare(variants, rounds=arguments.rounds, steps=arguments.steps, copies=arguments.copies)
    first = next(iter(makers))
    work[f"{first}, again"] = work[first]
    print(HEADER, f"{'MFLOP':>7} {'hours':>6}")
    rows = []
    for name, (seconds, ratios) in results.items():
        rows.append(Row.of_ratios(name, ratios, seconds=seconds, flop_ratio=work[name] / work[first]))
        print(line(rows[-1]), f"{work[name] / 1e6:7.1f} {seconds * iterations / 3600:6.2f}")
    print(f"hours: for the paper's {iterations:,} iterations on this core")
    write_record(arguments.json, rows)
