"""Run files: what is refused and how it is said, flags over the file, the saved file runs again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from pipelines.runfile import (
    RunConfig,
    RunFileError,
    differences,
    load_run,
    parse_flags,
    resolve_paths,
    save_run,
)

MINIMAL = """\
out: runs/a
data:
  stores: [store]
schedule:
  steps: 10
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_minimal_file_has_the_documented_defaults(write):
    config = load_run(write(MINIMAL))
    assert config.optimizer.lr == 6e-4
    assert config.drafter.layers == 5
    assert config.anchors.per_document == 512
    assert config.objective.weights == "exponential"


@pytest.mark.parametrize(
    ("text", "unknown", "near", "line"),
    [
        (
            MINIMAL + "optimizer:\n  weigth_decay: 0.1\n",
            "optimizer.weigth_decay",
            "optimizer.weight_decay",
            7,
        ),
        (MINIMAL + "optimiser:\n  lr: 0.1\n", "optimiser", "optimizer", 6),
        (MINIMAL + "drafter:\n  blocksize: 8\n", "drafter.blocksize", "drafter.block_size", 7),
        (MINIMAL + "objective:\n  gama: 4\n", "objective.gama", "objective.gamma", 7),
    ],
)
def test_unknown_key_is_refused_with_its_line_and_the_nearest_name(write, text, unknown, near, line):
    path = write(text)
    with pytest.raises(RunFileError) as error:
        load_run(path)
    assert f"{path}:{line}: unknown key '{unknown}'; did you mean '{near}'?" in str(error.value)


def test_every_problem_is_listed(write):
    text = MINIMAL.replace("steps: 10", "steps: -1") + "optimizer:\n  lr: fast\n"
    with pytest.raises(RunFileError) as error:
        load_run(write(text))
    assert "schedule.steps" in str(error.value)
    assert "optimizer.lr" in str(error.value)
    assert "'fast'" in str(error.value)


def test_missing_key_says_how_to_give_it(write):
    with pytest.raises(
        RunFileError, match=r"required key 'data\.stores' is missing; add it or give --data.stores"
    ):
        load_run(write("out: a\ndata: {}\nschedule: {steps: 1}\n"))


@pytest.mark.parametrize("schedule", ["{}", "{steps: 3, epochs: 1}"])
def test_schedule_needs_exactly_one_length(write, schedule):
    with pytest.raises(RunFileError, match="exactly one of steps, epochs and minutes"):
        load_run(write(f"out: a\ndata: {{stores: [s]}}\nschedule: {schedule}\n"))


def test_init_from_excludes_a_new_shape(write):
    text = MINIMAL + "drafter:\n  init_from: old\n  layers: 3\n"
    with pytest.raises(RunFileError, match="init_from takes the drafter as it is, so layers cannot be given"):
        load_run(write(text))
    assert load_run(write(MINIMAL + "drafter:\n  init_from: old\n")).drafter.init_from is not None


def test_flags_override_the_file(write):
    flags = parse_flags(
        ["--optimizer.lr", "1e-3", "--schedule.steps=7", "--data.stores", "[a, b]", "--out=x y"]
    )
    config = load_run(write(MINIMAL), flags)
    assert config.optimizer.lr == 1e-3
    assert config.schedule.steps == 7
    assert [str(path) for path in config.data.stores] == ["a", "b"]
    assert str(config.out) == "x y"


def test_flag_spelled_with_dashes_is_the_same_key():
    assert parse_flags(["--drafter.block-size", "4"]) == {"drafter.block_size": 4}


def test_unknown_flag_is_named_as_a_flag(write):
    with pytest.raises(
        RunFileError, match=r"flag --optimizer\.rl: unknown key 'optimizer\.rl'.*optimizer\.lr"
    ):
        load_run(write(MINIMAL), {"optimizer.rl": 1})


@pytest.mark.parametrize("arguments", [["lr", "3"], ["--optimizer.lr"]])
def test_flag_without_dashes_or_value_is_refused(arguments):
    with pytest.raises(RunFileError):
        parse_flags(arguments)


def test_file_that_is_no_mapping_or_absent_is_refused(write, tmp_path):
    with pytest.raises(RunFileError, match="mapping"):
        load_run(write("- a\n"))
    with pytest.raises(RunFileError, match="not valid YAML"):
        load_run(write("a: [1\n"))
    with pytest.raises(RunFileError, match="cannot read"):
        load_run(tmp_path / "none.yaml")


def test_saved_file_reads_back_equal(write, tmp_path):
    config = resolve_paths(load_run(write(MINIMAL), {"drafter.warm_start": "layers"}))
    save_run(config, tmp_path / "saved.yaml")
    again = load_run(tmp_path / "saved.yaml")
    assert again == config
    assert differences(config, again) == []


def test_saved_file_of_a_run_with_init_from_reads_back(write, tmp_path):
    config = resolve_paths(load_run(write(MINIMAL + "drafter:\n  init_from: old\n")))
    save_run(config, tmp_path / "saved.yaml")
    assert load_run(tmp_path / "saved.yaml") == config


def test_differences_name_what_changes_the_result_and_nothing_else():
    base = {"out": "a", "data": {"stores": ["s"]}, "schedule": {"steps": 5}}
    one = RunConfig.model_validate(base)
    other = RunConfig.model_validate(
        {**base, "seed": 3, "batch": {"samples": 4, "micro": 1}, "parallel": {"zero": 1}, "out": "b"}
    )
    assert differences(one, other) == ["seed: 0 -> 3"]


@pytest.mark.parametrize(
    "recipe", sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml")), ids=lambda p: p.stem
)
def test_recipes_are_valid_and_divide_over_eight_ranks(recipe):
    batch = load_run(recipe).batch
    if batch.unit != "samples":
        assert batch.limit(8) * 8 <= batch.size
        return
    replicas = 8 if batch.size % (8 * batch.limit(8)) == 0 else 1
    assert batch.accumulation(replicas) >= 1


def test_every_key_is_described():
    def undescribed(model, prefix=""):
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from undescribed(kind, f"{prefix}{name}.")
            elif not field.description:
                yield prefix + name

    assert list(undescribed(RunConfig)) == []


def test_every_key_is_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    keys = [
        key
        for section, field in RunConfig.model_fields.items()
        for key in (getattr(field.annotation, "model_fields", None) or [section])
        if section != "objective"
    ]
    assert [key for key in keys if key not in text] == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mode": "cp", "placement": "dealt"}, "leave both auto"),
        ({"mode": "replicated", "context_ranks": "auto"}, "give context_ranks a number"),
        ({"transport": "rings"}, "Input should be"),
        ({"retain": 0}, "greater than or equal to 1"),
    ],
)
def test_a_baseline_decides_alone_and_names_are_checked(write, given, says):
    path = write(MINIMAL + yaml.safe_dump({"parallel": given}))
    with pytest.raises(RunFileError, match=says):
        load_run(path)


def test_transports_of_all_layers_and_of_each_are_read_back(tmp_path, write):
    for transport, asked in (("ring", ("ring",)), (["halo", "auto"], ("halo", "auto"))):
        config = load_run(write(MINIMAL + yaml.safe_dump({"parallel": {"transport": transport}})))
        save_run(config, tmp_path / "run.yaml")
        assert load_run(tmp_path / "run.yaml") == config
        assert config.parallel.transports == asked
