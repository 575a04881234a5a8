"""The transformers backend: forward hooks on the tapped layers, in this process.

A hook sees the raw output of a layer, so taps mean the same as in the vLLM backend; the last hidden state is
the input of the final norm. Prompts of similar length share a right-padded batch: with causal attention no
row of a sequence sees the padding behind it. A prompt longer than a chunk is run alone, chunk by chunk over a
key/value cache; without an answer its rows are made while they are being written.

Shape legend: N sequences of a batch, T tokens, D hidden, W taps * hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from csbp.rows import RowSet
from pipelines.engine import Captured, EngineError, Job
from pipelines.rowformat import FEATURES, LAST

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm")
_GENERATION_BATCH = 64  # fastest of the sizes tried on two cores (126 tok/s)


class HfEngine:
    """See `pipelines.engine.Engine`.

    Args:
        target: checkpoint folder.
        target_layer_ids: taps (layer outputs).
        last_hidden: jobs may ask for last hidden states.
        dtype: "auto" or a torch dtype name to run in.
        eos_ids: ids that end an answer.
        step_tokens: tokens of a batch, padding included, and of a chunk.
        device: where to run; the first GPU if there is one.
    """

    def __init__(
        self,
        target: Path,
        target_layer_ids: Sequence[int],
        *,
        last_hidden: bool = False,
        dtype: str = "auto",
        eos_ids: frozenset[int] = frozenset(),
        step_tokens: int = 2048,
        device: str | None = None,
    ) -> None:
        self._target = target
        self._taps = list(target_layer_ids)
        self._last_hidden = last_hidden
        self._dtype = dtype
        self._eos = sorted(eos_ids)
        self._step = step_tokens
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._jobs: deque[Job] = deque()
        self._model: Any = None
        self._states: dict[int | str, Tensor] = {}  # tap, or LAST -> [N, T, D] of the last forward
        self._hooks: list[Any] = []

    def start(self) -> None:
        if self._model is not None:
            return
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(
                self._target, dtype=self._dtype if self._dtype == "auto" else getattr(torch, self._dtype)
            )
        except (OSError, ValueError, ImportError) as error:
            raise EngineError(f"transformers cannot load the target {self._target}: {error}") from None
        self._model = model.to(self._device).eval()
        layers = decoder_layers(self._model)
        for tap in self._taps:
            self._hooks.append(layers[tap].register_forward_hook(self._keep(tap)))
        if self._last_hidden:
            self._hooks.append(final_norm(self._model).register_forward_pre_hook(self._keep_last))

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._model, self._states = [], None, {}

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def results(self) -> Iterator[Captured]:
        while self._jobs:
            batch = self._take_batch()
            if len(batch) == 1 and batch[0].sampling.max_new_tokens:
                output, alone = self._generate_alone(batch[0])
                yield Captured(batch[0].key, output, batch[0].rows_made(output), pieces=iter(alone))
                continue
            outputs = self._generate(batch)
            sequences = [job.token_ids + output for job, output in zip(batch, outputs, strict=True)]
            # The last generated token was never an input: it has no row, as in the vLLM backend.
            inputs = [ids[:-1] if output else ids for ids, output in zip(sequences, outputs, strict=True)]
            made = [job.rows_made(output) for job, output in zip(batch, outputs, strict=True)]
            if len(batch) == 1:
                pieces = self._chunks(inputs[0], made[0])
                yield Captured(batch[0].key, outputs[0], made[0], pieces=pieces)
                continue
            rows = self._padded(inputs, made)
            for job, output, own, found in zip(batch, outputs, made, rows, strict=True):
                yield Captured(job.key, output, own, pieces=iter((found,)))

    def _take_batch(self) -> list[Job]:
        """The next jobs whose padded batch fits into a step; at least one."""
        batch = [self._jobs.popleft()]
        longest = len(batch[0].token_ids) + batch[0].sampling.max_new_tokens
        while self._jobs and len(batch) < _GENERATION_BATCH:
            job = self._jobs[0]
            wider = max(longest, len(job.token_ids) + job.sampling.max_new_tokens)
            if wider * (len(batch) + 1) > self._step or job.sampling != batch[0].sampling:
                break
            batch.append(self._jobs.popleft())
            longest = wider
        return batch

    @torch.inference_mode()
    def _chunks(self, ids: list[int], wanted: dict[str, RowSet]) -> Iterator[dict[str, Tensor]]:
        """Wanted rows [T, W] of one sequence, a chunk at a time."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        for start in range(0, len(ids), self._step):
            piece = torch.tensor([ids[start : start + self._step]], device=self._device)
            positions = torch.arange(start, start + piece.shape[1], device=self._device)[None]
            self._model(
                input_ids=piece,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            yield self._taken(0, start, start + piece.shape[1], wanted)
            self._states = {}

    @torch.inference_mode()
    def _generate_alone(self, job: Job) -> tuple[list[int], list[dict[str, Tensor]]]:
        """Answer of one job and its wanted rows, in one pass over a key/value cache.

        A long prompt is read once, chunk by chunk; its rows wait in memory until the answer is complete.
        """
        from transformers import DynamicCache

        generator = torch.Generator(self._device).manual_seed(job.seed)
        cache = DynamicCache(config=self._model.config)
        output: list[int] = []
        rows: list[dict[str, Tensor]] = []
        pending, position = torch.tensor([job.token_ids], device=self._device), 0
        while True:
            for piece in pending.split(self._step, dim=1):
                end = position + piece.shape[1]
                logits_V = self._model(
                    input_ids=piece,
                    position_ids=torch.arange(position, end, device=self._device)[None],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[0, -1]
                rows.append(self._taken(0, position, end, job.rows))
                self._states, position = {}, end
            if job.sampling.temperature > 0:
                weights_V = (logits_V.float() / job.sampling.temperature).softmax(-1)
                output.append(int(torch.multinomial(weights_V, 1, generator=generator)))
            else:
                output.append(int(logits_V.argmax()))
            if output[-1] in self._eos or len(output) == job.sampling.max_new_tokens:
                return output, rows
            pending = torch.tensor([output[-1:]], device=self._device)

    @torch.inference_mode()
    def _padded(self, sequences: list[list[int]], wanted: list[dict[str, RowSet]]) -> list[dict[str, Tensor]]:
        """Wanted rows [T, W] of each sequence from one right-padded batch."""
        longest = max(map(len, sequences))
        ids_NT = torch.zeros(len(sequences), longest, dtype=torch.int64)
        mask_NT = torch.zeros_like(ids_NT)
        for n, ids in enumerate(sequences):
            ids_NT[n, : len(ids)] = torch.tensor(ids)
            mask_NT[n, : len(ids)] = 1
        self._model(
            input_ids=ids_NT.to(self._device),
            attention_mask=mask_NT.to(self._device),
            position_ids=torch.arange(longest, device=self._device)[None].expand(len(sequences), -1),
            use_cache=False,
            logits_to_keep=1,
        )
        rows = [self._taken(n, 0, len(ids), wanted[n]) for n, ids in enumerate(sequences)]
        self._states = {}
        return rows

    @torch.inference_mode()
    def _generate(self, batch: list[Job]) -> list[list[int]]:
        """Answers of a batch; a second pass over prompt and answer gives the rows."""
        sampling = batch[0].sampling
        if sampling.max_new_tokens == 0:
            return [[] for _ in batch]
        longest = max(len(job.token_ids) for job in batch)
        ids_NT = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask_NT = torch.zeros_like(ids_NT)
        for n, job in enumerate(
            batch
        ):  # generation continues at the right edge, so the padding is on the left
            ids_NT[n, longest - len(job.token_ids) :] = torch.tensor(job.token_ids)
            mask_NT[n, longest - len(job.token_ids) :] = 1
        torch.manual_seed(batch[0].seed)
        warm = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        out_NT = self._model.generate(
            input_ids=ids_NT.to(self._device),
            attention_mask=mask_NT.to(self._device),
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self._eos or None,
            pad_token_id=0,
            **(warm if sampling.temperature > 0 else {"do_sample": False}),
        )
        self._states = {}
        return [self._until_end(row[longest:].tolist()) for row in out_NT]

    def _until_end(self, ids: list[int]) -> list[int]:
        ends = [at + 1 for at, token in enumerate(ids) if token in self._eos]
        return ids[: ends[0]] if ends else ids

    def _keep(self, tap: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._states[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    def _keep_last(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._states[LAST] = inputs[0]

    def _taken(self, n: int, start: int, stop: int, wanted: dict[str, RowSet]) -> dict[str, Tensor]:
        """Wanted rows of sequence `n`, of which the last forward made rows [start, stop)."""
        sources: dict[str, list[int | str]] = {FEATURES: [*self._taps], LAST: [LAST]}
        made = RowSet.of([(start, stop)])
        taken = {}
        for family, rows in wanted.items():
            at = (rows.intersection(made).indices() - start).to(self._device)
            taken[family] = torch.cat([self._states[name][n, at] for name in sources[family]], dim=-1).cpu()
        return taken


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal language model, inside a composite model too.

    Raises:
        EngineError: none found.
    """
    decoder = model.get_decoder()
    for owner in (decoder, getattr(decoder, "language_model", None), getattr(decoder, "model", None)):
        layers = getattr(owner, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise EngineError(f"{type(model).__name__} has no list of decoder layers that forward hooks could go on")


def final_norm(model: Any) -> nn.Module:
    """The norm between the last decoder layer and the head of a causal language model.

    Raises:
        EngineError: none found.
    """
    decoder = model.get_decoder()
    for owner in (decoder, getattr(decoder, "language_model", None), getattr(decoder, "model", None)):
        for name in _FINAL_NORMS:
            norm = getattr(owner, name, None)
            if isinstance(norm, nn.Module):
                return norm
    raise EngineError(
        f"{type(model).__name__} has no final norm under a known name ({', '.join(_FINAL_NORMS)}); capture "
        "it without --last-hidden"
    )
