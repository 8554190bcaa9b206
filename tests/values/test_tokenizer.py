"""The tokenizer of captions: what it learns, and that texts come back from their tokens."""

import random

import pytest

from unfog.errors import RequestError
from unfog.values.condition_kinds import ColumnFacts, kind_of
from unfog.values.kinds.text_kind import LONGEST_TEXT
from unfog.values.tokenizer import BYTES, Tokenizer, learn_merges, normalize_caption

CAPTIONS = [
    *("a red heart", "a blue heart", "Red square, left", "RED_square!!", "don't"),
    *("le café est là", "कहानी एक दिन", "العربية نص", "日本語の文、です", "😀 grinning face", "👩‍👩‍👧 family"),
]


def test_texts_come_back_from_their_tokens():
    for merges in ((), learn_merges(CAPTIONS * 3)):
        tokenizer = Tokenizer(merges)
        for text in [*CAPTIONS, "of words that are new: жук", "\0a\0", "", " \n"]:
            tokens = tokenizer.encode(text)
            assert tokenizer.decode(tokens) == normalize_caption(text)
            assert all(0 <= token < tokenizer.vocabulary for token in tokens)


def test_frequent_words_become_single_tokens_and_others_are_spelled():
    tokenizer = Tokenizer(learn_merges(["a red heart"] * 2 + ["a lone sauropod"]))
    assert len(tokenizer.encode("a red heart")) == 3
    assert len(tokenizer.encode("A  RED\theart")) == 3
    assert tokenizer.split_words("a red sauropod, a red sauropod") == ["sauropod"]
    assert tokenizer.encode("heart") == tokenizer.encode("a heart")[1:]


def test_merges_depend_on_the_captions_alone():
    merges = learn_merges(CAPTIONS * 3)
    assert learn_merges(random.Random(0).sample(CAPTIONS * 3, 3 * len(CAPTIONS))) == merges
    assert learn_merges(["ab ab cd cd"]) == learn_merges(["cd cd ab ab"]) != ()
    assert learn_merges(CAPTIONS * 3, most=5) == merges[:5]
    assert learn_merges(["a b c d e"]) == ()


@pytest.mark.parametrize(
    "text", ["a" * 10**6, "\u0301" * 10**6, "\u202eabc", "\ud800 half", "\ufeffmark", "\x1b[31mred"], ids=range(6)
)
def test_hostile_texts_are_bounded_and_plain(text):
    normal = normalize_caption(text)
    assert len(normal) <= 4096 * 6
    assert normal.isprintable()
    assert Tokenizer().decode(Tokenizer().encode(text)) == normal


def test_facts_of_a_text_are_checked():
    merges = learn_merges(CAPTIONS * 3)
    facts = ColumnFacts("text", "text", merges, (float(BYTES + len(merges)), 8.0))
    assert kind_of("text").width(facts) == 8
    size = BYTES + len(merges)
    sizes = [(size - 1, 8.0), (size, 0.0), (size, 2.5), (size, LONGEST_TEXT + 1.0), (size, float("nan"))]
    for wrong in ((), (size,), *sizes):
        with pytest.raises(RequestError, match="tokens"):
            ColumnFacts("text", "text", merges, wrong)
    for bad in (("ab c",), ("a b", "a b"), ("a",), ("a b c",)):
        with pytest.raises(RequestError, match="tokens"):
            ColumnFacts("text", "text", bad, (BYTES + len(bad), 8.0))


def test_prompts_are_parsed_and_named():
    merges = learn_merges(CAPTIONS * 3)
    facts, kind = ColumnFacts("text", "text", merges, (float(BYTES + len(merges)), 8.0)), kind_of("text")
    value = kind.parse(facts, "A red, red heart")
    assert len(value) == 8
    assert value[-1] == -1
    assert kind.show(facts, value) == "a red, red heart"
    assert kind.parse(facts, "") == kind.usual(facts)[0]
    assert kind.show(facts, kind.usual(facts)[0]) == ""
    assert kind.concern(facts, value) == ""
    assert "'xyzzy'" in kind.concern(facts, kind.parse(facts, "xyzzy"))
    with pytest.raises(RequestError, match="9 tokens is longer than the 8 tokens of this run"):
        kind.parse(facts, "a red heart " * 3)
    with pytest.raises(RequestError, match="must be a text"):
        kind.parse(facts, 5)
