"""The command line: `proxvi reproduce figure-1`, `proxvi results`.

JAX and the experiments are imported only for the command that needs them, so that `--help` answers at once.
"""

import argparse
import difflib
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["EXPERIMENTS", "main"]


class Experiment(NamedTuple):
    """Where the parts of an experiment are, in a module of `proxvi_paper.experiments`.

    Attributes:
        module: its name.
        summary: what it makes, for the help.
        grid_name: of a dataclass of its options, whose `trials` are to be run.
        report_name: of the function that makes the table and the plots of the result files in a folder.
    """

    module: str
    summary: str
    grid_name: str = "Grid"
    report_name: str = "report"

    @property
    def grid(self) -> Any:
        """The dataclass of its options."""
        return getattr(self._imported, self.grid_name)

    @property
    def report(self) -> Callable[[Path], str]:
        """Makes the table and the plots, and returns the table."""
        return getattr(self._imported, self.report_name)

    @property
    def _imported(self) -> Any:
        return importlib.import_module(f"proxvi_paper.experiments.{self.module}")


EXPERIMENTS = {
    "figure-1": Experiment("figure_1", "the factor model from a ring of starts"),
    "figure-1-settings": Experiment("figure_1", "the same with other settings", "SettingsGrid", "report_settings"),
    "table-1": Experiment("belief_networks", "belief networks of one layer on MNIST", "OneLayer"),
    "table-2": Experiment("belief_networks", "belief networks of three layers on MNIST", "ThreeLayers"),
    "table-3": Experiment("autoencoders", "variational autoencoders on MNIST"),
    "logistic-regression": Experiment("logistic", "logistic regression from many starts"),
}
AGAIN = (
    "A trial that has a result file is not run again, and one that was interrupted resumes from its checkpoint. The "
    "table and the plots are of all result files in the folder."
)


def main() -> None:
    """Entry point of the command `proxvi`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that workers are stopped, too
    command, rest = _parse(sys.argv[1:])
    try:
        answer = _results(rest) if command == "results" else _reproduce(command, rest)
    except KeyboardInterrupt:
        kept = "" if command == "results" else " What was finished is kept; the same command goes on from there."
        print(f"\nInterrupted.{kept}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    try:
        print(answer, flush=True)
    except BrokenPipeError:  # the reader has closed the pipe, as in `proxvi results | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def _parse(words: Sequence[str]) -> tuple[str, list[str]]:
    """The experiment or "results", and the words that are left."""
    parser = argparse.ArgumentParser(
        prog="proxvi",
        description="Proximity variational inference: the experiments of the paper.",
        epilog="`proxvi reproduce --help` lists the experiments, `proxvi reproduce table-1 --help` the options of one.",
    )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("proxvi-paper", "proxvi"))
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{reproduce,results}")
    reproduce = commands.add_parser(
        "reproduce",
        help="make a figure or table of the paper again",
        description="Make a figure or table of the paper again.",
        epilog="experiments:\n" + "\n".join(f"  {name:20} {known.summary}" for name, known in EXPERIMENTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    reproduce.add_argument("experiment", nargs="?", help="one of those below; its --help lists its options")
    commands.add_parser("results", help="print all tables from the result files, and make the plots", add_help=False)
    known, rest = parser.parse_known_args(words)
    if known.command == "results":
        return known.command, rest
    if known.experiment is None and {"-h", "--help"} & set(rest):
        reproduce.print_help()
        sys.exit(0)
    if known.experiment is None:
        reproduce.error(f"`experiment` is missing; it comes first, and is one of {', '.join(EXPERIMENTS)}.")
    if known.experiment not in EXPERIMENTS:
        near = difflib.get_close_matches(known.experiment, EXPERIMENTS, n=1)
        guess = f" Did you mean {near[0]}?" if near else ""
        choices = ", ".join(EXPERIMENTS)
        reproduce.error(f"`experiment` comes first and must be one of {choices}, got {known.experiment}.{guess}")
    return known.experiment, rest


def _reproduce(name: str, words: Sequence[str]) -> str:
    import jax
    import tyro

    from proxvi_paper.experiments.results import cores
    from proxvi_paper.experiments.sweeps import Options

    # A device for each core, over which `luck` spreads its work. This must come before the first array.
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", cores())
    experiment = EXPERIMENTS[name]
    grid_type = experiment.grid

    def options(grid: grid_type = grid_type(), execution: Options = Options()) -> tuple[Any, Options]:  # noqa: B008 # pyright: ignore
        return grid, execution

    description = (inspect.getdoc(grid_type) or "").partition("\n\nArgs:")[0]
    grid, execution = tyro.cli(
        options,
        prog=f"proxvi reproduce {name}",
        description=f"{description}\n\n{AGAIN}",
        args=words,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    execution.run(name, grid.trials())
    return experiment.report(execution.results / name)


def _results(words: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(
        prog="proxvi results",
        description="Print all tables, the paper's figures beside ours, and make the plots, from the result files.",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="their folder, as for `reproduce`")
    folder = parser.parse_args(words).results
    return "\n\n".join(f"{name}: {known.report(folder / name)}" for name, known in EXPERIMENTS.items())


if __name__ == "__main__":
    main()
