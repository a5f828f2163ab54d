"""Draw the pictures of docs/howto/report.md: ``python -m tests.report.screenshots RUN RUN RUN RUN``

The folder of the first run is shown light and on a phone, the second dark, of the third the charts
of layers; the fourth is docs/tutorial.md's. Needs Chromium.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from report.page import render
from tests.lib.browser import Page, browser_page
from tests.lib.repository import ROOT
from tools.report import page_data

PICTURES = ROOT / "docs" / "images"


def main(folders: list[str]) -> None:
    with TemporaryDirectory() as scratch, browser_page(Path(scratch) / "profile") as page:
        for name, folder, scheme, size in (
            ("light", folders[0], "light", (1280, 980)),
            ("dark", folders[1], "dark", (1280, 980)),
            ("phone", folders[0], "light", (390, 960)),
            ("layers", folders[2], "light", (1280, 780)),
            ("tutorial", folders[3], "light", (1280, 980)),
        ):
            path = Path(scratch) / "report.html"
            path.write_bytes(render(page_data([Path(folder)])))
            page.prefer(scheme)
            page.open(f"file://{path}", width=size[0], height=size[1])
            if name == "layers":
                page.evaluate(
                    "[...document.querySelectorAll('figure')].at(-1).scrollIntoView({block: 'end'})"
                )
            elif name != "phone":
                point(page, 0.62)
            (PICTURES / f"report_{name}.png").write_bytes(page.screenshot())


def point(page: Page, share: float) -> None:
    """Show the values of the first chart at a share of its width."""
    left, top, width, height = page.box("#charts figure:first-child .plot > svg")
    page.mouse("mouseMoved", left + share * width, top + height / 2)


if __name__ == "__main__":
    main(sys.argv[1:])
