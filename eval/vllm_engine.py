"""One vLLM engine as a process: started, asked, stopped; whatever goes wrong in it is one error.

Shape of a job and its answer: `eval.vllm_worker`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from eval.decode import Decoded, Limits, Step
from eval.errors import EvalError
from eval.sampling import Sampling

ENDED = "the engine process ended"

_STOP_SECONDS = 20
_ERROR_LINE = re.compile(r"^\W*(?:\([^)]*\)\s*)*(?:\[rank\d+\]:\s*)?(\w*(?:Error|Exception): .+)$")

#: What engines print when they fail, and what it means for an evaluation.
_CAUSES = (
    (
        "mixed sliding/full dflash",
        "vLLM's CPU runner serves a drafter whose layers are all full or all sliding, not a mixture; use "
        "--backend hf, or a GPU",
    ),
    (
        "non-causal support",
        "the attention backend has no non-causal attention, which this drafter needs; choose another with "
        "--engine-args attention_backend=...",
    ),
    ("EAGLE3 interface", "vLLM's class of this target gives no hidden states to a drafter; use --backend hf"),
    (
        "no available memory for the cache",
        "there is no memory for the key/value cache: raise VLLM_CPU_KVCACHE_SPACE (GiB, on a CPU) or "
        "--engine-args gpu_memory_utilization=0.9, or lower --concurrency",
    ),
    (
        "max seq len",
        "the key/value cache cannot hold one sequence: raise VLLM_CPU_KVCACHE_SPACE (GiB, on a CPU) or "
        "--engine-args gpu_memory_utilization=0.9, or lower --max-new-tokens",
    ),
    ("out of memory", "the device ran out of memory: lower --concurrency or the length of prompts"),
    (
        "is not supported for now",  # vLLM's own words
        "this vLLM has no class for the target or for the drafter; use --backend hf",
    ),
    ("Head size", "the attention backend does not know this head size; use --backend hf"),
)


class EngineFailure(EvalError):  # noqa: N818 an engine that failed, told as an error of the evaluation
    """vLLM could not be started or died: what it said, the likely cause, and where its log is."""


def room_for(tokens: int, block: int) -> int:
    """The `max_model_len` with which a sequence of `tokens` is drafted for to its end.

    vLLM drafts zeros where the verified block and another one behind it do not fit any more.
    """
    return tokens + 2 * block


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with.

    Attributes:
        target: checkpoint folder.
        method: "plain", "ngram" or "dflash".
        drafter: folder of the drafter for "dflash".
        candidates: the drafter is DFlash2, which a CPU serves with `eval.vllm_dflash_cpu`.
        drafts: tokens that a step proposes.
        max_model_len: of sequences in the engine, see `room_for`.
        max_concurrent: sequences that run at once.
        engine_arguments: further arguments of `vllm.EngineArgs`.
    """

    target: str
    method: str
    drafter: str | None
    candidates: bool
    drafts: int
    dtype: str
    max_model_len: int
    max_concurrent: int
    stop_token_ids: Sequence[int]
    seed: int
    engine_arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Generated:
    """The answer to one job.

    Attributes:
        responses: one a prompt; an engine does not tell drafting from verifying, so all of a step's share of
            the engine's time is in `verify_seconds`.
        drafts: per prompt, every (tokens emitted before it, token ids); empty unless asked for.
        counters: what vLLM's own counters rose by.
        seconds: of the whole job.
    """

    responses: list[Decoded]
    drafts: list[list[tuple[int, list[int]]]]
    counters: dict[str, Any]
    seconds: float


