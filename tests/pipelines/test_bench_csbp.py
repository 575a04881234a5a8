import pytest
from pydantic import ValidationError

from csbp.transport import KINDS
from pipelines.bench_csbp import CsbpOptions, CsbpResult, ratio_interval, render_bench_csbp, run_bench_csbp
from pipelines.bench_step import ONE_RANK, ModeFigures


def result(csbp=(1.0, 1.1, 0.9), other=(2.0, 2.2, 1.8), sent=100, **options):
    def ranks(times, **sent_by_kind):
        sent_by_kind = {**dict.fromkeys(KINDS, 0), **sent_by_kind}
        return [ModeFigures(list(times), list(times), sent_by_kind, 1, 1, 1, "dealt", ("ring",))] * 2

    figures = {
        "csbp": ranks(csbp, context_kv=sent),
        "replicated": ranks(other),
        ONE_RANK: ranks([1.8 * t for t in csbp])[:1],
    }
    return CsbpResult(CsbpOptions(**options), figures, 100.0)


def test_efficiency_is_one_rank_time_over_all_ranks_time():
    assert result().efficiency == pytest.approx(0.9)


def test_nothing_is_missed_when_bounds_hold():
    bounds = {"min_efficiency": 0.85, "min_ratio": {"replicated": 1.7}, "max_imbalance": 1.06}
    assert result(check=True, **bounds).missed == []


def test_every_missed_bound_is_named():
    bounds = {"min_efficiency": 0.95, "min_ratio": {"replicated": 2.3}}
    missed = " ".join(result(check=True, sent=103, **bounds).missed)
    assert "efficiency 0.900 is below 0.95" in missed
    assert "replicated takes" in missed
    assert "103 bytes a rank; closed form 100" in missed


def test_bounds_count_only_under_check():
    assert result(min_efficiency=0.99).missed == []


def test_the_interval_of_a_steady_ratio_is_narrow_and_holds_it():
    steady = ratio_interval([2.0, 2.02, 1.98, 2.0, 2.01, 1.99, 2.0], [1.0] * 7)
    assert 1.97 < steady["low"] <= steady["median"] == 2.0 <= steady["high"] < 2.03


def test_rounds_are_drawn_together():
    # a slow machine in some rounds slows both modes alike: the ratio does not vary
    slow = [1.0, 5.0, 1.0, 5.0, 1.0, 5.0, 1.0]
    interval = ratio_interval([2 * t for t in slow], slow)
    assert interval == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_csbp_must_be_among_the_modes():
    with pytest.raises(ValidationError, match="must hold csbp"):
        CsbpOptions(modes=("cp",))
    with pytest.raises(ValidationError, match="not timed"):
        CsbpOptions(min_ratio={"cp": 1.0})


@pytest.mark.ranks
def test_a_small_run_measures_every_mode_and_its_bytes():
    options = CsbpOptions(
        context=700,
        anchors=12,
        block=4,
        layers="mixed",
        window=64,
        modes=("csbp", "cp", "replicated", "query-sharded"),
        placement="contiguous",
        transport="halo",
        steps=2,
        warmup=0,
        check=True,
    )
    measured = run_bench_csbp(options)
    figures = measured.to_dict()
    assert set(figures["modes"]) == {*options.modes, ONE_RANK}
    assert figures["modes"]["csbp"]["bytes_sent"]["block_kv"] == 0
    assert figures["modes"]["cp"]["bytes_sent"]["block_kv"] == 2 * 12 * 4 * 2 * 3 * 64 * 4
    assert figures["modes"]["csbp"]["bytes_sent"]["gradients"] > 0
    assert all(peak > 0 for peak in figures["modes"]["csbp"]["peak_bytes"])
    assert len(figures["modes"]["csbp"]["peak_bytes"]) == 2
    assert figures["modes"]["replicated"]["blocks"] == [12, 12]
    assert render_bench_csbp(measured).row_count == 11
