"""`run_train` in a process of its own: ``python -m tests.pipelines.train_process FOLDER SECTIONS_JSON``.

Prints the result as JSON. With TRAIN_HOLD_SAVE set, every save after the first waits in the middle, with
files written and the folder not yet renamed, and says so on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from pipelines import training_state
from pipelines.trainer import run_train
from tests.pipelines.tiny_run import make_run


def hold_saves_after_the_first() -> None:
    save_file, saved = training_state.save_file, []

    def held(tensors, path):
        save_file(tensors, path)
        saved.append(path)
        if len(saved) > 3:  # two files a checkpoint: this is the second file of the second one
            print("HELD", flush=True)
            time.sleep(600)

    training_state.save_file = held


if __name__ == "__main__":
    if os.environ.get("TRAIN_HOLD_SAVE"):
        hold_saves_after_the_first()
    sections = json.loads(sys.argv[2])
    result = run_train(make_run(Path(sys.argv[1]), **sections))
    print("RESULT " + json.dumps(result.to_dict()), flush=True)
