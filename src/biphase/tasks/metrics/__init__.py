"""How an example is scored, for each family of tasks: the paper's way and the usual way.

    family   file             the paper's                    the usual
    SC       classification   accuracy                       accuracy, macro_f1, mcc
    TC       tagging          sentence_macro_f1              entity_counts, entity_f1
    QA       answers          token_set_f1                   answer_f1, exact_match
    IR       ranking          paper_ndcg@10                  ndcg@10, mrr@10, recall@100

Every example keeps its own value, so that two models can be compared example by example and a set resampled.
The score of a set is the mean of its examples. Entity F1 is no mean: its examples keep three counts,
and `tagging.entity_f1` turns the counts of any choice of examples into its score. Macro F1 and MCC are no means
either; they are worked out from the labels of a whole set. Arrays of values are float32, as they are kept; take
their mean in float64 (`values.mean(dtype=float)`).

Scores lie between 0 and 1, MCC between -1 and 1. Only numpy is needed here.
"""
