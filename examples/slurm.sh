#!/usr/bin/env bash
#SBATCH --job-name=pretrain-gpt
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --signal=TERM@300
# Starts the job of four_times_eight_h100.sh under Slurm: srun starts a process for every GPU, which
# reads its rank from Slurm. Five minutes before the time is up the job saves and leaves.
#
#   sbatch examples/slurm.sh DATA          DATA: prefix of a .bin and .idx file of token ids
#
# You should see in slurm-JOB.out how the ranks lie in the machines, and the lines of the training.
set -euo pipefail
# Slurm runs a copy of this file; the job's folder is where sbatch was called.
root="${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"

exec srun --kill-on-bad-exit=1 --cpu-bind=none bash "$root/examples/four_times_eight_h100.sh" "$@"
