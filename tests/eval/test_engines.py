"""Real vLLM engines on a CPU: wrong exports caught, and an evaluation whose figures are the hf backend's."""

import pytest

from eval.decode import Limits
from eval.options import EvalOptions
from eval.run import run_eval
from eval.sampling import Sampling
from eval.serving_check import run_check
from eval.vllm_engine import Engine, EngineFailure
from tests.eval.counting import counting_drafter, counting_target
from tests.eval.test_serving_check import (  # noqa: F401 a fixture and its helpers
    WRONG_EXPORTS,
    exported,
    made,
    options,
    varied,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A function that answers a check with real engines, which all live in one process one after another."""
    running = []

    def serve(settings, log, prompts, limits: Limits):
        if running:
            running[0].replace(settings, log)
        else:
            running.append(Engine(settings, log))
        found = running[0].generate(
            prompts, limits=limits, sampling=Sampling(), concurrency=1, keep_drafts=True
        )
        return found, running[0].facts

    yield serve
    for engine in running:
        engine.stop()


def test_real_engine_drafts_what_we_draft_and_wrong_exports_are_caught(made, engines):  # noqa: F811
    """C14, D4, D10: one engine each for the right export and four wrong ones."""
    folder, drafter = made
    late, _ = counting_drafter(counting_target(), sliding_window=16, steps=300, shift=1)
    drafters = {name: varied(drafter, name) for name in ("right", *WRONG_EXPORTS)} | {"late": late.eval()}
    causes = {**WRONG_EXPORTS, "late": "blocks 1 position later"}
    for name, model in drafters.items():
        path = exported(folder, model, name)
        result = run_check(options(folder, path, min_acceptance=3.5, log=folder / f"{name}.log"), engines)
        assert result.passed == (name == "right")
        assert result.worst_agreement == 1.0  # to the last draft of the longest prompt
        if name in causes:
            assert causes[name] in result.causes[0]
    assert "custom scheduler" in (folder / "right.log").read_text()


def test_evaluation_in_engines_has_the_figures_of_the_hf_backend(made, tmp_path):  # noqa: F811
    """DFlash2 through the adapter, plain, and vLLM's ngram; four prompts, two concurrencies."""
    folder, _ = made
    second, _ = counting_drafter(counting_target(), version=2, sliding_window=16, steps=120)
    path = exported(folder, second.eval(), "counting2")
    asked = EvalOptions(
        target=str(folder / "target"),
        drafter=[f"two={path}"],
        data=[str(folder / "prompts.jsonl")],
        max_new_tokens=24,
        device="cpu",
        backend="vllm",
        concurrency=[1, 3],
        out=tmp_path / "vllm",
    )
    report = run_eval(asked)
    own = run_eval(asked.model_copy(update={"backend": "hf", "out": tmp_path / "hf"}))
    assert report["prompts"]["rendered_hash"] == own["prompts"]["rendered_hash"]
    for level in report["concurrency"]:
        tau = own["methods"]["two"]["overall"]["acceptance_length"]
        found = level["methods"]["two"]["acceptance_length"]
        assert found["numerator"] == tau["numerator"] == 4 * 23
        # The last block is not shortened in an engine, so one step a prompt may go otherwise.
        assert abs(found["denominator"] - tau["denominator"]) <= 4
    assert report["methods"]["two"]["lossless"]["equal"] == 4
    assert report["methods"]["lookup"]["lossless"]["equal"] == 4
    assert report["engine"]["counters"]["two"]["acceptance_length"] > 2


def test_engine_that_cannot_start_is_one_error_with_a_cause_and_a_log(made, tmp_path):  # noqa: F811
    """A CPU runner refuses drafters that mix full and sliding layers."""
    folder, _ = made
    mixed, _ = counting_drafter(
        counting_target(),
        steps=1,
        sliding_window=16,
        layer_types=("sliding_attention", "full_attention"),
    )
    path = exported(folder, mixed.eval(), "mixed")
    log = tmp_path / "engine.log"
    with pytest.raises(EngineFailure, match="all full or all sliding") as failure:
        run_check(options(folder, path, log=log))
    assert str(log) in str(failure.value)
    assert "\n" not in str(failure.value)
