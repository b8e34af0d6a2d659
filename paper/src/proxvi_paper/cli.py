"""The command line: `proxvi reproduce figure-1`, `proxvi results`."""

import inspect
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union

import jax
import tyro

from proxvi_paper.experiments.results import cores
from proxvi_paper.experiments.sweeps import Options

__all__ = ["main"]


class Experiment(NamedTuple):
    """What makes a figure or table.

    Attributes:
        grid: a dataclass of its options, whose `trials` are to be run.
        report: makes the table and the plots of the result files in a folder, and returns the table.
    """

    grid: Any
    report: Callable[[Path], str]


def experiments() -> dict[str, Experiment]:
    """All experiments, by name. Imported here because some make arrays at import, which start JAX's backend."""
    from proxvi_paper.experiments import autoencoders, belief_networks, figure_1, logistic

    return {
        "figure-1": Experiment(figure_1.Grid, figure_1.report),
        "figure-1-settings": Experiment(figure_1.SettingsGrid, figure_1.report_settings),
        "table-1": Experiment(belief_networks.OneLayer, belief_networks.report),
        "table-2": Experiment(belief_networks.ThreeLayers, belief_networks.report),
        "table-3": Experiment(autoencoders.Grid, autoencoders.report),
        "logistic-regression": Experiment(logistic.Grid, logistic.report),
    }


def _subcommand(name: str, experiment: Experiment) -> Any:
    def reproduce(grid: experiment.grid = experiment.grid(), execution: Options = Options()) -> str:  # noqa: B008 # pyright: ignore
        execution.run(name, grid.trials())
        return experiment.report(execution.results / name)

    description = (inspect.getdoc(experiment.grid) or "").partition("\n\nArgs:")[0]
    more = (
        "A trial that has a result file is not run again, and one that was interrupted resumes from its checkpoint. "
        "The table and the plots are of all result files in the folder."
    )
    return Annotated[Any, tyro.conf.subcommand(name, constructor=reproduce, description=f"{description}\n\n{more}")]


def main() -> None:
    """Entry point of the command `proxvi`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that workers are stopped, too
    # A device for each core, over which `luck` spreads its work. This must come before the first array.
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", cores())
    known = experiments()
    choices = Union[tuple(_subcommand(*item) for item in known.items())]  # noqa: UP007, only now they are known

    def reproduce(experiment: choices) -> str:  # pyright: ignore[reportInvalidTypeForm]
        """Make a figure or table of the paper again."""
        return experiment

    def results(results: Path = Path("results")) -> str:
        """Print all tables, the paper's figures beside ours, and make the plots, from the result files.

        Args:
            results: folder of the result files, as for `reproduce`.
        """
        return "\n\n".join(f"{name}: {report(results / name)}" for name, (_, report) in known.items())

    answer = tyro.extras.subcommand_cli_from_dict(
        {"reproduce": reproduce, "results": results},
        prog="proxvi",
        description="Proximity variational inference: the experiments of the paper.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    try:
        print(answer, flush=True)
    except BrokenPipeError:  # the reader has closed the pipe, as in `proxvi results | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


if __name__ == "__main__":
    main()
