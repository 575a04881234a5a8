"""How many of a block's drafts are worth verifying: the gain of one more token against its cost.

A block is drafted in one pass, so all of its drafts are there before any is verified, and each of them makes
the target's forward one row longer. With q_j the probability that draft j is accepted when all before it are,
verifying n drafts gives G(n) = 1 + q_1 + q_1 q_2 + ... + q_1 ... q_n tokens in D + V(n + 1) seconds. The rate
over many steps is highest when every step maximises G(n) - r (D + V(n + 1)), r being that highest rate; the
rate so far stands for it.

q_j is logistic in two scores of the draft and fitted on replayed answers (`longdraft replay --adaptive`);
D and V are measured on the machine.

Only greedy drafts are cut. A cut may depend on the drafts that it keeps: if these were drawn, those that are
kept would no longer be distributed as the rejection test assumes, and responses not as the target's.

Shape legend: K drafts of a block, M blocks, S = 2 scores (selector's and unary log-probability).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eval.clock import Clock
from eval.errors import EvalError
from eval.sampling import Sampling
from eval.target import Target

if TYPE_CHECKING:
    from eval.decode import Drafter

Array = NDArray[np.float64]

_ITERATIONS = 50
_RIDGE = 1.0  # a slot that was hardly ever reached keeps to what the scores say
_TIMED_ROUNDS = 7
_TIMED_CONTEXT = 512


@dataclass(frozen=True)
class AcceptanceModel:
    """log-odds of q_j = bias_j + weights . scores_j.

    Attributes:
        biases: one a draft position.
        weights: of the selector's and of the unary log-probability.
        drafts: how many drafts it was fitted on.
        log_loss: mean over them, in nats.
        base_log_loss: the same for a probability of each position alone.
    """

    biases: list[float]
    weights: list[float]
    drafts: int
    log_loss: float
    base_log_loss: float

    @classmethod
    def fit(cls, scores_MKS: Tensor, accepted_M: Tensor, known_M: Tensor) -> AcceptanceModel:
        """Fit by Newton's method on the drafts that were reached, that is with all before them accepted.

        Args:
            scores_MKS: of every draft.
            accepted_M: int64, drafts before the first miss.
            known_M: int64, drafts of the block that there is a true token for.

        Raises:
            EvalError: not one draft was reached.
        """
        position_K = torch.arange(scores_MKS.shape[1])
        reached_MK = (position_K <= accepted_M[:, None]) & (position_K < known_M[:, None])
        if not reached_MK.any():
            raise EvalError("no draft of these samples can be compared with a token of the target")
        slot = position_K.expand_as(reached_MK)[reached_MK].numpy()
        hit = (position_K < accepted_M[:, None])[reached_MK].double().numpy()
        inputs = np.concatenate(
            [np.eye(len(position_K))[slot], scores_MKS[reached_MK].double().numpy()], axis=1
        )
        parameters = _newton(inputs, hit)
        rate_K = np.array([hit[slot == k].mean() if (slot == k).any() else 0.5 for k in position_K])
        return cls(
            biases=parameters[: len(position_K)].tolist(),
            weights=parameters[len(position_K) :].tolist(),
            drafts=len(hit),
            log_loss=_log_loss(_sigmoid(inputs @ parameters), hit),
            base_log_loss=_log_loss(rate_K[slot], hit),
        )

    def probabilities(self, scores_KS: Tensor) -> Array:
        """q_1 ... q_K of one block; K may be less than the model was fitted for."""
        logits: Array = scores_KS.double().cpu().numpy() @ np.array(self.weights)
        return _sigmoid(logits + np.array(self.biases[: len(logits)]))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path, drafts: int) -> AcceptanceModel:
        """Read what `save` wrote, for blocks of at most `drafts` drafts.

        Raises:
            EvalError: no such file, another one, or one for shorter blocks.
        """
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise EvalError(
                f"expected an acceptance model in {path} (longdraft replay --adaptive {path}): {error}"
            ) from error
        if len(found.biases) < drafts:
            raise EvalError(
                f"{path} was fitted on blocks of {len(found.biases) + 1} rows, but {drafts + 1} are decoded; "
                f"fit it with longdraft replay --block {drafts + 1}"
            )
        return found


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's two passes.

    Attributes:
        draft: of one block.
        verify: of 1, 2, ... rows.
    """

    draft: float
    verify: Sequence[float]


class DraftLength:
    """Cuts one block after the other.

    Attributes:
        model: what the drafts' scores say.
        costs: of steps; set before the first block.
    """

    def __init__(self, model: AcceptanceModel, costs: StepCosts | None = None) -> None:
        self.model = model
        self.costs = costs
        self._tokens = self._seconds = 0.0

    def choose(self, scores_KS: Tensor) -> int:
        """How many of K drafts to verify, 0 to K."""
        if self.costs is None:
            return len(scores_KS)
        gains = 1 + np.concatenate([[0.0], np.cumprod(self.model.probabilities(scores_KS)).cumsum()])
        seconds = self.costs.draft + np.array(self.costs.verify[: len(gains)])
        rate = self._tokens / self._seconds if self._seconds else float((gains / seconds).max())
        best = int((gains - rate * seconds).argmax())
        self._tokens += gains[best]
        self._seconds += seconds[best]
        return best


@torch.inference_mode()
def measure_costs(target: Target, drafter: Drafter) -> StepCosts:
    """Time a draft, and a forward of the target of every number of rows, behind 512 tokens if they fit.

    Medians of rounds in which all of them take turns; the first round is not counted.
    """
    context = min(_TIMED_CONTEXT, target.max_positions - drafter.block)
    ids = torch.arange(context, device=target.device) % len(target.embedding)
    drafter.start(ids.tolist(), Sampling(), None)
    session = target.open(drafter.taps)
    session.prefill(ids, drafter.prefill)
    seconds = []
    for _ in range(1 + _TIMED_ROUNDS):
        clock = Clock(target.device)
        clock.mark()
        drafter.draft(ids[-1:], drafter.block - 1)
        clock.mark()
        for rows in range(1, drafter.block + 1):
            session.forward(ids[-1:].expand(rows))
            clock.mark()
            session.drop(rows)
            clock.mark()
        seconds.append(clock.seconds())
    draft, *rest = np.median(seconds[1:], axis=0).tolist()
    # A forward of more rows is not cheaper: what looks so is noise, and would make the cut jump.
    return StepCosts(draft, np.maximum.accumulate(rest[::2]).tolist())


def _newton(inputs_MP: Array, hit_M: Array) -> Array:
    parameters_P: Any = np.zeros(inputs_MP.shape[1])
    for _ in range(_ITERATIONS):
        chance_M = _sigmoid(inputs_MP @ parameters_P)
        gradient_P = inputs_MP.T @ (hit_M - chance_M) - _RIDGE * parameters_P
        curvature_PP = (inputs_MP * (chance_M * (1 - chance_M))[:, None]).T @ inputs_MP
        step_P = np.linalg.solve(curvature_PP + _RIDGE * np.eye(len(parameters_P)), gradient_P)
        parameters_P = parameters_P + step_P
        if np.abs(step_P).max() < 1e-9:
            break
    return parameters_P


def _sigmoid(logits: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -logits))


def _log_loss(chance_M: Array, hit_M: Array) -> float:
    chance_M = np.clip(chance_M, 1e-12, 1 - 1e-12)
    return float(-np.mean(hit_M * np.log(chance_M) + (1 - hit_M) * np.log(1 - chance_M)))
