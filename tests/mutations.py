"""Mutations: one-line breaks of the source, each with the test that must fail. They show that the tests test.

    pytest -m campaign tests/test_mutations.py              all of them
    pytest -m campaign tests/test_mutations.py -k Holm      those whose name contains "Holm"

For each mutation the runner copies src/ to a temporary folder, replaces `old` by `new` in the copy, and runs the named
test on it in a fresh process. The test must fail by an assertion, a missing refusal or a wrong refusal; a name, import
or syntax error does not count. The same tests must pass on an unchanged copy. `tests/test_mutations.py` runs this with
`python3 run test --all`, and checks in every run that each `old` still occurs exactly once and each test exists.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
CRUDE = (
    "NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "AttributeError", "UnboundLocalError",
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # below src/biphase
    old: str  # occurs exactly once in the file
    new: str
    test: str  # below tests: file::function or file::class::function
    why: str  # what the mutation breaks
    subtle: bool = False  # still looks right, and is wrong in few cases only


MUTATIONS = [
    # ------------------------------------------------------------ the hub
    Mutation(
        "a branch passes for a commit",
        "remote.py",
        "if branch.name == revision:",
        "if branch.name == revision == kind:",
        "test_remote.py::test_a_refusal_is_one_line_that_says_what_to_type",
        "the content under one key changes when somebody pushes",
        subtle=True,
    ),
    # ------------------------------------------------------------ stores of other versions
    Mutation(
        "keys change without a word",
        "keys.py",
        "TRIAL_GENERATION = 1",
        "TRIAL_GENERATION = 2",
        "test_store.py::test_what_the_first_version_wrote_is_read_and_continued",
        "every score of every store is computed again",
    ),
    # ------------------------------------------------------------ what a study says about training
    Mutation(
        "z-loss without its gradient",
        "fast/plain.py",
        "error *= 1 + 2 * z_loss * top",
        "error *= 1 + z_loss * top",
        "test_loss.py::test_loss_and_gradients_equal_torchs",
        "half of the z-loss is trained on",
        subtle=True,
    ),
    # ------------------------------------------------------------ law: attention sees what it should, and no more
    Mutation(
        "causal mask sees one token ahead",
        "attention.py",
        "dtype=torch.bool, device=mask.device).tril()",
        "dtype=torch.bool, device=mask.device).tril(1)",
        "models/test_attention.py::test_the_mask_alone_is_right",
        "a causal model reads the token that it predicts",
        subtle=True,
    ),
    Mutation(
        "segment sees the one before",
        "attention.py",
        "mask = segments[:, None, :, None] == segments[:, None, None, :]",
        "mask = segments[:, None, :, None] >= segments[:, None, None, :]",
        "models/test_attention.py::test_the_mask_alone_is_right",
        "attention leaves its chunk or document",
    ),
    # ------------------------------------------------------------ contrastive stages
    Mutation(
        "a process has the gradient of its own queries only",
        "training/contrastive.py",
        "return whole + (mine - whole).detach()",
        "return mine",
        "training/test_distributed.py::test_pairs_over_processes_are_those_of_one_and_a_stop_changes_no_bit",
        "negatives of other processes teach nothing, so the model depends on the number of processes",
        subtle=True,
    ),
    Mutation(
        "a text that is right for the query is its negative",
        "training/contrastive.py",
        ".any(-1).fill_diagonal_(False)",
        ".all(-1).fill_diagonal_(False)",
        "training/test_contrastive.py::test_loss_and_gradients_are_those_of_a_plain_reference",
        "pairs with equal texts push each other apart",
        subtle=True,
    ),
    # ------------------------------------------------------------ law: objectives
    Mutation(
        "label crosses a chunk's border",
        "objectives.py",
        "shifted[:, :-1].masked_fill_(segments[:, 1:] != segments[:, :-1], IGNORE)",
        "shifted[:, :-1].masked_fill_(segments[:, 1:] < segments[:, :-1], IGNORE)",
        "test_objectives.py::TestEveryObjective::test_labels_stay_inside_their_segment",
        "CLM predicts the first token of the next chunk",
        subtle=True,
    ),
    Mutation(
        "mask ignores the epoch",
        "objectives.py",
        'hash32(seed, "mask", samples, ids.shape[1])',
        'hash32(seed, "mask", samples * 0, ids.shape[1])',
        "test_objectives.py::test_epochs_and_seeds_mask_differently",
        "the same positions are masked in each epoch",
        subtle=True,
    ),
    Mutation(
        "a mixture's objective counts by its labels in each process",
        "training/loop.py",
        "if term.number == part) for part in range(terms[0].terms)]",
        "if term.number >= part) for part in range(terms[0].terms)]",
        "training/test_pretrain.py::test_the_loss_of_a_step_is_the_stated_mean",
        "the loss of an objective is divided by the labels of others",
        subtle=True,
    ),
    Mutation(
        "weights reach the loss and not its gradient",
        "fast/trunk.py",
        "logits.mul_(weights[rows, None])",
        "logits.mul_(1.0)",
        "test_loss.py::test_weights_multiply_losses_and_gradients",
        "rows with a low ratio teach less than they should",
        subtle=True,
    ),
    Mutation(
        "masking ratio is a step ahead",
        "specs/objectives.py",
        "return self.first + (self.last - self.first) * min(step / self.steps, 1.0)",
        "return self.first + (self.last - self.first) * min((step + 1) / self.steps, 1.0)",
        "test_specs.py::test_ratio_schedules_at_their_corners",
        "a linear ratio does not begin at its first value",
        subtle=True,
    ),
    Mutation(
        "loss drops the last row of a slice",
        "fast/trunk.py",
        "rows = slice(start, start + slice_rows)",
        "rows = slice(start, start + max(slice_rows - 1, 1))",
        "test_loss.py::test_loss_and_gradients_equal_torchs",
        "off by one at the border of two slices",
        subtle=True,
    ),
    # ------------------------------------------------------------ law: data and order
    Mutation(
        "chunk cut misses its last place",
        "data/stream.py",
        "choices = length - 2 * packing.shortest + 1",
        "choices = length - 2 * packing.shortest",
        "data/test_stream.py::test_chunk_cuts_are_uniform_and_leave_the_shortest",
        "off by one at a chunk's border",
        subtle=True,
    ),
    Mutation(
        "processes share a row",
        "data/stream.py",
        "rows * rank // world, rows * (rank + 1) // world",
        "rows * rank // world, -(-rows * (rank + 1) // world)",
        "data/test_stream.py::test_processes_and_micro_batches_together_see_the_global_batch",
        "two processes train on one row where rows do not divide evenly",
        subtle=True,
    ),
    Mutation(
        "row at the border of two shards",
        "data/shards.py",
        "first, until = -(-start // length), end // length",
        "first, until = start // length, end // length",
        "data/test_shards.py::test_rows_are_slices_of_the_whole_wherever_files_end",
        "a row that began in the file before counts as the first of this file",
        subtle=True,
    ),
    Mutation(
        "held-out documents are trained on",
        "data/tokenize.py",
        "filled = self.train.append(ids[~apart])",
        "filled = self.train.append(ids)",
        "data/test_tokenize.py::test_every_document_is_in_one_split_in_order_and_ends_with_the_end_token",
        "held-out text is in the training split too",
    ),
    Mutation(
        "special tokens in text",
        "data/tokenizer.py",
        'return literal(self.tokenizer.model, self.tokenizer.control_ids, "")',
        "return self.tokenizer.model",
        "data/test_tokenizer.py::test_pieces_that_are_special_tokens_are_not_produced_from_text",
        "</s> in a document ends the document",
    ),
    Mutation(
        "permutation loses rows",
        "randomness.py",
        "while (outside := x >= n).any():",
        "while (outside := x > n).any():",
        "test_randomness.py::test_permute_is_a_permutation",
        "cycle walking stops at n itself",
        subtle=True,
    ),
    # ------------------------------------------------------------ law: kills and resume
    Mutation(
        "tokenization re-reads a file after a kill",
        "data/tokenize.py",
        'FilePosition(**journal["position"])',
        'FilePosition(journal["position"]["file"])',
        "data/test_tokenize.py::test_an_interrupted_attempt_is_resumed_and_ends_in_the_same_bytes",
        "documents are written twice",
    ),
    Mutation(
        "resumed run re-reads one sample",
        "training/pretrain.py",
        "run.origin_sample + run.rows_until(step),",
        "run.origin_sample + run.rows_until(step) - bool(self.meter.first),",
        "training/test_pretrain.py::test_a_resumed_run_equals_one_that_never_stopped",
        "the data position is off by one after a resume",
        subtle=True,
    ),
    Mutation(
        "live model of another checkpoint is trained",
        "training/pretrain.py",
        "if live and live.key == key and keeps:",
        "if live and keeps:",
        "training/test_pretrain.py::test_jobs_that_go_on_with_a_live_model_equal_jobs_that_load_it",
        "a branch begins with the weights of the job before it",
        subtle=True,
    ),
    Mutation(
        "needed checkpoint is pruned",
        "training/checkpoint.py",
        "if key not in needed and store.has(",
        "if store.has(",
        "training/test_pretrain.py::test_intermediate_checkpoints_are_pruned_except_needed_ones",
        "a branch point that another run needs is removed",
    ),
    Mutation(
        "publish is not atomic",
        "store.py",
        "built.rename(folder)  # fails",
        "shutil.copytree(built, folder)  # fails",
        "test_store.py::test_publish_killed_at_any_disk_access_leaves_a_complete_result_or_none",
        "a kill leaves a part of a result",
    ),
    Mutation(
        "lease of another machine counts as dead",
        "leases.py",
        "if holder and holder.alive is False:",
        "if holder and holder.alive is not True:",
        "test_leases.py::test_a_truncated_or_foreign_lease_is_respected_until_it_is_stale",
        "a lease is taken over while its holder is alive",
        subtle=True,
    ),
    # ------------------------------------------------------------ training
    Mutation(
        "WSD decays one step early",
        "specs/training.py",
        "if left > self.decay or not self.decay:",
        "if left > self.decay + 1 or not self.decay:",
        "test_specs.py::test_the_learning_rate_at_the_corners_of_a_run",
        "the last step before the decay has another rate",
        subtle=True,
    ),
    Mutation(
        "warmup of fine-tuning rounds down",
        "training/optimizer.py",
        "rising = math.ceil(warmup * steps)",
        "rising = math.floor(warmup * steps)",
        "finetune/test_parity.py::test_the_rate_of_each_step_is_that_of_transformers_linear_schedule",
        "the schedule differs from transformers' by one step",
        subtle=True,
    ),
    Mutation(
        "nonfinite gradient is applied",
        "training/loop.py",
        "(~torch.isfinite(norm + loss)).float()",
        "(~torch.isfinite(loss)).float()",
        "training/test_loop.py::test_a_nonfinite_step_is_skipped",
        "an infinite gradient of a finite loss destroys the weights",
        subtle=True,
    ),
    Mutation(
        "mean of micro-batch means",
        "training/loop.py",
        "part = self.loss_sum(batch.to(device)) / divisors[number]",
        "part = self.loss_sum(batch.to(device)) / max(batch.count, 1) / len(micro)",
        "training/test_loop.py::test_steps_equal_torchs_clipping_and_adamw",
        "micro-batches with few labels weigh too much",
        subtle=True,
    ),
    Mutation(
        "a bucket is summed before its gradients are complete",
        "training/distributed.py",
        "self.waiting = [len(bucket) for bucket in self.buckets]",
        "self.waiting = [1 for _ in self.buckets]",
        "training/test_distributed.py::test_gradients_that_are_summed_during_the_backward_pass_are_those_of_whole_passes",
        "a bucket misses gradients that come later in the backward pass",
        subtle=True,
    ),
    Mutation(
        "gradient norm over the wrong processes",
        "training/distributed.py",
        "return (square / self.copies).sqrt()",
        "return square.sqrt()",
        "training/test_distributed.py::test_sharded_in_groups_or_unevenly_is_not_sharded_up_to_rounding",
        "with several groups each gradient is counted once per group",
        subtle=True,
    ),
    # ------------------------------------------------------------ law: keys
    Mutation(
        "key misses the seed",
        "keys.py",
        '"seed": run.seed,',
        '"seed": 0,',
        "test_keys.py::test_a_change_is_seen_exactly_downstream_of_where_it_acts",
        "two seeds share a checkpoint",
    ),
    Mutation(
        "key misses the first step of the decay",
        "keys.py",
        "if step > decay:",
        "if step > decay + 1:",
        "test_keys.py::test_a_change_is_seen_exactly_downstream_of_where_it_acts",
        "the first decayed step shares a key with one that does not decay",
        subtle=True,
    ),
    Mutation(
        "key of a fine-tuning misses the precision",
        "keys.py",
        '"precision": spec.precision,',
        '"precision": "",',
        "test_keys.py::test_whatever_determines_a_fine_tuned_model_is_in_its_key",
        "fp32 and bf16 share their scores",
        subtle=True,
    ),
    Mutation(
        "continued run reads its parent's text again",
        "specs/training.py",
        "return self.run.origin_sample + self.run.rows_until(self.step)",
        "return self.run.rows_until(self.step)",
        "test_specs.py::test_steps_and_samples_add_up_along_a_chain_of_runs",
        "the third run of a chain begins where the second did",
        subtle=True,
    ),
    # ------------------------------------------------------------ selection: validation chooses, test is reported
    Mutation(
        "learning rate chosen on test scores",
        "study/ledger.py",
        'choice = choose({cell: trial["scores"]["validation"][metric] for cell, trial in done.items()})',
        'choice = choose({cell: trial["scores"]["test"][metric] for cell, trial in done.items()})',
        "study/test_ledger.py::test_whatever_the_test_scores_are_the_choice_is_the_same",
        "selection on the reported scores",
    ),
    Mutation(
        "report chooses on test scores",
        "report/evidence.py",
        "float(self.validation[self.metric][at, column])",
        "float(self.test[self.metric][at, column])",
        "report/test_evidence.py::test_test_scores_choose_nothing",
        "selection on the reported scores",
    ),
    Mutation(
        "choice from an unfinished grid",
        "study/ledger.py",
        "if not rates or len(validation) != len(rates) * len(seeds):",
        "if not rates:",
        "study/test_ledger.py::test_a_grid_with_a_hole_is_not_chosen_from",
        "a missing trial might have been the best",
    ),
    Mutation(
        "fine-tuning order ignores the epoch",
        "finetune/trial.py",
        'order = permute(numbers, size, salt(seed, "order", epoch)).numpy()',
        'order = permute(numbers, size, salt(seed, "order")).numpy()',
        "finetune/test_trial.py::test_the_order_is_a_function_of_seed_and_epoch",
        "every epoch has the same batches",
        subtle=True,
    ),
    # ------------------------------------------------------------ metrics
    Mutation(
        "neighbouring entities merge",
        "tasks/metrics.py",
        'if tag[0] == "I" and tag[2:] == kind:',
        "if tag[2:] == kind:",
        "tasks/test_metrics.py::test_entities_are_those_of_seqeval",
        "B- after an entity of its type does not begin another",
        subtle=True,
    ),
    Mutation(
        "macro F1 counts absent labels",
        "tasks/metrics.py",
        "return float((2 * np.diag(counts)[occurs > 0] / occurs[occurs > 0]).mean())",
        "return float((2 * np.diag(counts) / np.maximum(occurs, 1)).mean())",
        "tasks/test_metrics.py::test_the_scores_of_a_set_are_those_of_sklearn",
        "labels that never occur pull the mean down",
        subtle=True,
    ),
    Mutation(
        "retrieval ties by the higher index",
        "finetune/families.py",
        "by_index = ranked.argsort(dim=1)",
        "by_index = ranked.argsort(dim=1, descending=True)",
        "finetune/test_retrieval.py::test_search_is_a_full_sort_whatever_the_blocks_and_their_order",
        "scores depend on the blocks of documents",
        subtle=True,
    ),
    Mutation(
        "the best epoch by test scores",
        "finetune/trial.py",
        'score(model, grid.family, options, PARTS[:1])["validation"]',
        'score(model, grid.family, options, PARTS[1:])["test"]',
        "finetune/test_text_families.py::test_the_best_epoch_is_chosen_without_test_examples",
        "selection sees test scores",
    ),
    Mutation(
        "ranks of the whole test set in its resamples",
        "tasks/metrics.py",
        "np.add.reduceat(counts[..., order], starts, axis=-1)",
        "np.add.reduceat(np.ones_like(counts)[..., order], starts, axis=-1)",
        "tasks/test_metrics.py::test_correlations_are_those_of_scipy_also_where_examples_occur_several_times",
        "the interval of Spearman's correlation is not that of the statistic",
        subtle=True,
    ),
    # ------------------------------------------------------------ statistics
    Mutation(
        "Holm without its monotonic step",
        "report/statistics/intervals.py",
        "largest = max(largest, min(1.0, (len(made) - rank) * p))",
        "largest = min(1.0, (len(made) - rank) * p)",
        "report/statistics/test_intervals.py::test_it_is_closed_testing_with_bonferroni",
        "a larger p-value can become the smaller adjusted one",
        subtle=True,
    ),
    Mutation(
        "bootstrap over the wrong axis",
        "report/statistics/intervals.py",
        "centred = draws - draws.mean(axis=0)",
        "centred = draws - draws.mean()",
        "report/statistics/test_resampling.py::test_points_of_any_shape_each_have_their_own_interval",
        "the spread between models enters the interval of each",
        subtle=True,
    ),
    Mutation(
        "population sd",
        "report/statistics/intervals.py",
        "float(np.std(values, ddof=1))",
        "float(np.std(values))",
        "report/statistics/test_intervals.py::test_a_row_of_seeds_gets_scipys_t",
        "intervals over few seeds are too narrow",
        subtle=True,
    ),
    Mutation(
        "pretraining seeds count as fine-tuning seeds",
        "report/statistics/intervals.py",
        "if len(table) <= 1:",
        "if len(table) <= 9:",
        "report/statistics/test_intervals.py::test_a_crossed_table_worked_by_hand",
        "cells of a crossed table are treated as independent",
    ),
    Mutation(
        "claims without their premise",
        "report/verdicts.py",
        "return all(part.above <= ALPHA for part in premises)",
        "return True",
        "report/test_claim_truths.py::test_without_its_premise_a_claim_is_not_applicable_and_the_numbers_say_so",
        "a claim is judged although what it presupposes is false",
    ),
    Mutation(
        "refutation is not corrected for the parts",
        "report/statistics/moderated.py",
        "refuted = min(1.0, len(pairs) * min(one for _, one in pairs))",
        "refuted = min(1.0, min(one for _, one in pairs))",
        "report/statistics/test_moderated.py::test_every_part_must_hold_and_any_refutes",
        "a claim of many parts is refuted by chance",
        subtle=True,
    ),
    Mutation(
        "models of a claim of a paper with other hyperparameters",
        "report/selectors.py",
        "return recipe.size, recipe.shape, base, recipe.own_steps, setting",
        "return recipe.size, recipe.shape, base, recipe.own_steps",
        "report/test_papers.py::test_models_that_differ_in_anything_but_what_is_named_are_not_compared",
        "a claim about objectives is judged by two learning rates",
        subtle=True,
    ),
    Mutation(
        "best of three rates against one",
        "report/contrasts.py",
        "frozenset.intersection(*(evidence.grids[result, task].rates for result in results))",
        "frozenset.union(*(evidence.grids[result, task].rates for result in results))",
        "report/test_contrasts.py::test_models_are_compared_at_the_learning_rates_that_both_have",
        "a checkpoint tuned at one rate loses against the best of three",
        subtle=True,
    ),
    # ------------------------------------------------------------ security: archives, folders, pages
    Mutation(
        "manifest leaves its folder",
        "store.py",
        'return not path.is_absolute() and ".." not in path.parts',
        "return not path.is_absolute()",
        "faults/test_security.py::test_a_manifest_with_a_path_outside_is_refused",
        "a result can read files outside the store",
    ),
    Mutation(
        "result of another key",
        "store.py",
        "            if key != folder.name:\n",
        "            if not key:\n",
        "data/test_shards.py::test_shards_under_the_key_of_another_corpus_are_refused",
        "a folder that was moved passes for another result",
    ),
    Mutation(
        "score out of range is merged",
        "metadata.py",
        "not low - ROUNDING <= score <= high + ROUNDING",
        "not low - ROUNDING <= score",
        "study/test_archive.py::test_files_that_do_not_say_what_they_should_are_refused",
        "an archive brings an accuracy of 2",
        subtle=True,
    ),
    Mutation(
        "file of an archive is not what was packed",
        "study/archive.py",
        "if (len(content), sha256(content).hexdigest()) != listed:",
        "if len(content) != listed[0]:",
        "study/test_archive.py::test_a_cut_or_flipped_file_is_refused_wherever_it_was_hurt",
        "flipped bits are merged",
    ),
    Mutation(
        "links in an archive",
        "study/archive.py",
        "or info.type != tarfile.REGTYPE or info.pax_headers:",
        "or info.pax_headers:",
        "study/test_archive.py::test_links_devices_and_folders_are_refused",
        "an archive brings a symbolic link",
    ),
    Mutation(
        "page does not escape",
        "report/build.py",
        "autoescape=True,",
        "autoescape=False,",
        "faults/test_security.py::test_names_and_errors_are_escaped_on_the_page",
        "a study's name runs as a script",
    ),
    # ------------------------------------------------------------ new models of any configuration
    Mutation(
        "window reaches one token further",
        "attention.py",
        "reach = sliding_window - 1",
        "reach = sliding_window",
        "families/test_new_models.py::test_a_new_model_follows_the_attention_pattern",
        "transformers counts the token itself",
        subtle=True,
    ),
    # ------------------------------------------------------------ export
    Mutation(
        "export with the wrong window",
        "export/writing.py",
        "return both | {name: width - 1 for name, width in fields.items()}, both",
        "return both | {name: width for name, width in fields.items()}, both",
        "export/test_writing.py::test_a_window_to_both_sides_reaches_as_far_as_it_was_trained_to",
        "transformers counts the token itself in a causal window only",
        subtle=True,
    ),
    Mutation(
        "export agrees on the mean token",
        "export/vectors.py",
        "return float(share.max())",
        "return float(share.mean())",
        "export/test_writing.py::test_the_deviation_is_that_of_the_worst_token",
        "a model that differs in one token passes",
        subtle=True,
    ),
    Mutation(
        "verify imports what a folder names",
        "export/vectors.py",
        'if not name.startswith("sentence_transformers."):',
        "if not name:",
        "export/test_vectors.py::test_neither_code_nor_pickles_of_a_folder_are_run",
        "sentence-transformers before version 6 runs code of the folder",
    ),
]  # fmt: skip


# ---------------------------------------------------------------- runner


def source_of(mutation: Mutation) -> str:
    """Return the mutated source of its file."""
    text = (SOURCE / "biphase" / mutation.file).read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name}: src/biphase/{mutation.file} has {text.count(mutation.old)} times {mutation.old!r}; "
            "correct `old` in tests/mutations.py"
        )
    return text.replace(mutation.old, mutation.new)


def run(tests: Iterable[str], mutation: Mutation | None = None) -> tuple[int, list[str]]:
    """Run tests on a copy of src, mutated or not; return pytest's exit code and the message of each failed test.

    A test that failed before its body, e.g. in a fixture, has a message that begins with "ERROR".
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(SOURCE, copy)
        if mutation:
            (copy / "biphase" / mutation.file).write_text(source_of(mutation), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        report = Path(folder) / "report.xml"
        stop = "-x" if mutation else "-q"
        command = [sys.executable, "-m", "pytest", stop, "--tb=short", f"--junitxml={report}"]
        command += [f"tests/{test}" for test in tests]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            return done.returncode, [f"ERROR {done.stdout[-2000:]}{done.stderr[-2000:]}"]
        found = [node for case in ET.parse(report).iter("testcase") for node in case]
        return done.returncode, [
            f"{'ERROR ' if node.tag == 'error' else ''}{node.get('message', '')}"
            for node in found
            if node.tag in ("failure", "error")
        ]


def survives(mutation: Mutation) -> str:
    """Return why a mutation counts as not detected, or "" if its test fails as it should."""
    code, messages = run([mutation.test], mutation)
    if code == 0:
        return f"{mutation.test} passes"
    if code != 1 or not messages or any(message.startswith(("ERROR", *CRUDE)) for message in messages):
        return f"{mutation.test} does not fail by what it tests (pytest exits with {code}): {' | '.join(messages)[:500]}"
    return ""
