"""A batch gives every sequence what it gets alone: tokens, steps, drafts; and computes nothing twice."""

import pytest
import torch

from eval.batch import EachDrafter, NoDrafter, decode_batch
from eval.batch_drafter import BatchBlockDrafter
from eval.decode import Limits, decode_plain, decode_speculative
from eval.errors import EvalError
from eval.lookup import LookupDrafter
from eval.sampling import Sampling
from eval.target import Target, prefill_parts
from tests.eval.conftest import head_of, tiny_drafter, tiny_model
from tests.eval.test_block_drafter import PROMPT, favour_few_tokens

GREEDY = {"sampling": Sampling(), "generator": None}
#: Lengths 12, 3, 32, 7, 1: sequences start, and end, far apart.
PROMPTS = [PROMPT, PROMPT[:3], [*PROMPT, *range(40, 60)], PROMPT[5:], [44]]


def counted(decoded):
    return [(d.ids, [s[:4] for s in d.steps]) for d in decoded]


def batched(target, model, slots, *, block=None, sampling=GREEDY["sampling"], generator=None):
    block = block or model.config.block_size
    return BatchBlockDrafter(
        model, head_of(target), block=block, slots=slots, sampling=sampling, generator=generator
    )


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_plain_batch_equals_plain_decoding(target, slots):
    limits = Limits(40)
    alone = [decode_plain(target, prompt, limits=limits, **GREEDY) for prompt in PROMPTS[:slots]]
    together = decode_batch(target, NoDrafter(), PROMPTS[:slots], limits=limits, **GREEDY)
    assert counted(together) == counted(alone)


@pytest.mark.parametrize(("version", "masks"), [(1, "causal"), (2, "full"), (2, "sliding")])
def test_batch_drafts_accepts_and_emits_what_each_sequence_does_alone(target, make_drafter, version, masks):
    favour_few_tokens(target)  # acceptance differs from step to step and from sequence to sequence
    options = {"version": version, "sliding_window": None if masks == "full" else 8}
    options |= {"is_causal": masks == "causal"}
    stop = decode_plain(target, PROMPT, limits=Limits(28), **GREEDY).ids[15]
    varied = set()
    for limits in (Limits(28, frozenset([stop])), Limits(5)):
        alone = [
            decode_speculative(target, make_drafter(target, **options), prompt, limits=limits, **GREEDY)
            for prompt in PROMPTS
        ]
        drafter = batched(target, tiny_drafter(target, **options), len(PROMPTS))
        together = decode_batch(target, drafter, PROMPTS, limits=limits, **GREEDY)
        assert counted(together) == counted(alone)
        varied |= {step.accepted for decoded in alone for step in decoded.steps}
    assert len(varied) > 1


def test_drafts_of_a_batch_are_those_of_single_drafters(llama):
    """Token by token, also for blocks cut short by the limit and after sequences changed their slots."""
    model = tiny_drafter(llama, version=2, sliding_window=8)
    seen = []

    def spied(drafter):
        propose = drafter.draft

        def spy(anchors, counts):
            found = propose(anchors, counts)
            seen[-1].append([found[i].ids.tolist() for i in range(len(counts))])
            return found

        drafter.draft = spy
        return drafter

    def single():
        from eval.block_drafter import BlockDrafter

        return BlockDrafter(model, head_of(llama), name="single")

    for drafter in (batched(llama, model, len(PROMPTS)), EachDrafter(single, **GREEDY)):
        seen.append([])
        decode_batch(llama, spied(drafter), PROMPTS, limits=Limits(30), **GREEDY)
    assert seen[0] == seen[1]


def test_lookup_in_a_batch_keeps_every_sequence_apart(target):
    limits = Limits(40)
    drafter = LookupDrafter(8, shortest=1)
    alone = [decode_speculative(target, drafter, prompt, limits=limits, **GREEDY) for prompt in PROMPTS]
    many = EachDrafter(lambda: LookupDrafter(8, shortest=1), **GREEDY)
    assert counted(decode_batch(target, many, PROMPTS, limits=limits, **GREEDY)) == counted(alone)


def test_step_computes_only_new_rows_with_one_projection_and_shares_out_its_seconds(llama):
    rows, projected, waits = [], [], []
    llama.layers[0].register_forward_hook(lambda _m, _i, o: rows.append(tuple(o.shape[:2])))
    llama.model.lm_head.register_forward_hook(lambda _m, i, _o: projected.append(i[0].shape[:2]))
    drafter = batched(llama, tiny_drafter(llama, version=1, block=4), 2)
    draft = drafter.draft
    drafter.draft = lambda anchors, counts: waits.append(len(counts)) or draft(anchors, counts)
    together = decode_batch(llama, drafter, PROMPTS[:2], limits=Limits(6), **GREEDY)
    assert rows[:2] == [(1, 12), (1, 3)]
    assert projected[:2] == [(1, 1), (1, 1)]
    assert len(rows) == len(projected) == 2 + len(waits)
    assert projected[2:] == [(count, rows[2 + i][1]) for i, count in enumerate(waits)]
    shared = [d.steps[0] for d in together]
    assert shared[0][4:] == shared[1][4:]
    assert min(shared[0][4:]) > 0


