"""Training jobs and fine-tunings as runs of trackers: their names, settings, scores and costs."""

from __future__ import annotations

from biphase.finetune.tune import TunedModel
from biphase.study.costs import start_of
from biphase.study.ledger import FineTuning
from biphase.study.plan import Plan, TrainingJob
from biphase.tracking import TrackedRun, Tracking
from biphase.training.checkpoint import Progress


def job_run(job: TrainingJob, tracking: Tracking) -> TrackedRun:
    """Return the run of a training job, named after its result or run, objective, steps, and key."""
    run, (first, until) = job.run, job.span
    config = {
        "run": run.name,
        "results": ", ".join(job.results),
        "parent": job.parent or job.root,
        "start": start_of(run),
        "objective": job.objective.label,
        "first_step": first,
        "last_step": until,
        "corpus": getattr(job.corpus, "name", ""),
        "batch_tokens": run.batch_tokens,
        "peak": run.schedule.peak,
        "precision": run.precision,
        "seed": run.seed,
    }
    name = f"{(job.results or (run.name,))[0]}, {job.objective.label} {first}-{until}, {job.key[:6]}"
    return tracking.run(job.key, name, "pretraining", config, first)


def finish_job(tracked: TrackedRun, job: TrainingJob, progress: Progress) -> None:
    """Add what its steps and those before them cost, beside the tokens and seconds of every line; finish its run."""
    tracked.log({"step": job.span[1], "flops": progress.flops, "joules": progress.joules})
    tracked.finish()


def track_tuned(training: FineTuning, tuned: TunedModel, plan: Plan, tracking: Tracking) -> None:
    """Send a fine-tuning that is done: its losses, and at its last step its scores and costs."""
    summary = tuned.summary
    config = {
        "model": training.model,
        "results": ", ".join(name for name, key in plan.results.items() if key == training.model),
        "task": training.task.name,
        "lr": training.lr,
        "seed": training.seed,
        "share": training.share,
        "trials": ", ".join(trial.key for trial in training.trials),
    }
    name = f"{training.title(plan)}, {training.key[:6]}"
    run = tracking.run(training.key, name, "fine-tuning", config)
    for step, loss in summary.losses.items():
        run.log({"step": step, "loss": loss})
    scores = {
        task: {part: scores.metrics for part, scores in scored.parts.items()}
        for task, scored in tuned.scores.items()
    }
    seconds = summary.seconds + sum(scored.seconds for scored in tuned.scores.values())
    run.log({"step": summary.steps, **scores, "examples": summary.examples, "seconds": seconds})
    run.finish()
