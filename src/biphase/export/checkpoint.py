"""Export a pretrained or adapted checkpoint as a folder that loads in transformers and sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from biphase.data.shards import Shards
from biphase.data.tokenizer import load_saved
from biphase.export import writing
from biphase.export.card import Card, base_of, data, escaped, grids_of, losses, recipe, scores, titled
from biphase.export.folder import SavedCheckpoint, Say, building
from biphase.export.writing import Exported, ExportedTokenizer, Prompts, Written, WrittenForm
from biphase.models.backbone import LanguageModel
from biphase.models.encoder import Encoder
from biphase.models.native import is_masked, masked_forms
from biphase.presets import sources_of
from biphase.specs import BPE, Contrastive, Objective, Pairs, Pretrain, Retrieve, Task
from biphase.store import Store
from biphase.study.ledger import heldout
from biphase.study.plan import identities
from biphase.training.checkpoint import metrics_of
from biphase.training.pretrain import model_of_checkpoint


def shards_of(run: Pretrain, store: Store) -> Shards:
    """Return the shards of a run's first corpus, for its tokenizer."""
    return Shards.open(store.shards / identities(store).data(sources_of(run)[0]))


def tokenizer_for(run: Pretrain, shards: Shards, context: int) -> ExportedTokenizer:
    """The tokenizer of a run's model, for texts of up to `context` tokens."""
    corpus, saved = sources_of(run)[0], load_saved(shards.tokenizer)
    trained_here = isinstance(corpus.tokenizer, BPE)
    return writing.tokenizer_of(saved, bos=corpus.bos, context=context, trained_here=trained_here)


def export_checkpoint(
    checkpoint: SavedCheckpoint, store: Store, target: Path, *, onnx: bool, say: Say
) -> Exported:
    """Write a checkpoint's model to `target` and verify it; if that fails, raise and leave nothing behind."""
    with building(target) as folder:
        say(f"reading {checkpoint.key[:8]}")
        run, shards = checkpoint.run, shards_of(checkpoint.run, store)
        model = model_of_checkpoint(run, checkpoint.key, store, shards)
        model.eval()
        width, context = model.encoder.width, run.packing.length
        tokenizer = tokenizer_for(run, shards, context)
        say("writing it, and reading it again")
        written = write_encoder(model, tokenizer, folder)
        writing.write_tokenizer(tokenizer, folder)
        last = _last_objective(checkpoint)
        prompts = writing.prompts_of(Retrieve())
        if isinstance(last, Contrastive):
            trained = _trained_prompts(last)
            prompts = trained[0] if len(trained) == 1 else Prompts("", "")
        writing.write_sentences(folder, width=width, context=context, prompts=prompts)
        fills = is_masked(written.architecture)
        head = AutoModelForMaskedLM if fills else AutoModelForCausalLM
        config, outputs = model.encoder.trunk.config, partial(readbacks, model, head)
        vectors = writing.vectors_of(tokenizer, config, outputs, prompts=prompts, fills=fills)
        del model  # from here on the folder is checked, not the model in memory
        if onnx:
            say("writing ONNX, and running it")
            writing.write_onnx(folder, tokenizer)
        writing.verify_vectors(folder, vectors, onnx=onnx)
        _card(checkpoint, store, shards, written, prompts, last, onnx=onnx).write(folder)
    return Exported(target, written, onnx)


def write_encoder(model: LanguageModel, tokenizer: ExportedTokenizer, folder: Path) -> Written:
    """Write a language model as an encoder: as EuroBERT if its architecture fits, otherwise in its own class."""
    own: Any = model.model
    encoder: Encoder = model.encoder
    texts = tuple(writing.recorded_texts(tokenizer, encoder.trunk.config).values())
    hidden, logits = readbacks(model, AutoModelForMaskedLM, texts).values()

    def form(whole: Any, auto: Any = AutoModelForMaskedLM, edits: Any = ({},)) -> WrittenForm:
        return WrittenForm(whole, (hidden, replace(logits, auto=auto)), edits)

    def forms() -> Iterator[WrittenForm]:
        ids = tokenizer.native_ids
        for build in masked_forms(model, tokenizer.context, classifier_pooling="mean", **ids):
            yield form(build())
        if is_masked(type(own).__name__):
            yield form(own)
        else:
            yield form(own, AutoModelForCausalLM, writing.edits_for(own.config, windows=encoder.windows))

    return writing.write_model(folder, forms(), tokenizer, title=type(own).__name__)


LONGEST = 256  # tokens of a text whose logits are compared; those of longer ones would need too much memory