def test_sampled_batch_follows_the_targets_distribution(llama):
    """The first token after the prefill, drawn 400 times in batches of 40, against its probabilities."""
    import scipy.stats

    from eval.sampling import target_probabilities

    sampling, generator = Sampling(temperature=0.8, top_k=3), torch.Generator().manual_seed(1)
    model = tiny_drafter(llama, version=2, block=4)
    counts: dict[tuple[int, int], int] = {}
    for _ in range(10):
        drafter = batched(llama, model, 40, sampling=sampling, generator=generator)
        settings = {"limits": Limits(2), "sampling": sampling, "generator": generator}
        for decoded in decode_batch(llama, drafter, [PROMPT] * 40, **settings):
            counts[tuple(decoded.ids)] = counts.get(tuple(decoded.ids), 0) + 1
    expected = {}
    with torch.inference_mode():
        first = target_probabilities(llama.open().prefill(torch.tensor(PROMPT))[None], sampling)[0]
        for token in first.nonzero().flatten().tolist():
            logits = llama.open().prefill(torch.tensor([*PROMPT, token]))
            for second, p in enumerate(target_probabilities(logits[None], sampling)[0].tolist()):
                if p > 0:
                    expected[token, second] = float(first[token]) * p * 400
    common = [path for path, e in expected.items() if e >= 5]
    assert set(counts) <= set(expected)
    assert len(common) >= 3
    observed = [counts.get(path, 0) for path in common]
    rest = 400 - sum(observed), 400 - sum(expected[path] for path in common)
    cells = [*observed, rest[0]], [*(expected[path] for path in common), rest[1]]
    if rest[1] < 5:
        cells = cells[0][:-1], cells[1][:-1]
    assert scipy.stats.chisquare(*cells, sum_check=False).pvalue > 1e-3


def test_layers_of_two_kinds_get_a_mask_each(make_drafter):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from eval.folded_attention import register
    from tests.eval.conftest import SIZES

    torch.manual_seed(3)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Qwen3Config(
        **SIZES,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=0,
        layer_types=kinds,
    )
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    model.config._attn_implementation = register()
    target = Target(model.eval())
    alone = [decode_plain(target, prompt, limits=Limits(30), **GREEDY) for prompt in PROMPTS]
    assert counted(decode_batch(target, NoDrafter(), PROMPTS, limits=Limits(30), **GREEDY)) == counted(alone)
    drafter = batched(target, tiny_drafter(target, version=2), len(PROMPTS))
    together = decode_batch(target, drafter, PROMPTS, limits=Limits(30), **GREEDY)
    assert [d.ids for d in together] == [d.ids for d in alone]


def test_rope_that_depends_on_the_longest_sequence_is_refused():
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(EvalError, match="--batch-size 1"):
        decode_batch(Target(model), NoDrafter(), PROMPTS, limits=Limits(4), **GREEDY)


def test_long_prompt_is_read_in_parts_of_bounded_masks():
    parts = prefill_parts(131_072)
    assert sum(parts) == 131_072
    done = 0
    for rows in parts:
        assert rows <= 4096
        done += rows
        assert rows * done <= max(1 << 25, 256 * done)
    assert prefill_parts(8192) == [4096, 4096]
    assert prefill_parts(100) == [100]


def test_eight_thousand_tokens_in_parts_and_in_a_batch():
    """Drafts at 8K positions: the prompt in parts, alone and beside a short neighbour."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from eval.block_drafter import BlockDrafter
    from eval.folded_attention import register
    from tests.eval.conftest import SIZES

    torch.manual_seed(5)
    sizes = {**SIZES, "max_position_embeddings": 8192, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.config._attn_implementation = register()
    target = Target(model.eval())
    favour_few_tokens(target)
    prompt = torch.randint(97, (8100,), generator=torch.Generator().manual_seed(0)).tolist()
    drafter = tiny_drafter(target, version=2, sliding_window=512)
    limits = Limits(12)
    single = BlockDrafter(drafter, head_of(target), name="single")
    alone = decode_speculative(target, single, prompt, limits=limits, **GREEDY)
    assert alone.ids == decode_plain(target, prompt, limits=limits, **GREEDY).ids
    assert alone.steps[0].context == 8100
    together = decode_batch(target, batched(target, drafter, 2), [PROMPT, prompt], limits=limits, **GREEDY)
    assert counted(together[1:]) == counted([alone])
