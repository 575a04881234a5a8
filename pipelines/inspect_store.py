"""What a feature store holds: counts, lengths, taps, sizes and how the taps' rows look."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from pipelines.rowformat import FEATURES
from pipelines.store import FeatureStore
from pipelines.store_counts import store_bytes, store_counts

_SAMPLES, _ROWS = 32, 32  # rows looked at for the tap statistics: this many samples, this many rows of each


def inspect_store(path: Path | str, *, verify: bool = False) -> dict[str, Any]:
    """Figures of a store, JSON-serialisable.

    Args:
        path: the store's folder.
        verify: also compare every sample with its checksums; `damaged` lists what differs.

    Raises:
        StoreError: no store there, nothing in it yet, or a part of the wrong size.
    """
    path = Path(path)
    store = FeatureStore.open(path)
    manifest = store.manifest
    counts = store_counts(path)
    lengths = store.lengths
    parts = {
        family: [file.stat().st_size for file in (path / family).glob("*.safetensors")]
        for family in manifest.formats
    }
    report = {
        "store": str(path),
        "target": manifest.target,
        "target_fingerprint": manifest.target_fingerprint,
        "backend": manifest.backend,
        "target_dtype": manifest.target_dtype,
        "dtype": manifest.dtype,
        "target_layer_ids": manifest.target_layer_ids,
        "tap_convention": manifest.tap_convention,
        "hidden_size": manifest.hidden_size,
        "keep": manifest.keep,
        "last_hidden": manifest.last_hidden,
        "settings": manifest.settings,
        "parity": manifest.parity,
        "command": manifest.command,
        **counts,
        "conversations": len(set(store.conversations)),
        "row_bytes": manifest.formats[FEATURES].row_bytes,
        "bytes": store_bytes(path),
        "bytes_of": {family: sum(sizes) for family, sizes in parts.items()},
        "parts": sum(map(len, parts.values())),
        "length": {
            "min": int(lengths.min()),
            "median": int(lengths.median()),
            "max": int(lengths.max()),
            "histogram": _histogram(lengths),
        },
        "taps": _tap_statistics(store),
    }
    if verify:
        report["damaged"] = [
            {"sample": sample, "part": part, "problem": problem}
            for sample, part, problem in store.damaged_samples()
        ]
    return report


def render_store(report: dict[str, Any]) -> Group:
    """Tables for the terminal."""
    length = report["length"]
    table = Table(title=f"feature store {report['store']}", show_header=False, title_justify="left")
    table.add_row("target", f"{report['target']} ({report['backend']}, {report['target_dtype']})")
    table.add_row("samples", f"{report['samples']:,} of {report['conversations']:,} conversations")
    table.add_row("tokens", f"{report['tokens']:,}, {report['supervised']:,} supervised")
    table.add_row("rows", f"{report['rows']:,} x {len(report['taps'])} taps x {report['hidden_size']}")
    share = report["stored_rows"] / report["rows"]
    table.add_row("kept", f"{report['stored_rows']:,} rows ({share:.1%}): {_rule(report['keep'])}")
    last = f"{report['last_rows']:,}" if report["last_hidden"] else "none"
    table.add_row("last hidden states", last)
    table.add_row("size", f"{report['bytes'] / 2**30:.3f} GiB in {report['parts']} parts, {report['dtype']}")
    table.add_row("length", f"{length['min']:,} to {length['max']:,}, median {length['median']:,}")
    if "damaged" in report:
        table.add_row("checksums", f"{len(report['damaged'])} damaged" if report["damaged"] else "all match")
    histogram = Table(title="tokens per sample", title_justify="left")
    for name in ("up to", "samples"):
        histogram.add_column(name, justify="right")
    for upper, count in length["histogram"]:
        histogram.add_row(f"{upper:,}", f"{count:,}")
    taps = Table(title="row norms (sampled)", title_justify="left")
    for name in ("layer output", "mean", "median", "max", "spread between rows"):
        taps.add_column(name, justify="right")
    for tap in report["taps"]:
        taps.add_row(
            str(tap["layer"]),
            f"{tap['mean_norm']:.3g}",
            f"{tap['median_norm']:.3g}",
            f"{tap['max_norm']:.3g}",
            f"{tap['spread']:.3g}",
        )
    damaged = [f"damaged: {item['part']}: sample {item['sample']}" for item in report.get("damaged", [])[:20]]
    return Group(table, histogram, taps, *damaged)


def _rule(keep: dict[str, Any]) -> str:
    if keep["rule"] == "all":
        return "all"
    return (
        f"windows of {keep['window']:,}, at most {keep['neighbourhoods']} neighbourhoods of "
        f"{keep['neighbourhood_length']:,} tokens a sample"
    )


def _histogram(lengths: torch.Tensor) -> list[tuple[int, int]]:
    """(upper bound, samples) in powers of two."""
    bins: dict[int, int] = {}
    for length in lengths.tolist():
        upper = 2 ** math.ceil(math.log2(length))
        bins[upper] = bins.get(upper, 0) + 1
    return sorted(bins.items())


def _tap_statistics(store: FeatureStore) -> list[dict[str, float]]:
    """Norms per tap, and the RMS over rows of the distance from the mean row (0 means constant rows)."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(store), generator=generator)[:_SAMPLES].tolist()
    pieces = [torch.empty(0, store.feature_width)]
    for index in chosen:
        for start, stop in store.sample(index).kept.tolist()[-1:]:
            first = start + int(torch.randint(max(1, stop - start - _ROWS), (1,), generator=generator))
            pieces.append(store.rows(index, first, min(stop, first + _ROWS)).float())
    rows_TLH = torch.cat(pieces).view(-1, len(store.manifest.target_layer_ids), store.manifest.hidden_size)
    norms_TL = rows_TLH.norm(dim=-1)
    spread_L = (rows_TLH - rows_TLH.mean(dim=0)).norm(dim=-1).square().mean(dim=0).sqrt()
    return [
        {
            "layer": tap,
            "mean_norm": float(norms_TL[:, at].mean()),
            "median_norm": float(norms_TL[:, at].median()),
            "max_norm": float(norms_TL[:, at].max()),
            "spread": float(spread_L[at]),
        }
        for at, tap in enumerate(store.manifest.target_layer_ids)
    ]
