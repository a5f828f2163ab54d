"""Small plausible faults, and the tests that should notice each.

A fault keeps the program running and changes what it computes, communicates, saves or logs. A
comment says why it matters where the code does not.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.lib.cells import FAST, NAMED, Cell, cost

PARITY = "tests/parallelisms/test_parity.py::test_cell_matches_one_device"
RESUME = "tests/reliability/test_resume.py"
MESHES = "tests/test_meshes.py"
PLANTED = "tests/reliability/test_planted.py"
LINKS = "tests/reliability/test_links.py"


@dataclass(frozen=True)
class CellWith:
    """The cheapest cell of the parity test with these values; all cells if none has them.

    The ids of most cells change with the covering array.
    """

    values: tuple[tuple[str, Any], ...]

    @property
    def test_id(self) -> str:
        for cell in _cells():
            if all(getattr(cell, name) == value for name, value in self.values):
                return f"{PARITY}[{cell}]"
        return PARITY


@cache
def _cells() -> list[Cell]:
    """Cells of the fast suite that compute in float64, in which any wrong factor shows."""
    exact = [cell for cell in (*NAMED, *FAST.cells) if cell.compute_dtype == "float64"]
    return sorted(exact, key=cost)


@dataclass(frozen=True)
class Mutation:
    """One fault: ``before`` is replaced with ``after`` in ``file``."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str | CellWith, ...]
    """Files, test ids or cells, the quickest that should notice it first."""
    reason: str = ""
    """Reason why it may survive; "" if it must not."""

    @property
    def test_ids(self) -> list[str]:
        """Arguments of pytest."""
        return [test.test_id if isinstance(test, CellWith) else test for test in self.tests]

    def apply(self, text: str) -> str:
        """Return ``text`` with the fault; ``ValueError`` unless ``before`` occurs exactly once."""
        count = text.count(self.before)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} has {count} of {self.before!r}")
        return text.replace(self.before, self.after)


def cell(**values: Any) -> CellWith:
    return CellWith(tuple(values.items()))


