"""The draft cache's formula against the rows that a drafter's cache really keeps."""

import pytest
import torch

from drafter.cache import DraftCache, draft_hidden
from eval.cache_size import draft_cache
from tests.eval.conftest import head_of, tiny_drafter


@pytest.mark.parametrize("sliding", [None, 8])
@pytest.mark.parametrize("context", [5, 40])
def test_formula_is_what_the_cache_keeps(llama, sliding, context):
    model = tiny_drafter(llama, sliding_window=sliding)
    config, cache = model.config, DraftCache(model.config)
    features = torch.randn(context, config.feature_width)
    draft_hidden(model, cache, features, torch.tensor([1]), head_of(llama))
    row = 2 * config.num_key_value_heads * config.head_dim * 4
    kept = sum(cache.kept_rows(layer) * row for layer in range(config.num_hidden_layers))

    size = draft_cache(config, llama.config.to_dict(), element_bytes=4)
    window = min(context * size.window_bytes_per_token, size.window_bytes)
    assert context * size.bytes_per_token + window == kept
    assert (size.bytes_per_token == 0) == (sliding is not None)


def test_targets_whose_layers_do_not_all_keep_every_token_have_no_figure(llama):
    def target_bytes(**changes):
        config = tiny_drafter(llama).config
        return draft_cache(
            config, {**llama.config.to_dict(), **changes}, element_bytes=2
        ).target_bytes_per_token

    # Four layers, two key/value heads of 16, keys and values of two bytes.
    assert target_bytes() == 4 * 2 * 2 * 16 * 2
    assert target_bytes(layer_types=["full_attention", "linear_attention"]) is None
    assert target_bytes(sliding_window=16, use_sliding_window=True) is None
    assert target_bytes(sliding_window=16, use_sliding_window=False) == 4 * 2 * 2 * 16 * 2
