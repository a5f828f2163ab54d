"""FlashAttention 3 and 4 are used where they are installed and pass the check."""

from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from torch.nn.attention import SDPBackend, activate_flash_attention_impl

from kernels import sdpa
from kernels.sdpa import (
    PRIORITY,
    activate_newest_flash,
    backend_priority,
    check_attention,
    plain_attention,
)

# ``json`` always exists, so FlashAttention 3 seems to be installed.
INSTALLED = {"FA3": ("json", (9, 0))}


def activated(**changes: object) -> str:
    """Return the implementation activated on a simulated Hopper GPU."""
    on_cpu = lambda *args, **kwargs: check_attention(*args, **kwargs | {"device": "cpu"})  # noqa: E731
    settings = {"FLASH_PACKAGES": INSTALLED, "check_attention": on_cpu, "_flash": plain_attention}
    settings |= {"activate_flash_attention_impl": lambda name: None} | changes
    with (
        patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        patch.multiple(sdpa, **settings),
    ):
        return activate_newest_flash(heads=(4, 2), head_dim=64)


def test_installed_package_is_activated() -> None:
    assert activated() == "FA3"
    assert activated(FLASH_PACKAGES={"FA3": ("flash_attn_interface_of_nobody", (9, 0))}) == ""
    assert activated(FLASH_PACKAGES={"FA4": ("json", (10, 0))}) == ""
    assert activated(FLASH_PACKAGES={"FA4": ("nobody.cute", (9, 0))} | INSTALLED) == "FA3"


def test_all_ranks_ask_whatever_they_have() -> None:
    packages = {"FA3": ("nobody", (9, 0)), "FA4": ("json", (10, 0))}
    ask = Mock(return_value="rank 3: no kernel")
    assert activated(FLASH_PACKAGES=packages, problem_on_any_rank=ask) == ""
    assert ask.call_count == 2


def test_package_whose_search_fails_is_not_used() -> None:
    assert activated(is_installed=Mock(side_effect=OSError("libcudart"))) == ""


def test_package_that_fails_on_another_rank_is_not_used() -> None:
    with patch.object(sdpa, "restore_flash_attention_impl") as restore:
        assert activated(problem_on_any_rank=lambda check: check() or "rank 3: no kernel") == ""
    restore.assert_called_once()


def test_package_that_fails_to_import_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Import fails as of a FlashAttention build for another PyTorch."""
    (tmp_path / "torn_flash.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert activated(FLASH_PACKAGES={"FA4": ("torn_flash.cute", (9, 0))}) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # PyTorch's real function, which does not find the package.
        ({"activate_flash_attention_impl": activate_flash_attention_impl}, "flash_attn_interface"),
        ({"_flash": lambda q, k, v: plain_attention(q, k, v.roll(1, dims=2))}, "max error"),
    ],
    ids=["another build", "other results"],
)
def test_failing_package_is_logged_and_not_used(
    changes: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert activated(**changes) == ""
    assert "SDPA: FA3 disabled: " in caplog.text
    assert message in caplog.text


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
def test_backend_priority_starts_with_the_fastest(
    major: int, has_newer_flash: bool, first: SDPBackend
) -> None:
    order = backend_priority(major, has_newer_flash=has_newer_flash)
    assert order == [first, *[backend for backend in PRIORITY if backend != first]]
