"""The command line: `proxvi reproduce figure-1`. Needs the extra `cli`."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Union

__all__ = ["main"]


def main() -> None:
    """Entry point of the command `proxvi`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that workers are told, too
    try:
        import tyro
    except ImportError as error:
        raise SystemExit("the command line needs tyro: pip install 'proxvi[cli]'") from error
    import jax

    from proxvi.experiments.results import cores

    # One device a core, over which `multistart` spreads its work; before any array.
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", cores())
    from proxvi.experiments import autoencoders, belief_networks, figure_1, logistic

    experiments = {
        "figure-1": figure_1.reproduce,
        "figure-1-settings": figure_1.reproduce_settings,
        "table-1": belief_networks.reproduce_table_1,
        "table-2": belief_networks.reproduce_table_2,
        "table-3": autoencoders.reproduce_table_3,
        "logistic-regression": logistic.reproduce,
    }
    named = (Annotated[Any, tyro.conf.subcommand(name, constructor=f)] for name, f in experiments.items())
    choices = Union[tuple(named)]  # noqa: UP007, they are known only now

    def reproduce(experiment: choices) -> str:  # pyright: ignore[reportInvalidTypeForm]
        """Make a figure or table of the paper again."""
        return experiment

    def results(folder: Path = Path("results")) -> str:
        """Tables beside the paper's, and plots, of the result files that there are.

        Args:
            folder: where the commands of `reproduce` put them.
        """
        reports = {
            "table-1": belief_networks.report,
            "table-2": belief_networks.report,
            "table-3": autoencoders.report,
        }
        return "\n\n".join(f"{name}: {report(folder / name)}" for name, report in reports.items())

    answer = tyro.extras.subcommand_cli_from_dict(
        {"reproduce": reproduce, "results": results},
        prog="proxvi",
        description="Proximity variational inference: the experiments of the paper.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    try:
        print(answer, flush=True)
    except BrokenPipeError:  # the reader has seen enough, as in `proxvi results | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
