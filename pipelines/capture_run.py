"""The pass itself: jobs to the engine, finished sequences into the store."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from pipelines.capture_options import CaptureOptions
from pipelines.capture_tasks import Task, job_seed, token_sample
from pipelines.chat import ChatRenderer, MaskedTokens
from pipelines.dialogue import Dialogue
from pipelines.engine import Captured, Engine, Job, Sampling
from pipelines.parity import ParityError, RowCheck
from pipelines.progress import Bar
from pipelines.records import Record, RecordError, Rejection
from pipelines.rowfile import NonFiniteError
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
        limit: longest sample in tokens.
    """

    def __init__(
        self, engine: Engine, writer: StoreWriter, renderer: ChatRenderer, options: CaptureOptions, limit: int
    ) -> None:
        self._engine, self._writer, self._renderer = engine, writer, renderer
        self._options, self._limit = options, limit
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
            conversation = _Conversation(task, self._renderer, self._options, self._limit)
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
        width, dtype = manifest.feature_width, manifest.torch_dtype
        sample = token_sample(record, tokens, number, of)
        check = RowCheck(manifest.target_layer_ids, manifest.hidden_size)
        distinct = len(set(tokens.token_ids))
        row_bytes = width * dtype.itemsize
        if (
            captured.files
            and sum(file.rows for file in captured.files) * row_bytes >= self._options.part_bytes // 4
        ):
            for rows in captured.rows(width, dtype):
                check.add(rows)
            check.finish(distinct)
            files = captured.files
            self._writer.adopt(sample, {"features": [(f.path, f.sha256, f.rows) for f in files]})
            self.figures.rows += sum(file.rows for file in files)
        else:
            with self._writer.stream() as stream:
                for rows in captured.rows(width, dtype):
                    check.add(rows.to(dtype))
                    stream.append(rows)
                    self.figures.rows += len(rows)
                check.finish(distinct)
                stream.finish(sample)
            captured.discard()
        self.figures.samples += 1


class _Conversation:
    """One task between its first job and its last sample."""

    def __init__(self, task: Task, renderer: ChatRenderer, options: CaptureOptions, limit: int) -> None:
        self.task = task
        self.jobs = 0
        self._limit = limit
        self._options = options
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
        return [
            Job(f"{self.task.record.id}/{at}", sample.token_ids.tolist(), Sampling())
            for at, sample in enumerate(self.task.given)
        ]

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
        job = Job(f"{record.id}/{self._turn}", prompt, sampling, job_seed(record, self._turn, options.seed))
        self._turn += 1
        self.jobs = 1
        return job
