"""An evaluation inside vLLM: plain decoding, `ngram` and the drafters, one engine at a time.

An engine takes tens of seconds to start, so methods cannot take turns on every prompt as in `eval.measure`.
Instead prompts are dealt into two halves, and the engines run as a palindrome: in order over the first half,
in reverse over the second. Every method then stands at the same mean distance from the start, so a machine
that slows down steadily slows them all alike, and the engine in the middle is started only once. `--repeats`
adds palindromes with the halves exchanged.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from drafter.checkpoint import load_drafter, save_drafter
from eval.block_drafter import read_config, without_dflash2
from eval.decode import Decoded, Limits
from eval.engine_runs import Job, Place, RunFile
from eval.errors import EvalError
from eval.measure import TIE_BOUNDS, check_length, first_difference
from eval.options import EvalOptions, blocks_of, named
from eval.prompts import Message, Prompt, ids_hash, render
from eval.responses import PLAIN, Response, Turn, failed
from eval.sampling import Sampling
from eval.target import Target, stop_tokens
from eval.vllm_engine import Engine, EngineSettings, room_for
from pipelines.target import load_tokenizer, target_config

log = logging.getLogger(__name__)

RUNS = "engine_runs.jsonl"
LOGS = "engine_logs"
_WARM_UP = Limits(8)


@dataclass(frozen=True)
class Pass:
    """One method over one half of the prompts."""

    method: str
    half: int
    repeat: int


def plan(methods: Sequence[str], repeats: int) -> list[Pass]:
    """The order of engines: a palindrome for every repeat, halves exchanged from one to the next."""
    passes = []
    for repeat in range(repeats):
        halves = (repeat % 2, (repeat + 1) % 2)
        passes += [Pass(method, halves[0], repeat) for method in methods]
        passes += [Pass(method, halves[1], repeat) for method in reversed(methods)]
    return passes


@dataclass
class Asked:
    """One prompt and the token ids of its turns, as far as they are known."""

    prompt: Prompt
    turns: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class EngineEvaluation:
    """Everything that the engines of one evaluation share."""

    def __init__(self, options: EvalOptions, checkpoint: Path, digest: str) -> None:
        self.file = RunFile(options.out / RUNS, digest)
        self._options = options
        self._checkpoint = checkpoint
        self._tokenizer = load_tokenizer(checkpoint)
        stop = stop_tokens(checkpoint, self._tokenizer) if options.stop else frozenset()
        self._limits = Limits(options.max_new_tokens, stop)
        self._sampling = Sampling(options.temperature, options.top_p, options.top_k)
        self._positions = int(target_config(checkpoint)["max_position_embeddings"])
        self._methods = [PLAIN, *blocks_of(options)]
        self._engine: tuple[str, Engine] | None = None
        self._longest = 0

    def run(self, prompts: Sequence[Prompt]) -> Iterator[Response]:
        """Ask every engine everything that is not in the file yet, then give each prompt's response.

        Raises:
            EngineFailure: an engine could not be started or died; what was answered stays in the file.
        """
        try:
            asked, failures = self._ask(prompts)
            self._measure(asked)
        finally:
            self._close()
        yield from failures
        yield from self._responses(asked)

    def _ask(self, prompts: Sequence[Prompt]) -> tuple[list[Asked], list[Response]]:
        """Render all turns; responses that later turns follow come from the plain engine, untimed."""
        histories = self.file.histories()
        every, failures = [Asked(prompt) for prompt in prompts], []
        messages: dict[str, list[Message]] = {prompt.key: list(prompt.history) for prompt in prompts}
        for number in range(max(len(prompt.turns) for prompt in prompts)):
            for asked in [one for one in every if number < len(one.prompt.turns)]:
                key = asked.prompt.key
                if number > 0:
                    earlier = histories[key, number - 1]
                    asked.texts.append(self._tokenizer.decode(earlier, skip_special_tokens=True))
                    messages[key].append({"role": "assistant", "content": asked.texts[-1]})
                messages[key].append({"role": "user", "content": asked.prompt.turns[number]})
                ids = render(self._tokenizer, messages[key], self._options.template_args)
                try:
                    check_length(self._positions, self._limits, ids, f"{asked.prompt.id}, turn {number + 1}")
                except EvalError as error:
                    failures.append(failed(asked.prompt, error))
                    every.remove(asked)
                    continue
                asked.turns.append(ids)
            self._longest = max([self._longest, *(len(ids) for asked in every for ids in asked.turns)])
            followed = [
                asked
                for asked in every
                if number + 1 < len(asked.prompt.turns) and (asked.prompt.key, number) not in histories
            ]
            if followed:
                engine = self._open(PLAIN)
                found = engine.generate(
                    [asked.turns[number] for asked in followed],
                    limits=self._limits,
                    sampling=self._sampling,
                    concurrency=max(self._options.concurrency),
                    seeds=[self._seed(PLAIN, asked.prompt.key, number) for asked in followed],
                )
                for asked, decoded in zip(followed, found.responses, strict=True):
                    self.file.add_history(asked.prompt.key, number, decoded.ids)
                    histories[asked.prompt.key, number] = decoded.ids
        return every, failures

    def _measure(self, asked: Sequence[Asked]) -> None:
        done = self.file.answers()
        for step in plan(self._methods, self._options.repeats):
            half = asked[step.half :: 2]
            levels = sorted(self._options.concurrency)
            for level in levels if step.half == 0 else levels[::-1]:
                requests = [
                    (Place(level, step.repeat, step.method, one.prompt.key, turn), ids)
                    for one in half
                    for turn, ids in enumerate(one.turns)
                ]
                requests = [request for request in requests if request[0] not in done]
                if requests:
                    self._run_job(step, level, requests)

    def _run_job(self, step: Pass, level: int, requests: Sequence[tuple[Place, list[int]]]) -> None:
        engine = self._open(step.method)
        found = engine.generate(
            [ids for _, ids in requests],
            limits=self._limits,
            sampling=self._sampling,
            concurrency=level,
            seeds=[self._seed(step.method, place.prompt, place.turn) for place, _ in requests],
        )
        job = Job(
            concurrency=level,
            repeat=step.repeat,
            method=step.method,
            counters=found.counters,
            seconds=found.seconds,
            requests=len(requests),
            log=str(engine.log),
            facts=engine.facts,
        )
        self.file.add(job, zip((place for place, _ in requests), found.responses, strict=True))
        log.info("%s, %d at once: %d responses in %.1f s", step.method, level, len(requests), found.seconds)

    def _seed(self, *parts: object) -> int:
        text = " ".join(map(str, (self._options.seed, *parts)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    def _open(self, method: str) -> Engine:
        """The engine of a method: the running one, or a new one in its place."""
        if self._engine is not None and self._engine[0] == method:
            return self._engine[1]
        logs = self._options.out / LOGS
        name = re.sub(r"\W+", "-", method)
        place = logs / f"{name}-{len(list(logs.glob(f'{name}-*.log'))) + 1}.log"
        log.info("starting vLLM: %s (log: %s)", method, place)
        if self._engine is None:
            engine = Engine(self._settings(method), place)
        else:
            engine = self._engine[1]
            engine.replace(self._settings(method), place)
        self._engine = method, engine
        warm = list(range(4, 4 + min(64, self._longest)))
        engine.generate(
            [warm] * max(self._options.concurrency),
            limits=_WARM_UP,
            sampling=self._sampling,
            concurrency=max(self._options.concurrency),
        )
        return engine

    def _close(self) -> None:
        if self._engine is not None:
            self._engine[1].stop()
            self._engine = None

    def _settings(self, method: str) -> EngineSettings:
        options = self._options
        block = blocks_of(options).get(method, 1)
        common = EngineSettings(
            target=str(self._checkpoint),
            method="plain" if method == PLAIN else "ngram",
            drafter=None,
            candidates=False,
            drafts=block - 1,
            dtype=options.dtype,
            max_model_len=min(self._positions, room_for(self._longest + self._limits.max_new_tokens, block)),
            max_concurrent=max(options.concurrency),
            stop_token_ids=sorted(self._limits.stop_ids),
            seed=options.seed,
            engine_arguments=options.engine_args,
        )
        for name, folder in map(named, options.drafter):
            if method not in (name, f"{name} as v1"):
                continue
            served = folder if method == name else self._without_dflash2(name, folder)
            candidates = read_config(served).version == 2
            return replace(common, method="dflash", drafter=str(served), candidates=candidates)
        return common

    def _without_dflash2(self, name: str, folder: Path) -> Path:
        """The same weights exported as DFlash v1."""
        out = self._options.out / "engine_drafters" / f"{name}-as-v1"
        if not out.is_dir():
            out.parent.mkdir(parents=True, exist_ok=True)
            save_drafter(without_dflash2(load_drafter(folder)), out, target_name=str(self._checkpoint))
        return out

    def _responses(self, asked: Sequence[Asked]) -> Iterator[Response]:
        """Each prompt with what all methods answered at the smallest concurrency."""
        answers = self.file.answers()
        level = min(self._options.concurrency)
        judge = _Judge(self._options, self._checkpoint)
        for one in asked:
            prompt, turns = one.prompt, []
            for turn, ids in enumerate(one.turns):
                runs = _runs(answers, level, self._methods, self._options.repeats, prompt.key, turn)
                text = self._tokenizer.decode(runs[PLAIN][0].ids, skip_special_tokens=True)
                turns.append(Turn(len(ids), ids_hash(ids), text, runs, judge.differences(ids, runs)))
            yield Response(prompt.id, prompt.key, prompt.dataset, prompt.category, turns)


class _Judge:
    """Tells near ties from failures by the target's own logits; loads the target only if there is need."""

    def __init__(self, options: EvalOptions, checkpoint: Path) -> None:
        self._options, self._checkpoint = options, checkpoint
        self._target: Target | None = None

    def differences(self, ids: Sequence[int], runs: dict[str, list[Decoded]]) -> dict[str, Any]:
        if self._options.temperature > 0:
            return {}
        plain = runs[PLAIN][0].ids
        found = {}
        for method, decoded in runs.items():
            if decoded[0].ids != plain:
                difference = first_difference(self._loaded(), ids, plain, decoded[0].ids, self._bound())
                if difference is not None:
                    found[method] = difference
        return found

    def _bound(self) -> float:
        return TIE_BOUNDS[getattr(torch, self._options.dtype)]

    def _loaded(self) -> Target:
        if self._target is None:
            self._target = Target.load(
                self._checkpoint,
                dtype=getattr(torch, self._options.dtype),
                device=self._options.torch_device(),
                attention="folded",
                prepack=False,
            )
        return self._target


def _runs(
    answers: dict[Place, Decoded], level: int, methods: Sequence[str], repeats: int, prompt: str, turn: int
) -> dict[str, list[Decoded]]:
    return {
        method: [answers[Place(level, repeat, method, prompt, turn)] for repeat in range(repeats)]
        for method in methods
    }


def at_level(
    responses: Sequence[Response], answers: dict[Place, Decoded], level: int, repeats: int
) -> list[Response]:
    """The same prompts with what was answered at another concurrency."""
    return [
        replace(
            response,
            turns=[
                replace(turn, runs=_runs(answers, level, list(turn.runs), repeats, response.key, number))
                for number, turn in enumerate(response.turns)
            ],
        )
        for response in responses
    ]
