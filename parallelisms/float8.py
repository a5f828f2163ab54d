"""Float8 GEMMs (arXiv 2209.05433) with dynamic scaling: each step computes new scales.

A linear layer has three GEMMs: x W' in forward, g W and g' x in backward. Parameters, gradients
and everything else keep their dtypes; the hardware accumulates in float32.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from config import ConfigError
from config.job_config import Float8
from runtime.compat import DISABLED_TORCH_FUNCTION, require, scaled_mm
from runtime.dtensor import to_local
from runtime.log import logger


@dataclass(frozen=True)
class Recipe:
    """Dtype of gradients and granularity of scales."""

    gradient_dtype: torch.dtype
    """E5M2 has the range of float16, E4M3 one more bit of precision."""
    is_rowwise: bool
    """True: power-of-two scales, one per row of the first and per column of the second operand.
    False: one scale per tensor."""


Matmul = Callable[..., torch.Tensor]
"""Signature of the function that ``runtime.compat.scaled_mm`` returns."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The recipes of torchao (torchao/float8/config.py).
RECIPES = {
    "tensorwise": Recipe(gradient_dtype=E5M2, is_rowwise=False),
    "rowwise": Recipe(gradient_dtype=E4M3, is_rowwise=True),
}


def check_float8(model: nn.Module, blocks: nn.ModuleDict, *, config: Float8) -> None:
    """Raise ``ConfigError`` if ``config`` converts no layer of the whole, unsharded ``model``, or
    if an entry of ``config.skip`` matches none."""
    if config.recipe == "none":
        return
    found = list(_linears(model, blocks))
    for entry in config.skip:
        if not any(_entry_of(linear.fqn, [entry]) for linear in found):
            text = f"float8.skip: no linear layer of a block has {entry!r} in its FQN, such as"
            raise ConfigError([f"{text} {found[0].fqn if found else None}"])
    reasons = [(linear.name, _skip_reason(linear, config)) for linear in found]
    if all(reason for _, reason in reasons):
        _raise_without_layers(f"{name} ({reason})" for name, reason in reasons)


def apply_float8(model: nn.Module, blocks: nn.ModuleDict, *, config: Float8) -> None:
    """Replace the ``nn.Linear`` layers of the ``blocks`` of ``model``, or of a pipeline stage, by
    ``Float8Linear``. Mutates both.

    FQNs stay. Skipped, and logged with the reason: layers that match ``config.skip``, shapes that
    the hardware does not support, and layers too small to get faster. The output layer is in no
    block; a router is not a plain ``nn.Linear``. Raises ``ConfigError`` if tensor parallel leaves
    no layer to convert.
    """
    if config.recipe == "none":
        return
    converted, kept = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    linears = list(_linears(model, blocks))
    for linear in linears:
        if reason := _skip_reason(linear, config):
            kept[f"{linear.name} ({reason})"].append(linear.layer)
            continue
        converted[linear.name].append(linear.layer)
        owner, _, attribute = linear.fqn.rpartition(".")
        new = Float8Linear(linear.module, RECIPES[config.recipe], is_emulated=config.emulate)
        setattr(model.get_submodule(owner), attribute, new)
    # A pipeline stage may consist of blocks in which entries of ``skip`` match.
    matched = {linear.layer for linear in linears if _entry_of(linear.fqn, config.skip)}
    if not converted and blocks.keys() - matched:
        _raise_without_layers(kept)
    for what, found in (("converted to", converted), ("not converted to", kept)):
        for name, layers in found.items():
            logger.info("float8: %s of %d blocks: %s %s",
                        name, len(layers), what, config.recipe)  # fmt: skip


def _raise_without_layers(skipped: Iterable[str]) -> NoReturn:
    skipped = list(dict.fromkeys(skipped))
    raise ConfigError([f"float8.recipe: all linear layers are skipped: {skipped}"])


class _Linear(NamedTuple):
    """A linear layer of a block."""

    module: nn.Linear
    fqn: str
    layer: str
    name: str
    """In its block."""


def _linears(model: nn.Module, blocks: nn.ModuleDict) -> Iterator[_Linear]:
    fqns = {module: fqn for fqn, module in model.named_modules()}
    for layer, block in blocks.items():
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                yield _Linear(module, fqns[module], layer, name)


