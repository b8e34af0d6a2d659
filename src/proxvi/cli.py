"""The command line: `proxvi reproduce figure-1`. Needs the extra `cli`."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union

__all__ = ["main"]


def _figure_1(
    folder: Path = Path("results/figure-1"),
    *,
    data_sets: int = 10,
    starts: int = 100,
    steps: int = 10_000,
    seed: int = 0,
) -> None:
    """The Bernoulli factor model from a ring of starts, by VI, coordinate ascent, annealing and PVI.

    Writes the figure, a table of all methods and a result file for each; what is in the folder already is not run
    again. About 5 minutes on two cores.

    Args:
        folder: where they go.
        data_sets: how many data sets of 100 points.
        starts: how many starts on the ring, for each data set.
        steps: of the optimiser.
        seed: of the data sets.
    """
    from proxvi.experiments import figure_1

    print(figure_1.reproduce(folder, data_sets=data_sets, starts=starts, steps=steps, seed=seed, command=_command()))


def _figure_1_settings(folder: Path = Path("results/figure-1-settings"), *, scale: float = 1.0) -> None:
    """How figure 1 depends on the decay of the magnitude, the learning rate and the number of steps.

    Args:
        folder: where the plot, the table and the result files go.
        scale: of all numbers of steps.
    """
    from proxvi.experiments import figure_1

    print(figure_1.reproduce_settings(folder, scale=scale, command=_command()))


EXPERIMENTS: dict[str, Callable[..., None]] = {"figure-1": _figure_1, "figure-1-settings": _figure_1_settings}


def _command() -> str:
    return shlex.join(["proxvi", *sys.argv[1:]])


def main() -> None:
    """Entry point of the command `proxvi`."""
    try:
        import tyro
    except ImportError as error:
        raise SystemExit("the command line needs tyro: pip install 'proxvi[cli,plot]'") from error
    # One device a core, over which `multistart` spreads its starts; before JAX looks.
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(len(os.sched_getaffinity(0))))
    named = (Annotated[Any, tyro.conf.subcommand(name, constructor=f)] for name, f in EXPERIMENTS.items())
    choices = Union[tuple(named)]  # noqa: UP007, they are known only now

    def reproduce(experiment: choices) -> None:  # pyright: ignore[reportInvalidTypeForm]
        """Make a figure or table of the paper again."""

    tyro.extras.subcommand_cli_from_dict(
        {"reproduce": reproduce},
        prog="proxvi",
        description="Proximity variational inference: the experiments of the paper.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
