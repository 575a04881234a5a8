"""The process that holds a vLLM engine: prompts come in as JSON lines, responses go out as JSON lines.

Run by `eval.vllm_engine` as `python -m eval.vllm_worker`. A process of its own keeps the engine's memory,
threads and log output away from the caller, and a crash in it becomes one error. Standard output carries only
the protocol; everything that vLLM prints goes to standard error (the log file of the engine).
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pipelines import vllm_cpu_seeds

_ORPHAN_SECONDS = 5

_COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_tokens_per_position",
}


class CountersDisagreeError(RuntimeError):
    """The engine's counters are not the sums of the steps that were seen."""


def engine_arguments(settings: dict[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs`."""
    speculation: dict[str, Any] = {}
    if settings["method"] == "dflash":
        speculation = {"method": "dflash", "model": settings["drafter"]}
    elif settings["method"] == "ngram":
        speculation = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if speculation:
        speculation["num_speculative_tokens"] = settings["drafts"]
    return {
        "model": settings["target"],
        "skip_tokenizer_init": True,  # ids in, ids out
        "dtype": settings["dtype"],
        "enforce_eager": on_cpu,  # compiling for a CPU takes minutes; a GPU decodes with graphs
        "max_model_len": settings["max_model_len"],
        "max_num_seqs": settings["max_concurrent"],
        "enable_prefix_caching": False,  # the second method of a prompt must not find the first one's work
        "seed": settings["seed"],
        "generation_config": "vllm",  # sampling comes from the request, not from the checkpoint's defaults
        "disable_log_stats": False,
        "async_scheduling": False,
        "scheduler_cls": "eval.vllm_scheduler.RecordingScheduler",
        "speculative_config": speculation or None,
        **settings["engine_arguments"],
    }


@dataclass
class _Running:
    """A request while it is being decoded."""

    index: int
    internal: str  # its name inside the engine
    prompt_tokens: int
    ids: list[int] = field(default_factory=list)
    #: its share of the engine's steps since its last tokens, in seconds
    waiting: float = 0.0
    prefill_seconds: float = 0.0
    #: context, drafted, accepted, emitted, seconds
    steps: list[tuple[int, int, int, int, float]] = field(default_factory=list)


class Worker:
    """One engine, and the loop that keeps a number of requests in flight."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        vllm_cpu_seeds.repair()
        on_cpu = current_platform.is_cpu()
        if on_cpu and settings["method"] == "dflash":
            from eval.vllm_dflash_cpu import install

            install(vllm.__version__, candidates=settings["candidates"])
        arguments = EngineArgs(**engine_arguments(settings, on_cpu=on_cpu))
        self._engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._stop_ids = settings["stop_token_ids"]
        self._number = 0
        self.facts = {
            "vllm": vllm.__version__,
            "platform": "cpu" if on_cpu else current_platform.device_name,
            "device": current_platform.get_device_name(),
        }

    def close(self) -> None:
        """Give back what the engine holds, so that another one can be loaded in this process."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.platforms import current_platform

        self._engine.engine_core.shutdown()
        del self._engine, self._scheduler
        cleanup_dist_env_and_memory()
        # They stay registered; a second time vLLM 0.32 searches all modules and trips over llvmlite's.
        current_platform.register_triton_kernel_overrides = lambda: None

    def generate(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decode the prompts of a job with at most `concurrency` of them in flight."""
        self._scheduler.keep_drafts = job["keep_drafts"]
        waiting = list(enumerate(job["prompts"]))[::-1]
        running: dict[str, _Running] = {}
        finished: dict[int, dict[str, Any]] = {}
        before = self._counters()
        started = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < job["concurrency"]:
                self._submit(*waiting.pop(), job, running)
            self._scheduler.verified.clear()
            begun = time.perf_counter()
            outputs = self._engine.step()
            share = (time.perf_counter() - begun) / len(running)
            for request in running.values():
                request.waiting += share
            for output in outputs:
                self._note(output, running, finished)
        seconds = time.perf_counter() - started
        responses = [finished[index] for index in range(len(job["prompts"]))]
        counters = _difference(self._counters(), before)
        _check(counters, responses)
        return {"responses": responses, "counters": counters, "seconds": seconds}

    def _submit(
        self, index: int, prompt: dict[str, Any], job: dict[str, Any], running: dict[str, _Running]
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampled = job["temperature"] > 0
        sampling = SamplingParams(
            temperature=job["temperature"],
            top_p=job["top_p"] if sampled else 1.0,
            top_k=job["top_k"] if sampled else 0,
            seed=prompt["seed"] if sampled else None,
            max_tokens=job["max_new_tokens"],
            ignore_eos=True,
            stop_token_ids=self._stop_ids if job["stop"] else [],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._number += 1
        name = str(self._number)
        internal = self._engine.add_request(name, {"prompt_token_ids": prompt["ids"]}, sampling)
        running[name] = _Running(index, internal, len(prompt["ids"]))

    def _note(self, output: Any, running: dict[str, _Running], finished: dict[int, dict[str, Any]]) -> None:
        """Book the tokens that a step gave to one request."""
        request = running[output.request_id]
        tokens = list(output.outputs[0].token_ids)
        if not request.ids:
            request.prefill_seconds = request.waiting
        elif tokens:
            drafted, accepted = self._scheduler.verified.get(request.internal, (0, 0))
            context = request.prompt_tokens + len(request.ids) - 1
            request.steps.append((context, drafted, accepted, len(tokens), request.waiting))
        if tokens:
            request.waiting = 0.0
            request.ids += tokens
        if output.finished:
            del running[output.request_id]
            finished[request.index] = {
                "ids": request.ids,
                "prefill_seconds": request.prefill_seconds,
                "steps": request.steps,
                "drafts": self._scheduler.proposed.pop(request.internal, []),
            }

    def _counters(self) -> dict[str, Any]:
        found: dict[str, Any] = dict.fromkeys(_COUNTERS.values(), 0)
        for metric in self._engine.get_metrics():
            if metric.name in _COUNTERS:
                found[_COUNTERS[metric.name]] = getattr(metric, "values", None) or metric.value
        return found


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    def subtract(now: Any, then: Any) -> Any:
        if isinstance(now, list):
            return [a - b for a, b in zip(now, then or [0] * len(now), strict=True)]
        return now - then

    return {name: subtract(after[name], before[name]) for name in after}


def _check(counters: dict[str, Any], responses: list[dict[str, Any]]) -> None:
    """The engine's own counters are the sums of what was seen step by step."""
    steps = [step for response in responses for step in response["steps"] if step[1] > 0]
    seen = {
        "drafts": len(steps),
        "draft_tokens": sum(step[1] for step in steps),
        "accepted_tokens": sum(step[2] for step in steps),
    }
    if seen != {name: counters[name] for name in seen}:
        raise CountersDisagreeError(
            f"vLLM's counters say {counters}, its steps sum to {seen}; this release counts otherwise than "
            "those that were tested"
        )


def serve(requests: queue.Queue[str | None], out: IO[str]) -> None:
    """Answer `{"load": settings, "log": file}` and `{"generate": job}` until None comes."""

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    worker: Worker | None = None
    try:
        while (line := requests.get()) is not None:
            message = json.loads(line)
            if "load" in message:
                _print_to(message["log"])
                if worker is not None:
                    worker.close()
                worker = Worker(message["load"])
                send({"ready": worker.facts})
            else:
                assert worker is not None
                send({"done": worker.generate(message["generate"])})
    except Exception as error:
        send({"failed": f"{type(error).__name__}: {error}"})
        raise


def _print_to(path: str) -> None:
    """Let standard error, and what C++ code prints to standard output, go to a file."""
    sys.stderr.flush()
    with Path(path).open("a") as file:
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)


def _read(requests: queue.Queue[str | None]) -> None:
    """Pass on what comes in; when the parent closes its end or dies, no job may keep the process alive."""
    for line in sys.stdin:
        requests.put(line)
    requests.put(None)
    time.sleep(_ORPHAN_SECONDS)
    os._exit(1)


def main() -> None:
    """Entry point of the process."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    serve(requests, out)
    out.close()
    os._exit(0)  # engine threads would keep the interpreter alive


if __name__ == "__main__":
    main()