PARALLELISMS = [
    Mutation(
        "delta-net-output-in-the-inverse-order",
        "parallelisms/context_parallel.py",
        before="return _to_sequence(_to_shards(out, self.degree",
        after="return _to_sequence(_from_shards(out, self.degree",
        tests=(
            "tests/parallelisms/test_hybrid.py",
            cell(model="qwen3_next", context="allgather 2"),
        ),
    ),
    Mutation(
        # Visibility is right, only decays and convolution are those of other heads.
        "delta-net-weights-of-the-mirrored-rank",
        "parallelisms/context_parallel.py",
        before="return weight.chunk(self.degree)[self.rank]",
        after="return weight.chunk(self.degree)[-1 - self.rank]",
        tests=(cell(model="qwen3_next", context="ulysses 4"),),
    ),
    Mutation(
        # The same on two ranks.
        "tied-gradients-added-from-the-second-stage",
        "parallelisms/pipeline_parallel.py",
        before="peers = (0, pp_mesh.size() - 1)",
        after="peers = (0, 1)",
        tests=(cell(pipeline="1F1B 4", tied=True),),
    ),
    Mutation(
        # Early stages store activations of more microbatches, and would get the larger share.
        "odd-layers-go-to-the-first-stage",
        "parallelisms/pipeline_parallel.py",
        before="lightest = min(reversed(range(n_stages)), key=weights.__getitem__)",
        after="lightest = min(range(n_stages), key=weights.__getitem__)",
        tests=("tests/parallelisms/test_pipeline_parallel.py",),
    ),
    Mutation(
        "embedding-and-output-weights-swapped",
        "parallelisms/pipeline_parallel.py",
        before="weights[0] += less_first\n    weights[-1] += less_last",
        after="weights[0] += less_last\n    weights[-1] += less_first",
        tests=("tests/parallelisms/test_pipeline_parallel.py",),
    ),
    Mutation(
        "pipeline-averages-over-microbatches",
        "parallelisms/pipeline_parallel.py",
        before="scale_grads=False",
        after="scale_grads=True",
        tests=(cell(pipeline="1F1B 2"),),
    ),
    Mutation(
        "experts-resharded-between-microbatches",
        "parallelisms/fsdp.py",
        before='reshard_experts=reshard != "never" and not has_pp,',
        after='reshard_experts=reshard != "never",',
        tests=(
            cell(
                model="qwen3_moe",
                pipeline="Interleaved1F1B 2",
                reshard="always",
                recompute="selective",
            ),
        ),
    ),
    Mutation(
        # Equal sums, but each microbatch sends what one all-reduce of the step could.
        "replicas-all-reduced-every-microbatch",
        "parallelisms/fsdp.py",
        before="model.set_requires_all_reduce(is_last or policy.all_reduce_every_microbatch)",
        after="model.set_requires_all_reduce(is_last or policy.reduce_every_microbatch)",
        tests=("tests/benchmarks/test_sharding.py", "tests/parallelisms/test_collectives.py"),
    ),
    Mutation(
        "replicas-forget-layers-that-the-last-microbatch-skips",
        "parallelisms/fsdp.py",
        before="model.set_requires_all_reduce(is_last or policy.all_reduce_every_microbatch)",
        after="model.set_requires_all_reduce(is_last)",
        tests=("tests/models/test_add_a_model.py",),
    ),
    Mutation(
        "own-step-of-a-fused-adamw-in-a-nonfinite-step",
        "optim/nonfinite.py",
        before="and not _has_own_step(optimizer)",
        after="",
        tests=("tests/optim/test_nonfinite.py",),
    ),
    Mutation(
        "last-unit-gathered-again-in-backward",
        "parallelisms/fsdp.py",
        before='reshard_last_unit=size or reshard == "always"',
        after='reshard_last_unit=size or reshard != "never"',
        tests=("tests/benchmarks/test_sharding.py",),
    ),
    Mutation(
        "backward-prefetch-in-forward-order",
        "parallelisms/fsdp.py",
        before="before = chain(*groups[max(0, index - behind) : index][::-1])",
        after="before = chain(*groups[max(0, index - behind) : index])",
        tests=("tests/parallelisms/test_experts.py",),
    ),
    Mutation(
        # Averages the dense weights where each rank holds whole experts.
        "averages-if-any-mesh-is-of-one-rank",
        "parallelisms/fsdp.py",
        before="if all(mesh.size() == 1 for mesh in meshes):",
        after="if any(mesh.size() == 1 for mesh in meshes):",
        tests=(cell(shard=4, expert=4),),
    ),
    Mutation(
        # A tied embedding shares its unit with the output, whose backward needs the weight.
        "unit-with-an-embedding-not-gathered-in-backward",
        "parallelisms/fsdp.py",
        before="if all(isinstance(module, nn.Embedding) for module in unit):",
        after="if any(isinstance(module, nn.Embedding) for module in unit):",
        tests=(cell(tied=True, reshard="always", pipeline=""),),
    ),
    Mutation(
        "frozen-parameters-are-trained",
        "parallelisms/parallelize.py",
        before="stage.get_parameter(fqn).requires_grad_(False)",
        after="stage.get_parameter(fqn)",
        tests=("tests/parallelisms/test_parity.py::test_frozen_parameters_stay_frozen",),
    ),
    Mutation(
        "token-counts-not-reduced-over-tensor-parallel",
        "parallelisms/expert_parallel.py",
        before="for mesh in (cp_mesh, tp_mesh) if mesh.size() > 1]",
        after="for mesh in (cp_mesh,) if mesh.size() > 1]",
        tests=(
            cell(model="qwen3_moe", tensor=2),
            "tests/parallelisms/test_experts.py",
        ),
    ),
    Mutation(
        "token-counts-transposed",
        "parallelisms/expert_parallel.py",
        before="sent = counts.view(self.degree, -1)",
        after="sent = counts.view(-1, self.degree).t().contiguous()",
        tests=(cell(model="qwen3_moe", expert=2), "tests/parallelisms/test_experts.py"),
    ),
    Mutation(
        # Equal values, but the experts' all-to-alls leave the node.
        "expert-ranks-are-no-neighbors",
        "parallelisms/parallel_dims.py",
        before="""\
            (pp, replicate, shard * tp // ep, ep),
            mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"),
""",
        after="""\
            (pp, replicate, ep, shard * tp // ep),
            mesh_dim_names=("pp", "dp_replicate", "ep", "efsdp"),
""",
        tests=("tests/parallelisms/test_experts.py", "tests/optim/test_muon.py"),
    ),
    Mutation(
        "sequence-may-not-divide-by-tensor-parallel",
        "parallelisms/parallel_dims.py",
        before="return chunks * degrees.cp * degrees.tp",
        after="return chunks * degrees.cp",
        tests=("tests/parallelisms/test_constraints.py", "tests/config/test_bad_configs.py"),
    ),
    Mutation(
        # The same where both degrees are equal; otherwise checkpoints have rows in wrong places.
        "strided-shard-split-by-the-other-degree",
        "parallelisms/simple_fsdp.py",
        before="split_factor=unsharded.device_mesh.size()",
        after="split_factor=fsdp_mesh.size(-1)",
        tests=(cell(data_parallel="simple_fsdp", tensor=2, shard=3),),
    ),
    Mutation(
        "simple-fsdp-reduces-in-the-compute-dtype",
        "parallelisms/simple_fsdp.py",
        before="backward_dtype=self.mp_policy.reduce_dtype",
        after="backward_dtype=self.mp_policy.param_dtype",
        tests=("tests/parallelisms/test_same_curve.py",),
    ),
    Mutation(
        "element-counter-strides-of-the-shard",
        "parallelisms/materialize.py",
        before="strides = [math.prod(parameter.shape[dim + 1 :])",
        after="strides = [math.prod(local.shape[dim + 1 :])",
        tests=("tests/parallelisms/test_materialize.py",),
    ),
    Mutation(
        # Recomputation begins with the other half if a block has an odd number of matmuls.
        "recomputation-continues-the-count-of-matmuls",
        "parallelisms/activation_checkpoint.py",
        before="""\
        is_saved = matmuls[ctx.is_recompute] % every == every - 1
        matmuls[ctx.is_recompute] += 1
""",
        after="""\
        is_saved = matmuls[False] % every == every - 1
        matmuls[False] += 1
""",
        tests=(cell(model="llama3", recompute="selective", compile=False),),
        reason="since 2.13 PyTorch asks the policy in forward only",
    ),
    Mutation(
        "float8-scales-of-the-replicas",
        "parallelisms/float8_all_gather.py",
        before="group = fsdp_mesh.get_group(fsdp_mesh.ndim - 1)",
        after="group = fsdp_mesh.get_group(0)",
        tests=("tests/parallelisms/test_float8_all_gather.py",),
    ),
    Mutation(
        "float8-scales-of-unrounded-weights",
        "parallelisms/float8_all_gather.py",
        before="        amaxes = _rounded(amaxes, mp_policy)\n",
        after="",
        tests=("tests/parallelisms/test_float8_all_gather.py",),
    ),
    Mutation(
        "float8-scales-of-a-rank's-tokens",
        "parallelisms/float8_tensor_parallel.py",
        before='Partial("max")',
        after="Replicate()",
        tests=("tests/parallelisms/test_float8_all_gather.py",),
    ),
    Mutation(
        # The top bit of a word times an even number is lost.
        "digest-with-even-weights",
        "parallelisms/replicas.py",
        before="weights = 2 * torch.arange(min(size, words.numel()), device=words.device) + 1",
        after="weights = torch.arange(min(size, words.numel()), device=words.device) + 1",
        tests=("tests/parallelisms/test_replicas.py",),
    ),
    Mutation(
        "compiled-block-gets-an-unfinished-embedding",
        "parallelisms/tensor_parallel.py",
        before="return output.clone()",
        after="return output",
        tests=(
            "tests/parallelisms/test_parity.py::"
            "test_embedding_with_a_style_of_pytorch_learns_if_compiled",
        ),
    ),
    Mutation(
        # Rounds the rope table to bfloat16.
        "block-inputs-cast-to-the-compute-dtype",
        "parallelisms/mixed_precision.py",
        before="cast_forward_inputs=False",
        after="cast_forward_inputs=True",
        tests=("tests/parallelisms/test_same_curve.py", PARITY),
    ),
    Mutation(
        "ranks-added-by-halves",
        "parallelisms/elastic.py",
        before="sums = sums[::2].add_(sums[1::2])",
        after="sums = sums[: len(sums) // 2].add_(sums[len(sums) // 2 :])",
        tests=("tests/parallelisms/test_elastic.py",),
    ),
]

