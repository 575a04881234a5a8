"""Our exports in a real vLLM engine on CPU: it drafts, token by token, what this package drafts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drafter.cache import DraftCache, draft_hidden
from drafter.checkpoint import load_drafter, save_drafter
from drafter.frozen import FrozenHead
from drafter.proposal import propose
from tests.drafter.successor import COUNT, FIRST, successor_target, train_on_successor
from tests.drafter.targets import qwen3_target
from tests.drafter.tiny import tiny_config, tiny_drafter

pytestmark = pytest.mark.engine

GENERATED = 24
ROOT = Path(__file__).parents[2]


def engine_drafts(target_dir, drafter_dir, prompt):
    """Tokens and drafts of vLLM, generated in a process of its own."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "tests.drafter.vllm_drafts", target_dir, drafter_dir]
    done = subprocess.run(
        [*command, json.dumps(prompt), str(GENERATED)],
        env=environment,
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"the engine failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(lines[0].removeprefix("RESULT "))


@torch.no_grad()
def own_drafts(target, drafter, prompt):
    """The speculative loop in this package's own pieces, the target recomputed at every step."""
    head = FrozenHead(target.get_input_embeddings().weight, target.lm_head.weight)
    cache, tokens, drafts = DraftCache(drafter.config), list(prompt), []

    def run(ids):
        output = target(torch.tensor([ids]), output_hidden_states=True)
        taps = [output.hidden_states[layer + 1][0] for layer in drafter.config.target_layer_ids]
        return output.logits[0].argmax(-1).tolist(), torch.cat(taps, -1)

    best, features = run(tokens)
    tokens.append(best[-1])
    while len(tokens) - len(prompt) < GENERATED:
        context = len(tokens) - 1
        anchor = torch.tensor(tokens[-1:])
        hidden = draft_hidden(drafter, cache, features[cache.length : context], anchor, head)
        draft = propose(drafter, hidden, anchor, head).ids[0].tolist()
        drafts.append(draft)
        best, features = run(tokens + draft)
        accepted = 0
        while accepted < len(draft) and draft[accepted] == best[context + accepted]:
            accepted += 1
        tokens += [*draft[:accepted], best[context + accepted]]
    return tokens[len(prompt) : len(prompt) + GENERATED], drafts


def compare(tmp_path, target, drafter, prompt, layout):
    """Serve the exported drafter; return its tokens and drafts after comparing both with our own loop."""
    target.save_pretrained(tmp_path / "target")
    save_drafter(drafter, tmp_path / "drafter", target_name=str(tmp_path / "target"), layout=layout)
    found = engine_drafts(str(tmp_path / "target"), str(tmp_path / "drafter"), prompt)
    tokens, drafts = own_drafts(target, load_drafter(tmp_path / "drafter"), prompt)
    assert found["tokens"] == tokens
    assert found["drafts"][: len(drafts)] == drafts
    return tokens, drafts


@pytest.mark.parametrize(("layout", "window"), [("zlab", None), ("speculators", 16)])
def test_engine_drafts_what_we_draft(tmp_path, layout, window):
    """D10, C9: DFlash, prompt three times the window; every draft identical, greedy and float32.

    Key norms of the two layers differ much: vLLM's CPU kernel reads the first layer's for both.
    """
    config = tiny_config(1, block_size=6, vocab_size=128, sliding_window=window)
    drafter, draw = tiny_drafter(config, seed=3, scale=0.05), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.k_norm.weight.copy_(2 * torch.randn(config.head_dim, generator=draw))
    prompt = torch.randint(4, 97, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    compare(tmp_path, qwen3_target(vocab_size=128), drafter, prompt, layout)


def test_engine_accepts_what_a_trained_drafter_drafts(tmp_path):
    """C4: DFlash2 that knows the sequence: the prefill and 4 steps of 6 give 24 tokens, no draft is lost."""
    config = tiny_config(2, vocab_size=128, block_size=6, num_layers=1, sliding_window=16)
    target = successor_target()
    drafter, _ = train_on_successor(config, target, steps=300, learning_rate=6e-3)
    prompt = [FIRST + i % COUNT for i in range(5, 53)]
    tokens, drafts = compare(tmp_path, target, drafter, prompt, "zlab")
    assert tokens == [FIRST + i % COUNT for i in range(53, 53 + GENERATED)]
    assert len(drafts) == 4
    assert drafts[0] == tokens[1:6]
