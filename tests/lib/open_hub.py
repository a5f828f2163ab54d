"""Open a dataset of the Hugging Face Hub, ``owner/data``, as a run in FOLDER does.

    python -m tests.lib.open_hub FOLDER REVISION

Prints JSON: its commit, fingerprint and first text as a stream, and the latter two as a table.
"""

import json
import sys

from config.job_config import Data, Job, JobConfig
from data.hub import hub_streams, pin_datasets
from data.sources import open_documents

if __name__ == "__main__":
    folder, revision = sys.argv[1:]
    data = Data(source="huggingface", path="owner/data", revision=revision)
    config = pin_datasets(JobConfig(job=Job(output_dir=folder), data=data))
    (source,) = config.data.mixture
    stream, _ = hub_streams(source, False, 0.0, skips_bad=False)
    table, fingerprint = open_documents(source)
    streamed = [stream.fingerprint, next(stream.documents(0, 1, 0))]
    print(json.dumps([source.revision, *streamed, fingerprint, table[0]]))
