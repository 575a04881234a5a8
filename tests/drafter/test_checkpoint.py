"""Round trips of both layouts, and exports that have to be refused."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.checkpoint import (
    CheckpointError,
    ExportError,
    check_export,
    load_drafter,
    materialise,
    released_state,
    save_drafter,
    used_special_tokens,
)
from drafter.config import ConfigError, DrafterConfig
from drafter.model import Drafter
from tests.drafter.tiny import MIXED, TARGET, dense_hidden, tiny_config, tiny_drafter, tiny_head

RELEASED_NAMES = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{i}.{name}"
    for i in range(2)
    for name in (
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    )
}
DFLASH2_NAMES = {
    f"layers.{i}.{conv}.{name}"
    for i in range(2)
    for conv in ("attention_conv", "mlp_conv")
    for name in ("base_kernel", "kernel_projection.weight")
} | {
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "candidate_selector.hidden_projection.weight",
}


def outputs(drafter, head):
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(20, drafter.config.feature_width, generator=generator)
    ids = torch.randint(97, (20,), generator=generator)
    with torch.no_grad():
        return dense_hidden(drafter, head, features, [5, 12], ids)


@pytest.mark.parametrize(("version", "names"), [(1, RELEASED_NAMES), (2, RELEASED_NAMES | DFLASH2_NAMES)])
@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_round_trip_keeps_names_config_and_outputs(tmp_path, version, names, layout):
    config, head = tiny_config(version), tiny_head()
    drafter = tiny_drafter(config)
    save_drafter(drafter, tmp_path / "out", target_name="org/target", layout=layout)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == names
    loaded = load_drafter(tmp_path / "out")
    assert loaded.config == config
    assert torch.equal(outputs(loaded, head), outputs(drafter, head))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_number_of_tensors_is_that_of_the_releases():
    config = tiny_config(2, num_layers=5, num_taps=5)
    assert len(released_state(Drafter(config))) == 81
    assert len(released_state(Drafter(tiny_config(1, num_layers=5, num_taps=5)))) == 58


def test_training_only_parametrisations_fold_into_the_release(tmp_path):
    head = tiny_head()
    config = tiny_config(selector_parametrisation="low_rank", feature_scaling=True)
    drafter = tiny_drafter(config)
    drafter.feature_scale.copy_(torch.linspace(0.5, 2.0, config.feature_width))
    with pytest.raises(ExportError, match="low-rank"):
        save_drafter(drafter, tmp_path / "out", target_name="t")
    save_drafter(drafter, tmp_path / "out", target_name="t", head=head)
    loaded = load_drafter(tmp_path / "out")
    for released in (loaded, materialise(drafter, head)):
        torch.testing.assert_close(outputs(released, head), outputs(drafter, head), rtol=1e-5, atol=1e-5)
        hidden = outputs(drafter, head)[:, 1]
        arguments = (
            torch.tensor([4, 9]),
            hidden,
            torch.tensor([[1, 2, 3], [4, 5, 6]]),
            torch.zeros(2, 3),
            head,
        )
        torch.testing.assert_close(
            released.candidate_selector.scores(*arguments), drafter.candidate_selector.scores(*arguments)
        )


def test_codebooks_may_be_named_with_weight(tmp_path):
    drafter = tiny_drafter(tiny_config())
    save_drafter(drafter, tmp_path / "out", target_name="t")
    path = tmp_path / "out" / "model.safetensors"
    state = {name + ".weight" * name.endswith("codebook"): value for name, value in load_file(path).items()}
    save_file(state, path)
    assert torch.equal(outputs(load_drafter(tmp_path / "out"), tiny_head()), outputs(drafter, tiny_head()))


def test_replacing_an_export_leaves_no_other_folder(tmp_path):
    for seed in (0, 1):
        drafter = tiny_drafter(tiny_config(), seed)
        save_drafter(drafter, tmp_path / "out", target_name="t")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert torch.equal(load_drafter(tmp_path / "out").fc.weight, drafter.fc.weight)


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_weights_that_do_not_fit_the_config_are_named(tmp_path):
    save_drafter(tiny_drafter(tiny_config()), tmp_path / "out", target_name="t")
    edit_config(tmp_path / "out", intermediate_size=100)
    with pytest.raises(
        CheckpointError, match=r"mlp.gate_proj.weight is \[96, 64\], the config says \[100, 64\]"
    ):
        load_drafter(tmp_path / "out")


def test_separate_mask_embedding_is_refused(tmp_path):
    """C16: reading the table's row instead would draft from a mask that was never trained."""
    save_drafter(tiny_drafter(tiny_config()), tmp_path / "out", target_name="t")
    (tmp_path / "out" / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="mask_embedding"):
        load_drafter(tmp_path / "out")


def test_block_size_is_read_nested_or_outside_and_must_agree(tmp_path):
    """D6: a reader that looks in one place only must find the same number."""
    released = tiny_config().to_dict()
    assert released["block_size"] == released["dflash_config"]["block_size"] == 4
    nested_only = {key: value for key, value in released.items() if key != "block_size"}
    assert DrafterConfig.from_dict(nested_only).block_size == 4
    with pytest.raises(ConfigError, match="block_size is 8 at top level and 4 in dflash_config"):
        DrafterConfig.from_dict({**released, "block_size": 8})