OPTIM = [
    Mutation(
        "remainders-are-lost",
        "optim/one_pass_adamw.py",
        before="    remainder.copy_(bits - (high << 16))\n",
        after="",
        tests=("tests/optim/test_one_pass_adamw.py",),
    ),
    Mutation(
        "skipped-update-changes-a-moment",
        "optim/one_pass_adamw.py",
        before="exp_avg.copy_(torch.where(is_skipped != 0, exp_avg, mean.to(exp_avg.dtype)))",
        after="exp_avg.copy_(mean.to(exp_avg.dtype))",
        tests=("tests/optim/test_one_pass_adamw.py",),
    ),
    Mutation(
        "one-pass-adamw-couples-weight-decay-to-the-gradient",
        "optim/one_pass_adamw.py",
        before="new = old * decay - step_size * mean / (square.sqrt() * inverse_root + eps)",
        after="new = (old - step_size * mean / (square.sqrt() * inverse_root + eps)) * decay",
        tests=("tests/optim/test_one_pass_adamw.py",),
    ),
    Mutation(
        "first-id-of-the-next-rank-counts-as-own",
        "optim/loss.py",
        before="(labels < start + rows.shape[1])",
        after="(labels <= start + rows.shape[1])",
        tests=(cell(tensor=2),),
    ),
    Mutation(
        "largest-logit-not-reduced-over-ranks",
        "optim/loss.py",
        before="""\
        if group is not None:
            dist.all_reduce(row_max, dist.ReduceOp.MAX, group)
""",
        after="",
        tests=(cell(tensor=2),),
    ),
    Mutation(
        # A mesh with tensor parallel alone shards the residual stream over tp only.
        "layer-statistics-of-one-sequence-shard",
        "metrics/layer_stats.py",
        before='dims = ("batch", "cp", "tp", "pp")',
        after='dims = ("batch", "cp", "pp")',
        tests=("tests/metrics/test_layer_stats.py",),
    ),
    Mutation(
        "layer-statistics-count-a-tied-weight-twice",
        "metrics/layer_stats.py",
        before="if p not in set(tied_duplicates)}",
        after="}",
        tests=("tests/metrics/test_layer_stats.py",),
    ),
    Mutation(
        # The last stage's copy of a tied weight then drifts away from the first stage's.
        "tied-copy-is-not-clipped",
        "optim/grad_norm.py",
        before="""\
            shards[groups].append(to_local(parameter.grad))
            if parameter not in duplicates:
                norms_by_group[groups].append(local_norm)
""",
        after="""\
            if parameter not in duplicates:
                shards[groups].append(to_local(parameter.grad))
                norms_by_group[groups].append(local_norm)
""",
        tests=(cell(pipeline="1F1B 2", tied=True),),
    ),
    Mutation(
        # Ranks with shards of other sizes use other fixed-point levels.
        "levels-of-the-exact-norm-by-shard-size",
        "optim/grad_norm.py",
        before="n_elements = sum(p.numel() for p in parameters)",
        after="n_elements = sum(to_local(p).numel() for p in parameters)",
        tests=("tests/reliability/test_elastic.py",),
    ),
    Mutation(
        # Later chunks of the tensor then copy a step count that the first has incremented.
        "first-segment-gets-the-step",
        "optim/chunked_adamw.py",
        before="step if segment is segments[-1] else step.clone()",
        after="step if segment is segments[0] else step.clone()",
        tests=("tests/optim/test_chunked_adamw.py",),
    ),
    Mutation(
        "second-moment-of-copies-not-stored",
        "optim/chunked_adamw.py",
        before="del stored[1], padded[1]",
        after="del stored[1], padded[1], stored[2], padded[2]",
        tests=("tests/optim/test_chunked_adamw.py",),
    ),
    Mutation(
        "rank-without-a-task-does-not-communicate",
        "optim/muon.py",
        before="needs_communication = any(task.needs_communication for task in tasks)",
        after=(
            "needs_communication = any(task.needs_communication for task in tasks"
            " if task.owner == rank)"
        ),
        tests=(cell(model="qwen3_moe", expert=4, optimizer="muon"), "tests/optim/test_muon.py"),
    ),
    Mutation(
        "masked-step-changes-the-momentum",
        "optim/muon.py",
        before="momentum.copy_(torch.where(is_skipped, momentum, updated))",
        after="momentum.copy_(updated)",
        tests=("tests/optim/test_muon.py",),
    ),
    Mutation(
        # A rollback would keep the longest row of bad steps, and with it mask all updates.
        "loaded-guard-keeps-counts-that-are-not-saved",
        "optim/nonfinite.py",
        before="""\
        for name, count in self._counts.items():
            count.fill_(state_dict.get(name, 0))
""",
        after="""\
        for name, count in state_dict.items():
            self._counts[name].fill_(count)
""",
        tests=("tests/optim/test_nonfinite.py",),
    ),
    Mutation(
        "first-nonfinite-value-logged-again",
        "optim/nonfinite.py",
        before='        self._counts["first_step"].zero_()\n',
        after="",
        tests=("tests/optim/test_nonfinite.py",),
    ),
    Mutation(
        "router-bias-ignores-context-parallel",
        "optim/router_bias.py",
        before='for dim in ("batch", "cp", "tp"):',
        after='for dim in ("batch", "tp"):',
        tests=("tests/optim/test_router_bias.py", "tests/parallelisms/test_experts.py"),
    ),
    Mutation(
        # After a rollback the window would begin with steps that were undone.
        "loaded-window-appended",
        "optim/spikes.py",
        before="            self._windows[name].clear()\n",
        after="",
        tests=("tests/optim/test_spikes.py",),
    ),
]

