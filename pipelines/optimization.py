"""Learning rate, AdamW, and the DeepSpeed engine that reduces gradients and shards optimizer state.

Parameters stay in float32 whatever the compute dtype (autocast does the casting), so they are their own
master copies, and moments are float32 too. The learning rate is a function of progress that is computed
anew at every step; there is no scheduler object whose state could be restored wrongly.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from csbp.cost import gathering_bytes, reduction_bytes
from csbp.footprint import REDUCTION_BUCKET
from pipelines.ranks import TIMEOUT
from pipelines.reduction import OverlappedAverage, hand_over_in_order, take_averaged

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerConfig(BaseModel):
    """AdamW (arXiv 1711.05101)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(
        default=6e-4, gt=0, description="Peak learning rate (arXiv 2602.06036 trains with 6e-4)."
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="Decay of the first and second moment."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(
        default=0.01, ge=0, description="Applied to matrices only, never to gains or kernels."
    )
    clip: float = Field(default=1.0, gt=0, description="Largest global gradient norm.")


class ScheduleConfig(BaseModel):
    """How long a run is and how its learning rate moves. Exactly one of steps, epochs and minutes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["cosine", "constant"] = Field(
        default="cosine", description="Shape of the learning rate after its warm-up."
    )
    steps: int | None = Field(default=None, ge=1, description="Optimizer steps.")
    epochs: float | None = Field(default=None, gt=0, description="Passes over the training samples.")
    minutes: float | None = Field(
        default=None,
        gt=0,
        description="Budget of wall time. The learning rate follows the clock, so such a run can be resumed "
        "but not repeated bit by bit.",
    )
    warmup: float = Field(
        default=0.04, ge=0, lt=1, description="Share of the run with a rising learning rate."
    )
    floor: float = Field(
        default=0.0, ge=0, le=1, description="Last learning rate of the cosine, as a share of lr."
    )

    @model_validator(mode="after")
    def _one_length(self) -> ScheduleConfig:
        given = [name for name in ("steps", "epochs", "minutes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of steps, epochs and minutes; found {given or 'none'}")
        return self

    def total_steps(self, steps_per_epoch: float) -> int | None:
        """Optimizer steps of the run, or None where the clock decides."""
        if self.steps is not None:
            return self.steps
        if self.epochs is not None:
            return max(1, math.ceil(round(self.epochs * steps_per_epoch, 6)))  # 3 epochs of 7 / 3 steps are 7
        return None

    def factor(self, step: int, total_steps: int | None, elapsed: float) -> float:
        """Share of the peak learning rate for the update after `step` finished updates.

        Args:
            step: finished updates.
            total_steps: updates of the whole run; None for a run by the clock.
            elapsed: seconds since the run began, over all its resumptions; read only for a run by the clock.
        """
        if total_steps is not None:
            done, warmup = step / total_steps, round(self.warmup * total_steps) / total_steps
            rise = (step + 1) / total_steps
        else:
            assert self.minutes is not None
            done, warmup = min(elapsed / (60.0 * self.minutes), 1.0), self.warmup
            rise = done
        if done < warmup:
            return min(rise / warmup, 1.0)
        if self.kind == "constant":
            return 1.0
        return self.floor + (1.0 - self.floor) * 0.5 * (
            1.0 + math.cos(math.pi * (done - warmup) / (1.0 - warmup))
        )


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is not a number any more."""


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips the global norm itself and refuses to apply a non-finite gradient.

    DeepSpeed keeps the norm and clips only under ZeRO; without ZeRO this class does both.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig, *, clip: bool) -> None:
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self.grad_norm: Tensor | None = None
        self._clip = config.clip if clip else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._clip is not None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            self.grad_norm = nn.utils.clip_grad_norm_(parameters, self._clip)
            if not torch.isfinite(self.grad_norm):
                raise NonFiniteError(f"gradient norm {float(self.grad_norm)}")
        return super().step(closure)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay; gains, biases and convolution kernels (identity at the start) without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Engine:
    """A DeepSpeed engine reduced to what a step needs: backward, update, moments by parameter name.

    Gradients are averaged over the world while the backward pass goes on: by `OverlappedAverage`, once a
    step, without ZeRO and at stage 1; by DeepSpeed, in every micro-batch, at stage 2, which keeps no whole
    gradient. (At stage 1 DeepSpeed 0.19 begins after the backward pass; told to overlap, it gives other
    gradients with several buckets and micro-batches.)

    Args:
        model: holds the trained parameters, and frozen ones.
        config: of AdamW.
        zero_stage: DeepSpeed's.
        bucket: elements that are averaged at once.

    Attributes:
        sent_bytes: sent by this rank so far to average gradients and, under ZeRO, to gather updated weights.
            What DeepSpeed sends is counted by the forms of `csbp.cost`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        zero_stage: Literal[0, 1, 2],
        bucket: int = REDUCTION_BUCKET,
    ) -> None:
        prepare_deepspeed()
        import deepspeed

        self.model = model
        self.zero_stage = zero_stage
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._elements = sum(parameter.numel() for parameter in self._parameters)
        self._ranks = dist.get_world_size()
        alone = self._ranks == 1
        self._optimizer = ClippedAdamW(
            parameter_groups(model, config.weight_decay), config, clip=zero_stage == 0
        )
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self._optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                # we call step() once per optimizer step and backward() once per micro-batch
                "managed_gradient_accumulation": False,
                "zero_optimization": {
                    "stage": zero_stage,
                    "reduce_bucket_size": min(bucket, self._elements),
                    "overlap_comm": zero_stage == 2 and not alone,
                },
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": config.clip if zero_stage else 0.0,
                "steps_per_print": None,
            },
        )
        self._touch = zero_stage == 2 and not alone  # every rank has to bring every gradient
        self._average: OverlappedAverage | None = None
        if zero_stage == 0:
            self._engine.enable_backward_allreduce = False
        if zero_stage < 2 and not alone:
            self._average = OverlappedAverage(self._parameters, bucket, TIMEOUT)
        if zero_stage == 1:
            take_averaged(self._engine.optimizer)
        elif self._touch:
            hand_over_in_order(self._engine.optimizer, self._parameters)
        self._backwards = self._updates = 0
        self._allocate_moments(step=0)

    @property
    def sent_bytes(self) -> int:
        gathered = gathering_bytes(self._elements, self._ranks) if self.zero_stage else 0.0
        if self._average is not None:
            return self._average.sent_bytes + round(gathered * self._updates)
        summed = reduction_bytes(self._elements, self._ranks)
        return round(summed * self._backwards + gathered * self._updates)

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Add the gradient of `loss` to the step's.

        Args:
            loss: scalar.
            last: of the step's micro-batches; its backward pass completes the gradients.
        """
        if self._touch or not loss.requires_grad:
            loss = loss + zero_of(self._parameters)
        if last and self._average is not None:
            self._average.watch()
        self._engine.backward(loss, scale_wrt_gas=False)
        self._backwards += 1

    def update(self, lr: float) -> float:
        """Finish the average of gradients over ranks, clip, apply; returns the global norm before clipping.

        Raises:
            NonFiniteError: on every rank alike, since the norm is global.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self.zero_stage < 2:
            for parameter in self._parameters:
                if parameter.grad is None:  # no slot of this rank reached it; AdamW still moves it
                    parameter.grad = torch.zeros_like(parameter)
        if self._average is not None:
            self._average.finish()
        self._engine.step()
        self._updates += 1
        norm = self._engine.get_global_grad_norm() if self.zero_stage else self._optimizer.grad_norm
        value = float(norm) if norm is not None else math.nan
        if not math.isfinite(value) or value < 0:  # DeepSpeed reports a non-finite norm as -1
            raise NonFiniteError(f"gradient norm {value}")
        return value

    def moments(self) -> dict[str, Tensor]:
        """Full float32 moments on the CPU as ``exp_avg.<parameter>``; collective under ZeRO."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            for key in MOMENTS:
                value = self._moment(parameter, key)
                found[f"{key}.{name}"] = value.detach().to("cpu", torch.float32, copy=True)
        return found

    def load_moments(self, moments: dict[str, Tensor], step: int) -> None:
        """Put back what `moments` gave, after `step` updates."""
        self._allocate_moments(step)
        for name, parameter in self.model.named_parameters():
            for key in MOMENTS:
                self._set_moment(parameter, key, moments[f"{key}.{name}"].to(parameter.device))

    def _allocate_moments(self, step: int) -> None:
        """Zero moments before the first update, after which DeepSpeed would find only the first group's."""
        for flat in [p for group in self._optimizer.param_groups for p in group["params"]]:
            self._optimizer.state[flat] = {
                "step": torch.tensor(float(step), device=flat.device),
                **{key: torch.zeros_like(flat, dtype=torch.float32) for key in MOMENTS},
            }
        if self.zero_stage:
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.zero_stage:
            return safe_get_full_optimizer_state(parameter, key)
        moment: Tensor = self._optimizer.state[parameter][key]
        return moment

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if self.zero_stage:
            safe_set_full_optimizer_state(parameter, value, key)
        else:
            self._optimizer.state[parameter][key].copy_(value)


def zero_of(parameters: list[nn.Parameter]) -> Tensor:
    """Zero, with a zero gradient for every parameter: what a rank without blocks adds to a step."""
    return sum((p.sum() * 0.0 for p in parameters), torch.zeros((), device=parameters[0].device))


def prepare_deepspeed() -> None:
    """Settings that have to stand before DeepSpeed is imported: device, no compiled extensions, few words."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    # a shared-memory all-reduce for inference that DeepSpeed would compile at start; gloo does the work here
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
