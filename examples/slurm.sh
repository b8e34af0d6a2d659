#!/usr/bin/env bash
# Two processes, on a node each, that train together, and go on from their checkpoint when the job is started again.
#   sbatch examples/slurm.sh runs/bars
#SBATCH --job-name=proxvi
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120 # two minutes before the time is up: `fit` saves and ends
set -euo pipefail
# If one process dies, the others wait for it in vain: end them all. The folder must be one that all nodes see.
srun --kill-on-bad-exit=1 python examples/long_run.py --folder "${1:?a folder for checkpoints and metrics}" "${@:2}"
