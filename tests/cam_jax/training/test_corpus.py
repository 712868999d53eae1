"""The split goes by name, and nothing six lines long stands on both of its sides."""

from cam_jax.training.corpus import (
    DOMAINS,
    SHARED_RUN,
    Document,
    cut_runs,
    fingerprint,
    gather,
    run_hashes,
    split,
)
from cam_jax.training.heldout import choose, shipped_heldout


def _document(text, name="a", domain="source"):
    return Document(domain=domain, name=name, text=text)


def _lines(*numbers):
    return "".join(f"line number {n}\n" for n in numbers)


def test_split_has_no_overlap_on_this_machine():
    shipped = shipped_heldout()
    training, heldout = split(gather(), shipped=shipped)
    names = {(x.domain, x.name) for x in training}
    assert names.isdisjoint((x.domain, x.name) for x in [*heldout, *shipped])
    assert run_hashes(training).isdisjoint(run_hashes([*heldout, *shipped]))
    assert {x.domain for x in training} == set(DOMAINS)
    assert sum(len(x.text) for x in training) > 5_000_000


def test_split_depends_on_the_name_only():
    names = [f"package/module_{n}.py" for n in range(500)]
    first = [_document("x\n", name).heldout for name in names]
    second = [_document("something else\n", name).heldout for name in names]
    assert first == second
    assert 5 < sum(first) < 50  # one in 24


def test_gather_is_sorted_unique_and_free_of_tests_and_tables():
    documents = gather()
    names = [(x.domain, x.name) for x in documents]
    assert names == sorted(set(names))
    source = [x.name for x in documents if x.domain == "source"]
    assert "argparse.py" in source
    assert not [name for name in source if "/test/" in name or name.startswith("encodings/")]


def test_a_shared_run_is_cut_and_a_shorter_one_stays():
    forbidden = run_hashes([_document(_lines(*range(100, 120)))])
    copied = range(103, 103 + SHARED_RUN)
    text = _lines(1, 2) + _lines(*copied) + _lines(3)
    assert cut_runs(_document(text), forbidden).text == _lines(1, 2, 3)
    short = _document(_lines(1, *copied[:-1], 2))
    assert cut_runs(short, forbidden) is short


def test_indentation_and_blank_lines_do_not_hide_a_copy():
    forbidden = run_hashes([_document(_lines(*range(10)))])
    indented = "".join(f"    line number {n}\n\n" for n in range(10))
    assert not cut_runs(_document(indented), forbidden).text.strip()


def test_shipped_text_is_kept_out_of_training_under_any_name():
    shipped = [_document(_lines(*range(40)), name="only/elsewhere.py")]
    copy = _document(_lines(*range(40)) + _lines(*range(1000, 1040)), name="b.py")
    assert not copy.heldout
    training, _ = split([copy], shipped=shipped)
    assert [x.text for x in training] == [_lines(*range(1000, 1040))]


def test_shipped_text_is_about_200_kilobytes_in_three_domains():
    sizes = {d: sum(len(x.text.encode()) for x in shipped_heldout(d)) for d in DOMAINS}
    assert all(size > 10_000 for size in sizes.values())
    assert 150_000 < sum(sizes.values()) < 250_000
    assert all(x.heldout for x in shipped_heldout())
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in shipped_heldout("licence")[0].text


def test_source_with_terms_of_its_own_is_not_shipped():
    ours = _document("x = 1\n" * 400, name="a.py")
    theirs = _document("# Copyright 1999 Somebody\n" + "x = 1\n" * 400, name="b.py")
    assert choose([ours, theirs]) == [ours]


def test_fingerprint_changes_with_any_character():
    assert fingerprint([_document("a")]) != fingerprint([_document("b")])
    assert fingerprint([_document("a")]) == fingerprint([_document("a")])
