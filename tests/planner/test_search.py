"""A search finds what a plan of every choice would, and its answer can be pasted."""

import json
import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from unittest.mock import patch

import pytest

from config import ConfigError, load_config
from planner import search as module
from planner.estimate import Sample, Shape, estimated
from planner.search import GIB, N_BEST, Found, Search, alike
from planner.search_simulations import Request, simulate_sample, simulate_stage
from planner.search_space import Choice, Kind, SearchSpace
from planner.search_text import search_json, search_text, toml_lines
from planner.step_record import StepRecord
from runtime.devices import find_hardware
from tests.lib.marks import slow
from tests.lib.planned import BATCH, EMULATED, FLOAT8, MOE, SMALL

WORLD = 8


def search_of(
    keys: dict[str, object], world_size: int, *, device: str = "a100", held: Collection[str] = ()
) -> Search:
    values = SMALL | {"model.vocab_size": 320, "model.args.n_layers": 2} | keys
    texts = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    config = load_config(Path("debug_model"), texts)
    return Search(config, world_size, find_hardware(device, None), held)


def test_estimates_are_those_of_plans() -> None:
    """Collectives, FLOPs and traffic of a mesh, from a sample with other ranks and microbatches."""
    search = search_of({BATCH: 64}, WORLD)
    choice = Choice(2, 2, 2, 1, 1, 1, "1F1B", "full", "default", 4, "none")
    sample = simulate_sample(search._sample_request(choice.kind))
    assert sample is not None
    found = estimated(sample, Shape(choice.degrees, 1, 2, 4, 4, 1.0, 1.0, is_resharded=True))
    real = simulate_stage(Request(search.space.config_of(choice), WORLD))
    assert found is not None
    assert found.flops == pytest.approx(real.flops)
    assert sum(found.traffic.values()) == pytest.approx(sum(real.traffic.values()), rel=0.05)
    sent = [sent_bytes(record) for record in (found, real)]
    assert sent[0] == pytest.approx(sent[1], rel=0.01)
    assert found.peak == pytest.approx(real.peak, rel=0.3)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_replicas_sum_the_shards_of_experts(ep: int) -> None:
    search = search_of(MOE | {"model.flavor": "debugmodel", BATCH: 8}, WORLD)
    choice = Choice(2, 4, 1, 1, 1, ep, "1F1B", "none", "default", 1, "none")
    sample = simulate_sample(search._sample_request(choice.kind))
    assert sample is not None
    found = estimated(sample, Shape(choice.degrees, ep, 2, 1, 1, 1.0, 1.0, is_resharded=True))
    assert found is not None
    real = simulate_stage(Request(search.space.config_of(choice), WORLD))
    sent = [sent_bytes(record, "dp_replicate") for record in (found, real)]
    assert sent[0] == pytest.approx(sent[1], rel=0.01)


@pytest.mark.parametrize("schedule", [slow("1F1B"), "Interleaved1F1B"])
def test_estimates_of_pipelines_are_near_their_plans(schedule: str) -> None:
    """In float8, whose gathers depend on the schedule, and which casts weights per microbatch."""
    sizes = {"model.args.n_layers": 4, "model.args.dim": 256, "model.args.hidden_dim": 768}
    search = search_of(sizes | EMULATED | {BATCH: 16, FLOAT8: "tensorwise"}, 4, device="h100")
    choice = Choice(1, 2, 1, 1, 2, 1, schedule, "none", "default", 2, "tensorwise")
    found = search._estimate(choice, simulate_sample(search._sample_request(choice.kind)))
    assert found is not None
    (planned,) = search._planned([found], map)
    assert found.peak == pytest.approx(planned.peak, rel=0.3)
    work = [
        sum(each.parts[part] for part in ("float8 matmul", "attention", "other operators"))
        for each in (found, planned)
    ]
    assert work[0] == pytest.approx(work[1], rel=0.1)


