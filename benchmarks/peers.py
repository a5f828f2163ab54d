"""Training loops of other projects on one rank, with the settings of the bare loop.

Model, batch and dtype are the same. Each loop loads the bare loop's weights into its own model or,
if it takes any module, trains the bare loop's model.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.loops import (
    Case,
    adamw,
    batch_of,
    make_ready,
    plain_steps,
    reference_model,
)
from benchmarks.turns import Turns
from models.llama3 import HUGGING_FACE
from runtime.compat import configure

MAX_STEPS = 10**9


def transformers_model(case: Case) -> nn.Module:
    """Build Llama of ``transformers`` with the weights of the bare loop."""
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = HUGGING_FACE.config(case.args) | {"attn_implementation": "sdpa", "use_cache": False}
    model = LlamaForCausalLM(LlamaConfig(**keys))
    weights = reference_model(case).state_dict()
    pairs = HUGGING_FACE.tensors(case.args)
    model.load_state_dict({pair.hf_names[0]: weights[pair.fqn] for pair in pairs})
    if case.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return cast(nn.Module, model.train())


def transformers_loop(turns: Turns, case: Case) -> None:
    """Train the model of ``transformers`` in the bare loop."""
    model = transformers_model(case)
    plain_steps(turns, case, model, lambda tokens: model(tokens).logits)


def trainer_loop(turns: Turns, case: Case) -> None:
    """Train the model of ``transformers`` in its ``Trainer``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class TurnCallback(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.next_step()

    model = transformers_model(case)
    make_ready(turns, case, lambda tokens: model(tokens).logits)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=case.batch_size,
        max_steps=MAX_STEPS, optim="adamw_torch_fused", learning_rate=3e-5, weight_decay=0.1,
        adam_beta2=0.95, max_grad_norm=1.0, bf16=case.dtype == "bfloat16", report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    tokens, _ = batch_of(case, torch.device("cpu"))
    rows = [{"input_ids": row, "labels": row} for row in tokens] * 10**6
    Trainer(model, arguments, train_dataset=rows, callbacks=[TurnCallback()]).train()


def lightning_loop(turns: Turns, case: Case) -> None:
    """Train the model of Shardloom in Lightning's ``Trainer``."""
    model = reference_model(case)
    fit_with_lightning(turns, case, model, lambda tokens: model(tokens))


def transformers_lightning_loop(turns: Turns, case: Case) -> None:
    """Train the model of ``transformers`` in Lightning's ``Trainer``."""
    model = transformers_model(case)
    fit_with_lightning(turns, case, model, lambda tokens: model(tokens).logits)


def fit_with_lightning(
    turns: Turns, case: Case, model: nn.Module, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Train ``model`` in Lightning's ``Trainer``; each batch is a step of a turn."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            turns.next_step()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tokens, labels = batch
            return F.cross_entropy(logits_of(tokens).float().flatten(0, 1), labels.flatten())

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            # Lightning's own clipping rejects fused optimizers in mixed precision.
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    make_ready(turns, case, logits_of)
    trainer = lightning.Trainer(
        devices=1, max_steps=MAX_STEPS, max_epochs=1, logger=False,
        precision="bf16-mixed" if case.dtype == "bfloat16" else "32-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    batches: Any = [batch_of(case, torch.device("cpu"))] * 10**6
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))


def torchtitan_loop(turns: Turns, case: Case) -> None:
    """Train the model of torchtitan 0.2.2 with its ``train_step``."""
    if not torch.cuda.is_available():
        patch_torchtitan_for_cpu()
    reference = reference_model(case).state_dict()
    torch.distributed.destroy_process_group()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    import torchtitan.models.llama3 as llama3
    from torchtitan.config import JobConfig
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    args = case.args
    titan_args = llama3.TransformerModelArgs(
        dim=args.dim, n_layers=args.n_layers, n_heads=args.n_heads, n_kv_heads=args.n_kv_heads,
        vocab_size=args.vocab_size, max_seq_len=case.seq_len, rope_theta=args.rope_theta,
        norm_eps=args.norm_eps, multiple_of=args.hidden_dim,
        ffn_dim_multiplier=0.99 * args.hidden_dim / (8 * args.dim / 3),
    )  # fmt: skip
    # By default torchtitan scales low RoPE frequencies, as Llama 3.1 does.
    titan_args.rope_scaling_args.scaling_factor = 1.0
    spec = replace(
        llama3.get_train_spec(), model_args={"case": titan_args}, build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: None, state_dict_adapter=None,
    )  # fmt: skip
    register_train_spec("case", spec)
    config = JobConfig()
    config.model.name, config.model.flavor = "case", "case"
    training = config.training
    training.seq_len, training.local_batch_size = case.seq_len, case.batch_size
    training.steps, training.mixed_precision_param = MAX_STEPS, case.dtype
    config.optimizer.lr = 3e-5
    config.compile.enable = case.compile
    config.activation_checkpoint.mode = "none"
    config.job.dump_folder = tempfile.mkdtemp()
    trainer = Trainer(config)
    model = trainer.model_parts[0]
    # torch.compile adds _orig_mod to the names of compiled blocks.
    weights = {
        name: reference[name.replace("_orig_mod.", "")] for name, _ in model.named_parameters()
    }
    weights = {
        name: interleave_rotary_rows(weight, name, args.head_dim)
        for name, weight in weights.items()
    }
    model.load_state_dict(weights, strict=False)
    make_ready(turns, case, model)
    tokens, labels = batch_of(case, torch.device("cpu"))

    def batches() -> Iterator[Any]:
        while True:
            turns.next_step()
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            yield {"input": tokens}, labels

    data = trainer.batch_generator(batches())
    while True:
        trainer.train_step(data)


def interleave_rotary_rows(weight: torch.Tensor, name: str, head_dim: int) -> torch.Tensor:
    """Reorder the rows of wq and wk: torchtitan rotates adjacent pairs, Shardloom halves."""
    if ".wq." not in name and ".wk." not in name:
        return weight
    heads = weight.view(-1, 2, head_dim // 2, weight.shape[-1])
    return heads.transpose(1, 2).reshape(weight.shape)


def patch_torchtitan_for_cpu() -> None:
    """Patch torchtitan to run on CPU: it imports triton kernels and queries a GPU."""
    from types import ModuleType, SimpleNamespace

    kernels = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels
    configure("torch._utils:_get_available_device_type", lambda: "cpu", key="benchmark")
    from torchtitan.components import metrics

    no_stats = metrics.DeviceMemStats(*[0] * 6)
    monitor = SimpleNamespace(
        device_name="", get_peak_stats=lambda: no_stats, reset_peak_stats=lambda: None
    )
    metrics.build_device_memory_monitor = lambda: monitor


PEERS: dict[str, Callable[[Turns, Case], None]] = {
    "transformers": transformers_loop,
    "transformers Trainer": trainer_loop,
    "Lightning": lightning_loop,
    "transformers in Lightning": transformers_lightning_loop,
    "torchtitan": torchtitan_loop,
}
PACKAGES = {
    "transformers": ("transformers",),
    "transformers Trainer": ("transformers", "accelerate"),
    "Lightning": ("lightning",),
    "transformers in Lightning": ("transformers", "lightning"),
    "torchtitan": ("torchtitan",),
}
