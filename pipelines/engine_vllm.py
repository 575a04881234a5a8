"""The vLLM backend: runs `pipelines.engine_worker` as a process and talks to it in JSON lines."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from pipelines.engine import Captured, EngineError, Job, RowSpool
from pipelines.rowfile import StoreError
from pipelines.taps import engine_layer_ids
from pipelines.target import target_config

_STOP_SECONDS = 20
_ERROR_LINE = re.compile(r"^\W*(?:\([^)]*\)\s*)*(?:\[rank\d+\]:\s*)?(\w*(?:Error|Exception): .+)$")
_OTHER_BACKEND = "use --backend hf for this target"


def refuse_target(target: Path) -> None:
    """Refuse what can be seen from the config alone, before the engine and the data are touched.

    Raises:
        EngineError: vLLM is not installed, or it cannot isolate this target's hidden states.
    """
    if find_spec("vllm") is None:
        raise EngineError(
            "vLLM is not installed: install the extra `cpu` or `cuda` of longdraft, or use --backend hf"
        )
    config = target_config(target)
    if config.get("kv_lora_rank"):
        raise EngineError(
            f"{target} uses latent attention (MLA), whose hidden states vLLM cannot isolate; {_OTHER_BACKEND}"
        )


class VllmEngine:
    """See `pipelines.engine.Engine`.

    Args:
        target: checkpoint folder.
        target_layer_ids: taps (layer outputs).
        spool: empty folder on the store's file system for row files.
        log: file for everything that vLLM prints.
        dtype: "auto" or a dtype name to run in.
        feature_dtype: dtype of the row files, as in `Manifest.dtype`.
        last_hidden: jobs may ask for last hidden states.
        max_model_len: longest prompt plus answer.
        max_concurrent: sequences that run at once.
        step_tokens: tokens of one engine step; longer prompts are prefilled in chunks of it.
        bounded: hidden-state cache independent of the sequence length, without prefix caching; False keeps
            all rows of running sequences in pages and reuses common prefixes.
        kv_cache_gib: key/value cache in GiB; None leaves it to vLLM (4 GiB without a GPU).
        tensor_parallel: GPUs that share the target.
        part_bytes: row files of a request are begun anew at this size.
        eos_ids: ids that end an answer.
        seed: of the engine.
        engine_arguments: further arguments of `vllm.EngineArgs`.
    """

    def __init__(
        self,
        target: Path,
        target_layer_ids: Sequence[int],
        *,
        spool: Path,
        log: Path,
        dtype: str = "auto",
        feature_dtype: str = "bfloat16",
        last_hidden: bool = False,
        max_model_len: int,
        max_concurrent: int = 128,
        step_tokens: int = 2048,
        bounded: bool = False,
        kv_cache_gib: float | None = None,
        tensor_parallel: int = 1,
        part_bytes: int = 1 << 30,
        eos_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        engine_arguments: dict[str, Any] | None = None,
    ) -> None:
        self._log = log
        self._spool = spool
        self._kv_cache_gib = kv_cache_gib
        layers = int(target_config(target)["num_hidden_layers"])
        self._settings = {
            "target": str(target),
            "engine_layer_ids": engine_layer_ids(target_layer_ids, layers if last_hidden else None),
            "last_hidden": last_hidden,
            "spool": str(spool),
            "dtype": dtype,
            "feature_dtype": feature_dtype,
            "max_model_len": max_model_len,
            "max_concurrent": max_concurrent,
            "step_tokens": step_tokens,
            "bounded": bounded,
            "tensor_parallel": tensor_parallel,
            "part_bytes": part_bytes,
            "stop_token_ids": sorted(eos_ids),
            "seed": seed,
            "engine_arguments": engine_arguments or {},
        }
        self._process: subprocess.Popen[str] | None = None
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._waiting: dict[str, Job] = {}
        self._number = 0
        self.bounded = bounded  # as it came to be; known after `wait_ready`
        self.bounded_refused: str | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process and wait until it is known that vLLM supports the target (the model still loads).

        Raises:
            EngineError: it does not, or the process died.
        """
        if self._process is not None:
            return
        self._spool.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.engine_worker", json.dumps(self._settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment(),
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        self._expect("supported")

    def wait_ready(self) -> None:
        """Start if need be, and wait until the model is loaded.

        Raises:
            EngineError: it did not load.
        """
        if self._ready:
            return
        self.start()
        message = self._expect("ready")
        self.bounded = message["bounded"]
        self.bounded_refused = message["bounded_refused"]
        self._ready = True

    def submit(self, job: Job) -> None:
        self.wait_ready()
        self._number += 1
        line = json.dumps({
            "key": job.key,
            "number": self._number,
            "token_ids": job.token_ids,
            "max_new_tokens": job.sampling.max_new_tokens,
            "temperature": job.sampling.temperature,
            "seed": job.seed,
            "rows": {family: rows.ranges for family, rows in job.rows.items()},
        })  # fmt: skip
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure("the engine process ended") from None
        self._waiting[job.key] = job

    def results(self) -> Iterator[Captured]:
        while self._waiting:
            message = self._next()
            job = self._waiting.pop(message["key"])
            files = {
                family: [RowSpool(self._spool / file["part"], file["rows"], file["sha256"]) for file in of]
                for family, of in message["files"].items()
            }
            # vLLM always samples; the token behind a prompt alone is nobody's.
            output = message["output_ids"][: job.sampling.max_new_tokens]
            error = message["error"]
            if error and error.startswith("DiskFullError"):
                raise StoreError(error.partition(": ")[2])
            yield Captured(job.key, output, job.rows_made(output), files=files, error=error)

    def stop(self) -> None:
        """End the process; what it still runs is lost."""
        if self._process is None:
            return
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            if self._waiting or not self._ready:
                self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
        shutil.rmtree(self._spool, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        root = str(Path(__file__).resolve().parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process is the isolation; steps are driven from here
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self._kv_cache_gib is not None or "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(self._kv_cache_gib or 4)))
        return environment

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._messages.put(json.loads(line))
        self._messages.put(None)

    def _next(self) -> dict[str, Any]:
        message = self._messages.get()
        if message is None:
            raise self._failure("the engine process ended")
        if "failed" in message:
            raise self._failure(message["failed"])
        return message

    def _expect(self, kind: str) -> dict[str, Any]:
        message = self._next()
        assert kind in message, message
        return message

    def _failure(self, what: str) -> EngineError:
        """One error out of a log of pages: its most telling line, what to do, and where the rest is."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        causes = [match.group(1) for line in lines if (match := _ERROR_LINE.match(line))]
        if what.startswith("UnsupportedTargetError"):
            return EngineError(f"{what.partition(': ')[2]}; {_OTHER_BACKEND}")
        told = " ".join([what, *causes])
        if "EAGLE3 interface" in told:
            return EngineError(f"vLLM's class of this target gives no hidden states; {_OTHER_BACKEND}")
        if "max seq len" in told:
            return EngineError(
                f"the key/value cache cannot hold a sequence of {self._settings['max_model_len']} tokens: "
                f"lower --max-length or raise --kv-cache-gib ({self._log})"
            )
        detail = "" if not causes or causes[-1] in what else f" - {causes[-1]}"
        return EngineError(f"vLLM failed: {what}{detail} (everything it printed: {self._log})")
