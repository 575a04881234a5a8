"""The adapter says which vLLM it was made for, and walks as the selector does; engines: test_engines.py."""

from types import SimpleNamespace

import pytest
import torch

from drafter.proposal import propose
from eval.vllm_dflash_cpu import SUPPORTED, UnsupportedVersionError, install, walk
from eval.vllm_engine import ENDED, explain
from tests.drafter.tiny import tiny_config, tiny_drafter, tiny_head


@pytest.mark.parametrize("version", ["0.31.1", "0.33.0", "1.0"])
def test_other_versions_are_refused_with_what_to_do(version):
    with pytest.raises(
        UnsupportedVersionError, match=rf"vLLM {SUPPORTED[-1]}, found {version}.*--backend hf"
    ):
        install(version, candidates=True)


def test_walk_drafts_what_the_selector_drafts():
    """Three requests at once; vLLM may give ids and logits in either order."""
    drafter, head = tiny_drafter(tiny_config(2)), tiny_head()
    hidden = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([5, 9, 9])
    expected = propose(drafter, hidden, anchors, head).ids
    selector = drafter.candidate_selector
    engine_selector = SimpleNamespace(
        top_k=drafter.config.selector_top_k,
        hidden_projection=selector.hidden_projection,
        predecessor_codebook=selector.predecessor_codebook,
        successor_codebook=selector.successor_codebook,
    )

    def candidates(rows):
        best = (rows @ head.head.T).topk(engine_selector.top_k)
        return best.indices.int(), best.values

    for order in (1, -1):
        model = SimpleNamespace(compute_candidates=lambda rows, order=order: candidates(rows)[::order])
        with torch.no_grad():
            drafts = walk(model, engine_selector, hidden[:, 1:], anchors)
        assert torch.equal(drafts, expected)


LOG = """INFO 11-30 starting
(EngineCore pid=7) ERROR 11-30 [core.py:1] Traceback (most recent call last):
[rank0]: ValueError: {message}
"""


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("Model Runner V1 does not support: mixed sliding/full dflash drafts", "all full or all sliding"),
        ("No available memory for the cache blocks.", "VLLM_CPU_KVCACHE_SPACE"),
        ("To serve at least one request with the models's max seq len (9)", "cannot hold one sequence"),
        ("Model does not support EAGLE3 interface", "gives no hidden states"),
        ("Model architectures ['X'] are not supported for now.", ""),
    ],
)
def test_engine_failure_is_one_line_with_the_log_and_the_cause(tmp_path, message, cause):
    log = tmp_path / "engine.log"
    log.write_text(LOG.format(message=message))
    told = str(explain(ENDED, log))
    assert message in told
    assert cause in told
    assert str(log) in told
    assert "\n" not in told


def test_killed_engine_is_told_as_such(tmp_path):
    told = str(explain(ENDED, tmp_path / "none.log", -9))
    assert "killed by signal 9" in told
    assert "short of memory" in told