@pytest.mark.parametrize("degrees", [(1, 2, 1), (1, 1, 2), (2, 1, 1)])
def test_an_update_with_matmuls_is_of_no_microbatch(degrees: tuple[int, int, int]) -> None:
    """Muon's, whose ranks exchange gradients over all dims of the mesh."""
    sizes = {"model.args.dim": 256, "model.args.hidden_dim": 768, "optimizer.name": "muon"}
    search = search_of(sizes | {BATCH: 64}, 2)
    choice = Choice(*degrees, 1, 1, 1, "1F1B", "none", "default", 1, "none")
    found = search._estimate(choice, simulate_sample(search._sample_request(choice.kind)))
    assert found is not None
    (planned,) = search._planned([found], map)
    # How many of the few matrices of a sample are a rank's is rounded.
    assert 0.5 < found.parts["matmul"] / planned.parts["matmul"] < 2.0


def test_all_that_is_searched_can_train() -> None:
    """Of 16 sequences, three stages have no multiple of 3, and four of size 8 too few."""
    space = search_of({"model.args.n_layers": 12, BATCH: 48}, 12).space
    choices = [choice for choice in space.choices() if choice.pp > 1]
    assert {choice.pp for choice in choices} == {2, 3, 4, 6, 12}
    assert all(map(space.is_legal, choices))


def test_what_is_not_sampled_is_not_among_the_best() -> None:
    search = search_of({BATCH: 8}, 2)
    choices = list(search.space.choices())
    samples: dict[Kind, Sample | None] = {}

    def simulated(kinds: list[Kind], _: object) -> list[Sample | None]:
        samples.update((kind, simulate_sample(search._sample_request(kind))) for kind in kinds)
        return [samples[kind] for kind in kinds]

    with patch.object(module, "N_BEST", 1), patch.object(module, "SAMPLES_AT_ONCE", 1):
        with patch.object(search, "_samples", simulated):
            some = search._estimates(choices, map)
            kinds = {choice.kind for choice in choices}
            assert len(samples) < len(kinds)
            simulated([*(kinds - samples.keys())], map)
        every = [search._estimate(choice, samples[choice.kind]) for choice in choices]
        assert len(some) < len(every)
        best = [search.different(search._fitting(found), [], 1) for found in (some, every)]
    assert len(best[0]) == 2
    assert best[0] == best[1]


def test_keys_that_a_choice_replaces_do_not_time_it() -> None:
    choice = Choice(1, 2, 1, 1, 1, 1, "1F1B", "none", "default", 1, "none")
    replaced = (
        {"parallelism.tensor_parallel_async": "true", "parallelism.tensor_parallel_degree": 2},
        {"parallelism.data_parallel": "simple_fsdp"},
    )
    searches = [search_of({BATCH: 4} | keys, 2, device="h100") for keys in ({}, *replaced)]
    sample = simulate_sample(searches[0]._sample_request(choice.kind))
    assert sample is not None
    first, *others = (search._estimate(choice, sample) for search in searches)
    assert first is not None
    assert others == [first, first]


def test_skips_of_single_layers_do_not_spoil_the_samples() -> None:
    keys = {FLOAT8: "tensorwise", "float8.skip": '["layers.1", "wo"]', "model.args.n_layers": 4}
    search = search_of(keys | EMULATED | {BATCH: 4}, 2, device="h100")
    choice = Choice(1, 2, 1, 1, 1, 1, "1F1B", "none", "default", 1, "tensorwise")
    found = search._estimate(choice, simulate_sample(search._sample_request(choice.kind)))
    assert found is not None
    (planned,) = search._planned([found], map)
    assert 0 < planned.parts["float8 matmul"] < found.parts["float8 matmul"]


def sent_bytes(record: StepRecord, dim: str = "") -> float:
    """Bytes that a rank sends over the mesh dim; "": over all."""
    calls = record.collectives.items()
    return sum(n * record.groups[c.dim].sent(c) for c, n in calls if c.dim == (dim or c.dim))


