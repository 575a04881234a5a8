"""The pass itself: jobs to the engine, finished sequences into the store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pipelines.capture_options import CaptureOptions
from pipelines.capture_tasks import GivenSample, Task, job_seed, sample_id, token_sample
from pipelines.chat import ChatRenderer, MaskedTokens
from pipelines.dialogue import Dialogue
from pipelines.engine import Captured, Engine, Job, Sampling
from pipelines.keep import Kept, WindowRule, choose_rows, rows_to_make
from pipelines.parity import ParityError, RowCheck
from pipelines.progress import Bar
from pipelines.records import Record, RecordError, Rejection
from pipelines.rowfile import NonFiniteError
from pipelines.rowformat import FEATURES, RowFormat
from pipelines.store import StoreWriter

_JOBS_AHEAD = 4  # jobs kept at the engine per sequence that it runs at once


class _NoAnswerError(RecordError):
    """The engine gave no valid rows."""


@dataclass
class PassFigures:
    """What one pass did."""

    samples: int = 0
    rows: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    rejections: list[Rejection] = field(default_factory=list)


class CapturePass:
    """Runs the tasks of a plan through an engine.

    Args:
        engine: started.
        writer: of the store.
        renderer: of the target.
        options: of the capture.
        rule: which rows are stored; None for all.
        limit: longest sample in tokens.
    """

    def __init__(
        self,
        engine: Engine,
        writer: StoreWriter,
        renderer: ChatRenderer,
        options: CaptureOptions,
        rule: WindowRule | None,
        limit: int,
    ) -> None:
        self._engine, self._writer, self._renderer = engine, writer, renderer
        self._options, self._rule, self._limit = options, rule, limit
        self._open: dict[str, _Conversation] = {}
        self.figures = PassFigures()

    def run(self, tasks: list[Task]) -> PassFigures:
        """All tasks; finished samples are in the store even if an error ends the pass.

        Raises:
            EngineError, StoreError: the engine or the disk failed.
        """
        waiting = deque(tasks)
        started = time.monotonic()
        ahead = _JOBS_AHEAD * self._options.max_concurrent
        with Bar("capture", len(tasks)) as bar:
            self._feed(waiting, ahead, bar)
            for captured in self._engine.results():
                self._take(captured, bar, started)
                self._feed(waiting, ahead, bar)
        self.figures.seconds = time.monotonic() - started
        return self.figures

    def _feed(self, waiting: deque[Task], ahead: int, bar: Bar) -> None:
        while waiting and sum(conversation.jobs for conversation in self._open.values()) < ahead:
            task = waiting.popleft()
            conversation = _Conversation(task, self._renderer, self._options, self._rule, self._limit)
            self._open[task.record.id] = conversation
            try:
                for job in conversation.first_jobs():
                    self._engine.submit(job)
            except RecordError as error:
                self._reject(task.record, str(error))
                bar.advance()

    def _take(self, captured: Captured, bar: Bar, started: float) -> None:
        record_id = captured.key.partition("/")[0]
        self.figures.generated_tokens += len(captured.output_ids)
        conversation = self._open.get(record_id)
        if conversation is None:  # rejected after its jobs had been sent
            captured.discard()
            return
        record = conversation.task.record
        try:
            job = conversation.take(captured)
            if job is not None:
                self._engine.submit(job)
            for number, of, tokens, rows in conversation.finished():
                self._write(record, number, of, tokens, rows)
        except (RecordError, NonFiniteError, ParityError) as error:
            self._reject(record, str(error))
            conversation.discard()
            captured.discard()
            bar.advance()
            return
        if conversation.jobs == 0:
            del self._open[record_id]
            seconds = time.monotonic() - started
            bar.advance(figures=f"{self.figures.rows / max(seconds, 1e-9):.0f} tok/s")

    def _reject(self, record: Record, reason: str) -> None:
        self.figures.rejections.append(Rejection(record.source, record.line, reason))
        self._open.pop(record.id, None)

    def _write(self, record: Record, number: int, of: int, tokens: MaskedTokens, captured: Captured) -> None:
        if captured.error:
            raise _NoAnswerError(f"the engine's rows are not usable: {captured.error}")
        manifest = self._writer.manifest
        formats = manifest.formats
        sample = token_sample(record, tokens, number, of)
        num_rows = len(sample.token_ids) - bool(captured.output_ids)
        kept = choose_rows(
            sample.id, sample.loss_mask, num_rows, self._rule, last_hidden=manifest.last_hidden
        )
        sample = replace(sample, **kept.fields(num_rows, self._rule))
        check = RowCheck(manifest.target_layer_ids, manifest.hidden_size)
        distinct = len(sample.token_ids[kept.rows[FEATURES].indices()].unique())
        if self._is_adopted(captured, kept, formats):
            for family, rows in captured.stored(formats):
                if family == FEATURES:
                    check.add(formats[family].unpack(rows))
            check.finish(distinct)
            files = captured.files or {}
            self._writer.adopt(
                sample, {family: [(f.path, f.sha256, f.rows) for f in of] for family, of in files.items()}
            )
        else:
            with self._writer.stream() as stream:
                for family, rows in chosen_rows(captured, kept, formats):
                    if family == FEATURES:
                        check.add(_readable(rows, formats[family]))
                    stream.append(rows, family)
                check.finish(distinct)
                stream.finish(sample)
            captured.discard()
        self.figures.rows += num_rows
        self.figures.samples += 1

    def _is_adopted(self, captured: Captured, kept: Kept, formats: dict[str, RowFormat]) -> bool:
        """Whether the engine's files become parts as they are: nothing to leave out, and large enough."""
        if captured.files is None:
            return False
        size = sum(len(rows) * formats[family].row_bytes for family, rows in kept.rows.items())
        whole = all(rows.ranges == captured.made[family].ranges for family, rows in kept.rows.items())
        return whole and size >= self._options.part_bytes // 4


