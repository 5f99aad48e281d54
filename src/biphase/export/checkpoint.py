"""Export a pretrained or adapted checkpoint as a folder that loads in transformers and sentence-transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, EuroBertForMaskedLM

from biphase.data.shards import Shards
from biphase.data.tokenizer import load_saved
from biphase.export.card import Card, base_of, data, grids_of, loading, losses, recipe_lines, scores, titled
from biphase.export.folder import SavedCheckpoint, Say, building
from biphase.export.onnx import write_onnx
from biphase.export.tokenizer import (
    ExportedTokenizer,
    Prompts,
    check_tokenizer,
    prompts_of,
    tokenizer_of,
    write_sentences,
    write_tokenizer,
)
from biphase.export.writing import (
    Exported,
    Form,
    Readback,
    Written,
    edits_for,
    ours,
    ours_logits,
    probe_texts,
    write_model,
)
from biphase.models.backbone import LanguageModel
from biphase.models.encoder import Encoder
from biphase.models.native import is_masked, masked_forms
from biphase.presets import corpus_of
from biphase.specs import BPE, Objective, Pretrain, Retrieve
from biphase.store import Store
from biphase.study.ledger import heldout
from biphase.study.plan import identities
from biphase.training.checkpoint import metrics_of
from biphase.training.pretrain import model_of_checkpoint


def shards_of(run: Pretrain, store: Store) -> Shards:
    return Shards.open(store.shards / identities(store).data(run))


def export_checkpoint(state: SavedCheckpoint, store: Store, place: Path, *, onnx: bool, say: Say) -> Exported:
    """Write a checkpoint's model to `place` and verify it; if that fails, raise and leave nothing behind."""
    with building(place) as folder:
        say(f"reading {state.key[:8]}")
        run, shards = state.run, shards_of(state.run, store)
        model = model_of_checkpoint(run, state.key, store, shards)
        model.eval()
        width, context = model.reader[0].width, run.packing.length
        corpus = corpus_of(run)
        words = tokenizer_of(
            load_saved(shards.tokenizer),
            bos=corpus.bos,
            context=context,
            trained_here=isinstance(corpus.tokenizer, BPE),
        )
        say("writing it, and reading it again")
        written = write_encoder(model, words, folder)
        del model  # from here on the folder is checked, not the model in memory
        write_tokenizer(words, folder)
        check_tokenizer(words, folder, fills=is_masked(written.architecture))
        prompts = prompts_of(Retrieve())
        write_sentences(folder, width=width, context=context, prompts=prompts)
        if onnx:
            say("writing ONNX, and running it")
            write_onnx(folder, words)
        card = _card(state, store, shards, written, prompts, onnx=onnx)
        (folder / "README.md").write_text(card.text(), encoding="utf-8")
    return Exported(place, written, onnx)


def write_encoder(model: LanguageModel, words: ExportedTokenizer, folder: Path) -> Written:
    """Write a language model as an encoder: as EuroBERT if its architecture fits, otherwise in its own class."""
    own: Any = model.model
    encoder: Encoder = model.reader[0]
    texts = probe_texts(encoder.trunk.config, words)
    hidden, logits = ours(encoder, texts), ours_logits(model, texts)

    def asked(auto: Any) -> tuple[Readback, Readback]:
        return Readback(AutoModel, hidden, last_hidden), Readback(auto, logits, lambda said: said.logits)

    def forms() -> Iterator[Form]:
        for make in masked_forms(model, words.context, classifier_pooling="mean", **words.native_ids):
            made = make()
            yield Form(made, asked(AutoModelForMaskedLM), native=isinstance(made, EuroBertForMaskedLM))
        if is_masked(type(own).__name__):
            yield Form(own, asked(AutoModelForMaskedLM))
        else:
            yield Form(own, asked(AutoModelForCausalLM), edits_for(own.config, windows=encoder.windows))

    return write_model(folder, forms(), words, title=type(own).__name__)


def last_hidden(said: Any) -> Tensor:
    return said.last_hidden_state


# ---------------------------------------------------------------- card


def _card(
    state: SavedCheckpoint, store: Store, shards: Shards, written: Written, prompts: Prompts, *, onnx: bool
) -> Card:
    untrue = _of_objective(state.run.phase_at(state.step - 1).objective) if state.step else []
    fills = is_masked(written.architecture) and not untrue  # in transformers' own pipeline
    return Card(
        title=titled(state),
        summary=(
            f"A text encoder of the class {written.architecture}, trained with biphase: it reads in both directions "
            "and gives one vector for each token, or for a text their mean."
        ),
        pipeline="fill-mask" if fills else "feature-extraction",
        library="transformers",
        tags=["sentence-transformers", "feature-extraction", *(["onnx"] if onnx else [])],
        base=base_of(state.run),
        needs=written.needs,
        loading=loading(written, prompts, fills=not untrue, onnx=onnx),
        sections=[
            ("How it was trained", recipe_lines(state)),
            ("Data", data(state, shards)),
            ("Losses", losses(heldout(metrics_of(store, state.key)))),
            ("Scores", scores(grids_of(state.key, store))),
        ],
        limits=[*untrue, *limits_of(written), cut_words(state.run.packing.length), *_ALWAYS],
    )


_ALWAYS = (
    "Without fine-tuning for retrieval, mean vectors are a start and not an embedding model.",
    "It was trained on the data named above and knows what is there, its errors and slants too.",
)


def cut_words(context: int) -> str:
    return (
        f"Texts are cut at {context:,} tokens, the longest it was trained on: `model_max_length` of the tokenizer, "
        "`max_seq_length` in sentence-transformers."
    )


def limits_of(written: Written) -> list[str]:
    """Limits that a user of the class would not expect."""
    said = []
    if written.edits:
        said.append(
            f"{written.architecture} was made to read forwards; `is_causal` in its config makes it read in both "
            'directions, as checked with attn_implementation "sdpa" and "eager". It must not be used to generate text. '
            "A copy that transformers saves again loads in 4.x too, and is read forwards only there."
        )
    if not is_masked(written.architecture) and written.architecture.endswith(("ForCausalLM", "LMHeadModel")):
        said.append(
            "transformers has no masked-language-model class for it: AutoModel works, the fill-mask pipeline does not; "
            "`biphase.load` fills masks."
        )
    if written.attention:
        said.append(
            f"It reads as trained with attn_implementation={written.attention!r} alone, which its config says."
        )
    return said


def _of_objective(last: Objective) -> list[str]:
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