def readbacks(model: LanguageModel, head: Any, texts: tuple[np.ndarray, ...]) -> dict[str, writing.Readback]:
    """The hidden states of a language model for texts, and its logits for those that are not long."""
    short = tuple(text for text in texts if len(text) < LONGEST)
    return {
        "hidden_states": writing.Readback(AutoModel, texts, writing.ours(model.encoder, texts)),
        "logits": writing.Readback(head, short, writing.ours(model.logits, short), ("logits",)),
    }


def _last_objective(checkpoint: SavedCheckpoint) -> Objective | None:
    """Return the objective that trained a checkpoint last; of a merge, its longest part."""
    run, step = checkpoint.run, checkpoint.step
    while not step and run.sources:
        run, step = run.sources[0].run, run.sources[0].step
    return run.phase_at(step - 1).objective if step else None


def _trained_prompts(objective: Contrastive) -> list[Prompts]:
    """Return the different prompts of the texts that a contrastive objective trains on."""
    forms = (source.form for source in objective.pairs if isinstance(source, Task))
    plain = [Prompts("", "")] * any(isinstance(source, Pairs) for source in objective.pairs)
    trained = (writing.prompts_of(form) for form in forms if isinstance(form, Retrieve))
    return [*dict.fromkeys((*plain, *trained))]


# ---------------------------------------------------------------- card


NOT_TRAINED_ON_PAIRS = "Without training on pairs, mean vectors are not an embedding model: fine-tune it."


def _card(
    checkpoint: SavedCheckpoint,
    store: Store,
    shards: Shards,
    written: Written,
    prompts: Prompts,
    last: Objective | None,
    *,
    onnx: bool,
) -> Card:
    not_masked = _limits_of_objective(last) if last else []
    embeds, grids = isinstance(last, Contrastive), grids_of(checkpoint.key, store)
    what, gives = "encoder", "one vector for each token, or for a text their mean"
    if embeds:
        what, gives = "embedding model", "one vector of length 1 for a text, the mean of those of its tokens"
    return Card(
        title=titled(checkpoint),
        summary=(
            f"A text {what} of the class {written.architecture}, trained with biphase: it reads in both directions and "
            f"gives {gives}."
        ),
        kind="sentence-similarity" if embeds else "encoder",
        written=written,
        base=base_of(checkpoint.run),
        prompts=prompts,
        fills=not not_masked,
        graph="last_hidden_state" if onnx else "",
        grids=grids,
        sections=[
            recipe(checkpoint),
            data(checkpoint, shards),
            losses(heldout(metrics_of(store, checkpoint.key))),
            scores(grids),
        ],
        limits=[
            *not_masked,
            *limits_of(written),
            f"Texts are cut at {checkpoint.run.packing.length:,} tokens, the longest it was trained on.",
            *(() if embeds else (NOT_TRAINED_ON_PAIRS,)),
            "It was trained on the data named above and knows what is there, its errors and slants too.",
        ],
    )


def limits_of(written: Written) -> list[str]:
    """Limits that a user of the class would not expect."""
    limits = []
    if written.edits:
        limits.append(
            f"{written.architecture} was made to read forwards; `is_causal` in its config makes it read in both "
            'directions, as checked with attn_implementation "sdpa" and "eager". It must not be used to generate text. '
            "A copy that transformers saves again loads in 4.x too, and is read forwards only there."
        )
    if not is_masked(written.architecture) and written.architecture.endswith(("ForCausalLM", "LMHeadModel")):
        limits.append(
            "transformers has no masked-language-model class for it: AutoModel works, the fill-mask pipeline does not; "
            "`biphase.load` fills masks."
        )
    if written.attention:
        limits.append(
            f"It reads as trained with attn_implementation={written.attention!r} alone, which its config says."
        )
    return limits


def _limits_of_objective(last: Objective) -> list[str]:
    if isinstance(last, Contrastive):
        prompts = _trained_prompts(last)
        limits = [
            f"It was trained last on pairs of texts, of which it read the first {last.length:,} tokens each: its "
            "vectors are to be compared, and what fill-mask says means little."
        ]
        if len(prompts) > 1:
            shown = ", ".join(f"{json.dumps(one.query)} and {json.dumps(one.document)}" for one in prompts)
            limits.append(f"It was trained with several prompts, so none is set here: {escaped(shown)}.")
        return limits
    if last.causal:
        return [
            "It was trained last to predict the next token, seeing what came before. Here it sees both sides, "
            "which it has not learnt to use: fine-tune it. What fill-mask says means nothing."
        ]
    if last.shifted:
        return [
            "It answers one position early, as a decoder does: the logits of a token are about the next one, so "
            "the fill-mask pipeline, which looks at the masked position itself, means nothing."
        ]
    return []
