"""The table of devices and links: ``devices.toml``, and a user's own."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tomli
from pydantic import Field, ValidationError

from config import ConfigError
from config.job_config import Count, Section

BUILT_IN = Path(__file__).with_name("devices.toml")
# In the names that CUDA gives to slices of a GPU, and to other chips of a card's name.
VARIANT = re.compile(r"\b(MIG|Laptop|Mobile|Max-Q|Ti|D)\b", re.IGNORECASE)
# GPUs. More share the link of a rack, such as NVL72.
MOST_IN_A_SERVER = 16
Positive = Annotated[float, Field(gt=0.0)]


class Device(Section):
    """A device, and what connects several."""

    title: str
    tflops: dict[str, Positive]
    """Peak dense TFLOP/s by dtype of compute."""
    memory_gib: Positive
    memory_gb_per_second: Positive
    gpus_per_node: Count
    link: str
    """Inside of a node."""
    network: str
    """Between nodes."""
    usd_per_hour: Positive | None = None


class Link(Section):
    """A kind of link."""

    gb_per_second: Positive
    """Of one device, each way."""


class Table(Section):
    """The tables of one file."""

    devices: dict[str, Device] = Field(default_factory=dict)
    links: dict[str, Link] = Field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """A device, the link inside of its nodes, and that between them."""

    device: Device
    link: Link
    network: Link


def find_hardware(name: str, own: Path | None, gpus_per_node: int | None = None) -> Hardware:
    """Return the hardware of the device ``name``, which may be a GPU's as CUDA has it.

    ``own``: a file whose tables come before the built-in ones. ``gpus_per_node``: instead of the
    device's, unless that is of a rack. Raises ``ConfigError``.
    """
    devices: dict[str, Device] = {}
    links: dict[str, Link] = {}
    for path in (BUILT_IN, *([] if own is None else [own])):
        table = _read(path)
        devices |= table.devices
        links |= table.links
    found = next((each for each in devices if each.lower() == name.lower()), "")
    found = found or _model_of(name, devices)
    if not found:
        raise ConfigError([f"--device: {name} is none of {', '.join(devices)}; --devices FILE"])
    device = devices[name := found]
    for key in ("link", "network"):
        if getattr(device, key) not in links:
            text = f"{getattr(device, key)} is none of {', '.join(links)}"
            raise ConfigError([f"devices.{name}.{key}: {text}"])
    # The servers of a rack share its link, so that a server's number says nothing.
    if gpus_per_node is not None and device.gpus_per_node <= MOST_IN_A_SERVER:
        device = device.model_copy(update={"gpus_per_node": gpus_per_node})
    return Hardware(device, links[device.link], links[device.network])


def bfloat16_tflops(title: str) -> float | None:
    """Peak dense bfloat16 TFLOP/s of the GPU that CUDA calls ``title``; None if not known."""
    devices = _read(BUILT_IN).devices
    name = _model_of(title, devices)
    return devices[name].tflops.get("bfloat16") if name else None


def _model_of(title: str, names: Iterable[str]) -> str:
    """Return the name with the most words of ``title``: "NVIDIA H100 PCIe" is h100_pcie, not h100.

    "" if it is none of ``names``.
    """
    found = [name for name in names if is_model(title, name)]
    return max(found, key=lambda name: name.count("_"), default="")


def is_model(title: str, name: str) -> bool:
    """True if ``title`` has the words of ``name``: "NVIDIA GeForce RTX 4090" for rtx4090, not
    GH200 for h200, nor a slice or another chip such as "RTX 4090 Laptop GPU"."""
    if VARIANT.search(title):
        return False
    words = re.sub(r"(?<=[a-z])(?=\d)", r"\\s?", re.escape(name.lower())).split("_")
    return all(re.search(rf"\b{word}\b", title.lower()) for word in words)


def _read(path: Path) -> Table:
    try:
        return Table.model_validate(tomli.loads(path.read_text()))
    except ValidationError as error:
        texts = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise ConfigError([f"{path}: {text}" for text in texts]) from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from None
