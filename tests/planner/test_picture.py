"""The picture of a plan is well-formed, and its bars add up to memory and time."""

import re
import xml.etree.ElementTree as ET

import pytest

from planner.picture import GIB, LEFT, WIDTH, picture
from planner.roofline import step_time
from planner.step_plan import plan_step
from runtime.devices import find_hardware
from tests.lib.planned import run_of


def test_bars_are_as_long_as_what_they_show() -> None:
    plan, hardware = plan_step(run_of({}, 2), 2), find_hardware("laptop", None)
    time = step_time(plan, hardware)
    image = picture(plan, time, hardware)
    root = ET.fromstring(image)
    assert root.get("viewBox")
    bars: dict[str, float] = {}
    for each in root.iter("{http://www.w3.org/2000/svg}rect"):
        if each.get("fill") and each.get("height") == "26":
            y = str(each.get("y"))
            bars[y] = bars.get(y, 0.0) + float(str(each.get("width")))
    memory, seconds = bars.values()
    assert seconds == pytest.approx(WIDTH - 2 * LEFT, rel=0.01)
    share = plan.stages[0].record.peak / GIB / hardware.device.memory_gib
    assert memory == pytest.approx(share * (WIDTH - 2 * LEFT), abs=0.1)
    assert re.search("prefers-color-scheme: dark", image)
