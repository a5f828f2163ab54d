"""Print all keys or those of a section, or write the JSON schema or the page of all keys.

``python -m config help [SECTION ...]``, ``python -m config schema``, ``python -m config reference``
"""

import os
import pydoc
import shutil
import sys
from pathlib import Path

from config.describe import help_text, reference_page, schema_text
from config.loader import ConfigError

# As in runtime/exit_codes.py.
BAD_ARGUMENTS, CLOSED_PIPE = 2, 141
MOST_COLUMNS = 100

match sys.argv[1:]:
    case ["schema"]:
        Path(__file__).with_name("schema.json").write_text(schema_text())
    case ["reference"]:
        page = Path(__file__).parents[1] / "docs" / "reference" / "config.md"
        page.write_text(reference_page())
    case ["help", *names]:
        columns = min(MOST_COLUMNS, shutil.get_terminal_size().columns)
        try:
            text = help_text(names, width=columns)
        except ConfigError as error:
            print(error, file=sys.stderr)
            sys.exit(BAD_ARGUMENTS)
        try:
            if sys.stdout.isatty():
                # Without a key press if the text fits the screen.
                os.environ.setdefault("LESS", "FRX")
                pydoc.pager(text)
            else:
                print(text, flush=True)
        except BrokenPipeError:  # The reader, such as head, has seen enough.
            os._exit(CLOSED_PIPE)
    case _:
        sys.exit(__doc__)