class Engine:
    """A running engine; leave its `with` block to end it.

    Attributes:
        log: file of everything that the present engine prints.
        facts: version of vLLM, platform and device.
    """

    def __init__(self, settings: EngineSettings, log: Path) -> None:
        """Start the process and wait until the engine can decode.

        Raises:
            EngineFailure: vLLM is not installed, refuses the models, or dies.
        """
        if find_spec("vllm") is None:
            raise EngineFailure(
                "vLLM is not installed: install the extra `cpu` or `cuda` of longdraft, or use --backend hf"
            )
        self.facts: dict[str, Any] = {}
        self._start(settings, log)

    def replace(self, settings: EngineSettings, log: Path) -> None:
        """End the engine and start another one; there are never two in memory.

        On a CPU the process stays, which saves most of a start, unless vLLM cannot start twice in it; on a
        GPU only the end of the process gives back all memory.

        Raises:
            EngineFailure: as at the start.
        """
        if self.facts["platform"] == "cpu":
            try:
                self._load(settings, log)
            except EngineFailure:
                self._start(settings, log)
        else:
            self.stop()
            self._start(settings, log)

    def _start(self, settings: EngineSettings, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "eval.vllm_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=_environment(),
            )
        self._load(settings, log)

    def _load(self, settings: EngineSettings, log: Path) -> None:
        self.log = log
        self.facts = self._ask({"load": asdict(settings), "log": str(log.resolve())}, "ready")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        limits: Limits,
        sampling: Sampling,
        concurrency: int,
        seeds: Sequence[int] | None = None,
        keep_drafts: bool = False,
    ) -> Generated:
        """Decode prompts with at most `concurrency` of them in flight.

        Raises:
            EngineFailure: the engine died.
        """
        job = {
            "prompts": [
                {"ids": list(ids), "seed": seed}
                for ids, seed in zip(prompts, seeds or [0] * len(prompts), strict=True)
            ],
            "max_new_tokens": limits.max_new_tokens,
            "stop": bool(limits.stop_ids),
            "concurrency": concurrency,
            "keep_drafts": keep_drafts,
            **asdict(sampling),
        }
        done = self._ask({"generate": job}, "done")
        return Generated(
            [_decoded(response) for response in done["responses"]],
            [[(place, ids) for place, ids in response["drafts"]] for response in done["responses"]],
            done["counters"],
            done["seconds"],
        )

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, message: dict[str, Any], kind: str) -> dict[str, Any]:
        """Send one message and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # a dead process is found out by the missing answer
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": ENDED}
        if kind not in answer:
            raise self._failure(answer["failed"])
        found: dict[str, Any] = answer[kind]
        return found

    def _failure(self, what: str) -> EngineFailure:
        self.stop()
        return explain(what, self.log, self._process.returncode)


def explain(what: str, log: Path, status: int | None = None) -> EngineFailure:
    """One error out of a log of pages: its most telling line, the likely cause, and where the rest is."""
    text = log.read_text(errors="replace") if log.exists() else ""
    errors = [match.group(1) for line in text.splitlines() if (match := _ERROR_LINE.match(line))]
    if what.startswith("UnsupportedVersionError"):
        return EngineFailure(what.partition(": ")[2])
    told = " ".join([what, *errors]).lower()
    causes = [cause for sign, cause in _CAUSES if sign.lower() in told]
    if not causes and status is not None and status < 0:
        causes = [f"it was killed by signal {-status}, which is usually the system short of memory"]
    if what == ENDED and errors:
        what = errors[-1]
    cause = f"; likely cause: {causes[0]}" if causes else ""
    return EngineFailure(f"vLLM failed: {what.splitlines()[0]}{cause} (everything it printed: {log})")


def _decoded(response: dict[str, Any]) -> Decoded:
    steps = [
        Step(
            context, drafted, accepted, emitted, draft_seconds=0.0, verify_seconds=seconds, other_seconds=0.0
        )
        for context, drafted, accepted, emitted, seconds in response["steps"]
    ]
    return Decoded(response["ids"], response["prefill_seconds"], steps)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process is the isolation, and its scheduler is looked at
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # As many threads as the hf backend takes, so that figures of the two compare.
    if "VLLM_CPU_OMP_THREADS_BIND" not in environment:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    return environment
