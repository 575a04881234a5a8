"""How right and how fast the kernels and the training step are on the GPU at hand, in one command.

    PYTHONPATH=. python benchmarks/gpu_step.py --out runs/gpu_step.json         # one Hopper card, 6 minutes
    PYTHONPATH=. python benchmarks/gpu_step.py --out runs/tiny.json --tiny      # on a CPU, to try the script

It measures the card's matrix products and copies; sets every kernel beside its plain twin in float64; times
the attention kernels alone; then times whole training steps of the released 27B drafter (synthetic features,
bf16 products, float32 weights and moments) at 64K to 1M tokens, with neighbouring and with uniform anchors,
all layers sliding and one of them full; and the first of these steps with other attention and other losses.
What does not fit, or is not reached in time, is named. Results go to --out as they come.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_checks import attention_speed, check_kernels
from gpu_variants import FLEX, VARIANTS

from csbp.backends import choose_backend
from csbp.cost import Workload
from csbp.plan import plan_step
from csbp.share import draw_layout
from csbp.topology import Grid
from drafter.config import DrafterConfig
from drafter.frozen import FrozenHead, embed_blocks
from drafter.model import Drafter
from drafter.objective import ObjectiveConfig, block_loss

SHAPE = Path(__file__).resolve().parent.parent / "pipelines/shapes/qwen3.8-27b-dflash2.json"
PUBLISHED = {65_536: 20_995, 1_048_576: 17_443}  # tokens/s of one H100, arXiv 2609.19242 (8 replicas, CP2)


@dataclass
class Report:
    """Everything measured so far."""

    machine: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    attention: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


class Parts:
    """Seconds of the named parts of a step, by events on a GPU and by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = self._now()
        yield
        self._marks.append((name, began, self._now()))

    def seconds(self) -> dict[str, float]:
        if self.gpu:
            torch.cuda.synchronize()
            return {name: began.elapsed_time(ended) / 1000 for name, began, ended in self._marks}
        return {name: ended - began for name, began, ended in self._marks}


class Step:
    """A drafter with its optimizer on `device`, and one step at a time of any context."""

    def __init__(self, config: DrafterConfig, device: torch.device) -> None:
        torch.manual_seed(0)
        self.config, self.device = config, device
        self.half = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            self.drafter = Drafter(config)
            tables = [
                torch.randn(config.vocab_size, config.hidden_size, dtype=self.half).mul_(0.02) for _ in "eh"
            ]
        self.head = FrozenHead(tables[0], tables[1])
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-5, fused=True)
        self.objective = ObjectiveConfig.model_validate({})
        self.backend, self.reason = choose_backend("auto", device, self.half)

    def inputs(self, work: Workload) -> dict[str, Any]:
        """A layout, and features of the rows that it reads."""
        layout = draw_layout(work, self.config.block_size)
        rows = self.plan(layout).row_positions.numel()
        features = torch.empty(rows, self.config.feature_width, dtype=torch.bfloat16, device=self.device)
        for part in features.split(1 << 14):
            part.normal_()
        labels = torch.randint(self.config.vocab_size, (work.anchors, self.config.num_drafts))
        return {"layout": layout, "features": features, "labels": labels.to(self.device)}

    def plan(self, layout: Any) -> Any:
        masks = self.config.layer_masks
        return plan_step(layout, masks, Grid.single(), device=self.device, backend=self.backend)

    def run(self, inputs: dict[str, Any]) -> dict[str, float]:
        """One step; seconds by part."""
        clock, labels = Parts(self.device), inputs["labels"]
        anchor_ids = labels[:, 0]
        with clock.part("plan"):
            plan = self.plan(inputs["layout"])
            offsets = torch.arange(self.config.block_size)
            positions = (inputs["layout"].positions[:, None] + offsets).to(self.device)
        narrow = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.half != torch.float32)
        with narrow:
            with clock.part("fuse"):
                context = self.drafter.fuse(inputs["features"])
            with clock.part("layers"):
                blocks = embed_blocks(self.head, self.config, anchor_ids)
                hidden = self.drafter(context, plan.row_positions, blocks, positions, plan.attention())
            with clock.part("loss"):
                every = torch.ones_like(labels, dtype=torch.bool)
                sums = block_loss(
                    self.drafter, hidden, labels, every, anchor_ids, self.head, self.objective, 0
                )
        with clock.part("backward"):
            (sums.loss / labels.numel()).backward()
        with clock.part("update"):
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        found = clock.seconds()
        if not bool(torch.isfinite(sums.loss)):
            raise RuntimeError(f"the loss of a step is {float(sums.loss)}")
        return found


