"""Time of a step by a roofline: work over peaks, and the communication that compute does not hide.

Unlike memory and collectives, this is a model. Its constants are shares of the vendors' peaks.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from build_model import training_flops
from config import ConfigError, JobConfig
from config.constraints import is_float8
from models.meta import build_on_meta
from parallelisms.fsdp import FSDPPolicy
from parallelisms.pipeline_parallel import stages_per_rank
from planner.operators import DELTA_RULE, FLOAT8_MATMUL
from planner.step_plan import StepPlan, compute_dtype, planned_config
from planner.step_record import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    PARAMETERS,
    RECOMPUTE,
    UPDATE,
    Collective,
    Group,
    StepRecord,
)
from runtime.devices import Hardware

# Fitted to rows of benchmarks/results, see FIT.
MATMUL, ATTENTION, MEMORY = 0.78, 0.40, 0.70
# Share of an eager block's traffic that is left in compiled kernels. They recompute what backward
# needs where they need it.
COMPILED = 0.30
# With float8, most of an eager block's traffic is quantization, which the compiler fuses. Fitted to
# benchmarks/published.toml.
COMPILED_FLOAT8 = 0.22
# Share of tensor parallel's communication that async tensor parallel hides, if the matmuls last as
# long. Fitted to five pairs of benchmarks/published.toml, with and without.
ASYNC = 0.4
FIT = (
    "fitted to 9 measured rows of Llama 124M to 8B on one H200 and one H100: 8 within 4 %, a step"
    " of 20 ms 16 % too fast; of 54 published runs of others, to which three constants are fitted,"
    " the median error is 9.4 %"
)
# Assumed: share of a link that collectives reach, and the time of a hop.
LINK, NETWORK, HOP_SECONDS = 0.80, 0.85, 8e-6
# Compute of one unit hides the collectives of others over these mesh dims.
OVERLAPPED = ("dp_", "efsdp")
PHASES = {FORWARD: FORWARD, BACKWARD: BACKWARD, RECOMPUTE: BACKWARD, UPDATE: UPDATE}


@dataclass(frozen=True)
class StepTime:
    """Modelled time of a step."""

    parts: Mapping[str, float]
    """Seconds that add up to the step, by what takes them."""
    tokens_per_second: float
    """Of all devices."""
    mfu: tuple[float, float]
    """By PaLM's convention, and with causal attention counted as such."""
    checkpoint_bytes: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=self.parts.__getitem__)


def step_time(plan: StepPlan, hardware: Hardware) -> StepTime:
    """Return the modelled time of ``plan``. Raises ``ConfigError`` if a peak is not known."""
    run, records = plan.run, [stage.record for stage in plan.stages]
    # As the run's, whatever its compute dtype.
    peak = 1e12 * hardware.device.tflops.get("bfloat16", peak_flops(run.config, hardware) / 1e12)
    parts = step_parts(records, run.config, plan.n_microbatches, hardware)
    tokens = run.global_batch_size * run.config.training.seq_len
    rate = tokens / sum(parts.values())
    spec, args, training = run.model_spec, run.model_args, run.config.training
    module = build_on_meta(spec, args, getattr(torch, training.dtype))
    palm, causal = training_flops(spec, args, module, training.seq_len)
    memory = plan.stages[0].record.memory
    n_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return StepTime(
        parts,
        rate,
        (rate * palm / (plan.world_size * peak), rate * causal / (plan.world_size * peak)),
        n_bytes * (1 + memory[OPTIMIZER] / memory[PARAMETERS]),
    )


def step_parts(
    records: Sequence[StepRecord], config: JobConfig, n_microbatches: int, hardware: Hardware
) -> dict[str, float]:
    """Seconds that add up to the step, by what takes them: of the slowest of the stages' ranks.

    Raises ``ConfigError`` if a peak is not known.
    """
    peak, parallelism = peak_flops(config, hardware), config.parallelism
    stages = [_stage_parts(record, config, n_microbatches, hardware, peak) for record in records]
    parts, once = max(stages, key=lambda stage: sum(stage[0].values()))
    if (degree := parallelism.pipeline_parallel_degree) > 1:
        repeated = sum(parts.values()) - once
        n_slots = n_microbatches * stages_per_rank(parallelism)
        parts["pipeline idle"] = repeated * (degree - 1) / n_slots
    return parts


def peak_flops(config: JobConfig, hardware: Hardware) -> float:
    """Return a device's peak FLOP/s in the dtype of compute. Raises ``ConfigError``."""
    dtype = compute_dtype(planned_config(config))
    needed = {"training.dtype": dtype} | ({"float8.recipe": "float8"} if is_float8(config) else {})
    for key, each in needed.items():
        if each not in hardware.device.tflops:
            title, found = hardware.device.title, ", ".join(hardware.device.tflops)
            raise ConfigError([f"{key}: the peak of {title} is known in {found}, not {each}"])
    return hardware.device.tflops[dtype] * 1e12


def rates_of(hardware: Hardware, peak: float) -> dict[str, float]:
    """Return the FLOP/s that each kind of FLOPs reaches."""
    return {
        "matmul": MATMUL * peak,
        "attention": ATTENTION * peak,
        DELTA_RULE: ATTENTION * peak,
        FLOAT8_MATMUL: MATMUL * 1e12 * hardware.device.tflops.get("float8", 0.0),
    }


