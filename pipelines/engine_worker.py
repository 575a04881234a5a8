"""The process that holds vLLM: jobs come in as JSON lines on stdin, results go out as JSON lines.

Run by `pipelines.engine_vllm` as `python -m pipelines.engine_worker SETTINGS`. A process of its own keeps the
engine's memory, threads, signal handlers and log output away from the caller, and a crash in it becomes one
error. Standard output carries only the protocol; everything that vLLM prints goes to standard error (the log
file).
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from pipelines import vllm_cpu_seeds

_ORPHAN_SECONDS = 15


class UnsupportedTargetError(RuntimeError):
    """vLLM cannot give the hidden states of this target."""


def check_interface(target: str) -> None:
    """Raise `UnsupportedTargetError` if the target's vLLM class has no interface for tapped hidden states."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    architectures = json.loads((Path(target) / "config.json").read_text()).get("architectures") or []
    known = [name for name in architectures if name in ModelRegistry.get_supported_archs()]
    if not known:
        raise UnsupportedTargetError(f"vLLM has no model class for {architectures}")
    registered = ModelRegistry.models[known[0]]
    if not supports_eagle3(registered.load_model_cls()):
        raise UnsupportedTargetError(f"{known[0]} has no auxiliary hidden-state interface in vLLM")


def engine_arguments(settings: dict[str, Any], *, bounded: bool) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs`."""
    return {
        "model": settings["target"],
        "skip_tokenizer_init": True,  # ids in, ids out
        "dtype": settings["dtype"],
        "enforce_eager": True,
        "max_model_len": settings["max_model_len"],
        "max_num_seqs": settings["max_concurrent"],
        "max_num_batched_tokens": settings["step_tokens"],
        "enable_chunked_prefill": True,
        "enable_prefix_caching": not bounded,
        "tensor_parallel_size": settings["tensor_parallel"],
        "seed": settings["seed"],
        "generation_config": "vllm",  # sampling comes from the job, not from the checkpoint's defaults
        "disable_log_stats": True,
        "async_scheduling": False,
        "scheduler_cls": "pipelines.connector_scheduler.NoDraftScheduler",
        "worker_extension_cls": "pipelines.connector_bounded.BoundedCache" if bounded else "",
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": settings["engine_layer_ids"]}
            },
        },
        "kv_transfer_config": {
            "kv_connector": "StreamingRows",
            "kv_connector_module_path": "pipelines.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "spool": settings["spool"],
                "dtype": settings["feature_dtype"],
                "last_hidden": settings["last_hidden"],
                "part_bytes": settings["part_bytes"],
            },
        },
        **settings["engine_arguments"],
    }


def bounded_cache_available() -> str | None:
    """Why this vLLM cannot run the bounded hidden-state cache; None if it can."""
    try:
        import pipelines.connector_bounded  # noqa: F401 - the import is the check
    except (ImportError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


class Worker:
    """Feeds jobs to the engine and reports each when its rows are on disk."""

    def __init__(self, settings: dict[str, Any], out: IO[str], *, bounded: bool) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        vllm_cpu_seeds.repair()
        self._settings = settings
        self._out = out
        self._spool = Path(settings["spool"])
        arguments = EngineArgs(**engine_arguments(settings, bounded=bounded))
        self._engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        self._jobs: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._running: dict[str, str] = {}  # request id -> job key
        self._ended: dict[str, dict[str, Any]] = {}  # name of the row files -> result waiting for them

    def send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def run(self) -> None:
        """Until stdin ends. The parent keeps it open while it waits for jobs; a dead parent closes it."""
        threading.Thread(target=self._read_jobs, daemon=True).start()
        while self._take_jobs(wait=not self._running and not self._ended):
            for output in self._engine.step() if self._running or self._ended else ():
                if output.finished:
                    self._end(output)
            self._report()

    def _read_jobs(self) -> None:
        for line in sys.stdin:
            self._jobs.put(json.loads(line))
        self._jobs.put(None)
        time.sleep(_ORPHAN_SECONDS)
        os._exit(1)  # a step that does not end must not keep an orphan alive

    def _take_jobs(self, *, wait: bool) -> bool:
        """Submit what has arrived; False once stdin has ended."""
        while True:
            try:
                job = self._jobs.get(block=wait)
            except queue.Empty:
                return True
            if job is None:
                return False
            self._submit(job)
            wait = False

    def _submit(self, job: dict[str, Any]) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=job["temperature"],
            seed=job["seed"] if job["temperature"] > 0 else None,
            max_tokens=max(1, job["max_new_tokens"]),
            ignore_eos=True,
            stop_token_ids=self._settings["stop_token_ids"],
            detokenize=False,
            extra_args={"kv_transfer_params": {"rows": job["rows"]}},
        )
        request_id = f"job-{job['number']}"
        self._running[request_id] = job["key"]
        self._engine.add_request(request_id, {"prompt_token_ids": job["token_ids"]}, sampling)

    def _end(self, output: Any) -> None:
        key = self._running.pop(output.request_id)
        name = output.kv_transfer_params["rows"]
        self._ended[name] = {"key": key, "output_ids": list(output.outputs[0].token_ids)}

    def _report(self) -> None:
        for name in [name for name in self._ended if (self._spool / f"{name}.json").exists()]:
            report = self._spool / f"{name}.json"
            self.send({**self._ended.pop(name), **json.loads(report.read_text())})
            report.unlink()


def main() -> None:
    """Entry point of the process."""
    settings = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        check_interface(settings["target"])
        send({"supported": True})
        bounded = settings["bounded"]
        refused = bounded_cache_available() if bounded else None
        if refused:
            bounded = False
        worker = Worker(settings, out, bounded=bounded)
        send({"ready": True, "bounded": bounded, "bounded_refused": refused})
        worker.run()
    except Exception as error:
        send({"failed": f"{type(error).__name__}: {error}"})
        raise
    out.close()
    os._exit(0)  # engine threads would keep the interpreter alive


if __name__ == "__main__":
    main()
