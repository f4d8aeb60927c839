import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dvc.scm import Git
from hypothesis import given
from hypothesis import strategies as st

from stages.data.parquet import read_rows, write_rows
from stages.evaluation.likelihood import AnswerLikelihood
from stages.evaluation.score import rouge
from stages.launcher.pipeline import declared_stages
from stages.mixture.certificate import Routing
from stages.tasks.moe.samples import Record, candidates
from stages.tasks.moe.scoring import (
    BLEURT_DIR,
    PREDICTIONS,
    ROUGES,
    bleu,
    load_bleurt,
    mc1,
    mc2,
    models,
    nearest_score,
    score,
)
from tests import ROOT
from tests.tasks.moe.made_up import fact, meeting

RECORDS = [fact(1), meeting(2), fact(3), meeting(4)]


def likelihoods_of(records: list[Record], rate: float = 1.0) -> list[AnswerLikelihood]:
    """The best answers at `rate` nats a token, the others by their order, the correct ones likelier."""
    found = []
    for record in records:
        found.append(AnswerLikelihood(-rate * 4, 4))
        if record.incorrect:
            found += [AnswerLikelihood(-rate * 4, 4)] * len(record.correct)
            found += [AnswerLikelihood(-9.0, 2)] * len(record.incorrect)
    return found


def test_candidates_are_the_best_answer_then_the_correct_and_the_incorrect_ones() -> None:
    texts = [candidate.messages[-1]["content"][0]["text"] for candidate in candidates(RECORDS[:2])]
    one, other = RECORDS[:2]
    assert texts == [one.best, *one.correct, *one.incorrect, other.best]
    with pytest.raises(AssertionError, match="5 likelihoods for 6 candidates"):
        score(RECORDS[:2], ["", ""], likelihoods=likelihoods_of(RECORDS[:2])[:-1])


def test_right_completions_score_one_and_rows_give_the_figures_again() -> None:
    metrics, rows = score(RECORDS, [record.best for record in RECORDS], likelihoods=likelihoods_of(RECORDS, 0.5))
    assert metrics["perplexity"] == pytest.approx(math.exp(0.5))
    assert metrics["perplexity_truthfulqa"] == metrics["perplexity_qmsum"] == pytest.approx(math.exp(0.5))
    assert (metrics["mc1"], metrics["rouge1"], metrics["rougeL"]) == (1, 1, 1)
    assert metrics["mc2"] == pytest.approx(2 * math.exp(-2) / (2 * math.exp(-2) + 2 * math.exp(-9)))
    assert metrics["bleu_difference"] > 0.5 < metrics["rougeL_difference"]
    assert metrics["bleurt_difference"] == "unavailable"
    assert "routing_entropy" not in metrics
    assert sum(row["qmsum_nats"] for row in rows) / sum(row["qmsum_tokens"] for row in rows) == pytest.approx(0.5)
    assert [row["token_probability"] for row in rows] == pytest.approx([math.exp(-0.5)] * 4)


def test_empty_and_wrong_completions_are_counted_and_never_fail() -> None:
    wrong = [record.incorrect[1] if record.incorrect else "" for record in RECORDS]
    metrics, _ = score(RECORDS, wrong, likelihoods=likelihoods_of(RECORDS))
    assert metrics["bleu_difference"] == 0, "texts of fewer than four words have no BLEU"
    assert metrics["rougeL_difference"] < -0.5
    assert metrics["rouge1"] == 0
    assert metrics["empty_rate"] == 0.5


def test_routing_says_how_far_apart_the_domains_are() -> None:
    def routed(*load: float) -> Routing:
        return Routing(load=load, entropy=0.25)

    apart = [routed(1, 0) if record.domain == "qmsum" else routed(0.25, 0.75) for record in RECORDS]
    metrics, rows = score(RECORDS, [""] * 4, likelihoods=likelihoods_of(RECORDS), routing=apart)
    assert metrics["routing_apart"] == pytest.approx(0.75)
    assert (metrics["expert_0_load_qmsum"], metrics["expert_1_load_truthfulqa"]) == (1, 0.75)
    assert metrics["routing_entropy"] == 0.25
    assert rows[1]["expert_load"] == [1, 0]


def test_rows_fit_their_schema(tmp_path: Path) -> None:
    texts = ["", "Xin chào\x00 – 书 " * 300, "$x_{1}$\n\n", RECORDS[3].best]
    _, rows = score(RECORDS, texts, likelihoods=likelihoods_of(RECORDS))
    write_rows(rows, tmp_path / "predictions.parquet", PREDICTIONS)
    assert list(read_rows(tmp_path / "predictions.parquet")) == rows


def test_choices_by_hand() -> None:
    true, false = [math.log(0.2), math.log(0.1)], [math.log(0.05), math.log(0.15)]
    assert mc2(true, false) == pytest.approx(0.3 / 0.5)
    assert (mc1(true[0], false), mc1(true[1], false), mc1(false[1], false)) == (1, 0, 0)


@given(st.lists(st.floats(-5000, 0), min_size=1, max_size=5), st.lists(st.floats(-5000, 0), min_size=1, max_size=5))
def test_a_share_is_a_share_however_unlikely_the_answers(true: list[float], false: list[float]) -> None:
    share = mc2(true, false)
    assert 0 <= share <= 1
    assert share + mc2(false, true) == pytest.approx(1)
    assert share == pytest.approx(mc2(list(np.array(true) - 1000), list(np.array(false) - 1000)), abs=1e-6)


def test_overlap_by_hand() -> None:
    scores = {key: rouge(key, "The cat sat.", "the cat ran away") for key in ROUGES}
    assert scores["rouge1"] == scores["rougeL"] == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert scores["rouge2"] == pytest.approx(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))
    assert bleu("The lamp is made of glass.", "The lamp is made of glass.") == pytest.approx(1)
    assert bleu("", "The lamp.") == rouge("rouge1", "", "The lamp.") == 0
    assert nearest_score(bleu, "It is made of glass.", ["Clay.", "It is made of glass."]) == pytest.approx(1)


def save_tokenizer(folder: Path) -> None:
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "lamp", "glass", "clay"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)


def test_bleurt_without_a_checkpoint_is_none_and_with_one_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_bleurt() is None
    stages = {stage.name: stage for stage in declared_stages(ROOT)}
    assert str(BLEURT_DIR.parent) in stages["evaluate@moe-gate"].deps, "a container has to see it"
    assert str(BLEURT_DIR.parent) in stages["baseline@base-moe"].deps
    assert not Git(ROOT).is_ignored(f"{ROOT / BLEURT_DIR.parent}/"), "DVC has to see what is added there"
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    BLEURT_DIR.mkdir(parents=True)
    save_tokenizer(BLEURT_DIR)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=9, num_labels=1, initializer_range=1.0, **sizes)
    BertForSequenceClassification(config).save_pretrained(BLEURT_DIR)
    measure = load_bleurt()
    assert measure is not None
    assert measure("the lamp", "glass") == measure("the lamp", "glass") != measure("the lamp", "clay")

    def scored(**own: Any) -> object:
        completions = [record.best for record in RECORDS]
        return score(RECORDS, completions, likelihoods=likelihoods_of(RECORDS), **own)[0]["bleurt_difference"]

    assert isinstance(scored(**models()), float)
    assert scored() == "unavailable", "a training and a merge score too, and do not have it as an input"
