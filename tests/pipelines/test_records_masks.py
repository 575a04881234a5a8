"""Loss masks from chat templates (A1, A3, A4, A5, A7, A8) and turn-by-turn regeneration (H2, H3)."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.chat import ChatRenderer, MaskedTokens, split_reasoning
from pipelines.dialogue import Dialogue, eos_ids
from pipelines.records import RecordError, parse_record
from tests.pipelines.tiny_target import CHATML, THINKING, make_tokenizer


def renderer(template: str | None = CHATML, **tokenizer: Any) -> ChatRenderer:
    made = make_tokenizer(template, **tokenizer)
    return ChatRenderer(made, eos_ids(made, {}))


def supervised(chat: ChatRenderer, sample: MaskedTokens) -> str:
    return chat.tokenizer.decode([t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m])


def conversation(*contents: str, **last: Any) -> Any:
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)
    ]
    messages[-1].update(last)
    return parse_record({"messages": messages})


def test_every_answer_and_its_end_are_supervised_and_nothing_else() -> None:
    chat = renderer()
    (sample,) = chat.given(conversation("one?", "First.", "two?", "Second."))
    assert supervised(chat, sample) == "First.<|end|>Second.<|end|>"


def test_ids_equal_the_serving_rendering() -> None:  # A3
    chat = renderer()
    record = conversation("one?", "First.", "two?", "Second.")
    (sample,) = chat.given(record)
    served = chat.tokenizer.apply_chat_template(list(record.messages), tokenize=True, return_dict=False)
    assert sample.token_ids == list(served)
    prompt = chat.encode(chat.prompt_text(record.messages[:1]))
    assert sample.token_ids[: len(prompt)] == prompt
    assert sample.loss_mask[: len(prompt) + 1] == [False] * len(prompt) + [True]


def test_roles_of_context_are_not_supervised() -> None:  # A7
    chat = renderer()
    messages = [
        {"role": role, "content": role * 2} for role in ("system", "developer", "user", "tool", "assistant")
    ]
    (sample,) = chat.given(parse_record({"messages": messages}))
    assert supervised(chat, sample) == "assistantassistant<|end|>"


def test_empty_think_block_of_the_template_is_not_supervised() -> None:  # A5
    chat = renderer(THINKING)
    (sample,) = chat.given(conversation("q?", "Answer."))
    assert "<think>" in chat.tokenizer.decode(sample.token_ids)
    assert supervised(chat, sample) == "Answer.<|end|>"


@pytest.mark.parametrize("inline", [False, True])
def test_reasoning_is_supervised(inline: bool) -> None:  # A4
    chat = renderer(THINKING)
    record = (
        conversation("q?", "<think>\nbecause\n</think>\n\nAnswer.")
        if inline
        else conversation("q?", "Answer.", reasoning_content="because")
    )
    (sample,) = chat.given(record)
    assert supervised(chat, sample) == "<think>\nbecause\n</think>\n\nAnswer.<|end|>"


def test_answer_without_a_mark_stays_as_it_is() -> None:
    message = {"role": "assistant", "content": "plain"}
    assert split_reasoning(message) is message


def test_template_that_changes_history_gives_one_sample_per_turn() -> None:
    chat = renderer(THINKING)
    first, second = chat.given(conversation("a?", "First.", "b?", "Second."))
    assert supervised(chat, first) == "First.<|end|>"
    assert supervised(chat, second) == "Second.<|end|>"
    assert "First." in chat.tokenizer.decode(second.token_ids)


def test_template_that_hides_the_answer_is_zero_supervised_tokens() -> None:  # A1
    chat = renderer("{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% endfor %}")
    with pytest.raises(RecordError, match="0 supervised tokens"):
        chat.given(conversation("a?", "First."))


def test_prefix_that_does_not_match_is_refused_with_the_reason() -> None:
    # The number of messages stands in front: the prompt's rendering is no prefix of the answer's.
    chat = renderer("{{ messages | length }}" + CHATML)
    with pytest.raises(RecordError, match="does not continue the rendered prompt"):
        chat.given(conversation("a?", "First."))


def test_answer_that_joins_the_prompts_last_token_is_refused() -> None:
    chat = renderer(merges=(("Ċ", "Ċ"),))  # a token for two newlines
    with pytest.raises(RecordError, match="join the prompt's last token"):
        chat.given(conversation("a?", "\nFirst."))


def test_template_error_is_the_records_error() -> None:  # A8
    chat = renderer("{{ raise_exception('no system here') if messages[0].role == 'system' }}" + CHATML)
    with pytest.raises(RecordError, match="no system here"):
        chat.given(
            parse_record({"messages": [{"role": "system", "content": "s"}, *conversation("a", "b").messages]})
        )


def test_conversation_without_answer_points_to_regenerate() -> None:
    with pytest.raises(RecordError, match="--regenerate"):
        renderer().given(conversation("a?"))


def test_target_without_template_takes_text_and_refuses_messages() -> None:
    chat = renderer(None)
    (sample,) = chat.given(parse_record({"text": "abc"}))
    assert sample.loss_mask == [True] * 3
    with pytest.raises(RecordError, match="no chat template"):
        chat.given(conversation("a?", "b"))


# -------------------------------------------------------------------- regeneration


def play(chat: ChatRenderer, record: Any, answers: list[str]) -> tuple[Dialogue, list[list[int]]]:
    dialogue = Dialogue(record, chat)
    prompts = []
    for answer in answers:
        prompt = dialogue.next_prompt()
        assert prompt is not None
        prompts.append(prompt)
        dialogue.answered(chat.encode(answer))
    assert dialogue.next_prompt() is None
    return dialogue, prompts


def test_history_is_the_targets_own() -> None:  # H2
    chat = renderer()
    record = conversation("one?", "GIVEN", "two?", "GIVEN TOO")
    dialogue, prompts = play(chat, record, ["own first<|end|>", "own second<|end|>"])
    (sample,) = dialogue.samples
    text = chat.tokenizer.decode(sample.token_ids)
    assert "GIVEN" not in text
    assert supervised(chat, sample) == "own first<|end|>own second<|end|>"
    # What the second request sent is what the first left, continued: nothing was tokenized again.
    first = prompts[0] + chat.encode("own first<|end|>")
    assert prompts[1][: len(first)] == first


def test_answer_cut_by_the_limit_is_closed_by_the_template() -> None:
    chat = renderer()
    dialogue, prompts = play(chat, parse_record({"turns": ["one", "two"]}), ["cut", "end<|end|>"])
    assert chat.tokenizer.decode(prompts[1]).endswith("cut<|end|>\n<|user|>\ntwo<|end|>\n<|assistant|>\n")
    (sample,) = dialogue.samples
    assert supervised(chat, sample) == "cutend<|end|>"


def test_ids_that_decode_and_encode_differently_are_kept() -> None:
    chat = renderer(merges=(("a", "b"),))
    split = [chat.tokenizer.convert_tokens_to_ids(token) for token in "ab"]  # the text "ab" encodes to one id
    dialogue = Dialogue(parse_record({"turns": ["one", "two"]}), chat)
    dialogue.next_prompt()
    dialogue.answered(split)
    assert dialogue.next_prompt()
    dialogue.answered(split)
    assert dialogue.next_prompt() is None
    (sample,) = dialogue.samples
    kept = [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
    assert kept == split * 2


def test_history_that_the_template_rewrites_starts_a_new_sample() -> None:
    chat = renderer(THINKING)
    dialogue, prompts = play(
        chat, parse_record({"turns": ["a", "b"]}), ["<think>\nx\n</think>\n\none<|end|>", "two<|end|>"]
    )
    assert len(dialogue.samples) == 2 or chat.tokenizer.decode(prompts[1]).startswith("<|user|>\na")


def test_tool_calls_and_their_results_stay() -> None:  # H3
    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + (m['content'] or '') }}"
        "{% for c in m['tool_calls'] or [] %}{{ '[call ' + c['function']['name'] + ']' }}{% endfor %}"
        "{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    chat = renderer(template)
    call = {"function": {"name": "look", "arguments": {}}}
    record = parse_record({
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "GIVEN"},
        ]
    })  # fmt: skip
    dialogue, prompts = play(chat, record, ["It is sunny.<|end|>"])
    assert "[call look]" in chat.tokenizer.decode(prompts[0])
    assert "sunny" in chat.tokenizer.decode(prompts[0])
    (sample,) = dialogue.samples
    assert supervised(chat, sample) == "It is sunny.<|end|>"


def test_text_cannot_be_regenerated() -> None:
    with pytest.raises(RecordError, match="nothing to regenerate"):
        Dialogue(parse_record({"text": "abc"}), renderer())


def test_target_without_template_answers_one_prompt_and_refuses_turns() -> None:
    chat = renderer(None)
    dialogue = Dialogue(parse_record({"prompt": "def f("}), chat)
    assert dialogue.next_prompt() == chat.tokenizer("def f(")["input_ids"]
    with pytest.raises(RecordError, match=r"conversation of 2 messages has no rendering.*one `prompt`"):
        Dialogue(parse_record({"turns": ["one", "two"]}), chat)
