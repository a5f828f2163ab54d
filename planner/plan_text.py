"""A step's plan as lines of at most 100 columns, and as JSON."""

from collections import defaultdict
from textwrap import wrap
from typing import Any

from config.auto import MODE, MODES, SIZE
from data.batch_size import sequences_in
from planner.roofline import FIT, StepTime, is_inside_node, step_time
from planner.step_plan import TIGHT, StagePlan, StepPlan
from planner.step_record import GRADIENTS, OPTIMIZER, PARAMETERS, Group, StepRecord
from runtime.devices import Hardware
from runtime.log import duration, plain_number

MIB, GIB, GB, WIDTH = 1 << 20, 1 << 30, 1e9, 100


def plan_text(plan: StepPlan, hardware: Hardware, price: float | None) -> list[str]:
    """Lines on memory, collectives and FLOPs of each stage that is planned, and on time.

    ``price``: of a device, in USD per hour.
    """
    device = hardware.device
    inside = f"{device.link} {hardware.link.gb_per_second:g} GB/s"
    outside = f"{device.network} {hardware.network.gb_per_second:g} GB/s"
    lines = [
        f"devices: {plan.world_size:,} of {device.title}, {device.gpus_per_node} a node",
        f"links: {inside} inside of a node, {outside} between nodes, each way",
        f"batch: {plan.n_microbatches} microbatch{'es' * (plan.n_microbatches > 1)} of "
        f"{plan.run.microbatch_size} x {_tokens_of_a_rank(plan)}",
    ]
    for stage in plan.stages:
        lines += ["", *_memory_lines(plan, stage, hardware), "", *_traffic_lines(stage, hardware)]
        lines += ["", *_flops_lines(stage.record)]
    lines += ["", *_time_lines(plan, step_time(plan, hardware), price)]
    return [*lines, "", *(line for note in notes(plan) for line in wrap(note, WIDTH))]


def _tokens_of_a_rank(plan: StepPlan) -> str:
    seq_len, cp = plan.run.config.training.seq_len, plan.degrees.cp
    sharded = f", of sequences of {seq_len:,}" if cp > 1 else ""
    return f"{seq_len // cp:,} tokens on each rank{sharded}"


def notes(plan: StepPlan) -> list[str]:
    """Lines on the precision of the plan."""
    texts = [
        "exact: collectives, FLOPs and the memory of tensors, from train.py's step without data",
        "modelled: time, by shares of the peaks; " + FIT,
    ]
    if plan.run.config.compile.enable:
        texts.append(
            "compile.enable: memory is that of eager code, which holds more activations, but up to"
            " 8 % less with selective recomputation"
        )
        if plan.run.config.parallelism.data_parallel == "simple_fsdp":
            texts.append(
                "compile.enable: SimpleFSDP's calls are those of eager code, one per weight"
            )
    if plan.run.config.data.document_mask:
        texts.append("data.document_mask: planned as attention over whole sequences")
    if hasattr(plan.run.model_args, "n_experts"):
        texts.append("experts: planned with grouped_mm and a balanced load; an expert's rank that"
                     " gets more tokens needs more memory and time; plans of two measured runs were"
                     " 30 and 62 % too fast")  # fmt: skip
    if hasattr(plan.run.model_args, "n_key_heads"):
        texts.append("gated delta nets: planned with flash-linear-attention's kernels")
    return texts


def plan_json(plan: StepPlan, hardware: Hardware) -> dict[str, Any]:
    """The plan as a JSON object; sizes in bytes."""
    time = step_time(plan, hardware)
    return {
        "world_size": plan.world_size,
        "degrees": vars(plan.degrees),
        "microbatches": plan.n_microbatches,
        "device": hardware.device.title,
        "stages": [
            {
                "stage": stage.stage,
                "memory": dict(stage.record.memory) | {"peak": stage.record.peak},
                "collectives": [
                    {
                        **collective._asdict(),
                        "calls": count,
                        "sent": count * stage.record.groups[collective.dim].sent(collective),
                        "ranks": len(stage.record.groups[collective.dim].ranks),
                    }
                    for collective, count in stage.record.collectives.items()
                ],
                "flops": {f"{phase} {kind}": n for (phase, kind), n in stage.record.flops.items()},
            }
            for stage in plan.stages
        ],
        "modelled": {
            "step_seconds": time.seconds,
            "parts": dict(time.parts),
            "bound": time.bound,
            "tokens_per_second": time.tokens_per_second,
            "mfu_palm": time.mfu[0],
            "mfu_causal": time.mfu[1],
            "run_seconds": run_seconds(plan, time),
            "checkpoint_bytes": time.checkpoint_bytes,
        },
        "notes": notes(plan),
    }


def run_seconds(plan: StepPlan, time: StepTime) -> float:
    """Modelled seconds of ``training.steps``; steps of a ramp count by their sequences."""
    return run_tokens(plan) / time.tokens_per_second


def run_tokens(plan: StepPlan) -> int:
    """Tokens of ``training.steps``, also with a batch size ramp."""
    run = plan.run
    n_sequences = sequences_in(run.config.training.steps, run.ramp, run.global_batch_size)
    return n_sequences * run.config.training.seq_len


