"""The slips of sixty.py fit the source: each snippet occurs once, and each test that is to catch it is there."""

from __future__ import annotations

from mutation.sixty import ROOT, SLIPS, TESTS, source_of


def test_every_slip_is_in_the_source() -> None:
    assert len(SLIPS) == 60
    for slip in SLIPS:
        assert source_of(slip, ROOT / "src").is_file()
        assert slip.new != slip.old


def test_the_tests_that_catch_them_are_there() -> None:
    for slip in SLIPS:
        for test in slip.tests:
            file, _, name = test.partition(" ")[0].partition("::")
            texts = [path.read_text("utf-8") for path in TESTS.rglob(file)]
            assert len(texts) == 1, test
            assert f"def {name.partition('[')[0]}" in texts[0], test
