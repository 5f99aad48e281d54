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
        "a busy hub is asked once",
        "remote.py",
        "if not (status in BUSY or dropped) or (wanted",
        "if not dropped or (wanted",
        "test_remote.py::test_a_streamed_corpus_is_read_as_a_copy_of_it_through_faults",
        "one 503 ends a night's work",
    ),
    Mutation(
        "a branch passes for a commit",
        "remote.py",
        "if branch.name == revision:",
        "if branch.name == revision == kind:",
        "test_remote.py::test_a_refusal_is_one_line_that_says_what_to_type",
        "the content under one key changes when somebody pushes",
        subtle=True,
    ),
    Mutation(
        "an upload leaves an older export's files",
        "export/folder.py",
        "for pattern in WRITTEN\n",
        "for pattern in WRITTEN[:2]\n",
        "export/test_folder.py::test_an_export_is_one_commit_and_replaces_an_earlier_one",
        "the ONNX graph of another model stays beside the new weights",
        subtle=True,
    ),
    Mutation(
        "a new branch begins with the newest model",
        "export/folder.py",
        "api.list_repo_commits(repo)[-1]",
        "api.list_repo_commits(repo)[0]",
        "export/test_folder.py::test_a_kept_step_is_pushed_to_a_branch_of_its_own",
        "after a failed upload the branch of a step shows the weights of another one",
        subtle=True,
    ),
    # ------------------------------------------------------------ what a study says about training
    Mutation(
        "a mean depends on the order in which it is written",
        "keys.py",
        "return sorted([key, weight] for key, weight in",
        "return list([key, weight] for key, weight in",
        "training/test_merge.py::test_the_written_order_changes_neither_key_nor_bits",
        "the same mean is computed twice, with other roundings",
    ),
    Mutation(
        "Muon takes a step that is not finite",
        "training/optimizer.py",
        "if not nonfinite.item():",
        "if nonfinite.item() < 2:",
        "training/test_pretrain.py::test_muon_skips_a_nonfinite_step_as_adamw_does",
        "one batch without a finite loss destroys the matrices",
    ),
    Mutation(
        "z-loss without its gradient",
        "fast/plain.py",
        "error *= 1 + 2 * z_loss * top",
        "error *= 1 + z_loss * top",
        "test_loss.py::test_a_z_loss_and_its_gradients_equal_autograds",
        "half of the z-loss is trained on",
        subtle=True,
    ),
    Mutation(
        "what was frozen stays frozen",
        "training/optimizer.py",
        "weight.requires_grad_(name not in frozen)",
        "weight.requires_grad_(weight.requires_grad and name not in frozen)",
        "training/test_pretrain.py::test_frozen_weights_keep_their_bits_and_their_optimizer_state_rests",
        "a later stage does not train the layers that an earlier one froze",
        subtle=True,
    ),
    Mutation(
        "a decay ends below its floor",
        "specs/training.py",
        "low = self.floor * peak",
        "low = self.floor * peak * left / self.decay",
        "test_specs.py::test_a_decay_of_each_shape_falls_from_the_peak_to_its_floor",
        "the floor is that of the first step of the decay only",
        subtle=True,
    ),
    # ------------------------------------------------------------ captured steps
    Mutation(
        "filling repeats a position",
        "data/stream.py",
        "label_at = torch.cat([label_at, filling])",
        "label_at = torch.cat([label_at, filling[:1].expand(len(filling))])",
        "data/test_stream.py::test_fixed_shapes_pad_and_never_drop_a_label",
        "the gradient of a position is overwritten by that of another",
        subtle=True,
    ),
    Mutation(
        "masked and causal batches share a graph",
        "objectives.py",
        "return self.causal, tuple((name, tuple(tensor.shape))",
        "return True, tuple((name, tuple(tensor.shape)[:0])",
        "data/test_stream.py::test_batches_of_one_shape_share_a_captured_step",
        "a step replays the attention direction of another objective",
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
    Mutation(
        "separator belongs to the next document",
        "data/stream.py",
        "return ends.cumsum(1) - ends",
        "return ends.cumsum(1)",
        "data/test_stream.py::test_an_end_token_closes_its_document",
        "with document_mask the end token sees the next document",
        subtle=True,
    ),
    Mutation(
        "positions run on",
        "data/stream.py",
        "return count - _starts(segments).mul(count).cummax(1).values",
        "return count",
        "data/test_stream.py::test_an_end_token_closes_its_document",
        "positions do not restart in a new document",
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
    Mutation(
        "every epoch has the pairs in the same order",
        "training/contrastive.py",
        'salt(self.seed, "pairs", epoch)',
        'salt(self.seed, "pairs", 0)',
        "training/test_contrastive.py::test_every_epoch_has_each_pair_once_in_an_order_of_its_own",
        "the negatives of a query are always the same",
        subtle=True,
    ),
    Mutation(
        "a key does not know its pairs",
        "keys.py",
        "[self._identities.task(pairs) for pairs in phase.objective.pairs]",
        "[len(phase.objective.pairs)]",
        "training/test_contrastive.py::test_a_key_tells_what_the_pairs_are_and_not_where_they_are",
        "other pairs give the model of the first ones",
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
        "special tokens are masked",
        "objectives.py",
        "open_to_masks = ~vocabulary.special.to(ids.device)[ids]",
        "open_to_masks = ids >= 0",
        "test_objectives.py::test_mlm_masks_its_share_of_ordinary_tokens_and_no_special_one",
        "MLM predicts end tokens",
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
        "first token of a chunk is masked by MNTP",
        "objectives.py",
        "open_to_masks[:, 1:] &= segments[:, 1:] == segments[:, :-1]",
        "open_to_masks[:, 1:] &= segments[:, 1:] >= segments[:, :-1]",
        "test_objectives.py::test_mntp_predicts_one_position_earlier_and_never_masks_the_first",
        "MNTP predicts the first token of a chunk from the chunk before",
        subtle=True,
    ),
    Mutation(
        "random tokens overlap the masked ones",
        "objectives.py",
        "at_random = masked & (bits >= threshold(to_mask)) & (bits < threshold(to_mask + to_random))",
        "at_random = masked & (bits < threshold(to_random))",
        "test_objectives.py::test_the_bert_rule_splits_80_10_10_and_takes_only_ordinary_tokens",
        "80/10/10 becomes 70/10/20",
    ),
    Mutation(
        "rows of a mixture fall the same in every step",
        "objectives.py",
        'permute(torch.arange(rows), rows, salt(seed, "mix", first))',
        'permute(torch.arange(rows), rows, salt(seed, "mix"))',
        "test_objectives.py::test_every_row_gets_every_objective_in_its_turn",
        "the same places of a step always have the same objective",
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
        "epochs are rounded one by one",
        "specs/training.py",
        "round(passed * steps_of_epoch) - round(before * steps_of_epoch)",
        "round((passed - before) * steps_of_epoch)",
        "test_specs.py::test_epochs_become_steps_and_add_up_to_whole_passes",
        "turns of a fraction of an epoch drift from the passes over the corpus",
        subtle=True,
    ),
    Mutation(
        "a span reaches into the next chunk",
        "objectives.py",
        "        starts[:, 1:] |= segments[:, 1:] != segments[:, :-1]",
        "        starts[:, 1:] |= segments[:, 1:] < segments[:, :-1]",
        "test_objectives.py::test_units_are_masked_as_a_plain_reference_masks_them",
        "the masks of a document depend on the one before it",
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
        "order ignores the epoch",
        "data/stream.py",
        'salt(self.seed, "order", epoch)',
        'salt(self.seed, "order", 0)',
        "data/test_stream.py::test_the_next_epoch_holds_them_in_another_order_with_other_masks",
        "every epoch has the same order",
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
        "held-out masks change between evaluations",
        "data/stream.py",
        "one.heldout, packing, 0, one.eos_id",
        "one.heldout, packing, np.random.randint(2**30), one.eos_id",
        "data/test_stream.py::test_heldout_rows_and_masks_do_not_depend_on_the_run",
        "held-out losses of two checkpoints are not comparable",
        subtle=True,
    ),
    Mutation(
        "held-out loss on training text",
        "data/stream.py",
        "one.heldout, packing, 0",
        "one.train, packing, 0",
        "data/test_stream.py::test_heldout_rows_and_masks_do_not_depend_on_the_run",
        "held-out losses are training losses",
    ),
    Mutation(
        "labels beyond the bound are dropped",
        "data/stream.py",
        "while bound < count:",
        "while bound < 0:",
        "data/test_stream.py::test_fixed_shapes_pad_and_never_drop_a_label",
        "fixed shapes lose labels",
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
        "documents run together",
        "data/tokenize.py",
        "ids[at + length - 1] = self.end",
        "ids[at + length - 1] = document[-1] if len(document) else self.end",
        "data/test_tokenize.py::test_every_document_is_in_one_split_in_order_and_ends_with_the_end_token",
        "shards mix two documents without an end token",
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
        "damaged shards are built upon",
        "data/shards.py",
        'if digest.hexdigest() != state["tail"]["sha256"]:',
        "if len(kept) < size:",
        "data/test_shards.py::test_a_writer_does_not_go_on_from_damaged_files",
        "a changed tail is kept after a kill",
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
        "resume forgets the optimizer state",
        "training/pretrain.py",
        'keeps = step > 0 or (run.parent is not None and run.optimizer_state == "keep")',
        'keeps = step == 0 and run.optimizer_state == "keep"',
        "training/test_pretrain.py::test_a_resumed_run_equals_one_that_never_stopped",
        "moments start from zero after a resume",
    ),
    Mutation(
        "live model of another checkpoint is trained",
        "training/pretrain.py",
        "unchanged = live is not None and live.key == key and keeps",
        "unchanged = live is not None and keeps",
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
        "damaged checkpoint is loaded",
        "training/checkpoint.py",
        'files = verify(folder, only="model")\n',
        'files = verify(folder, only="optimizer")\n',
        "training/test_pretrain.py::test_a_damaged_checkpoint_is_refused_not_used",
        "training goes on from flipped bits",
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
        "JSON is written in place",
        "store.py",
        'with draft.open("w", encoding="utf-8") as file:',
        'with (draft.touch(), path.open("w", encoding="utf-8"))[1] as file:',
        "test_store.py::test_write_json_killed_at_any_moment_leaves_the_old_or_the_new",
        "a kill leaves half a file",
    ),
    Mutation(
        "lease of another machine counts as dead",
        "leases.py",
        "if raw == FOREIGN or (holder and holder.alive is False):",
        "if raw == FOREIGN or (holder and holder.alive is not True):",
        "test_leases.py::test_a_truncated_or_foreign_lease_is_respected_until_it_is_stale",
        "a lease is taken over while its holder is alive",
        subtle=True,
    ),
    Mutation(
        "one long gap proves death",
        "leases.py",
        "still = still + min(now - looked, self.stale_seconds / 2) if seen == raw else 0.0",
        "still = still + now - looked if seen == raw else 0.0",
        "test_leases.py::test_one_long_gap_between_two_checks_does_not_make_a_lease_stale",
        "after ^Z of both, a worker takes the lease of a living one",
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
        "a larger GPU's micro-batch is taken over",
        "training/pretrain.py",
        "adopted = same and (fits or self.options.deterministic)",
        "adopted = same",
        "training/test_pretrain.py::test_a_run_that_goes_on_elsewhere_takes_a_micro_batch_that_fits_and_records_both_machines",
        "a resumed run needs more memory than the device has",
    ),
    Mutation(
        "all workers go through the grids in one order",
        "study/worker.py",
        "key=lambda place: (crowd[place], place[0] != self.grid[0])",
        "key=lambda place: place[0] != self.grid[0]",
        "study/test_many_workers.py::test_workers_divide_models_and_tasks_among_them",
        "every worker reads every model and dataset",
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
        "decay on norms",
        "finetune/trial.py",
        'is_spared = name.endswith("bias") or id(parameter) in norms',
        'is_spared = name.endswith("bias")',
        "finetune/test_parity.py::test_weight_decay_spares_what_the_trainer_spares",
        "AdamW decays LayerNorms in fine-tuning",
    ),
    Mutation(
        "layer decay is one layer off",
        "training/optimizer.py",
        "layer_decay ** (layers + 1 - depth)",
        "layer_decay ** (layers - depth)",
        "training/test_optimizer.py::test_each_layer_learns_at_a_share_of_the_one_above",
        "the head learns faster than the learning rate",
    ),
    Mutation(
        "gradients below the limit are scaled up",
        "training/loop.py",
        "shrink = (norm / self.clip).clamp(min=1)",
        "shrink = norm / self.clip",
        "training/test_loop.py::test_steps_equal_torchs_clipping_and_adamw",
        "clipping normalizes every gradient",
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
        "key of shards misses the begin token",
        "keys.py",
        'if k in ("text", "bos", "tokens")',
        'if k in ("text", "tokens")',
        "test_keys.py::test_shards_are_named_by_content_tokenizer_and_rules_not_by_place",
        "shards with and without begin tokens share a key",
        subtle=True,
    ),
    Mutation(
        "key of a trial misses the documents",
        "keys.py",
        '"documents": documents}',
        '"documents": ""}',
        "test_keys.py::test_scores_are_named_by_the_model_the_task_and_what_is_searched",
        "a search among few documents passes for one among all",
    ),
    Mutation(
        "continued run reads its parent's text again",
        "specs/training.py",
        "return self.parent.origin_sample + self.parent.rows_until(self.parent.steps)",
        "return self.parent.rows_until(self.parent.steps)",
        "test_specs.py::test_steps_and_samples_add_up_along_a_chain_of_runs",
        "the third run of a chain begins where the second did",
        subtle=True,
    ),
    Mutation(
        "changed tokenizer is published",
        "data/tokenize.py",
        "if now != self.hashes:",
        "if now.content != self.hashes.content:",
        "data/test_tokenize.py::test_a_tokenizer_that_changes_meanwhile_is_refused",
        "shards of another tokenizer stand under the key",
        subtle=True,
    ),
    # ------------------------------------------------------------ selection: validation chooses, test is reported
    Mutation(
        "split chosen on test scores",
        "report/splits.py",
        'evidence.on(model, tasks, part="validation")',
        'evidence.on(model, tasks, part="test")',
        "report/test_splits.py::test_test_scores_play_no_part_in_the_choice",
        "selection on the reported scores",
    ),
    Mutation(
        "confirmation seeds choose",
        "report/evidence.py",
        "kept = np.isin(model.seeds, self.plan.study.confirm)",
        "kept = np.isin(model.seeds, self.plan.study.looks)",
        "report/test_splits.py::test_a_confirmation_seed_plays_no_part_in_the_choice",
        "the seed that confirms a choice has made it",
    ),
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
        "report shows validation scores",
        "report/evidence.py",
        'grid.test if part == "test" else grid.validation',
        "grid.validation",
        "report/test_evidence.py::test_each_seed_is_scored_at_the_rate_its_own_validation_chose",
        "the score that chose is the score that is reported",
    ),
    Mutation(
        "ties go to the highest rate",
        "study/ledger.py",
        "rates = sorted({lr for lr, _ in validation})",
        "rates = sorted({lr for lr, _ in validation}, reverse=True)",
        "study/test_ledger.py::test_equal_means_are_equal_however_their_sums_are_rounded",
        "another rate among equals",
        subtle=True,
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
        "rates are screened with reported seeds",
        "specs/study.py",
        "if shared := sorted({*discard.seeds} & {*self.seeds}):",
        "if shared := sorted({*discard.seeds} - {*discard.seeds}):",
        "study/test_discard.py::test_what_cannot_be_is_refused",
        "the intervals of reported seeds would hide the selection",
    ),
    Mutation(
        "rates kept before all are screened",
        "study/ledger.py",
        "        if score is None:\n            return ()\n",
        "        if score is None:\n            continue\n",
        "study/test_discard.py::test_the_best_rates_are_kept",
        "a missing trial might have been the best, and workers would disagree",
        subtle=True,
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
        "word F1 over the wrong length",
        "tasks/metrics.py",
        "return 2 * shared / (len(predicted) + len(gold))",
        "return 2 * shared / (2 * len(gold))",
        "tasks/test_metrics.py::test_scores_are_the_official_ones",
        "F1 becomes recall",
    ),
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
        "discount is one rank off",
        "tasks/metrics.py",
        "np.log2(np.arange(2, first.shape[-1] + 2))",
        "np.log2(np.arange(3, first.shape[-1] + 3))",
        "tasks/test_metrics.py::test_usual_scores_are_those_of_trec_eval",
        "NDCG with the weights of the next rank",
        subtle=True,
    ),
    Mutation(
        "articles go before punctuation",
        "tasks/metrics.py",
        '_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()',
        '_ARTICLE.sub(" ", text.lower()).translate(_PUNCTUATION).split()',
        "tasks/test_metrics.py::test_normalised_forms_are_the_official_ones",
        "SQuAD's normalization in another order",
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
        "choices that do not exist compete",
        "finetune/families.py",
        'scores.masked_fill(absent, float("-inf"))',
        "scores",
        "finetune/test_text_families.py::test_the_loss_of_choices_is_that_of_a_softmax_over_the_scores_of_each_question",
        "questions with fewer choices are trained against texts of one token",
        subtle=True,
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
        "best part speaks for the claim",
        "report/statistics/moderated.py",
        "reproduced = max(one for one, _ in pairs)",
        "reproduced = min(one for one, _ in pairs)",
        "report/statistics/test_moderated.py::test_every_part_must_hold_and_any_refutes",
        "a claim holds if one of its parts does",
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
    Mutation(
        "claim without its premise is judged",
        "report/verdicts.py",
        "return all(part.above <= ALPHA for part in premises)",
        "return any(part.above <= 1 for part in premises)",
        "report/test_verdicts.py::test_a_claim_without_its_premise_is_not_applicable",
        "an advantage grows that is not there",
    ),
    Mutation(
        "missing family counts as reproduced",
        "report/verdicts.py",
        'return "reproduced" if complete else "holds in part"',
        'return "reproduced"',
        "report/test_verdicts.py::test_what_limits_a_claim_is_a_caveat",
        "all four families are reproduced on two",
    ),
    Mutation(
        "every look spends all of alpha",
        "report/statistics/moderated.py",
        "return self.spent(seeds) - self.spent(before)",
        "return self.alpha",
        "report/test_verdicts.py::test_a_study_with_declared_looks_is_judged_at_those_alone",
        "adding seeds until something is significant",
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
        "if sha256(content).hexdigest() != entry.sha256:",
        "if len(content) != entry.bytes:",
        "study/test_archive.py::test_a_cut_or_flipped_file_is_refused_wherever_it_was_hurt",
        "flipped bits are merged",
    ),
    Mutation(
        "links in an archive",
        "study/archive.py",
        "if info.name != name or info.type != tarfile.REGTYPE:",
        "if info.name != name:",
        "study/test_archive.py::test_links_devices_and_folders_are_refused",
        "an archive brings a symbolic link",
    ),
    Mutation(
        "page does not escape",
        "report/page/render.py",
        "autoescape=True,",
        "autoescape=False,",
        "faults/test_security.py::test_names_and_errors_are_escaped_on_the_page",
        "a study's name runs as a script",
    ),
    # ------------------------------------------------------------ new models of any configuration
    Mutation(
        "new model is not probed",
        "training/pretrain.py",
        "if probed and isinstance(root.start, Config):",
        "if not probed and isinstance(root.start, Config):",
        "families/test_new_models.py::test_a_configuration_that_does_not_suit_is_refused_in_one_line",
        "a model that cannot be packed or turned trains for hours",
    ),
    Mutation(
        "window reaches one token further",
        "attention.py",
        "reach = sliding_window - 1",
        "reach = sliding_window",
        "families/test_new_models.py::test_a_new_model_follows_the_attention_pattern",
        "transformers counts the token itself",
        subtle=True,
    ),
    Mutation(
        "end token begins as zero",
        "models/hub.py",
        'if getattr(table, "padding_idx", None) is not None:',
        'if getattr(table, "padding_idx", None) is None:',
        "families/test_new_models.py::test_weights_depend_on_the_seed_alone_and_no_token_begins_as_zero",
        "a norm of zeros has a gradient hundreds of times too large",
        subtle=True,
    ),
    # ------------------------------------------------------------ export
    Mutation(
        "export with causal attention",
        "export/writing.py",
        'both = {"is_causal": False, "use_cache": False}',
        'both = {"is_causal": True, "use_cache": False}',
        "export/test_writing.py::test_gpt2_reads_both_ways_by_its_configuration",
        "other tools read the exported encoder in one direction",
    ),
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
        "causal attention is not seen",
        "export/vectors.py",
        "moved < trained / 10",
        "moved < 0",
        "export/test_vectors.py::test_a_decoder_whose_configuration_is_causal_again_fails",
        "a decoder that serves as an encoder is called a change of weights",
    ),
    Mutation(
        "test vectors have no prompts",
        "export/writing.py",
        'zip(EMBEDDINGS, ("", *prompts), strict=True)',
        'zip(EMBEDDINGS, ("", "", ""), strict=True)',
        "export/test_vectors.py::test_every_tool_computes_what_the_trained_model_does",
        "a server that drops the prompts passes",
        subtle=True,
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