def _time_lines(plan: StepPlan, time: StepTime, price: float | None) -> list[str]:
    palm, causal = (f"{100 * share:.1f} %" for share in time.mfu)
    rate = time.tokens_per_second
    lines = [
        f"time of a step, modelled: {time.seconds:.3g} s, {rate / plan.world_size:,.0f} tokens/s"
        f" on a device, {rate:,.0f} in all",
        f"MFU {palm} (PaLM), {causal} (causal); bound by {time.bound}",
    ]
    for part, seconds in time.parts.items():
        share = seconds / time.seconds
        bar = "█" * round(50 * share)
        lines.append(f"  {part:<22}{1e3 * seconds:>9,.1f} ms {100 * share:>5.1f} %  {bar}".rstrip())
    steps, seconds = plan.run.config.training.steps, run_seconds(plan, time)
    hours = seconds / 3600 * plan.world_size
    cost = "" if price is None else f", {plain_number(price * hours, 2)} USD at {price:g} an hour"
    return [
        *lines,
        f"run, modelled: {steps:,} steps, {run_tokens(plan):,} tokens, in {_long(seconds)},"
        f" {plain_number(hours, 3)} device hours{cost}",
        f"checkpoint: {time.checkpoint_bytes / GB:,.4g} GB{_often(plan, time)}",
    ]


def _long(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} seconds"
    return duration(seconds) if seconds < 86400 else f"{plain_number(seconds / 86400, 3)} days"


def _often(plan: StepPlan, time: StepTime) -> str:
    checkpoint = plan.run.config.checkpoint
    apart = duration(checkpoint.interval * time.seconds)
    return f", each {checkpoint.interval:,} steps: {apart} apart" * checkpoint.enable


def _memory_lines(plan: StepPlan, stage: StagePlan, hardware: Hardware) -> list[str]:
    peak, capacity = stage.record.peak / GIB, hardware.device.memory_gib
    verdict = "fits" if peak <= capacity else "DOES NOT FIT"
    if TIGHT * capacity < peak <= capacity:
        verdict = "tight: fragments and buffers may need a tenth more"
    name = f" of stage {stage.stage}" if plan.degrees.pp > 1 else ""
    unit, unit_name, limit_unit = (GIB, "GiB", "") if peak >= 0.1 else (MIB, "MiB", " GiB")
    used = f"{stage.record.peak / unit:.2f} {unit_name} of {capacity:g}{limit_unit}"
    lines = [f"memory of a rank{name} at its peak: {used}, {verdict}"]
    for category, size in stage.record.memory.items():
        bar = "█" * round(50 * size / GIB / max(peak, capacity))
        lines.append(f"  {category:<22}{size / unit:>9.2f} {unit_name}  {bar}".rstrip())
    if peak > capacity and (advice := _advice(plan, stage, capacity)):
        lines.append(f"  {advice}")
    return lines


def _advice(plan: StepPlan, stage: StagePlan, capacity: float) -> str:
    """Advice for a stage that does not fit; "" if there is none."""
    state = sum(stage.record.memory[part] for part in (PARAMETERS, GRADIENTS, OPTIMIZER))
    if state / GIB > TIGHT * capacity:
        is_whole = plan.run.config.parallelism.data_parallel == "ddp"
        how = "with --parallelism.data_parallel fsdp2" if is_whole else "over more ranks"
        return f"parameters, gradients and optimizer state alone do not fit: shard them {how}"
    keys = " ".join(f"--{key} {value}" for key, value in _lowering(plan).items())
    return keys and f"may fit with {keys}"


def _lowering(plan: StepPlan) -> dict[str, object]:
    """Keys that "auto" could set to values which need less memory, and what that requires."""
    keys: dict[str, object] = {}
    # The microbatches of a pipeline have a key of their own.
    if plan.run.microbatch_size > 1 and plan.degrees.pp == 1:
        # Which may be that of one microbatch, and is required.
        keys |= {SIZE: "auto", "training.global_batch_size": plan.run.global_batch_size}
    if plan.run.config.activation_checkpoint.mode != MODES[-1]:
        keys[MODE] = "auto"
    return keys


def _traffic_lines(stage: StagePlan, hardware: Hardware) -> list[str]:
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for collective, count in stage.record.collectives.items():
        sent = stage.record.groups[collective.dim].sent(collective)
        row = rows[collective.dim, collective.kind]
        for index, value in enumerate((1.0, collective.payload, sent)):
            row[index] += count * value
    if not rows:
        return ["collectives of a step: none"]
    head = ("collectives of a step", "ranks", "over", "calls", "payload GB", "sent GB")
    lines = ["{:<32}{:>7}  {:<8}{:>9}{:>12}{:>12}".format(*head)]
    for (dim, kind), (calls, payload, sent) in sorted(rows.items()):
        group = stage.record.groups[dim]
        lines.append(
            f"  {dim + ' ' + kind:<30}{len(group.ranks):>7}  {_place(group, hardware):<8}"
            f"{calls:>9,.0f}{payload / GB:>12,.3f}{sent / GB:>12,.3f}"
        )
    return lines


def _place(group: Group, hardware: Hardware) -> str:
    return "node" if is_inside_node(group, hardware) else "network"


def _flops_lines(record: StepRecord) -> list[str]:
    phases = dict.fromkeys(phase for phase, _ in record.flops)
    scale, unit = (1e12, "TFLOPs") if max(record.flops.values()) >= 1e11 else (1e9, "GFLOPs")
    lines = [f"{unit} of a step" + "".join(f"{phase:>14}" for phase in phases)]
    for kind in dict.fromkeys(kind for _, kind in record.flops):
        cells = "".join(f"{record.flops.get((phase, kind), 0) / scale:>14,.2f}" for phase in phases)
        lines.append(f"  {kind:<14}{cells}")
    return lines