DATA = [
    Mutation(
        "begin-that-the-tokenizer-does-not-put",
        "data/markers.py",
        before='        return None\n    return _single(before, "bos")\n',
        after='        return None\n    return token_name(config, "bos_token")\n',
        tests=("tests/data/test_markers.py",),
    ),
    Mutation(
        "fingerprint-without-markers",
        "data/markers.py",
        before="    if firsts == [bos_id, eos_id]:",
        after="    if firsts[1] == eos_id:",
        tests=("tests/data/test_markers.py",),
    ),
    Mutation(
        "exported-tokenizer-not-compared",
        "data/tokenizer_export.py",
        before="        if written.encode(text, add_special_tokens=False).ids != ids:",
        after="        if False:",
        tests=("tests/data/test_tokenizer_export.py",),
    ),
    Mutation(
        "foreign-rank-file-taken-for-llama3",
        "data/rank_files.py",
        before="    found = PUBLISHED.get(n_ranks)\n",
        after="    found = PUBLISHED.get(n_ranks, PUBLISHED[LLAMA3_RANKS])\n",
        tests=("tests/data/test_tokenizer.py",),
    ),
    Mutation(
        "half-fetched-repository-used",
        "runtime/hub_cache.py",
        before="        get_cached_repo_tree(name.repository, revision=Path(folder).name)\n",
        after="",
        tests=("tests/runtime/test_hub.py",),
    ),
    Mutation(
        "rank-reads-consecutive-microbatches",
        "data/loader.py",
        before="firsts = [(a * dp_degree + config.dp_rank) * size for a",
        after="firsts = [(config.dp_rank * self.n_microbatches + a) * size for a",
        tests=("tests/data/test_loader.py",),
    ),
    Mutation(
        # A remainder of one token has no label, and becomes a sequence of padding.
        "chunk-of-one-token-is-packed",
        "data/packing.py",
        before="starts = range(0, len(ids) - 1, seq_len)",
        after="starts = range(0, len(ids), seq_len)",
        tests=("tests/data/test_packing.py",),
    ),
    Mutation(
        # A run that resumes between windows reads only WINDOW_SEQUENCES for the next one.
        "window-read-ahead-without-end",
        "data/packing.py",
        before="self._read_ahead(min(start.token + 1, WINDOW_SEQUENCES), len(tokens))",
        after="self._read_ahead(start.token + 1, len(tokens))",
        tests=("tests/data/test_packing.py", "tests/test_data_runs.py"),
    ),
    Mutation(
        # Valid sequences with more padding.
        "emptiest-bin-instead-of-the-best",
        "data/packing.py",
        before="space, number = free.pop(at)",
        after="space, number = free.pop()",
        tests=("tests/data/test_packing.py",),
    ),
    Mutation(
        # Rows that share a file with fewer others would skip some of its documents.
        "all-files-shared-by-as-many-rows",
        "data/hub.py",
        before="n_turns = len(range(index, n_rows, n_shards))",
        after="n_turns = -(-n_rows // n_shards)",
        tests=("tests/data/test_tables.py",),
    ),
    Mutation(
        "changed-table-read-from-the-cache",
        "data/storage.py",
        before='time = f"{status.st_mtime_ns} {status.st_ctime_ns}"',
        after='time = f"{status.st_mtime_ns}"',
        tests=("tests/data/test_tables.py",),
    ),
    Mutation(
        # The loss would be divided by a multiple of its tokens under tensor parallel.
        "tokens-of-shared-rows-counted-by-every-reader",
        "data/step_batches.py",
        before='n_tokens = sums["tokens"] // self._n_readers',
        after='n_tokens = sums["tokens"]',
        tests=("tests/data/test_step_batches.py",),
    ),
    Mutation(
        "data-end-after-one-empty-step",
        "data/step_batches.py",
        before="is_end = n_tokens == 0 and n_rows >= self._global_batch_size",
        after="is_end = n_tokens == 0",
        tests=("tests/data/test_step_batches.py",),
    ),
    Mutation(
        "id-equal-to-the-vocabulary-size-passes",
        "data/mixture.py",
        before=".max() < self._vocab_size:",
        after=".max() <= self._vocab_size:",
        tests=("tests/data/test_mixture.py",),
    ),
    Mutation(
        # All rows would begin with the same source.
        "unread-source-has-no-length",
        "data/mixture.py",
        before="length = means[i] or max(longest, first_tokens.get(i, 0))",
        after="length = means[i]",
        tests=("tests/data/test_mixture.py",),
    ),
    Mutation(
        # All rows would soon begin a long document, and then read short ones only.
        "unread-source-has-short-documents",
        "data/mixture.py",
        before="length = means[i] or max(longest, first_tokens.get(i, 0))",
        after="length = means[i] or longest",
        tests=("tests/data/test_mixture.py",),
    ),
    Mutation(
        # The file may come back, but the run has gone on without its documents.
        "unreadable-file-skipped-as-a-bad-record",
        "data/sources.py",
        before="""\
        except ValueError as error:
            logger.warning("data: skipped bad record""",
        after="""\
        except (ValueError, OSError) as error:
            logger.warning("data: skipped bad record""",
        tests=("tests/data/test_token_files.py", "tests/data/test_sources.py"),
    ),
    Mutation(
        "remote-file-read-in-two-versions",
        "data/remote.py",
        before="        self._file.check_version()",
        after="",
        tests=("tests/data/test_s3.py",),
    ),
    Mutation(
        # A server that ignores ranges, or a cut connection, would shift what follows.
        "short-range-accepted",
        "data/remote.py",
        before="if len(content) != size:",
        after="if len(content) > size:",
        tests=("tests/data/test_remote.py",),
        reason="the next request reads what is missing",
    ),
    Mutation(
        "remote-order-by-characters",
        "data/remote.py",
        before='return self.url.split("/") < other.url.split("/")',
        after="return self.url < other.url",
        tests=("tests/data/test_remote.py", "tests/data/test_s3.py"),
    ),
    Mutation(
        "every-epoch-in-the-same-order",
        "data/sources.py",
        before="np.random.Philox, key=[self._seed, epoch]",
        after="np.random.Philox, key=[self._seed, 0]",
        tests=("tests/data/test_sources.py",),
    ),
    Mutation(
        "document-ends-restart-in-every-block",
        "data/write_shards.py",
        before="ends = n_tokens + np.cumsum([len(document) for document in block])",
        after="ends = np.cumsum([len(document) for document in block])",
        tests=("tests/tools/test_prepare.py",),
    ),
    Mutation(
        "shard-not-synced-before-its-metadata",
        "data/write_shards.py",
        before="ends_file.publish()\n    fsync_folder(folder)\n",
        after="ends_file.publish()\n",
        tests=("tests/tools/test_prepare.py::test_shard_is_synced_before_its_metadata",),
    ),
]

