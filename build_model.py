"""Build a model: meta device, kernels, parallelisms, weights, and the runner that calls it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from config import ConfigError, JobConfig
from config.job_config import Model
from cuda_graphs import CudaGraphPool, GraphPool
from forward_backward import ModelRunner, PipelineRunner, SPMDRunner
from kernels.choose import choose_kernels
from metrics.flops import flops_per_token, peak_flops
from models import ModelSpec, TransformerArgs
from models.gated_delta_net import InnerDeltaNet
from models.meta import build_on_meta
from models.transformer import InnerAttention
from parallelisms.comm_volume import warn_if_comm_bound
from parallelisms.constraints import cuda_graph_obstacle
from parallelisms.elastic import PairwiseGradientAccumulator, apply_elastic
from parallelisms.materialize import materialize
from parallelisms.mixed_precision import mixed_precision_policy
from parallelisms.parallel_dims import ParallelDims
from parallelisms.parallelize import parallelize
from parallelisms.pipeline_parallel import tied_across_stages
from run_spec import RunSpec
from runtime.log import logger, show_phase
from runtime.object_collectives import run_on_rank0
from runtime.outside import mistakes_of


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """A model after ``parallelize``, on the meta device until ``materialize``."""

    spec: ModelSpec
    args: TransformerArgs
    config: JobConfig
    dims: ParallelDims
    device: torch.device
    mp_policy: MixedPrecisionPolicy
    module: nn.Module
    """Holds this rank's parameters under the FQNs of the whole model."""
    stages: list[nn.Module]
    """The modules that this rank calls: ``module``, or its pipeline stages in order."""
    fqns: list[str]
    """FQNs of all parameters of the whole model, tied ones once."""
    tied: list[str]
    """First FQNs of parameters that the first and the last pipeline stage share."""
    has_moes: bool
    """True if any layer of the whole model has experts."""
    flops_per_token: tuple[float, float]
    """Training FLOPs per token: by PaLM's convention, and with causal attention counted as such."""

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of one device in bfloat16, whatever the compute dtype; None if not known."""
        return peak_flops(self.device, self.config.metrics.peak_tflops)

    def materialize(self) -> None:
        """Allocate this rank's shards, and fill them by ``debug.seed``. Mutates ``module``."""
        with _mistakes_outside(self.config.model):
            materialize(
                self.module,
                self.device,
                seed=self.config.debug.seed,
                is_offloaded=self.config.parallelism.fsdp_cpu_offload,
            )

    def runner(self) -> ModelRunner:
        """Build the object that runs forward and backward. Collective with pipeline parallel."""
        config = self.config
        if self.dims.degrees.pp > 1:
            return PipelineRunner(
                self.module,
                self.stages,
                self.dims,
                parallelism=config.parallelism,
                compile=config.compile,
                mp_policy=self.mp_policy,
                device=self.device,
                tied=self.tied,
            )
        accumulator = None
        if config.debug.is_elastic:
            parameters = list(self.module.parameters())
            accumulator = PairwiseGradientAccumulator(parameters, self.mp_policy.reduce_dtype)
        return SPMDRunner(
            self.module,
            self.dims.cp_mesh,
            parallelism=config.parallelism,
            compile=config.compile,
            device=self.device,
            accumulator=accumulator,
            # No family of Shardloom skips layers.
            may_skip_layers=config.model.is_outside,
            graph_pool=self.graph_pool(),
        )

    def graph_pool(self) -> GraphPool | None:
        """Return a pool for CUDA graphs, unless ``without_cuda_graphs`` says why not."""
        return None if self.without_cuda_graphs else CudaGraphPool()

    @property
    def without_cuda_graphs(self) -> str:
        """Why microbatches do not run as CUDA graphs; "" if they do."""
        config, mode = self.config, self.config.compile.cuda_graphs
        if mode == "never":
            return "compile.cuda_graphs"
        has_gpu, degrees = self.device.type == "cuda", self.dims.degrees
        obstacle = cuda_graph_obstacle(config, degrees, has_gpu=has_gpu, has_experts=self.has_moes)
        if obstacle or mode == "always":
            return obstacle
        always = 'compile.cuda_graphs = "always"'
        reasons = {
            # A graph would repeat the first value of a number that their forward changes.
            f"models of your own: {always}": config.model.is_outside,
            # The next replay overwrites gradients, of which an optimizer may keep one.
            f"optimizers of your own: {always}": config.optimizer.is_outside,
            f"several GPUs: {always}": self.dims.weight_mesh.size() > 1,
        }
        return next((reason for reason, is_true in reasons.items() if is_true), "")