def test_the_answer_is_ranked_and_can_be_pasted(tmp_path: Path) -> None:
    # In float8, all layers of this model are too small.
    search = search_of({BATCH: 4, "model.args.n_layers": 1}, 1, device="h100")
    progress: list[str] = []
    answer = search.run(report=progress.append)
    simulated = [line for line in progress if line.endswith("simulated")]
    assert re.fullmatch(r"search: (\d+) of \1 samples simulated", simulated[-1])
    assert re.fullmatch(r"search: (\d+) of \1 stages planned in full", progress[-1])
    rates = [found.tokens_per_second for found in answer.best]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) == N_BEST + 1
    limit = 0.9 * find_hardware("h100", None).device.memory_gib * GIB
    assert all(found.peak <= limit for found in answer.best)
    lines = search_text(answer, 1)
    assert max(map(len, lines)) <= 100
    assert any("lost to the tenth" in line for line in lines)
    assert len(search_json(answer)["best"]) == N_BEST + 1
    file = tmp_path / "best.toml"
    file.write_text("\n".join(toml_lines(answer.best[0])))
    load_config(file, ["--model.flavor", "debugmodel"])


def test_lines_to_paste_give_the_choice_whatever_the_configuration_has(tmp_path: Path) -> None:
    text = """
        [model]
        flavor = "debugmodel"
        [training]
        global_batch_size = 32
        [parallelism]
        data_parallel_replicate_degree = 2
        data_parallel_shard_degree = 2
        tensor_parallel_async = true
        tensor_parallel_degree = 2
        context_parallel_degree = 2
        context_parallel_method = "allgather"
        pipeline_parallel_degree = 2
        pipeline_parallel_schedule = "Interleaved1F1B"
        pipeline_parallel_stages_per_rank = 3
        fsdp_reshard_after_forward = "always"
        fsdp_reduce_gradients = "last_microbatch"
        [activation_checkpoint]
        mode = "selective"
        selective = 2
    """
    file = tmp_path / "config.toml"
    file.write_text(text)
    config = load_config(file, [])
    space = SearchSpace(config, WORLD, find_hardware("h100", None).device)
    choices = list(space.choices())
    assert {1, 2} <= {choice.cp for choice in choices} & {choice.pp for choice in choices}
    for choice in choices:
        overrides = [
            part
            for name, table in space.settings(choice).items()
            for key, value in table.items()
            for part in (f"--{name}.{key}", json.dumps(value))
        ]
        found = load_config(file, overrides).model_dump()
        wanted = space.config_of(choice).model_dump()
        assert {name: found[name] for name in found if found[name] != wanted[name]} == {}, choice


def test_rows_are_of_different_meshes_and_name_what_is_alike() -> None:
    search = search_of({BATCH: 64}, WORLD)
    base = Choice(1, 8, 1, 1, 1, 1, "1F1B", "full", "default", 1, "none")
    choices = [base, base._replace(size=2), base._replace(dp_shard=4, tp=2), base._replace(size=4)]
    rates = [100.0, 99.5, 90.0, 80.0]
    left = [Found(choice, 1, {}, rate) for choice, rate in zip(choices, rates, strict=True)]
    assert search.different(left, [], 1) == [left[0], left[2]]
    assert search.different(left, left[2:3], 1) == [left[0]]
    assert search.different(left, [], 2) == [left[0], left[2], left[3]]
    assert search.different(left, [], 11) == left
    assert alike(base, left) == {"size": [2]}