def chosen_rows(
    captured: Captured, kept: Kept, formats: dict[str, RowFormat]
) -> Iterator[tuple[str, Tensor]]:
    """(family, next rows) of those that the engine made and the store keeps."""
    seen = dict.fromkeys(captured.made, 0)
    for family, rows in captured.stored(formats):
        made, first = captured.made[family], seen[family]
        seen[family] += len(rows)
        stored = made.members(first, seen[family]).intersection(kept.rows[family])
        if len(stored) == len(rows):
            yield family, rows
        elif len(stored):
            yield family, rows[made.rank_of(stored.indices()) - first]


def _readable(rows: Tensor, row_format: RowFormat) -> Tensor:
    """Rows as a reader will get them, but for the rounding of e4m3."""
    return row_format.unpack(rows) if rows.dtype == torch.uint8 else rows.to(row_format.dtype)


class _Conversation:
    """One task between its first job and its last sample."""

    def __init__(
        self,
        task: Task,
        renderer: ChatRenderer,
        options: CaptureOptions,
        rule: WindowRule | None,
        limit: int,
    ) -> None:
        self.task = task
        self.jobs = 0
        self._rule = rule
        self._limit = limit
        self._options = options
        self._last = options.last_hidden
        self._dialogue = Dialogue(task.record, renderer) if task.turns else None
        self._turn = 0
        self._prompt: list[int] = []
        self._held: list[Captured] = []  # rows of closed samples until their number is known
        self._ready: list[tuple[int, int, MaskedTokens, Captured]] = []

    def first_jobs(self) -> list[Job]:
        if self._dialogue is not None:
            job = self._next_turn()
            return [job] if job else []
        self.jobs = len(self.task.given)
        return [self._given_job(at, sample) for at, sample in enumerate(self.task.given)]

    def _given_job(self, at: int, sample: GivenSample) -> Job:
        """The rows that are stored of a given sequence are known before it runs."""
        record, mask = self.task.record, torch.from_numpy(sample.loss_mask)
        kept = choose_rows(
            sample_id(record, sample.number, sample.of), mask, len(mask), self._rule, last_hidden=self._last
        )
        return Job(f"{record.id}/{at}", sample.token_ids.tolist(), Sampling(), kept.rows)

    def take(self, captured: Captured) -> Job | None:
        """Accept a result; the job that has to follow it, if any.

        Raises:
            RecordError: the template refuses the next turn.
        """
        self.jobs -= 1
        if self._dialogue is None:
            sample = self.task.given[int(captured.key.partition("/")[2])]
            self._ready.append((sample.number, sample.of, sample.tokens(), captured))
            return None
        closed = len(self._dialogue.samples)
        self._dialogue.answered(captured.output_ids)
        job = self._next_turn()
        if len(self._dialogue.samples) > closed:
            self._held.append(captured)
        else:
            captured.discard()  # the next turn's prompt contains all of this one
        if job is None:
            samples = self._dialogue.samples
            for number, (tokens, rows) in enumerate(zip(samples, self._held, strict=True)):
                self._ready.append((number, len(samples), tokens, rows))
            self._held = []
        return job

    def finished(self) -> list[tuple[int, int, MaskedTokens, Captured]]:
        """(number, of, tokens, rows) of samples that can be written now."""
        ready, self._ready = self._ready, []
        return ready

    def discard(self) -> None:
        for captured in [*self._held, *(entry[3] for entry in self._ready)]:
            captured.discard()

    def _next_turn(self) -> Job | None:
        assert self._dialogue is not None
        prompt = self._dialogue.next_prompt()
        room = self._limit - len(prompt or ())
        if prompt is not None and room < 1:
            self._dialogue.stop()  # the answers so far are a sample of their own
            prompt = None
        if prompt is None:
            return None
        options = self._options
        sampling = Sampling(min(options.max_new_tokens, room), options.temperature, options.seed)
        record = self.task.record
        mask = torch.tensor(self._dialogue.loss_mask, dtype=torch.bool)
        rows = rows_to_make(mask, sampling.max_new_tokens, self._rule, last_hidden=self._last)
        seed = job_seed(record, self._turn, options.seed)
        job = Job(f"{record.id}/{self._turn}", prompt, sampling, rows, seed)
        self._turn += 1
        self.jobs = 1
        return job
