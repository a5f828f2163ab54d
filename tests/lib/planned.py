"""Small runs for tests of plans."""

from pathlib import Path

from config import load_config
from run_spec import RunSpec, resolve

SMALL = {
    "model.args.n_layers": 2, "model.args.dim": 64, "model.args.head_dim": 16,
    "model.args.hidden_dim": 96, "training.seq_len": 64, "training.local_batch_size": 2,
    "training.mixed_precision_param": "bfloat16", "activation_checkpoint.mode": "none",
}  # fmt: skip
# Beside these tensors, those inside of a CPU's operators are few.
LARGER = {
    "model.args.dim": 128, "model.args.head_dim": 32, "model.args.hidden_dim": 384,
    "training.seq_len": 256, "training.local_batch_size": 8,
}  # fmt: skip
TP, CP, PP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "context", "pipeline"))
REPLICATE = "parallelism.data_parallel_replicate_degree"
RESHARD = "parallelism.fsdp_reshard_after_forward"
METHOD = "parallelism.context_parallel_method"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
MODE, REDUCE = "parallelism.data_parallel", "parallelism.fsdp_reduce_gradients"
RECOMPUTE, BATCH = "activation_checkpoint.mode", "training.global_batch_size"
EP, FLOAT8 = "parallelism.expert_parallel_degree", "float8.recipe"
MOE = {
    "model.name": "qwen3_moe", "model.args.n_layers": 2, "model.args.n_experts": 4,
    "model.args.hidden_dim": 32,
}  # fmt: skip
NEXT = MOE | {
    "model.name": "qwen3_next", "model.args.attention_every": 2,
    "model.args.shared_hidden_dim": 32,
}  # fmt: skip
# On a CPU; the plan is that of a GPU's float8.
EMULATED = {"float8.emulate": "true", "float8.skip_small": "false"}
Keys = dict[str, object]


def run_of(keys: Keys, world_size: int) -> RunSpec:
    texts = [part for key, value in (SMALL | keys).items() for part in (f"--{key}", str(value))]
    return resolve(load_config(Path("debug_model"), texts), world_size, has_gpu=True)