def ceilings(device: torch.device, size: int) -> dict[str, float]:
    """Rates that this device reaches: a large product of random matrices, and a copy (bytes both ways)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.empty(size * size * 8, device=device, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    product = median_seconds(lambda: torch.mm(a, b), device)
    copy = median_seconds(lambda: target.copy_(source), device)
    return {"matmul_tflops": 2 * size**3 / product / 1e12, "copy_tbytes": 2 * source.numel() / copy / 1e12}


def median_seconds(work: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Median over `repeats`, after two that warm up."""
    times = []
    for _ in range(repeats + 2):
        clock = Parts(device)
        with clock.part("work"):
            work()
        times.append(clock.seconds()["work"])
    return sorted(times[2:])[repeats // 2]


def step_operations(step: Step, work: Workload) -> float:
    """Floating-point operations of one step, by the forms of `csbp.cost`."""
    from csbp.cost import step_flops
    from csbp.visibility import first_visible, seen
    from pipelines.plan import drafter_shape

    block, masks = step.config.block_size, step.config.layer_masks
    layout = draw_layout(work, block)
    rows = [len(seen(layout, mask)) for mask in masks]
    pairs = [
        float((layout.anchors[:, None] - first_visible(layout, mask)).sum()) + len(layout.anchors) * block**2
        for mask in masks
    ]
    parts = step_flops(
        drafter_shape(step.config),
        blocks=len(layout.anchors),
        fused_rows=max(rows),
        projected_rows=tuple(map(float, rows)),
        pairs=tuple(pairs),
        shared_search=True,
    )
    return sum(part.total for part in parts.values())


def measure_step(step: Step, work: Workload, peak_tflops: float, repeats: int) -> dict[str, Any]:
    """Median step of `repeats`, after one that warms up; or why there is none."""
    gpu = step.device.type == "cuda"
    try:
        inputs = step.inputs(work)
        step.run(inputs)
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        runs = [step.run(inputs) for _ in range(repeats)]
    except torch.OutOfMemoryError as error:
        step.optimizer.zero_grad(set_to_none=True)
        inputs = {}
        torch.cuda.empty_cache()
        return {"skipped": f"does not fit: {str(error).split('. ')[0]}"}
    runs.sort(key=lambda run: sum(run.values()))
    parts = runs[len(runs) // 2]
    seconds = sum(parts.values())
    return {
        "rows": len(inputs["features"]),
        "seconds": seconds,
        "tokens_per_second": inputs["labels"].numel() / seconds,
        "matmul_share": step_operations(step, work) / seconds / (peak_tflops * 1e12),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if gpu else 0.0,
        "parts": parts,
    }


def settings(tiny: bool) -> Iterator[tuple[int, str, int]]:
    """(context, anchor rule, full layers), the most wanted first."""
    contexts = (256, 512) if tiny else (65_536, 1_048_576, 262_144, 524_288)
    for full in (0, 1):
        for rule in ("locality", "uniform"):
            for context in contexts:
                yield context, rule, full


def config_of(tiny: bool, full_layers: int) -> DrafterConfig:
    content = json.loads(SHAPE.read_text())
    if tiny:
        content |= {
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "vocab_size": 300, "sliding_window": 32,
        }  # fmt: skip
        content["dflash_config"] = content["dflash_config"] | {"mask_token_id": 299, "selector_rank": 8}
    layers = content["num_hidden_layers"]
    content["layer_types"] = content["layer_types"][: layers - full_layers] + ["full_attention"] * full_layers
    return DrafterConfig.from_dict(content)


def machine(device: torch.device) -> dict[str, str]:
    import platform

    found = {"python": platform.python_version(), "torch": torch.__version__, "device": platform.processor()}
    if device.type == "cuda":
        import triton

        found["triton"], found["device"] = triton.__version__, torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    return found


def table(report: Report) -> str:
    """The report as lines of text."""
    lines = [f"{key}: {value}" for key, value in report.machine.items()]
    lines += [f"{key}: {value:.3f}" for key, value in report.ceilings.items()]
    lines += ["", "relative norm of the error against float64"]
    lines += [
        f"  {row['kernel']:28} {row['case']:26} {row['error']:.2e}  {row['verdict']}" for row in report.checks
    ]
    lines += ["", "attention kernels alone: TFLOP/s of the products that each does, share of the matmul peak"]
    for row in report.attention:
        lines.append(f"  {row['kernel']:28} {row['case']:26} {row['tflops']:7.1f} {row['share']:6.1%}")
    lines += ["", f"{'step':36} {'tok/s':>8} {'share':>7} {'peak GB':>8}  parts, ms"]
    for row in report.steps:
        name = f"{row['layers']}, {row['context']:,}, {row['anchors']}, {row['variant']}"
        if "skipped" in row:
            lines.append(f"{name:36} {row['skipped']}")
            continue
        parts = ", ".join(f"{part} {1000 * seconds:.1f}" for part, seconds in row["parts"].items())
        ratio = f"; {row['ratio']:.2f} x the time" if "ratio" in row else ""
        figures = f"{row['tokens_per_second']:8,.0f} {row['matmul_share']:7.1%} {row['peak_gb']:8.1f}"
        lines.append(f"{name:36} {figures}  {parts}{ratio}")
    return "\n".join(lines)


def steps(report: Report, options: argparse.Namespace, device: torch.device, deadline: float) -> None:
    """Fill `report.steps`; the first of each kind of layers also in other ways, with a ratio."""
    step: Step | None = None
    anchors = 8 if options.tiny else 2048
    loaded = -1
    for context, rule, full in settings(options.tiny):
        kind = "sliding" if not full else "one full layer"
        row: dict[str, Any] = {"layers": kind, "context": context, "anchors": rule, "variant": "kernels"}
        report.steps.append(row)
        if time.monotonic() > deadline:
            row["skipped"] = "not reached in time"
            continue
        if full != loaded:
            step = None  # the old one's memory first
            step, loaded = Step(config_of(options.tiny, full), device), full
        assert step is not None
        work = Workload(context, anchors, anchor_rule=rule)  # type: ignore[arg-type]
        row |= measure_step(step, work, report.ceilings["matmul_tflops"], 1 if options.tiny else 3)
        report.save(options.out)
        if (context, rule) == next(settings(options.tiny))[:2]:
            for name, variant in VARIANTS.items():
                if time.monotonic() < deadline:
                    other = {"layers": kind, "context": context, "anchors": rule, "variant": name}
                    report.steps.append(other)
                    if name == FLEX and device.type == "cpu":
                        other["skipped"] = "FlexAttention has no backward pass on a CPU"
                        continue
                    with variant(step):
                        other |= measure_step(step, work, report.ceilings["matmul_tflops"], 1)
                    if "seconds" in row and "seconds" in other:
                        other["ratio"] = other["seconds"] / row["seconds"]
                    report.save(options.out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU, to try the script")
    parser.add_argument("--minutes", type=float, default=6.0, help="begin nothing new after this")
    options = parser.parse_args()
    began = time.monotonic()
    if not options.tiny and not torch.cuda.is_available():
        print("expected a CUDA device, found none; --tiny tries the script on a CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.tiny else "cuda")
    deadline = began + 60 * options.minutes * 0.85  # a step that has begun is finished
    report = Report(machine=machine(device))
    report.ceilings = ceilings(device, 256 if options.tiny else 8192)
    report.checks = check_kernels(device, tiny=options.tiny)
    report.save(options.out)
    if not options.tiny:
        report.attention = attention_speed(device, report.ceilings["matmul_tflops"], median_seconds)
    steps(report, options, device, deadline)
    report.seconds = time.monotonic() - began
    report.save(options.out)
    print(table(report))
    return int(any(row["verdict"] != "ok" for row in report.checks))


if __name__ == "__main__":
    raise SystemExit(main())
