# What only one cluster needs. Copy it to slurm/site.sh, which git ignores, and keep what applies.
#
# Sourced twice: by you, in the shell that calls sbatch (source slurm/site.sh), and by
# slurm/train.sbatch on the first node. So it must do no harm when sourced twice.

# Read by sbatch, each as the option of the same name; the command line comes first.
# export SBATCH_ACCOUNT=my_project
# export SBATCH_PARTITION=gpu
# export SBATCH_QOS=normal
# export SBATCH_TIMELIMIT=24:00:00
# export SBATCH_GPUS_PER_NODE=8
# export SBATCH_EXCLUSIVE=1

# Software that is not simply there. PYTHON spares the search for an interpreter.
# if [[ -n ${SLURM_JOB_ID:-} ]]; then module load cuda; fi
# export PYTHON=/shared/venvs/shardloom/bin/python

# The network between nodes, when the default is the wrong one.
# export NCCL_SOCKET_IFNAME=ib0
# export GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5

# More for the srun of the training step, one option per word.
# SRUN_ARGS=(--mpi=none)

# A container, as pyxis takes it: all Python then runs inside, with the container's PyTorch.
# CONTAINER=(--container-image=/shared/images/torch.sqsh --container-mounts="$PWD:$PWD")
# PYTHON=python3
