"""Keep weights tied while modules get new parameters."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.nn as nn

from config import ConfigError


@contextmanager
def preserve_tied_weights(model: nn.Module) -> Iterator[None]:
    """On exit, tie the parameters again that were tied on entry. Mutates ``model``.

    ``parallelize_module`` and ``to_empty`` give every module a parameter of its own.
    """
    groups = fqns_by_parameter(model)
    yield
    for first, *others in groups:
        for fqn in others:
            path, _, name = fqn.rpartition(".")
            model.get_submodule(path).register_parameter(name, model.get_parameter(first))


def fqns_by_parameter(model: nn.Module) -> list[list[str]]:
    """Return all FQNs of each parameter."""
    fqns = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        fqns[parameter].append(fqn)
    return list(fqns.values())


def common_module(model: nn.Module, fqns: Iterable[str]) -> str:
    """Return the path of the deepest module with a forward that has the parameters ``fqns``."""
    common: list[str] = []
    for names in zip(*(fqn.split(".")[:-1] for fqn in fqns), strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    # Containers such as ModuleDict have none.
    while common and type(model.get_submodule(".".join(common))).forward is nn.Module.forward:
        common.pop()
    return ".".join(common)


@contextmanager
def forbid_untying(model: nn.Module) -> Iterator[None]:
    """Raise ``ConfigError`` on exit if parameters that were tied on entry no longer are."""
    before = _ties(model)
    yield
    after = _ties(model)
    for fqns in (fqns for fqns in before if fqns not in after):
        text = f"{' = '.join(fqns)} would be sharded apart: fsdp_units must have one unit with all"
        raise ConfigError([f"parallelism.data_parallel: {text}"])


def check_recomputed_ties(
    model: nn.Module, blocks: nn.ModuleDict, *, regions: Iterable[str]
) -> None:
    """Raise ``ConfigError`` if backward recomputes only some of the modules that share a weight.

    ``regions``: methods of a block by dotted path that are recomputed on their own; if there are
    none, each block is.
    """
    paths = {module: path for path, module in model.named_modules()}
    recomputed = []
    for block in blocks.values():
        for region in regions or ["forward"]:
            owner, _, method = region.rpartition(".")
            recomputed.append((paths[block.get_submodule(owner)], method))
    for fqns in _ties(model):
        # Its forward casts or gathers the weight, and is over when backward begins.
        owner = common_module(model, fqns)
        for path, method in recomputed:
            is_inside = path == owner and method == "forward"
            if is_inside or not _is_in(path, owner) or not any(_is_in(fqn, path) for fqn in fqns):
                continue
            text = f"{path}.{method} would be recomputed without what else has {' = '.join(fqns)}"
            remedy = 'set "none", and with simple_fsdp fsdp_reshard_after_forward = "never"'
            raise ConfigError([f"activation_checkpoint.mode: {text}: {remedy}"])


def _is_in(name: str, path: str) -> bool:
    """True if the module or parameter ``name`` is in the module at ``path``, or is it."""
    return not path or f"{name}.".startswith(f"{path}.")


def _ties(model: nn.Module) -> list[list[str]]:
    return [fqns for fqns in fqns_by_parameter(model) if len(fqns) > 1]