def _stage_parts(
    record: StepRecord, config: JobConfig, n_microbatches: int, hardware: Hardware, peak: float
) -> tuple[dict[str, float], float]:
    """Seconds of a stage's rank: compute by kind, and exposed communication by mesh dim.

    And how many of them are of what a step does once, whatever its microbatches.
    """
    kinds = dict.fromkeys(["matmul", "attention", *(kind for _, kind in record.flops)], 0.0)
    parts: dict[str, float] = kinds | {"other operators": 0.0}
    compute: dict[str, float] = defaultdict(float)
    rates = rates_of(hardware, peak)
    left = COMPILED_FLOAT8 if is_float8(config) else COMPILED
    left = left if config.compile.enable else 1.0
    for (phase, kind), flops in record.flops.items():
        seconds = flops / rates[kind]
        parts[kind] += seconds
        compute[PHASES[phase]] += seconds
    for phase, size in record.traffic.items():
        seconds = size / (hardware.device.memory_gb_per_second * 1e9 * MEMORY)
        if phase == UPDATE:
            parts["update"] = seconds
            continue
        seconds *= 0.0 if phase == RECOMPUTE and config.compile.enable else left
        parts["other operators"] += seconds
        compute[PHASES[phase]] += seconds
    # Eager SimpleFSDP waits for each weight; the compiler gathers a block's together, and earlier.
    parallelism = config.parallelism
    waits = parallelism.data_parallel == "simple_fsdp" and not config.compile.enable
    hiding = {} if waits else compute
    is_kept = parallelism.data_parallel == "fsdp2" and not FSDPPolicy.of(parallelism).reshard_units
    times = {FORWARD: 1 if is_kept else n_microbatches, BACKWARD: n_microbatches}
    for dim, seconds in exposed_seconds(record, hiding, times, hardware).items():
        parts[f"exposed {dim}"] = seconds
    of_once = {call: count for call, count in record.collectives.items() if _is_once(call, is_kept)}
    exposed = exposed_seconds(replace(record, collectives=of_once), hiding, times, hardware)
    once = parts.get("update", 0.0) + compute[UPDATE] + sum(exposed.values())
    if parallelism.tensor_parallel_async:
        matmuls = parts["matmul"] + parts.get(FLOAT8_MATMUL, 0.0)
        parts["exposed tp"] -= ASYNC * min(parts["exposed tp"], matmuls)
    return parts, once


def _is_once(call: Collective, is_kept: bool) -> bool:
    """True for a call that a step makes once; ``is_kept``: weights stay gathered."""
    is_gather = call.kind == "all_gather" and call.dim.startswith(OVERLAPPED)
    return PHASES[call.phase] == UPDATE or (is_kept and is_gather)


def exposed_seconds(
    record: StepRecord, compute: Mapping[str, float], times: Mapping[str, int], hardware: Hardware
) -> dict[str, float]:
    """Seconds of communication, by mesh dim, during which a rank computes nothing.

    The first gather of a forward and the last reduction of a backward have nothing to hide behind:
    in each microbatch, or once if weights stay gathered or gradients are reduced once. Each is
    taken to last as long as an average call. Pipelines reduce after the last backward, in the
    update. ``times``: how often, at most, a step's forward gathers and its backward reduces.
    """
    exposed: dict[str, float] = defaultdict(float)
    overlapped: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for collective, count in record.collectives.items():
        seconds = collective_seconds(collective, record.groups[collective.dim], hardware)
        phase = PHASES[collective.phase]
        if collective.dim.startswith(OVERLAPPED) and phase != UPDATE:
            overlapped[phase, collective.dim].append((count, seconds))
        else:
            exposed[collective.dim] += count * seconds
    left = dict(compute)
    for (phase, dim), calls in overlapped.items():
        total = sum(count * seconds for count, seconds in calls)
        counts = [count for count, _ in calls]
        first = total / sum(counts) * min(times[phase], *counts)
        exposed[dim] += max(total - left.get(phase, 0.0), min(first, total))
        left[phase] = max(left.get(phase, 0.0) - total, 0.0)
    return dict(exposed)


def collective_seconds(collective: Collective, group: Group, hardware: Hardware) -> float:
    """Modelled seconds of one call.

    Between nodes, what one rank sends to one other passes the adapter of that rank. A ring leaves a
    node once for all of the group's ranks there, which share their adapters.
    """
    link = hardware.link.gb_per_second * 1e9 * LINK
    adapter = hardware.network.gb_per_second * 1e9 * NETWORK
    n, n_there = len(group.ranks), _fewest_on_a_node(group, hardware.device.gpus_per_node)
    sent = group.sent(collective)
    if n_there == n:
        seconds = sent / link
    elif collective.kind == "all_to_all":
        leaves = collective.payload * (n - n_there) / n
        seconds = max((sent - leaves) / link, leaves / adapter)
    else:
        n_adapters = 1 if collective.kind == "send" else n_there
        seconds = sent / min(link, n_adapters * adapter)
    return seconds + HOP_SECONDS * math.log2(max(n, 1))


def is_inside_node(group: Group, hardware: Hardware) -> bool:
    """True if no group of this mesh dim is on several nodes, which have consecutive ranks."""
    return _fewest_on_a_node(group, hardware.device.gpus_per_node) == len(group.ranks)


@cache
def _fewest_on_a_node(group: Group, per_node: int) -> int:
    """Fewest ranks that a group of this mesh dim has on one of its nodes.

    All groups of the dim are looked at: if they do not divide the nodes, one that is inside of a
    node waits for those that are not.
    """
    n, first = len(group.ranks), group.ranks[0]
    stride = group.ranks[1] - first if n > 1 else 1
    length = n * stride
    begins = [first]
    if group.ranks == tuple(range(first, first + length, stride)):
        # After so many ranks, groups lie on nodes as before.
        end = min(group.world_size, math.lcm(length, per_node))
        begins = [base + k for base in range(0, end, length) for k in range(stride)]
    shifts = (begin - first for begin in begins)
    return min(
        min(Counter((rank + shift) // per_node for rank in group.ranks).values())
        for shift in shifts
    )