CHECKPOINT = [
    Mutation(
        "file-fsynced-before-it-is-flushed",
        "checkpoint/hashed_file.py",
        before="self._file.flush()\n            os.fsync(self._file.fileno())\n",
        after="os.fsync(self._file.fileno())\n            self._file.flush()\n",
        tests=("tests/checkpoint/test_write_errors.py",),
    ),
    Mutation(
        # Would accept an index whose last shard is cut off by one element.
        "shard-may-end-one-element-late",
        "checkpoint/tensor_index.py",
        before="end = shard.file_offset + count * itemsize",
        after="end = shard.file_offset + (count - 1) * itemsize",
        tests=("tests/checkpoint/test_damage.py",),
    ),
    Mutation(
        # After a power cut a visible checkpoint may lack files.
        "scratch-folder-not-fsynced",
        "checkpoint/checkpointer.py",
        before="        fsync_folder(save.scratch)\n",
        after="",
        tests=("tests/checkpoint/test_checkpointer.py", "tests/checkpoint/test_kill.py"),
    ),
    Mutation(
        # After a power cut a checkpoint that was logged may be gone, and older ones deleted.
        "rename-of-a-checkpoint-not-fsynced",
        "checkpoint/checkpointer.py",
        before="save.scratch.rename(folder)\n        fsync_folder(self._folder)\n",
        after="save.scratch.rename(folder)\n",
        tests=("tests/checkpoint/test_checkpointer.py", "tests/checkpoint/test_kill.py"),
    ),
    Mutation(
        "json-state-not-copied-before-they-change",
        "checkpoint/checkpointer.py",
        before="json_state |= {name: deepcopy(s.state_dict()) for",
        after="json_state |= {name: s.state_dict() for",
        tests=("tests/checkpoint/test_checkpointer.py",),
    ),
    Mutation(
        # If the first update was skipped, no checkpoint would have the optimizer's state.
        "writes-not-planned-again-for-new-state",
        "checkpoint/checkpointer.py",
        before="if run_on_rank0(lambda: any(is_new)):",
        after="if self._plan is None:",
        tests=("tests/checkpoint/test_checkpointer.py",),
    ),
    Mutation(
        # A rollback could load a checkpoint that retention is deleting.
        "load-does-not-wait-for-retention",
        "checkpoint/checkpointer.py",
        before="""\
            self._purged.result()
""",
        after="",
        tests=("tests/checkpoint/test_checkpointer.py", "tests/checkpoint/test_checkpoint_dir.py"),
    ),
    Mutation(
        "save-overdue-at-its-limit",
        "checkpoint/checkpointer.py",
        before="step - self.newest_step > limit",
        after="step - self.newest_step >= limit",
        tests=("tests/checkpoint/test_checkpointer.py",),
    ),
    Mutation(
        # Every tensor of another stage would count as unexpected.
        "tensor-unexpected-if-any-rank-does-not-want-it",
        "checkpoint/checkpointer.py",
        before="unexpected = set.intersection(",
        after="unexpected = set.union(",
        tests=(
            "tests/checkpoint/test_checkpointer.py",
            f"{MESHES}::test_pipeline_resumes_bitwise",
        ),
    ),
    Mutation(
        "file-that-the-manifest-omits-is-not-verified",
        "checkpoint/checkpoint_dir.py",
        before='files = {TENSOR_INDEX_FILE: None, STATE_FILE: None} | manifest["files"]',
        after='files = manifest["files"]',
        tests=("tests/checkpoint/test_damage.py", "tests/checkpoint/test_checkpoint_dir.py"),
    ),
    Mutation(
        "exported-files-not-fsynced",
        "checkpoint/hugging_face.py",
        before="""\
        for file in scratch.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
""",
        after="",
        tests=("tests/checkpoint/test_hugging_face_folder.py", "tests/tools/test_convert.py"),
    ),
    Mutation(
        "rename-of-an-exported-folder-not-fsynced",
        "checkpoint/hugging_face.py",
        before="    fsync_folder(path.parent)\n",
        after="",
        tests=("tests/checkpoint/test_hugging_face_folder.py", "tests/tools/test_convert.py"),
    ),
]

MODELS = [
    Mutation(
        "mask-of-the-first-positions",
        "models/transformer.py",
        before="mask = mask.tril(n_keys - n_queries)",
        after="mask = mask.tril()",
        tests=("tests/models/test_kv_cache.py", "tests/parallelisms/test_documents.py"),
    ),
    Mutation(
        # One query is the last position; a causal mask without an offset takes it for the first.
        "one-query-is-causal",
        "models/transformer.py",
        before="is_causal=mask is None and n_queries > 1",
        after="is_causal=mask is None",
        tests=("tests/models/test_kv_cache.py",),
    ),
    Mutation(
        # The residual stream would grow with depth.
        "initial-std-for-one-addition-per-block",
        "models/transformer.py",
        before="residual_std=0.02 / (2 * self.args.n_layers) ** 0.5",
        after="residual_std=0.02 / self.args.n_layers**0.5",
        tests=("tests/models/test_initialization.py",),
    ),
    Mutation(
        # A tied model would begin by predicting its input.
        "tied-embedding-of-unit-std",
        "models/transformer.py",
        before="std=0.02 if is_tied else 1.0",
        after="std=1.0",
        tests=("tests/models/test_initialization.py",),
    ),
    Mutation(
        # bfloat16 has 8 significant bits, so late positions get angles that are far off.
        "rope-table-in-the-weights-dtype",
        "models/transformer.py",
        before="dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)",
        after="dtype = torch.get_default_dtype()",
        tests=("tests/models/test_initialization.py",),
    ),
    Mutation(
        "replicated-weight-gets-the-gradient-of-own-tokens",
        "models/dtensor.py",
        before="placements = [Partial() if p.is_replicate() else p for p in weight.placements]",
        after="placements = list(weight.placements)",
        tests=(cell(model="qwen3_moe", tensor=2),),
    ),
    Mutation(
        "embedding-of-tokens-of-other-ranks-is-not-zero",
        "models/dtensor.py",
        before=".masked_fill(is_elsewhere.unsqueeze(-1), 0.0)",
        after="",
        tests=(cell(tensor=2), "tests/models/test_transformer_sharding.py"),
    ),
    Mutation(
        "convolution-cache-one-position-short",
        "models/kv_cache.py",
        before="min(qkv.shape[1], conv.shape[-1] - 1)",
        after="min(qkv.shape[1], conv.shape[-1] - 2)",
        tests=("tests/models/test_kv_cache.py",),
    ),
    Mutation(
        # erf maps the normal to its CDF only after a division by sqrt(2).
        "initial-decays-are-not-uniform",
        "models/gated_delta_net.py",
        before="torch.erf(self.a_log / math.sqrt(2))",
        after="torch.erf(self.a_log)",
        tests=("tests/models/test_initialization.py",),
    ),
    Mutation(
        "attention-in-the-first-of-every-four-layers",
        "models/qwen3_next.py",
        before="return (layer + 1) % self.attention_every == 0",
        after="return layer % self.attention_every == 0",
        tests=("tests/models/test_hugging_face_moe.py",),
    ),
    Mutation(
        # Changes no shape and no parameter count.
        "llama-32-scaled-like-llama-31",
        "models/llama3.py",
        before="_LLAMA32 = RopeScaling(factor=32.0)",
        after="_LLAMA32 = RopeScaling(factor=8.0)",
        tests=("tests/models/test_initialization.py",),
    ),
]

