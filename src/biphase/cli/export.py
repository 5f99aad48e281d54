"""`export`: a model of the store as a folder that other tools load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from biphase.cli.app import DEFAULT_STORE, StoreFolder, app, show, store_at, tell

Key = Annotated[
    str,
    typer.Argument(metavar="KEY", help="the first digits of the key of a state, or of a leaf (fine-tuned)"),
]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="where to write; must not be there yet")]
TaskName = Annotated[
    str, typer.Option(help="of a state: its fine-tuned model for this task, chosen by validation scores")
]
Push = Annotated[str, typer.Option(metavar="REPO", help="then upload it to the hub, as owner/name; private")]


@app.command()
def export(
    key: Key,
    folder: Folder,
    store: StoreFolder = DEFAULT_STORE,
    task: TaskName = "",
    onnx: Annotated[bool, typer.Option("--onnx", help="also write onnx/model.onnx")] = False,
    push: Push = "",
    public: Annotated[bool, typer.Option("--public", help="with --push: for everybody to see")] = False,
) -> None:
    """A trained model as a transformers and sentence-transformers folder, with its card; read again before it is kept."""
    from biphase.errors import SpecError
    from biphase.export.folder import refuse_taken
    from biphase.export.found import SavedLeaf, find
    from biphase.export.scores import leaf_for_task

    if public and not push:
        raise SpecError(
            "--public says who may see what --push uploads; type --push owner/name, or leave it out"
        )
    where = store_at(store)
    refuse_taken(folder)
    found = find(key, where)
    if task and isinstance(found, SavedLeaf):
        raise SpecError(f"--task {task}: {key} is the key of a fine-tuned model already; leave out --task")
    if task:
        found = leaf_for_task(found.key, task, where)
    if push:
        from biphase.export.push import check_push

        check_push(push)
    if onnx:
        from biphase.export.onnx import check_packages

        check_packages()
    if isinstance(found, SavedLeaf):
        from biphase.export.tuned import export_tuned

        made = export_tuned(found, where, folder, onnx=onnx, say=tell)
    else:
        from biphase.export.state import export_state

        made = export_state(found, where, folder, onnx=onnx, say=tell)
    show(made.words())
    if push:
        from biphase.export.push import upload

        show(upload(folder, push, public=public, say=tell))
