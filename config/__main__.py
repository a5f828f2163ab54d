"""``python -m config help`` prints all keys; ``python -m config schema`` writes the JSON schema."""

import sys
from pathlib import Path

from config.describe import USAGE, help_text, schema_text

match sys.argv[1:]:
    case ["schema"]:
        Path(__file__).with_name("schema.json").write_text(schema_text())
    case ["help"]:
        print(help_text())
    case _:
        sys.exit(USAGE)