def test_the_ten_are_of_as_many_meshes_as_there_are() -> None:
    search = search_of({BATCH: 32}, WORLD)
    by_mesh: dict[object, list[Choice]] = defaultdict(list)
    for choice in search.space.choices():
        by_mesh[choice.mesh].append(choice)
    # Three of each mesh, none as fast as another; second rows of the first beat the last meshes.
    found = [
        [Found(choice, 1, {}, 1e9 * 0.8**i * 0.97**j) for j, choice in enumerate(choices[:3])]
        for i, choices in enumerate(by_mesh.values())
    ]
    assert len(found) > N_BEST
    for n in (N_BEST + 1, N_BEST, 4, 1):
        ranked = [each for rows in found[:n] for each in rows]
        with (
            patch.object(search, "_estimates", return_value=ranked),
            patch.object(search, "_planned", lambda some, _: some),
            patch.object(search, "_limit", 2),
        ):
            best = search._best([], map).best
        assert len({each.choice.mesh for each in best[:N_BEST]}) == min(n, N_BEST)
        rates = [each.tokens_per_second for each in best]
        assert rates == sorted(rates, reverse=True)


def test_a_search_compares_equal_batches() -> None:
    with pytest.raises(ConfigError, match=r"training\.global_batch_size"):
        search_of({}, 2)


@pytest.mark.parametrize(
    ("key", "value", "field", "found"),
    [
        ("parallelism.data_parallel_replicate_degree", 2, "dp_replicate", {2}),
        ("parallelism.data_parallel_shard_degree", 2, "dp_shard", {2}),
        ("parallelism.data_parallel_shard_degree", -1, "dp_shard", {1, 2, 4, 8}),
        ("parallelism.tensor_parallel_degree", 2, "tp", {2}),
        ("parallelism.context_parallel_degree", 1, "cp", {1}),
        ("parallelism.pipeline_parallel_degree", 2, "pp", {2}),
        ("activation_checkpoint.mode", "selective", "mode", {"selective"}),
        ("activation_checkpoint.mode", "auto", "mode", {"none", "selective", "full"}),
        ("training.local_batch_size", 4, "size", {4}),
        ("float8.recipe", "none", "recipe", {"none"}),
    ],
)
def test_a_key_of_the_command_line_is_held(
    key: str, value: object, field: str, found: set[object]
) -> None:
    keys = {key: value, BATCH: 32}
    held, free = (
        list(search_of(keys, WORLD, device="h100", held=names).space.choices())
        for names in ([key, BATCH], [])
    )
    assert {getattr(choice, field) for choice in held} == found
    assert set(held) <= set(free)
    assert set(held) == {choice for choice in free if getattr(choice, field) in found}


@pytest.mark.parametrize(
    ("value", "alone", "in_pipelines"),
    [
        ("default", "default", "default"),
        ("always", "default", "always"),
        ("never", "never", "default"),
    ],
)
def test_resharding_is_held_by_its_effect(value: str, alone: str, in_pipelines: str) -> None:
    """By default, all but pipelines reshard."""
    key = "parallelism.fsdp_reshard_after_forward"
    choices = search_of({key: value, BATCH: 32}, WORLD, held=[key]).space.choices()
    found = {(choice.pp > 1, choice.reshard) for choice in choices}
    assert found == {(False, alone), (True, in_pipelines)}


def test_a_held_key_that_is_not_compared_is_an_error() -> None:
    for key, value, says in (
        ("parallelism.fsdp_reduce_gradients", "last_microbatch", "no effect with --search"),
        ("parallelism.pipeline_parallel_schedule", "GPipe", "compares 1F1B, Interleaved1F1B"),
        ("parallelism.tensor_parallel_degree", 3, "no mesh of 8 ranks.*tensor_parallel_degree = 3"),
    ):
        with pytest.raises(ConfigError, match=f"(parallelism|training).*{says}"):
            search_of({key: value, BATCH: 32}, WORLD, held=[key]).run()


def test_what_is_not_planned_yet_is_named() -> None:
    search = search_of({BATCH: 4, "debug.deterministic": "elastic"}, 2, device="h100")
    with pytest.raises(ConfigError, match=r"debug\.deterministic: is not planned yet"):
        search.run()
