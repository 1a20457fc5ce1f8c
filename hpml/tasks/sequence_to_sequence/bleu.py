"""BLEU of a corpus as sums over its rows, by sacrebleu's definition (Post 2018, arXiv:1804.08771)."""

from __future__ import annotations

from collections.abc import Sequence

STATISTICS = (
    10  # words of the answer, of the reference; then of 1 to 4 words how many match, how many there are
)


def statistics(answer: str, reference: str) -> list[float]:
    """Of one row, whose sums over a corpus are those of the corpus."""
    from sacrebleu.metrics.bleu import BLEU

    score = BLEU(effective_order=True).sentence_score(answer, [reference])
    return [score.sys_len, score.ref_len, *score.counts, *score.totals]


def bleu(sums: Sequence[float]) -> float:
    """0 to 100, of the sums; 0 where nothing was answered."""
    from sacrebleu.metrics.bleu import BLEU

    answered, of_references, *counts = map(round, sums)
    score: float = BLEU.compute_bleu(
        counts[:4], counts[4:], answered, of_references, smooth_method="exp"
    ).score
    return score