KERNELS = [
    Mutation(
        # A document that starts where a cached sequence continues would see the earlier state.
        "state-kept-at-a-document-start",
        "kernels/delta_rule.py",
        before="previous = torch.cat([document_ids[:, :1], ids[:, :-1, -1]], dim=1)",
        after="previous = torch.cat([ids[:, 0, :1], ids[:, :-1, -1]], dim=1)",
        tests=("tests/kernels/test_delta_rule.py", "tests/models/test_kv_cache.py"),
    ),
    Mutation(
        "block-attention-sees-the-next-token",
        "kernels/block_attention.py",
        before=".triu_(1)",
        after=".triu_(2)",
        tests=("tests/kernels/test_block_attention.py",),
    ),
    Mutation(
        "kernel-check-accepts-nan",
        "kernels/kernel_check.py",
        before="if not error <= MAX_ERROR:",
        after="if error > MAX_ERROR:",
        tests=("tests/kernels/test_flex_attention.py", "tests/kernels/test_grouped_mm.py"),
    ),
    Mutation(
        "last-block-of-queries-counts-as-full",
        "kernels/flex_attention.py",
        before="    is_full &= (first + block <= n_queries)[:, None]\n",
        after="",
        tests=("tests/kernels/test_flex_attention.py",),
    ),
    Mutation(
        # GPUs that leave gradients of experts without tokens unwritten would pass.
        "grouped-mm-checked-without-an-empty-expert",
        "kernels/grouped_mm.py",
        before="TOKENS_PER_EXPERT = (162, 0, 1283, 446, 0, 83)",
        after="TOKENS_PER_EXPERT = (162, 1, 1283, 446, 1, 83)",
        tests=("tests/kernels/test_grouped_mm.py",),
    ),
]

LAUNCHER_AND_RUNTIME = [
    Mutation(
        # Launcher and ranks share the list, and so do tests.
        "sigusr2-not-handled",
        "runtime/signals.py",
        before='"SIGUSR1", "SIGUSR2", ',
        after='"SIGUSR1", ',
        tests=(
            "tests/runtime/test_control.py",
            "tests/launcher/test_launch.py",
            f"{RESUME}::test_signals_save_and_run_resumes",
        ),
    ),
    Mutation(
        "every-signal-forwarded-as-sigterm",
        "launcher/agent.py",
        before="self._send(signal.SIGTERM if self._n_forwarded else request, self._processes)",
        after="self._send(signal.SIGTERM, self._processes)",
        tests=("tests/launcher/test_launch.py",),
    ),
    Mutation(
        "second-signal-does-not-restart-the-time-limit",
        "launcher/agent.py",
        before="self._deadline = time.monotonic() + SHUTDOWN_SECONDS",
        after="self._deadline = min(self._deadline, time.monotonic() + SHUTDOWN_SECONDS)",
        tests=("tests/launcher/test_launch.py",),
    ),
    Mutation(
        "children-of-ranks-outlive-them",
        "launcher/agent.py",
        before="os.killpg(process.pid, number)",
        after="os.kill(process.pid, number)",
        tests=("tests/launcher/test_launch.py",),
    ),
    Mutation(
        "hung-ranks-are-only-terminated",
        "launcher/agent.py",
        before="self._send(signal.SIGKILL, self.failure.silent)",
        after="self._send(signal.SIGTERM, self.failure.silent)",
        tests=("tests/launcher/test_launch.py",),
    ),
    Mutation(
        # Each node would train its part of the weights in its own way.
        "ranks-are-not-compared",
        "train.py",
        before="    raise_if_unequal(run.facts(device) | (program := program_facts()))\n",
        after="",
        tests=("tests/reliability/test_nodes.py",),
    ),
    Mutation(
        "only-imported-sources-of-the-user-are-compared",
        "runtime/program.py",
        before="for path in trainer for file in path.rglob",
        after="for path in trainer[:0] for file in path.rglob",
        tests=("tests/runtime/test_program.py",),
    ),
    Mutation(
        "ranks-may-load-different-checkpoints",
        "checkpoint/checkpointer.py",
        before='    raise_if_unequal({f"checkpoint {folder}": digests[0]})\n',
        after="",
        tests=("tests/checkpoint/test_checkpointer.py",),
    ),
    Mutation(
        # A scheduler would read how the last attempt ended while this one runs or after it died.
        "exit-code-of-the-last-launcher-stays",
        "launcher/launch.py",
        before="if nodes.rank == 0:\n            clear_previous_end(control)",
        after="if nodes.rank > 0:\n            clear_previous_end(control)",
        tests=("tests/launcher/test_launch.py", "tests/tools/test_slurm_end.py"),
    ),
    Mutation(
        "failed-rank-asks-to-be-requeued",
        "launcher/post_mortem.py",
        before="""\
                print(format_traceback(error), end="", file=sys.stderr)
        if isinstance(error, Exception):
            os._exit(exit_codes.FAILED)
""",
        after="""\
                print(format_traceback(error), end="", file=sys.stderr)
        if isinstance(error, Exception):
            os._exit(exit_codes.PREEMPTED)
""",
        tests=(
            "tests/launcher/test_launch.py",
            "tests/reliability/test_processes.py::test_crash_loop_is_bounded",
        ),
    ),
    Mutation(
        # Without checkpoints a requeued job would begin again for ever.
        "run-without-checkpoints-asks-to-be-requeued",
        "runtime/exit_codes.py",
        before="return StopReason(reason, PREEMPTED if has_checkpoints else FAILED)",
        after="return StopReason(reason, PREEMPTED)",
        tests=("tests/runtime/test_control.py",),
    ),
    Mutation(
        # After a power cut the outcome may be an empty file.
        "atomic-text-not-fsynced",
        "runtime/filesystem.py",
        before="file.flush()\n        os.fsync(file.fileno())\n",
        after="file.flush()\n",
        tests=("tests/runtime/test_control.py", "tests/launcher/test_launch.py"),
    ),
    Mutation(
        # Another order of additions, which depends on the number of ranks.
        "losses-added-rank-by-rank",
        "runtime/distributed.py",
        before=".t().flatten().sum()",
        after=".flatten().sum()",
        tests=("tests/reliability/test_elastic.py",),
    ),
    Mutation(
        # Not equivalent: PyTorch's _StridedShard is no Shard (2.13).
        "strided-shard-counts-as-replicated",
        "runtime/dtensor.py",
        before="return isinstance(placement, Shard) or is_strided(placement)",
        after="return isinstance(placement, Shard)",
        tests=(
            "tests/parallelisms/test_materialize.py",
            cell(tensor=2, context="allgather 2"),
        ),
    ),
    Mutation(
        "failed-write-leaves-a-torn-line",
        "runtime/run_folder.py",
        before="                    os.ftruncate(descriptor, size)\n",
        after="                    pass\n",
        tests=("tests/metrics/test_logger.py",),
    ),
    Mutation(
        # Another run could start in the folder, and both would write.
        "removed-lock-not-noticed",
        "runtime/control.py",
        before="if is_file_at(self._lock.fileno(), path) or read_text(path) == lock_holder():",
        after="if path is not None:",
        tests=("tests/runtime/test_control.py",),
    ),
    Mutation(
        # Failures at steps before those that the rollback undid would never be progress.
        "rollback-keeps-the-count-of-failures",
        "tools/rollback.py",
        before="        record_end(control, outcome)\n",
        after="",
        tests=("tests/launcher/test_failures.py",),
    ),
    Mutation(
        # A full disk may leave control/progress older than the newest checkpoint.
        "progress-not-taken-from-checkpoints",
        "launcher/failures.py",
        before="return step_of(saved[0]) if saved else read_number(",
        after="return read_number(",
        tests=("tests/runtime/test_run_folder.py",),
    ),
]

