"""The training job: from a run file to a served drafter.

One optimizer step: the anchors of all its micro-batches are drawn before the first forward pass, so Z, the
supervised slots of the whole step over all replicas, is known; every rank back-propagates its loss sums
times (number of ranks) / Z; the engine averages gradients over ranks. The gradient is therefore that of the
mean loss over supervised slots, however the samples are cut into micro-batches and replicas.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csbp.backends import fix_order_of_sums
from csbp.layout import BlockLayout
from csbp.plan import StepPlan, plan_step
from csbp.transport import Wire
from drafter import kernels
from drafter.model import Drafter
from drafter.precision import compute_dtype, cpu_products
from pipelines.backend_choice import backend_of
from pipelines.corpus import Corpus
from pipelines.drafter_source import find_target, make_drafter, make_head
from pipelines.exports import check_servable, drafter_of, publish, write_drafter
from pipelines.figures import BYTES_READ, STEP_KINDS, Sums, training_figures
from pipelines.grid import make_cost, make_grid
from pipelines.loader import Loader, MicroBatch, Sharding
from pipelines.logs import RunLog, peak_memory_bytes
from pipelines.optimization import Engine, NonFiniteError
from pipelines.prefetch import Prefetcher
from pipelines.ranks import (
    add_over_ranks,
    add_tensors_over_ranks,
    barrier,
    join_ranks,
    peers_named,
    require_same,
)
from pipelines.run_folder import check_same_run, complete, open_folder, starting_point
from pipelines.runfile import RunConfig, settings_by_key
from pipelines.step import DraftStep
from pipelines.stopping import StopSignal
from pipelines.train_result import TrainResult, read_result
from pipelines.training_state import CheckpointWriter, list_checkpoints, read_moments
from pipelines.validation import validate


def run_train(config: RunConfig) -> TrainResult:
    """Train, go on with the run found in `config.out`, or do nothing if it is finished.

    Called once per rank; a launcher's environment (RANK, WORLD_SIZE, ...) is recognised.

    Raises:
        RunFileError: `config.out` holds a run with other settings.
        DataError, ConfigError, TargetError: stores, drafter and target do not fit each other.
        NonFiniteError: the loss or a gradient stopped being a number; the message names the step.
        RanksError: ranks were given different runs, see different files, or lost a peer.
    """
    config = complete(config)
    check_same_run(config)
    finished = read_result(config.out)
    join_ranks()
    with peers_named():
        require_same({
            **settings_by_key(config),
            "finished result": finished is not None,
            "newest checkpoint": max(list_checkpoints(config.out), default=None),
        })  # fmt: skip
        if finished is not None:
            return replace(finished, status="already finished")
        return Trainer(config).run()


class Trainer:
    """One rank of one run.

    Args:
        config: from `run_folder.complete`.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = device = join_ranks()
        if config.parallel.deterministic:
            fix_order_of_sums()
        self.corpus = Corpus(config.data)
        require_same({"data (fingerprint of data.stores)": self.corpus.fingerprint})
        self.target = find_target(config.drafter, self.corpus)
        self.state, checkpoint = starting_point(config, self.corpus)
        self.drafter = self._make_drafter(checkpoint).to(device)
        check_servable(self.drafter, self.target)
        self.corpus.check_reach(self.drafter.config, config.parallel.mode, config.objective)
        dtype = compute_dtype(config.precision, device)
        kernels.set_mode("never" if config.parallel.attention_backend == "torch" else "auto")
        on_distribution = config.objective.on_distribution
        head = make_head(self.corpus, self.target, device, dtype, output=on_distribution)
        self.grid = grid = make_grid(
            config, self.corpus, self.drafter.config, head.head is head.embedding, device
        )
        self._backend, self._why_backend = backend_of(config, self.corpus, self.drafter.config, grid, device)
        self._cost = make_cost(config, self.drafter.config, device)
        self._wire = Wire(grid)
        self.lead = grid.rank == 0
        if self.lead:
            open_folder(config, self.corpus, self.drafter, grid, device)
        self.loader = Loader(
            self.corpus,
            config.batch,
            Sharding(grid.replica, grid.replicas, self._plan),
            anchors=config.anchors,
            block_size=self.drafter.config.block_size,
            seed=config.seed,
            last_hidden=on_distribution,
            device=device,
        )
        self.total_steps = config.schedule.total_steps(self.loader.sampler.steps_per_epoch)
        self.module = DraftStep(
            self.drafter,
            head,
            config.objective,
            autocast=dtype == torch.bfloat16,
            seed=config.seed,
            recompute=config.parallel.recompute,
        )
        self.engine = Engine(self.module, config.optimizer, config.parallel.zero)
        if checkpoint is not None:
            self.engine.load_moments(read_moments(checkpoint), self.state.step)
        self._writer = CheckpointWriter(config.out, config.checkpoint)
        self._began = time.monotonic() - self.state.elapsed
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of this call's steps, by part
        self._totals: defaultdict[str, float] = defaultdict(float)  # of this call's steps, all ranks
        self._sums = Sums()  # since the last line of the log, this rank
        self._line_began = time.monotonic()
        self._logged_wait = 0.0
        self._last_update: dict[str, float] = {}
        self._train: dict[str, Any] = {}
        self._validation: dict[str, Any] = {}
        self._validated_step = -1

    def run(self) -> TrainResult:
        """Train to the end, or until stopped."""
        config = self.config
        with (
            RunLog(
                config.out, step=self.state.step, tensorboard=config.logging.tensorboard, active=self.lead
            ) as log,
            StopSignal() as stop,
            cpu_products(config.precision),
        ):
            if self._why_backend and self.device.type == "cuda":
                log.say(f"attention backend {self._backend}: {self._why_backend}")
            batches = self.loader.train(self.state.step)
            try:
                status = self._steps(batches, log, stop)
            finally:
                batches.close()
            self._log(log)
            if status == "finished":
                self._validate(log)
            self._save()
            if status == "finished":
                self._publish("last")
            else:
                reason = stop.name or "checkpoint.stop_at"
                log.say(
                    f"stopped by {reason} after step {self.state.step}; the same command goes on from there"
                )
        result = self._result(status)
        if self.lead and status == "finished":
            result.save()
        barrier(self.grid)
        return result

    def _steps(self, batches: Prefetcher[MicroBatch], log: RunLog, stop: StopSignal) -> str:
        config = self.config
        while self.total_steps is None or self.state.step < self.total_steps:
            began = time.monotonic()
            with self._timed("data"):
                batch = next(batches)
            shared = self._agree(batch, stop)
            if shared["stop"]:
                return "stopped"
            budget = config.schedule.minutes
            if budget is not None and shared["elapsed"] >= 60.0 * budget:
                return "finished"
            lr = config.optimizer.lr * config.schedule.factor(
                self.state.step, self.total_steps, shared["elapsed"]
            )
            norm = self._step(batch, batches, shared["slots"], lr)
            self._advance(began)
            self._last_update = {"lr": lr, "grad_norm": norm}
            step = self.state.step
            if step % config.logging.every == 0:
                self._log(log)
            log.advance(self._done(), f"step {step}" + self._loss_text())
            if step % config.validation.every == 0:
                self._validate(log)
            if step == config.checkpoint.stop_at:
                return "stopped"
            if step % config.checkpoint.every == 0:
                self._save()
        return "finished"

    def _agree(self, batch: MicroBatch, stop: StopSignal) -> dict[str, float]:
        """What all ranks have to know alike before a step: its slots, whether to stop, the time."""
        mine = {
            "slots": float(batch.step_slots) if self.grid.context_rank == 0 else 0.0,
            "stop": float(stop.name is not None),
            "elapsed": time.monotonic() - self._began if self.lead else 0.0,
        }
        return add_over_ranks(mine, self.grid, self.device)

    def _step(self, batch: MicroBatch, batches: Prefetcher[MicroBatch], slots: float, lr: float) -> float:
        """One optimizer step; returns the gradient norm."""
        scale = self.grid.world / slots
        sent = self.engine.sent_bytes
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        while True:
            with self._timed("forward"):
                sums = self.module(batch.taken(self.device))
            with self._timed("backward"):
                self.engine.backward(sums.loss * scale, last=batch.last)
            loss_sum += sums.metrics["loss"]
            self._count(batch, sums.metrics)
            if batch.last:
                break
            with self._timed("data"):
                batch = next(batches)
        try:
            with self._timed("update"):
                norm = self.engine.update(lr)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"step {self.state.step + 1}: {error} at learning rate {lr:.3g}, loss sum of this rank "
                f"{float(loss_sum):.4g}. Nothing of this step is saved; the newest checkpoint is good. Lower "
                "optimizer.lr, or look at the features of this step's samples"
            ) from None
        self._sums.add({"gradient_bytes": self.engine.sent_bytes - sent})
        self._sums.add({f"sent_{kind}": self._wire.sent[kind] for kind in STEP_KINDS})
        self._wire.sent.clear()
        return norm

    def _count(self, batch: MicroBatch, metrics: dict[str, Tensor]) -> None:
        """Add a micro-batch to the line being pooled; one rank counts what its replica shares."""
        self._sums.add(metrics)  # stays on the device: reading it would wait for the step
        first = self.grid.context_rank == 0
        self._sums.add({
            "coverage": batch.coverage_sum if first else 0.0,
            "documents": batch.documents if first else 0.0,
            "feature_bytes_read": batch.feature_bytes_read,
            "union_bytes": batch.union_bytes if first else 0.0,
            "state_bytes_read": batch.state_bytes_read,
        })  # fmt: skip

    def _advance(self, began: float) -> None:
        step = self.state.step + 1
        samples = self.loader.sampler.samples_before(step)
        self._seconds["total"] += time.monotonic() - began
        self.state = replace(
            self.state,
            step=step,
            samples=samples,
            epoch=samples // len(self.corpus.train),
            elapsed=time.monotonic() - self._began,
        )

    def _log(self, log: RunLog) -> None:
        """One line of metrics over the steps since the last, if there were any, pooled over ranks."""
        if not self._sums.values:
            return
        pooled = add_tensors_over_ranks(self._sums.take(), self.grid, self.device)
        seconds = time.monotonic() - self._line_began
        slots, blocks = float(pooled["slots"].sum()), float(pooled["blocks"])
        for name, value in (("slots", slots), *((name, float(pooled[name])) for name in BYTES_READ)):
            self._totals[name] += value
        self._train = {
            **training_figures(pooled),
            **self._last_update,
            "epoch": self.state.samples / len(self.corpus.train),
            "slots_per_second": slots / seconds,
            "blocks_per_second": blocks / seconds,
            "data_wait_seconds": self._seconds["data"] - self._logged_wait,
            "memory_bytes": float(peak_memory_bytes(self.device)),
        }
        log.write("train", self.state.step, self._train)
        self._logged_wait = self._seconds["data"]
        self._line_began = time.monotonic()

    def _validate(self, log: RunLog) -> None:
        """Draft held-out blocks, once per step; the best drafter so far is exported."""
        if not self.corpus.held_out or self._validated_step == self.state.step:
            return
        self._validated_step = self.state.step
        began = time.monotonic()
        batches = self.loader.held_out(self.config.validation.max_batches)
        try:
            self._validation = validate(self.module, batches, self.grid)
        finally:
            batches.close()
        self._wire.sent.clear()  # what is logged is of training alone
        log.write("validation", self.state.step, self._validation)
        log.say(
            f"step {self.state.step}: acceptance length {self._validation['acceptance_length']:.3f} over "
            f"{self._validation['blocks']:.0f} held-out blocks"
        )
        if self._validation["accepted"] > self.state.best_accepted:
            self.state = replace(
                self.state, best_step=self.state.step, best_accepted=self._validation["accepted"]
            )
            self._publish("best")
        self._line_began += time.monotonic() - began  # slots per second are of training alone

    def _save(self) -> None:
        began = time.monotonic()
        moments = self.engine.moments()
        if self.lead:
            self.state = replace(self.state, elapsed=time.monotonic() - self._began)
            weights = {
                name: value.detach().cpu().contiguous().clone()
                for name, value in self.drafter.state_dict().items()
            }
            self._writer.save(self.state, asdict(self.drafter.config), weights, moments)
        barrier(self.grid)
        self._line_began += time.monotonic() - began

    def _publish(self, link: str) -> None:
        if self.lead:
            publish(self.config.out, link, self.state.step, self._export)
        barrier(self.grid)

    def _export(self, folder: Path) -> None:
        write_drafter(self.drafter, self.target, str(self.config.drafter.target), folder, self.module.head)

    def _result(self, status: str) -> TrainResult:
        total = self._seconds.pop("total", 0.0)
        parts = {name: spent / total for name, spent in self._seconds.items()} if total else {}
        if parts:
            parts["other"] = 1.0 - sum(parts.values())
        links = {name: self.config.out / "export" / name for name in ("best", "last")}
        return TrainResult(
            status=status,
            out=str(self.config.out),
            step=self.state.step,
            total_steps=self.total_steps,
            epochs=self.state.samples / len(self.corpus.train),
            train=self._train,
            validation=self._validation,
            best_step=self.state.best_step,
            best_accepted=max(self.state.best_accepted, 0.0),
            seconds=self.state.elapsed,
            slots_per_second=self._totals["slots"] / total if total else 0.0,
            **{name: round(self._totals[name]) for name in BYTES_READ},
            breakdown=parts,
            exports={name: str(path) for name, path in links.items() if path.is_dir()},
        )

    def _make_drafter(self, checkpoint: Path | None) -> Drafter:
        if checkpoint is None:
            return make_drafter(self.config.drafter, self.corpus, self.target, self.config.seed)
        return drafter_of(checkpoint)

    def _plan(self, layout: BlockLayout) -> StepPlan:
        parallel = self.config.parallel
        return plan_step(
            layout,
            self.drafter.config.layer_masks,
            self.grid,
            mode=parallel.mode,
            placement=parallel.placement,
            transport=parallel.transport,
            cost=self._cost,
            retain=parallel.retain,
            wire=self._wire,
            device=self.device,
            backend=self._backend,
        )

    def _loss_text(self) -> str:
        return f"  loss {self._train['loss']:.3f}" if self._train else ""

    def _done(self) -> float:
        """Finished share of the run."""
        if self.total_steps is not None:
            return self.state.step / self.total_steps
        assert self.config.schedule.minutes is not None
        return min(self.state.elapsed / (60.0 * self.config.schedule.minutes), 1.0)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[part] += time.monotonic() - began