def _entry_of(fqn: str, entries: Iterable[str]) -> str | None:
    """First of ``entries`` that is a part of ``fqn``: one or more of the names between its dots."""
    return next((entry for entry in entries if f".{entry}." in f".{fqn}."), None)


def _skip_reason(linear: _Linear, config: Float8) -> str:
    """Reason not to convert ``linear``; "" if it is converted."""
    weight, recipe = linear.module.weight, RECIPES[config.recipe]
    n, k = to_local(weight).shape
    if entry := _entry_of(linear.fqn, config.skip):
        return f"float8.skip {entry!r}"
    if type(linear.module) is not nn.Linear or linear.module.bias is not None:
        return "not a plain nn.Linear"
    if isinstance(weight, DTensor) and not weight.placements[0].is_shard():
        return "not sharded by tensor parallel"
    if k % 16 or n % 16:
        return f"{k} -> {n} on a rank: not multiples of 16"
    if config.skip_small and _is_small(k, n, recipe):
        return f"{k} -> {n} on a rank: too small to get faster"
    return ""


def _is_small(k: int, n: int, recipe: Recipe) -> bool:
    """True if a k -> n layer is slower than in bfloat16 on an H100, where its scales cost more than
    its GEMMs gain. Thresholds: torchao/float8, README and ``_auto_filter_for_recipe``."""
    if recipe.is_rowwise:
        return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    return k <= 4096 and n <= 1024


class Float8Linear(nn.Linear):
    """Replacement of ``linear`` that shares its weight and its tensor parallel hooks."""

    def __init__(self, linear: nn.Linear, recipe: Recipe, *, is_emulated: bool) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(linear))
        self.recipe = recipe
        self.multiply = _multiply(recipe, emulated_mm if is_emulated else scaled_mm())
        self.is_gathered_in_float8 = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., k) to (..., n), both DTensors under tensor parallel. Each rank then scales what it
        multiplies, which is finer than one scale for the whole tensor."""
        if not isinstance(self.weight, DTensor):
            return self.multiply(input, self.weight)
        assert isinstance(input, DTensor), "tensor parallel passes DTensors to sharded linears"
        features: Placement = Shard(input.ndim - 1)
        # Colwise: x is replicated and out sharded. Rowwise: x is sharded and out a partial sum.
        x_placement, grad_placement, out_placement = (
            (Replicate(), Partial(), features)
            if self.weight.placements == (Shard(0),)
            else (features, features, Partial())
        )
        # Backward of a redistribution, even to the same placement, would all-reduce the gradient.
        if input.placements != (x_placement,):
            input = input.redistribute(placements=[x_placement])
        x = input.to_local(grad_placements=[grad_placement])
        out = self.multiply(x, self.weight.to_local())
        return DTensor.from_local(out, self.weight.device_mesh, [out_placement], run_check=False)


@cache
def _multiply(
    recipe: Recipe, matmul: Matmul
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The same function for all layers, which then share compilations."""

    # Dynamo would trace backward with plain gradients; tensor parallel has them in float8.
    @torch.compiler.allow_in_graph
    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _Float8Linear.apply(x, weight, recipe, matmul)

    return multiply


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, matmul: Matmul
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        scales = _tensorwise_scale(rows, E4M3, recipe), _tensorwise_scale(weight, E4M3, recipe)
        ctx.save_for_backward(x, weight, *scales)
        ctx.recipe, ctx.matmul = recipe, matmul
        out = float8_matmul(rows, weight.t(), E4M3, *scales, use_fast_accum=True, matmul=matmul)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, x_scale, weight_scale = ctx.saved_tensors
        g, dtype = gradients[0].flatten(0, -2), ctx.recipe.gradient_dtype
        g_scale = _tensorwise_scale(g, dtype, ctx.recipe)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = float8_matmul(
                g, weight, dtype, g_scale, weight_scale,
                use_fast_accum=False, matmul=ctx.matmul,
            ).view_as(x)  # fmt: skip
        if ctx.needs_input_grad[1]:
            weight_grad = float8_matmul(
                g.t(), x.flatten(0, -2), dtype, g_scale, x_scale,
                use_fast_accum=False, matmul=ctx.matmul,
            )  # fmt: skip
        return x_grad, weight_grad, None, None


def _tensorwise_scale(x: torch.Tensor, dtype: torch.dtype, recipe: Recipe) -> torch.Tensor | None:
    """Scale of x in both of its GEMMs; None if each GEMM computes scales per row or column."""
    return None if recipe.is_rowwise else compute_scale(x, dtype)