ROOT_FILES = [
    Mutation(
        # Each run and its reference would be late by the same step.
        "learning-rate-of-the-step-before",
        "train_step.py",
        before="run.lr_factor(step)",
        after="run.lr_factor(step - 1)",
        tests=("tests/test_train.py::test_log_line_says_what_users_look_for",),
    ),
    Mutation(
        "gradients-of-all-steps-add-up",
        "train_step.py",
        before="        self.optimizer.zero_grad()\n",
        after="",
        tests=("tests/test_train.py::test_extended_run_continues_bitwise", "tests/test_overfit.py"),
    ),
    Mutation(
        "update-before-its-mask",
        "train_step.py",
        before="""\
        self.nonfinite.update_found_inf(step, loss=loss, norms=norms, grad_norm=grad_norm)
        self._set_lr(lr)
        if layers is None:
            self.nonfinite.step()
""",
        after="""\
        self._set_lr(lr)
        if layers is None:
            self.nonfinite.step()
            self.nonfinite.update_found_inf(step, loss=loss, norms=norms, grad_norm=grad_norm)
""",
        tests=(PLANTED,),
    ),
    Mutation(
        "resumed-run-keeps-the-long-timeout",
        "train_loop.py",
        before="if state.step == first_step:",
        after="if state.step == 1:",
        tests=(f"{RESUME}::test_resumed_run_equals_uninterrupted_run",),
    ),
    Mutation(
        # A checkpoint between two logged steps may be of a run that must stop.
        "saved-steps-not-checked",
        "train_loop.py",
        before="is_synced = save_is_due or self.log.is_due(state.step)",
        after="is_synced = self.log.is_due(state.step)",
        tests=(f"{PLANTED}::test_nonfinite_loss_stops_the_run_or_is_skipped",),
    ),
    Mutation(
        # A signal may end the run between two logged steps.
        "last-steps-not-checked",
        "train_loop.py",
        before="""\
        if self.train_step.nonfinite.should_stop():
            stop = exit_codes.NOT_FINITE
""",
        after="",
        tests=(f"{PLANTED}::test_nonfinite_step_that_is_neither_logged_nor_saved_stops_the_run",),
    ),
    Mutation(
        "failed-last-save-counts-as-done",
        "train_loop.py",
        before="""\
        return self.checkpointer.newest_step == self.state.step
""",
        after="        return True\n",
        tests=(f"{PLANTED}::test_run_whose_last_save_fails_has_failed",),
    ),
    Mutation(
        "steps-before-unreadable-data-lost",
        "train_loop.py",
        before="""\
                self.save_newest_step(is_worth_saving=is_finite)
""",
        after="",
        tests=(f"{PLANTED}::test_unreadable_file_is_retried_by_a_restart",),
    ),
    Mutation(
        "unlistable-folder-has-no-checkpoints",
        "runtime/run_folder.py",
        before="    except (FileNotFoundError, NotADirectoryError):\n        return []\n    found",
        after="    except OSError:\n        return []\n    found",
        tests=("tests/checkpoint/test_damage.py::test_folder_that_cannot_be_listed_is_not_empty",),
    ),
    Mutation(
        "data-of-a-spike-read-again",
        "train_loop.py",
        before='self.checkpointer.load_latest(skip={"data"})',
        after="self.checkpointer.load_latest()",
        tests=(PLANTED,),
    ),
    Mutation(
        # After a power cut the ledger may lack steps that the checkpoint counts on.
        "ledger-not-durable-before-a-save",
        "run_log.py",
        before="            self._ledger.sync()\n",
        after="            pass\n",
        tests=(f"{PLANTED}::test_spike_is_rolled_back_and_its_data_skipped",),
    ),
    Mutation(
        "resumed-run-forgets-its-tokens",
        "resume.py",
        before='self.step, self.tokens = state_dict["step"], state_dict["tokens"]',
        after='self.step = state_dict["step"]',
        tests=(f"{RESUME}::test_resumed_run_equals_uninterrupted_run",),
    ),
    Mutation(
        "skipped-updates-not-saved",
        "resume.py",
        before='            "nonfinite": train_step.nonfinite,\n',
        after="",
        tests=(f"{PLANTED}::test_nonfinite_loss_stops_the_run_or_is_skipped",),
    ),
    Mutation(
        "loss-of-a-source-over-the-tokens-of-all",
        "validation.py",
        before="found[label] = self._sum(part) / n_tokens",
        after="found[label] = self._sum(part) / sum(self._n_tokens.values())",
        tests=("tests/test_data_runs.py",),
    ),
    Mutation(
        # Right before the first step, and later divided by that step's tokens.
        "pipeline-validates-with-the-divisor-of-training",
        "forward_backward.py",
        before="self._n_tokens, n = 1, len(self._stages) * self._dims.pp_mesh.size()",
        after="n = len(self._stages) * self._dims.pp_mesh.size()",
        tests=(
            f"{MESHES}::test_any_mesh_trains_the_same_model"
            "[debugmodel_tied-ranks2-pp2-Interleaved1F1B]",
        ),
    ),
    Mutation(
        "tied-weight-counts-twice-in-the-norm",
        "forward_backward.py",
        before="self.tied_duplicates = self._tied if dims.pp_mesh.get_local_rank() > 0 else []",
        after="self.tied_duplicates = []",
        tests=(cell(pipeline="1F1B 2", tied=True),),
    ),
    Mutation(
        "graphs-leave-the-last-unit-gathered-after-validation",
        "forward_backward.py",
        before="            reshard(self._model)",
        after="            pass",
        tests=("tests/test_cuda_graphs.py",),
    ),
    Mutation(
        "graph-of-the-last-microbatch-runs-for-all",
        "cuda_graphs.py",
        before="-1 if is_last else min(index, 1)",
        after="-1 if index else 0",
        tests=("tests/test_cuda_graphs.py",),
    ),
    Mutation(
        "graphs-return-one-loss-for-all-microbatches",
        "cuda_graphs.py",
        before="losses.append(graph.loss.clone())",
        after="losses.append(graph.loss)",
        tests=("tests/test_cuda_graphs.py",),
    ),
    Mutation(
        "graph-repeats-its-first-batch",
        "cuda_graphs.py",
        before="                    buffer.copy_(tensor)",
        after="                    pass",
        tests=("tests/test_cuda_graphs.py",),
    ),
    Mutation(
        "graph-repeats-its-first-learning-rate",
        "cuda_graphs.py",
        before="            buffer.copy_(tensor)\n        self._replay()",
        after="            pass\n        self._replay()",
        tests=("tests/test_cuda_graphs.py",),
    ),
    Mutation(
        "graph-updates-with-gradients-of-an-earlier-capture",
        "cuda_graphs.py",
        before="if capture_id != self._capture_id:",
        after="if self._capture_id is None:",
        tests=("tests/test_cuda_graphs.py",),
    ),
    Mutation(
        "update-that-makes-optimizer-state-is-captured-after-a-rollback",
        "cuda_graphs.py",
        before="        self._warm.clear()\n",
        after="",
        tests=("tests/test_cuda_graphs.py",),
    ),
]