def build_model(run: RunSpec, dims: ParallelDims, device: torch.device) -> ShardedModel:
    """Build and initialize the model of ``run``, on this device's kernels. Collective."""
    show_phase("building the model")
    spec, args = run.model_spec, run.model_args

    def apply_kernels(module: nn.Module, dtype: torch.dtype | None) -> None:
        choose_kernels(
            device,
            attentions=_replaceable(spec.attentions(module), InnerAttention),
            moes=spec.moes(module),
            delta_nets=_replaceable(spec.delta_nets(module), InnerDeltaNet),
            dtype=dtype,
            heads=(args.n_heads, args.n_kv_heads),
            head_dim=args.head_dim,
            wants_flex_attention=run.wants_flex_attention,
            n_ranks=dims.degrees.tp * dims.degrees.cp,
        )

    model = build_sharded_model(spec, args, run.config, dims, device, apply_kernels=apply_kernels)
    model.materialize()
    # Ranks with another GPU may not know its peak, but all or none measure the bandwidth.
    peak = run_on_rank0(lambda: model.peak_flops)
    if peak is not None and dims.degrees.pp == 1 and not model.has_moes:
        warn_if_comm_bound(
            model.module,
            dims,
            run.config.parallelism,
            model.mp_policy,
            n_tokens=run.microbatch_size * run.config.training.seq_len // dims.degrees.cp,
            n_microbatches=run.n_microbatches(dims.degrees.batch),
            flops_per_token=model.flops_per_token[0],
            peak_flops=peak,
            may_skip_layers=run.config.model.is_outside,
        )
    return model


def _replaceable(modules: list[nn.Module], inner_cls: type[nn.Module]) -> list[nn.Module]:
    """Return those whose ``inner`` kernels may replace: none of a user's own.

    Such as a sliding window, it may differ only where a check of the kernel does not look.
    """
    found = [module for module in modules if type(module.inner) is inner_cls]
    if own := len(modules) - len(found):
        text = "kernels: not used in %d layers, which have another inner than %s"
        logger.info(text, own, inner_cls.__name__)
    return found


def build_sharded_model(
    spec: ModelSpec,
    args: TransformerArgs,
    config: JobConfig,
    dims: ParallelDims,
    device: torch.device,
    *,
    apply_kernels: Callable[[nn.Module, torch.dtype | None], None] | None = None,
) -> ShardedModel:
    """Build a model on the meta device and apply the parallelisms of ``config``. Collective.

    ``apply_kernels``: called with the module and the compute dtype, before parallelisms wrap it.
    Raises ``ConfigError`` for a mistake in the user's own model.
    """
    with _mistakes_outside(config.model):
        module = build_on_meta(spec, args, getattr(torch, config.training.dtype))
        _check_dtypes(module, config.training.dtype)
        # What follows shards, splits and wraps the module: count and name its parameters first.
        fqns, tied = [fqn for fqn, _ in module.named_parameters()], list[str]()
        if dims.degrees.pp > 1:
            tied = tied_across_stages(
                module,
                dims.degrees.pp,
                split=spec,
                parallelism=config.parallelism,
                is_outside=config.model.is_outside,
            )
        has_moes = bool(spec.moes(module))
        if has_moes and config.compile.cuda_graphs == "always":
            text = '"always" is not possible: the model has experts'
            raise ConfigError([f"compile.cuda_graphs: {text}"])
        _log_size(config.model, module)
        flops = training_flops(spec, args, module, config.training.seq_len)
        mp_policy = mixed_precision_policy(config.training, device)
        if apply_kernels is not None:
            apply_kernels(module, mp_policy.param_dtype)
        stages = parallelize(module, dims, spec=spec, config=config, mp_policy=mp_policy)
        if config.debug.is_elastic:
            apply_elastic(module)
        return ShardedModel(
            spec=spec, args=args, config=config, dims=dims, device=device, mp_policy=mp_policy,
            module=module, stages=stages, fqns=fqns, tied=tied, has_moes=has_moes,
            flops_per_token=flops,
        )  # fmt: skip


def _check_dtypes(module: nn.Module, dtype: str) -> None:
    """Raise ``ValueError`` unless all parameters have ``dtype``: FSDP and optimizers rely on it."""
    for fqn, parameter in module.named_parameters():
        if parameter.dtype != getattr(torch, dtype):
            text = f"{fqn} is in {parameter.dtype}, and training.dtype is {dtype}"
            raise ValueError(f"{text}: parameters need one dtype; convert activations instead")


def _mistakes_outside(model: Model) -> AbstractContextManager[None]:
    """Context that names the user's own model in the errors of its spec; none for others."""
    return mistakes_of("model.name", model.name) if model.is_outside else nullcontext()


def _log_size(model: Model, module: nn.Module) -> None:
    n_parameters = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    changes = "".join(f", {name} = {value}" for name, value in model.args.items())
    logger.info(
        "model: %s %s%s, %s parameters%s",
        model.name,
        model.flavor,
        changes,
        f"{n_parameters:,}",
        f", of which {trained:,} are trained" if trained < n_parameters else "",
    )


def training_flops(
    spec: ModelSpec, args: TransformerArgs, module: nn.Module, seq_len: int
) -> tuple[float, float]:
    """Return ``flops_per_token`` of ``module``, which is still whole."""
    return flops_per_token(
        module,
        n_attentions=len(spec.attentions(module)),
        n_heads=args.n_heads,
        head_dim=args.head_dim,
        seq_len=seq_len,
        delta_nets=spec.delta_nets(module),
    )
