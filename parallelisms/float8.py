"""Matrix products in float8 (arXiv 2209.05433), with scales found anew in each step.

A linear layer has three: x W' forward, g W and g' x backward. Parameters, gradients and all else
keep their dtypes; products are added up in float32 by the hardware.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from config.job_config import Float8
from runtime.compat import DISABLED_TORCH_FUNCTION, require, scaled_mm
from runtime.distributed import local_part
from runtime.log import logger


@dataclass(frozen=True)
class Recipe:
    gradient_dtype: torch.dtype
    """E5M2 has the range of float16, E4M3 one more bit of precision."""
    is_rowwise: bool
    """A scale for each row of the first and column of the second matrix, a power of two; else one
    for each matrix."""


Matmul = Callable[..., torch.Tensor]
"""As ``runtime.compat.scaled_mm``."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# As torchao publishes them (torchao/float8/config.py).
RECIPES = {
    "tensorwise": Recipe(gradient_dtype=E5M2, is_rowwise=False),
    "rowwise": Recipe(gradient_dtype=E4M3, is_rowwise=True),
}


def apply_float8(blocks: nn.ModuleDict, *, config: Float8) -> None:
    """Let the linear layers of ``blocks`` multiply in float8. Mutates ``blocks``; FQNs stay.

    Left out, and logged with the reason: what ``config`` names, what the hardware cannot multiply,
    and what would not pay. The output layer is in no block; a router is no plain ``nn.Linear``.
    Raises ``ValueError`` if nothing is left, or if a name in ``config.skip`` matches nothing.
    """
    if config.recipe == "none":
        return
    recipe = RECIPES[config.recipe]
    converted, left = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for layer, block in blocks.items():
        for name, module in list(block.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            reason = _why_not(module, f"{layer}.{name}", recipe, config)
            (left if reason else converted)[f"{name} ({reason})" if reason else name].append(layer)
            if not reason:
                owner, _, attribute = name.rpartition(".")
                linear = Float8Linear(module, recipe, is_emulated=config.emulate)
                setattr(block.get_submodule(owner), attribute, linear)
    unused = [part for part in config.skip if not any(repr(part) in reason for reason in left)]
    if unused:
        raise ValueError(f"float8.skip: no linear layer of a block is called {unused}")
    if not converted:
        raise ValueError(f"float8.recipe: of no use, all linear layers are left out: {list(left)}")
    for what, found in (("in", converted), ("not in", left)):
        for name, layers in found.items():
            logger.info("float8: %s of %d blocks %s %s products",
                        name, len(layers), what, config.recipe)  # fmt: skip


def _why_not(linear: nn.Linear, fqn: str, recipe: Recipe, config: Float8) -> str:
    """Why ``linear`` stays as it is; "" if it is converted."""
    n, k = local_part(linear.weight).shape
    for part in config.skip:
        if part in fqn:
            return f"float8.skip {part!r}"
    if type(linear) is not nn.Linear or linear.bias is not None:
        return "not a plain linear"
    if isinstance(linear.weight, DTensor) and not linear.weight.placements[0].is_shard():
        return "not cut by tensor parallel"
    if k % 16 or n % 16:
        return f"{k} to {n} on a rank: not multiples of 16"
    if config.skip_small and _is_small(k, n, recipe):
        return f"{k} to {n} on a rank: too small to pay"
    return ""


def _is_small(k: int, n: int, recipe: Recipe) -> bool:
    """From k to n features, slower than bfloat16 on an H100 (torchao/float8, README and its
    ``_auto_filter_for_recipe``), since finding the scales costs more than the product gains."""
    if recipe.is_rowwise:
        return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    return k <= 4096 and n <= 1024


class Float8Linear(nn.Linear):
    """In place of ``linear``, with its weight, and the hooks that tensor parallel gave it."""

    def __init__(self, linear: nn.Linear, recipe: Recipe, *, is_emulated: bool) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(linear))
        self.recipe, self.matmul = recipe, emulated_mm if is_emulated else scaled_mm()
        self.is_gathered_in_float8 = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., k) to (..., n). Under tensor parallel both are DTensors, and each rank finds the
        scales of its own part: they are finer than those of the whole, and nothing is exchanged."""
        if not isinstance(self.weight, DTensor):
            return self._multiply(input, self.weight)
        assert isinstance(input, DTensor), "tensor parallel gives DTensors to what it cuts"
        features: Placement = Shard(input.ndim - 1)
        # Column-wise, all of x makes some outputs; row-wise, part of x makes a part of each.
        of_x, of_gradient, of_out = (
            (Replicate(), Partial(), features)
            if self.weight.placements == (Shard(0),)
            else (features, features, Partial())
        )
        x = input.redistribute(placements=[of_x]).to_local(grad_placements=[of_gradient])
        out = self._multiply(x, self.weight.to_local())
        return DTensor.from_local(out, self.weight.device_mesh, [of_out], run_check=False)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _Float8Linear.apply(x, weight, self.recipe, self.matmul)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, matmul: Matmul
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        scales = _of_each(rows, E4M3, recipe), _of_each(weight, E4M3, recipe)
        ctx.save_for_backward(x, weight, *scales)
        ctx.recipe, ctx.matmul = recipe, matmul
        out = multiply(rows, weight.t(), E4M3, *scales, is_fast=True, matmul=matmul)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, x_scale, weight_scale = ctx.saved_tensors
        g, dtype = gradients[0].flatten(0, -2), ctx.recipe.gradient_dtype
        g_scale = _of_each(g, dtype, ctx.recipe)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = multiply(
                g, weight, dtype, g_scale, weight_scale,
                is_fast=False, matmul=ctx.matmul,
            ).view_as(x)  # fmt: skip
        if ctx.needs_input_grad[1]:
            of_weight = multiply(
                g.t(), x.flatten(0, -2), dtype, g_scale, x_scale,
                is_fast=False, matmul=ctx.matmul,
            )  # fmt: skip
        return of_x, of_weight, None, None


def _of_each(matrix: torch.Tensor, dtype: torch.dtype, recipe: Recipe) -> torch.Tensor | None:
    """A matrix's scale in both of its products; None: they have scales of rows or of columns."""
    return None if recipe.is_rowwise else find_scale(matrix, dtype)


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    a_dtype: torch.dtype,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    *,
    is_fast: bool,
    matmul: Matmul,
) -> torch.Tensor:
    """a (m, k) times b (k, n), rounded to ``a_dtype`` and E4M3, to (m, n) in a's dtype.

    Error of an operand: half of its last bit, 2^-4 of an element in E4M3, 2^-3 in E5M2, until an
    element is so small beside its scale's greatest (2^-15 in E4M3, 2^-30 in E5M2) that it loses
    bits. If a scale is None, each row of a, or column of b, gets its own. ``is_fast``: sums of less
    precision, as is usual in forward. k and n must be multiples of 16.
    """
    a_scale = find_scale(a, a_dtype, dim=1) if a_scale is None else a_scale
    b_scale = find_scale(b, E4M3, dim=0) if b_scale is None else b_scale
    # The hardware reads both along k.
    a8 = round_to(a, a_scale, a_dtype).contiguous()
    b8 = round_to(b, b_scale, E4M3).t().contiguous().t()
    out_dtype = a.dtype if a.dtype == torch.bfloat16 else torch.float32
    out = matmul(
        a8, b8, scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=is_fast
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
    """What the hardware computes, in float32."""
    return (a.to(torch.float32) * scale_a) @ (b.to(torch.float32) * scale_b)


def find_scale(x: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> torch.Tensor:
    """What to divide x (m, n) by, float32, so that its greatest becomes the greatest of ``dtype``.

    Without ``dim`` one scale, (); else one for each index of the other dim, (m, 1) or (1, n), and
    powers of two, so that only ``dtype`` rounds. A ``Float8Weight`` has its scale.
    """
    if isinstance(x, Float8Weight):
        return x.scale
    x = x.to(torch.float32).abs()
    scale = scale_of(x.amax() if dim is None else x.amax(dim, keepdim=True), dtype)
    if dim is not None:
        # Up to the next power of two: float32 has its exponent above 23 bits.
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    return scale


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What to divide by so that ``amax``, float32, becomes the greatest of ``dtype``."""
    return (amax / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)


def round_to(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x divided by ``scale``, in ``dtype``; what is not finite stays so.

    A ``Float8Weight`` was rounded before.
    """
    if isinstance(x, Float8Weight):
        return x.rounded
    greatest = torch.finfo(dtype).max
    return (x.to(torch.float32) / scale).clamp_(-greatest, greatest).to(dtype)


_aten = torch.ops.aten
# The views that FSDP2 and autograd take of a parameter, and the transpose.
_VIEWS = {getattr(_aten, name).default for name in ("as_strided", "detach", "t", "view")}


class Float8Weight(torch.Tensor):
    """A weight (n, k) that is in float8 already: ``rounded`` times ``scale``.

    To autograd it has dtype ``dtype``, as its gradients do. ``Float8Linear`` can
    multiply with it; whatever would read its elements raises ``NotImplementedError``.
    """

    rounded: torch.Tensor
    scale: torch.Tensor
    __torch_function__ = DISABLED_TORCH_FUNCTION

    @staticmethod
    def __new__(
        cls, rounded: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> "Float8Weight":
        make = require("torch:Tensor._make_wrapper_subclass", key="float8.recipe")
        weight = make(
            cls, rounded.shape, strides=rounded.stride(), dtype=dtype, device=rounded.device
        )
        weight.rounded, weight.scale = rounded, scale
        return weight

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        if func not in _VIEWS:
            raise NotImplementedError(f"{func} of a weight that is in float8")
        weight, *others = args
        return cls(func(weight.rounded, *others, **kwargs or {}), weight.scale, weight.dtype)

    # The compiler takes it apart and puts it together again.
    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["rounded", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> "Float8Weight":
        return Float8Weight(inner["rounded"], inner["scale"], dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8Weight({tuple(self.shape)}, {self.dtype})"
