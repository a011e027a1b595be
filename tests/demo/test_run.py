"""The whole demo on its real models, and what it claims of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from symfuse.demo import packages
from symfuse.demo.run import run_demo
from symfuse.output import Output


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.data
def test_the_demo_shows_what_it_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if reason := packages.available(*packages.OF_THE_DEMO):
        pytest.skip(reason)
    data = run_demo(Output(False, False), tmp_path)
    assert "Summary" in capsys.readouterr().out
    everyday, planted, hidden, hard = (data[case] for case in ("everyday", "planted", "hidden", "hard"))
    for case in (everyday["verified"], planted["same_function"], hard["verified"]):
        assert case < 1e-11, "the function is preserved"

    # 1. A fine-tune is nearly aligned already: little moves, and nothing is lost.
    assert everyday["alignment"]["distance"]["left"] <= 1
    scores = everyday["scores"]
    assert scores["aligned average"]["topics"] > scores["average"]["topics"] - 0.05

    # 2. What was planted is found to the rounding of the files; without it the average is destroyed.
    before, after = planted["relative_distance"]
    assert after < 1e-6 < 0.5 < before
    assert planted["merge_equals_original"] < 1e-4
    scores = planted["scores"]
    assert scores["planted, aligned average"]["mrr_unseen"] == pytest.approx(scores["MiniLM"]["mrr_unseen"], abs=1e-3)
    assert scores["planted average"]["mrr_unseen"] < scores["MiniLM"]["mrr_unseen"] - 0.1

    # 3. A hidden fine-tune is one of the base, models trained apart are not; what it changed fits a moved base.
    kinds = {name: (one["kind"], one["moved"]) for name, one in hidden["verdicts"].items()}
    assert kinds["fine-tune"] == ("fine-tune", False)
    assert kinds["hidden fine-tune"] == ("fine-tune", True)
    assert not hidden["verdicts"][hard["models"][0]]["related"]
    assert hidden["rebased"] < 1e-4
    scores = hidden["scores"]
    assert scores["rebased"]["mrr_trained"] == pytest.approx(scores["fine-tune"]["mrr_trained"], abs=1e-3)
    assert scores["plain difference"]["mrr_trained"] < scores["fine-tune"]["mrr_trained"] - 0.2

    # 4. Models that were trained independently come nearer, and are not connected by it.
    assert hard["distance"]["left"] < 1
    scores = hard["scores"]
    ends = [scores[name]["accuracy"] for name in hard["models"]]
    assert scores["aligned"]["accuracy"] == pytest.approx(ends[0], abs=0.01)
    assert scores["aligned average"]["accuracy"] < min(ends)
