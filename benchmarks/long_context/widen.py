"""A drafter that was trained with sliding layers, served with layers that see the whole context.

    python benchmarks/long_context/widen.py runs/long/short/export/last runs/long/full-short

As long as no training sample is longer than the window, a sliding layer and a full one compute the same, so
the weights are those that a drafter of full layers would have got from the same samples, bit by bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from drafter.checkpoint import load_drafter, save_drafter


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(argv)
    drafter = load_drafter(options.drafter)
    layers = len(drafter.config.layer_types)
    drafter.config = dataclasses.replace(
        drafter.config, layer_types=("full_attention",) * layers, sliding_window=None
    )
    target = json.loads((options.drafter / "config.json").read_text())["target_name_or_path"]
    save_drafter(drafter, options.out, target_name=target)


if __name__ == "__main__":
    main()
