"""Table 1 as SLURM jobs, one for each trial; start it again and it goes on with what is not finished.

    python examples/slurm_sweep.py --scale 0.25 --seeds 0 1 2 --partition cpu

The jobs must be able to import proxvi_paper and must see the folders. With `--cluster local` they are processes on this
machine.
"""

import argparse
from pathlib import Path

import submitit

from proxvi_paper.experiments.belief_networks import OneLayer, report
from proxvi_paper.experiments.sweeps import sweep


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=float, default=0.25, help="share of the paper's 4 million steps")
    parser.add_argument("--methods", nargs="+", default=list(OneLayer.methods))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--samples", type=int, default=5_000, help="of the guide, in the evaluation")
    parser.add_argument("--digits", type=int, default=10_000, help="in the evaluation")
    parser.add_argument("--minutes", type=int, default=240, help="after which a job is ended; start the sweep again")
    parser.add_argument("--cluster", help="local, for example; SLURM is found by itself")
    parser.add_argument("--partition", help="of SLURM")
    parser.add_argument("--folder", type=Path, default=Path(), help="for `results` and `runs`; all nodes must see it")
    arguments = parser.parse_args()

    results, runs = arguments.folder / "results" / "table-1", arguments.folder / "runs" / "table-1"
    grid = OneLayer(
        scale=arguments.scale,
        methods=tuple(arguments.methods),
        seeds=tuple(arguments.seeds),
        samples=arguments.samples,
        digits=arguments.digits,
    )
    executor = submitit.AutoExecutor(folder=runs / "jobs", cluster=arguments.cluster)
    executor.update_parameters(timeout_min=arguments.minutes, cpus_per_task=1, slurm_partition=arguments.partition)
    sweep(grid.trials(), results, runs, executor)
    print(report(results))


if __name__ == "__main__":
    main()
