"""A recorded start of a run."""

from pathlib import Path

from runtime.provenance import Attempt, Node, write_content

SOFTWARE = """\
[program]
Python = "CPython 3.11.7"
PyTorch = "2.13.0"
CUDA = "None"
[packages]
numpy = "2.0.0"
tiktoken = "0.11.0"
[sources]
"train.py" = "abc"
"""


def attempt_of(folder: Path, software: str = SOFTWARE) -> Attempt:
    node = Node(hosts=["a", "b"], ranks=8, machine={"cpu": "4 x CPU", "gpus": "8 x H100"})
    return Attempt(
        number=1, time="2026-11-26T00:00:00+0000", command=["./shardloom", "train", "a b"],
        working_directory="/work", version="", commit="0123456789abcdef", branch="main",
        changed=["train.py"], untracked=[], diff="", git_problem="", world_size=16, nodes=[node],
        variables={"NCCL_ALGO": "Ring", "SLURM_JOB_ID": "1"}, resumed_from=None,
        config=write_content(folder, "config", "toml", "[training]\nsteps = 1\n"),
        software=write_content(folder, "software", "toml", software),
    )  # fmt: skip