SECURITY = [
    Mutation(
        "command-imports-from-the-current-folder",
        "shardloom.py",
        before='"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}',
        after='"PYTHONPATH": path, "PYTHONSAFEPATH": ""}',
        tests=("tests/test_shardloom.py",),
    ),
    Mutation(
        "model-of-a-checkpoint-is-imported",
        "saved_model.py",
        before='given is None and ":" not in name',
        after="given is None",
        tests=("tests/reliability/test_untrusted.py",),
    ),
    Mutation(
        "link-is-opened",
        "runtime/filesystem.py",
        before="FLAGS[mode] | os.O_NOFOLLOW |",
        after="FLAGS[mode] |",
        tests=(LINKS,),
    ),
    Mutation(
        "hard-link-is-written",
        "runtime/filesystem.py",
        before="status.st_nlink > 1",
        after="status.st_nlink > 2",
        tests=(LINKS,),
    ),
    Mutation(
        "folder-that-is-a-link-is-used",
        "runtime/filesystem.py",
        before="    reject_link(folder)\n",
        after="",
        tests=(LINKS,),
    ),
    Mutation(
        "scratch-file-that-is-a-link-is-written",
        "runtime/filesystem.py",
        before="""\
    scratch.unlink(missing_ok=True)
    with scratch.open("x",\
""",
        after='    with scratch.open("w",',
        tests=(LINKS,),
    ),
    Mutation(
        "link-to-a-checkpoint-stays",
        "checkpoint/checkpoint_dir.py",
        before="if trash.is_symlink():",
        after="if False:",
        tests=(LINKS,),
    ),
    Mutation(
        "launcher-writes-through-links",
        "launcher/launch.py",
        before="        check_run_folder(control.parent)\n        exit_codes.clear",
        after="        exit_codes.clear",
        tests=(LINKS,),
    ),
    Mutation(
        "rejected-start-writes-through-a-link",
        "launcher/launch.py",
        before="    with suppress(OSError):  # Links are not followed.\n"
        "        check_run_folder(control.parent)\n",
        after="    with suppress(OSError):  # Links are not followed.\n",
        tests=(LINKS,),
    ),
    Mutation(
        "buffers-of-any-size",
        "saved_model.py",
        before="if extra > n_bytes + EXTRA_BYTES:",
        after="if extra > 2**62:",
        tests=("tests/reliability/test_untrusted.py",),
    ),
    Mutation(
        "log-lines-with-line-breaks",
        "runtime/log.py",
        before="        return printable(text)\n",
        after="        return printable_lines(text)\n",
        tests=("tests/runtime/test_printable.py",),
    ),
    Mutation(
        "message-of-a-config-error-is-not-escaped",
        "runtime/log.py",
        before='return "\\n".join(map(printable, messages))',
        after='return "\\n".join(messages)',
        tests=("tests/runtime/test_printable.py",),
    ),
]

REPORT = [
    Mutation(
        "spikes-of-long-runs-are-hidden",
        "report/history.py",
        before="high.append(max(known, default=None))",
        after="high.append(mean[-1])",
        tests=("tests/report/test_history.py",),
    ),
    Mutation(
        "repeated-steps-are-plotted-twice",
        "metrics/history.py",
        before="_place(history.training[-1]) >= _first_undone(line)",
        after="_place(history.training[-1]) > _first_undone(line)",
        tests=("tests/metrics/test_history.py",),
    ),
    Mutation(
        "report-runs-any-script",
        "report/page.py",
        before='"script-src": _hash(script),',
        after='"script-src": "\'unsafe-inline\'",',
        tests=("tests/report/test_page.py",),
    ),
    Mutation(
        "report-is-served-under-any-name",
        "report/watch.py",
        before="return name.lower() in HOSTS and",
        after="return name != '' and",
        tests=("tests/report/test_watch.py",),
    ),
    Mutation(
        "other-files-are-overwritten-by-a-report",
        "tools/report.py",
        before="    check_output(output, MARKER)\n",
        after="",
        tests=("tests/tools/test_report.py",),
    ),
]

ALARMS = [
    Mutation(
        "peaks-are-leaks",
        "metrics/leaks.py",
        before="self._lowest = min(self._lowest, value)",
        after="self._lowest = value",
        tests=("tests/metrics/test_leaks.py",),
    ),
    Mutation(
        "slow-leaks-are-missed",
        "metrics/leaks.py",
        before="            if count % SCALE:\n                return\n",
        after="            return\n",
        tests=("tests/metrics/test_leaks.py",),
    ),
    Mutation(
        "a-spike-diverges",
        "metrics/divergence.py",
        before="or min(losses) <=",
        after="or max(losses) <=",
        tests=("tests/metrics/test_divergence.py",),
    ),
    Mutation(
        "alarms-are-in-no-report",
        "run_log.py",
        before="            self._alarms.end_step(step)\n",
        after="            self._alarms.close()\n",
        tests=("tests/test_troubles.py",),
    ),
]

MUTATIONS = [
    *PARALLELISMS,
    *OPTIM,
    *DATA,
    *CHECKPOINT,
    *MODELS,
    *KERNELS,
    *LAUNCHER_AND_RUNTIME,
    *ROOT_FILES,
    *SECURITY,
    *REPORT,
    *ALARMS,
]