def test_speculators_layout_counts_layers_from_one_and_sets_causality(tmp_path):
    config = tiny_config()
    save_drafter(tiny_drafter(config), tmp_path / "s", target_name="org/target", layout="speculators")
    written = json.loads((tmp_path / "s" / "config.json").read_text())
    assert written["aux_hidden_state_layer_ids"] == [i + 1 for i in config.target_layer_ids]
    assert written["sliding_window_non_causal"] is True
    assert written["transformer_layer_config"]["is_causal"] is False
    assert written["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


def test_speculators_layout_refuses_what_it_cannot_carry(tmp_path):
    """C10: one flag for all layers would turn a full-attention layer causal."""
    mixed = tiny_drafter(tiny_config(layer_types=MIXED, is_causal=None))
    with pytest.raises(ExportError, match="causality"):
        save_drafter(mixed, tmp_path / "s", target_name="t", layout="speculators")
    capped = tiny_drafter(tiny_config(final_logit_softcapping=20.0))
    with pytest.raises(ExportError, match="final_logit_softcapping"):
        save_drafter(capped, tmp_path / "s", target_name="t", layout="speculators")


@pytest.mark.parametrize("name", ["", "  "])
def test_blank_target_name_is_refused(tmp_path, name):
    """D8."""
    with pytest.raises(ExportError, match="blank"):
        save_drafter(tiny_drafter(tiny_config()), tmp_path / "out", target_name=name)


def test_good_drafter_passes():
    check_export(tiny_drafter(tiny_config()), TARGET)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("changes", "target_changes", "message"),
    [
        ({"max_position_embeddings": 2048}, {}, "position limit 2048 is below the target's 4096"),
        ({}, {"rope_parameters": YARN}, "position limit 4096 is below the target's 16384"),
        ({"max_position_embeddings": 16384}, {"rope_parameters": YARN}, "rope .* differs"),
        ({"rope": {"rope_type": "default", "rope_theta": 5e5}}, {}, "rope .* differs"),
        ({"mask_token_id": 97}, {}, "outside the target's table"),
        ({"mask_token_id": 2}, {}, "eos_token_id"),
        ({"mask_token_id": 1}, {}, "bos_token_id"),
        ({"mask_token_id": 5}, {"pad_token_id": 5}, "pad_token_id"),
        ({"mask_token_id": 5}, {"eos_token_id": [4, 5]}, "eos_token_id"),
        ({"target_layer_ids": (4, 2, 5)}, {}, "increase strictly"),
        ({"target_layer_ids": (1, 1, 5)}, {}, "increase strictly"),
        ({"target_layer_ids": (1, 4, 7)}, {}, "last of the target's"),
        ({"version": 1, "input_embedding_scale": 2.0}, {}, "input_embedding_scale"),
        ({}, {"vocab_size": 98}, "vocab_size 97, this one has 98"),
        ({}, {"num_hidden_layers": 9}, "num_hidden_layers"),
    ],
)
def test_exports_that_would_serve_wrongly_are_refused(changes, target_changes, message):
    """C14, C15, D1, D2, D4."""
    drafter = Drafter(dataclasses.replace(tiny_config(), **changes))
    with pytest.raises(ExportError, match=message):
        check_export(drafter, {**TARGET, **target_changes})


def test_rope_and_mask_refusals_can_be_overruled():
    config = dataclasses.replace(
        tiny_config(), mask_token_id=2, rope={"rope_type": "default", "rope_theta": 5e5}
    )
    check_export(Drafter(config), TARGET, allow_live_mask=True, allow_rope_difference=True)


def test_yarn_target_gives_a_yarn_drafter():
    config = DrafterConfig.for_target({**TARGET, "rope_parameters": YARN}, mask_token_id=3, selector_rank=8)
    check_export(Drafter(config), {**TARGET, "rope_parameters": YARN})


def test_weights_that_are_not_finite_are_refused(tmp_path):
    """C13: a drafter that diverged is not written."""
    drafter = tiny_drafter(tiny_config())
    with torch.no_grad():
        drafter.hidden_norm.weight[0] = float("nan")
    with pytest.raises(ExportError, match=r"hidden_norm\.weight"):
        check_export(drafter, TARGET)
    with pytest.raises(ExportError, match=r"hidden_norm\.weight"):
        save_drafter(drafter, tmp_path / "out", target_name="t")


def test_special_tokens_of_the_template_are_live_and_reserved_ones_free(tmp_path):
    added = [
        {"id": i, "content": text, "special": True} for i, text in enumerate(["<eos>", "<im>", "<free>"])
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "chat_template": "{{ '<im>' + message }}"})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert set(used_special_tokens(tmp_path)) == {0, 1, 7}
    drafter = Drafter(dataclasses.replace(tiny_config(), mask_token_id=7))
    with pytest.raises(ExportError, match="generation_config's eos_token_id"):
        check_export(drafter, TARGET, special_tokens=used_special_tokens(tmp_path))


def test_mask_token_of_the_tokenizer_may_be_the_drafters_unless_it_has_a_second_role(tmp_path):
    added = [{"id": 0, "content": "<pad>"}, {"id": 4, "content": "<mask>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    roles = {"pad_token": "<pad>", "mask_token": "<mask>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    assert set(used_special_tokens(tmp_path)) == {0}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**roles, "mask_token": "<pad>"}))
    assert set(used_special_tokens(tmp_path)) == {0}