def float8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    a_dtype: torch.dtype,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    *,
    use_fast_accum: bool,
    matmul: Matmul,
) -> torch.Tensor:
    """a (m, k) @ b (k, n), quantized to ``a_dtype`` and E4M3, to (m, n) in a's dtype.

    Relative rounding error: up to 2^-4 in E4M3, 2^-3 in E5M2. Elements below 2^-15 (E4M3) or 2^-30
    (E5M2) of their scale's amax lose more bits.
    A scale of None: computed per row of a, or per column of b. k and n: multiples of 16.
    ``use_fast_accum``: accumulate with less precision, as is usual in forward.
    """
    a_scale = compute_scale(a, a_dtype, dim=1) if a_scale is None else a_scale
    b_scale = compute_scale(b, E4M3, dim=0) if b_scale is None else b_scale
    # The GEMM needs both operands contiguous along k.
    a8 = quantize(a, a_scale, a_dtype).contiguous()
    b8 = quantize(b, b_scale, E4M3).t().contiguous().t()
    out_dtype = a.dtype if a.dtype == torch.bfloat16 else torch.float32
    out = matmul(
        a8, b8, scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=use_fast_accum
    )
    return out.to(a.dtype)


def emulated_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """The hardware's GEMM in float32: float8 a (m, k) and b (k, n) to (m, n)."""
    return (a.to(torch.float32) * scale_a) @ (b.to(torch.float32) * scale_b)


def compute_scale(x: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> torch.Tensor:
    """Scale s (float32) such that amax(x / s) == finfo(dtype).max, for x (m, n).

    Per tensor, (). With ``dim``, amax is over ``dim``, (1, n) or (m, 1), and s is rounded up to a
    power of two, so that dividing by it is exact. A ``Float8Tensor`` returns its own scale.
    """
    if isinstance(x, Float8Tensor):
        return x.scale
    x = x.to(torch.float32).abs()
    scale = scale_from_amax(x.amax() if dim is None else x.amax(dim, keepdim=True), dtype)
    if dim is not None:
        # Round up to a power of two: the addition carries from the 23 mantissa bits.
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    return scale


def scale_from_amax(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scale s (float32) such that amax / s == finfo(dtype).max, elementwise; s > 0."""
    return (amax / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x / ``scale`` in ``dtype``, clamped to its range; NaN and inf / inf give NaN.

    A ``Float8Tensor`` is already quantized and returns its ``qdata``.
    """
    if isinstance(x, Float8Tensor):
        return x.qdata
    limit = torch.finfo(dtype).max
    return (x.to(torch.float32) / scale).clamp_(-limit, limit).to(dtype)


# Private names without which ``Float8Tensor`` does not work.
WRAPPER_NAMES = ("torch:Tensor._make_wrapper_subclass", "torch:_C._disabled_torch_function_impl")
_aten = torch.ops.aten
# Views that FSDP2 and autograd take of a parameter, and the transpose.
_VIEWS = {getattr(_aten, name).default for name in ("as_strided", "detach", "t", "view")}


class Float8Tensor(torch.Tensor):
    """Tensor that is already in float8: ``qdata``, of its shape, times ``scale`` ().

    A weight, or what tensor parallel gathered. Autograd sees ``dtype``, the dtype of its gradients.
    Only ``Float8Linear`` multiplies with it; operations that read its elements raise
    ``NotImplementedError``.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    __torch_function__ = DISABLED_TORCH_FUNCTION

    @staticmethod
    def __new__(
        cls, qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> "Float8Tensor":
        make = require("torch:Tensor._make_wrapper_subclass", key="float8.recipe")
        tensor = make(cls, qdata.shape, strides=qdata.stride(), dtype=dtype, device=qdata.device)
        tensor.qdata, tensor.scale = qdata, scale
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        if func not in _VIEWS:
            raise NotImplementedError(
                f"{func} reads a tensor that was gathered in float8, as only float8 layers can:"
                " name one of those that read it in float8.skip"
            )
        tensor, *others = args
        return cls(func(tensor.qdata, *others, **kwargs or {}), tensor.scale, tensor.dtype)

    # torch.compile flattens and rebuilds tensor subclasses.
    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["qdata", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> "Float8Tensor":
        return Float8Tensor(inner["qdata"], inner["scale"], dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8Tensor({tuple(self.shape)}, {self.dtype})"
