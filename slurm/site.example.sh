# Settings of one cluster. Copy this file to slurm/site.sh, which git ignores, and keep what applies.
#
# It is sourced twice: by you, in the shell that calls sbatch (source slurm/site.sh), and by
# slurm/train.sbatch on the first node. It must be safe to source it twice.

# Read by sbatch as defaults of the options of the same name; the command line overrides them.
# export SBATCH_ACCOUNT=my_project
# export SBATCH_PARTITION=gpu
# export SBATCH_QOS=normal
# export SBATCH_TIMELIMIT=24:00:00
# export SBATCH_GPUS_PER_NODE=8
# export SBATCH_EXCLUSIVE=exclusive

# Modules to load. If PYTHON is set, no interpreter is searched for.
# if [[ -n ${SLURM_JOB_ID:-} ]]; then module load cuda; fi
# export PYTHON=/shared/venvs/shardloom/bin/python

# Network interfaces between nodes, if the default is wrong.
# export NCCL_SOCKET_IFNAME=ib0
# export GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5

# Ranks per node, if not one for each GPU; NGPU=2 sbatch ... goes before.
# export NGPU=${NGPU:-4}

# More options for the srun of the training step, one per word.
# SRUN_ARGS=(--mpi=none)

# Options of pyxis for a container: all Python then runs inside, with the container's PyTorch.
# CONTAINER=(--container-image=/shared/images/torch.sqsh --container-mounts="$PWD:$PWD")
# PYTHON=python3
