"""FlashAttention 3 and 4 are taken where they are installed and compute what they should."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend, activate_flash_attention_impl

from runtime import attention
from runtime.attention import (
    ORDER,
    activate_newest_flash,
    check_attention,
    kernel_order,
    plain_attention,
)

# There is one, so that it seems to be installed.
INSTALLED = {"FA3": ("json", (9, 0))}


def found(**changes: object) -> str:
    """Which is activated on a Hopper; without it here, its kernel and its place are others'."""
    on_cpu = lambda *args, **kwargs: check_attention(*args, **kwargs | {"device": "cpu"})  # noqa: E731
    settings = {"FLASHES": INSTALLED, "check_attention": on_cpu, "_flash": plain_attention}
    settings |= {"activate_flash_attention_impl": lambda name: None} | changes
    with (
        patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        patch.multiple(attention, **settings),
    ):
        return activate_newest_flash(heads=(4, 2), head_dim=64)


def test_what_is_installed_is_taken() -> None:
    assert found() == "FA3"
    assert found(FLASHES={"FA3": ("flash_attn_interface_of_nobody", (9, 0))}) == ""
    assert found(FLASHES={"FA4": ("json", (10, 0))}) == ""
    assert found(FLASHES={"FA4": ("nobody.cute", (9, 0))} | INSTALLED) == "FA3"


def test_a_package_that_cannot_be_imported_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FlashAttention 2, which is around 4, built for another PyTorch."""
    (tmp_path / "torn_flash.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert found(FLASHES={"FA4": ("torn_flash.cute", (9, 0))}) == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        # PyTorch's own, which does not find the package.
        ({"activate_flash_attention_impl": activate_flash_attention_impl}, "flash_attn_interface"),
        ({"_flash": lambda q, k, v: plain_attention(q, k, v.roll(1, dims=2))}, "off by"),
    ],
    ids=["another build", "other results"],
)
def test_what_does_not_work_is_told_and_left(
    changes: dict[str, object], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(**changes) == ""
    assert "not with FA3" in caplog.text
    assert told in caplog.text


@pytest.mark.parametrize(
    ("major", "has_newer_flash", "first"),
    [
        (8, False, SDPBackend.FLASH_ATTENTION),
        (9, False, SDPBackend.CUDNN_ATTENTION),
        (9, True, SDPBackend.FLASH_ATTENTION),
        (10, False, SDPBackend.CUDNN_ATTENTION),
        (12, False, SDPBackend.FLASH_ATTENTION),
    ],
)
def test_the_fastest_kernel_of_a_gpu_comes_first(
    major: int, has_newer_flash: bool, first: SDPBackend
) -> None:
    order = kernel_order(major, has_newer_flash=has_newer_flash)
    assert order == [first, *[backend for backend in ORDER if backend != first]]
