"""How to ask a cluster for workers: one small TOML file, read and checked. It never changes what is computed.

    partition = "gpu"
    time = "8h"
    gpus = 1
    cpus = 8
    memory = "64G"
    jobs = 4
    setup = ["module load cuda"]

Every field has a default; an unknown one is refused with the nearest name.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from biphase.errors import SpecError, nearest, one_line
from biphase.study.launch import seconds

# What the script sets itself, by the long and the short name, and the field to use instead.
OWN_OPTIONS = {
    "--array": "jobs", "-a": "jobs", "--time": "time", "-t": "time", "--signal": "warning", "--job-name": "", "-J": "",
    "--output": "", "-o": "", "--error": "", "-e": "", "--open-mode": "", "--requeue": "", "--no-requeue": "",
    "--chdir": "", "-D": "", "--wrap": "", "--parsable": "", "--wait": "", "-W": "", "--ntasks": "processes",
    "-n": "processes", "--nodes": "processes", "-N": "processes",
}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """What each job of an array asks for, and what it does before it works."""

    jobs: int = 1  # the size of the array: workers side by side
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    time: str = ""  # 8h, or Slurm's own 1-12:00:00; empty: what the partition gives
    warning: str = "5m"  # before the time is up: enough for a step and a checkpoint
    gpus: int = 0
    gpu_type: str = ""
    cpus: int = 0  # 0: what the partition gives
    memory: str = ""
    processes: int = 0  # that train a piece together; 0: one for each GPU
    sbatch: tuple[str, ...] = ()  # further options, as they stand after #SBATCH
    setup: tuple[str, ...] = ()  # shell lines before the worker starts
    command: str = ""  # what stands for `biphase` in the job; empty: this Python's own

    @property
    def together(self) -> int:
        """Processes of one worker."""
        return self.processes or max(1, self.gpus)

    @property
    def time_seconds(self) -> float:
        return _time(self.time) if self.time else 0.0

    @property
    def warning_seconds(self) -> int:
        return round(seconds(self.warning))


def read_profile(path: Path) -> Profile:
    """The profile at `path`; whatever is wrong with it becomes one line."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(
            f'no profile {path}; write one, e.g.: printf \'partition = "gpu"\\ntime = "8h"\\ngpus = 1\\njobs = 4\\n\' > {path}'
        ) from None
    except (OSError, ValueError) as wrong:  # tomllib's errors and undecodable text are ValueErrors
        raise SpecError(f"profile {path} cannot be read: {one_line(wrong)}; mend it and run again") from None
    known = {field.name: field.default for field in fields(Profile)}
    for name in data:
        if name not in known:
            raise SpecError(f"profile {path} has no field {name!r}; {nearest(name, known)}")
    try:
        profile = Profile(**{name: _checked(name, value, known[name]) for name, value in data.items()})
        _check(profile)
    except SpecError as wrong:
        raise SpecError(f"profile {path}: {wrong}") from None
    return profile


def _checked(name: str, value: Any, default: Any) -> Any:
    """A value of the kind its field wants."""
    if isinstance(default, int):
        if type(value) is not int or value < 0:
            raise SpecError(f"{name} must be a whole number, not {value!r}; type for example {name} = 1")
        return value
    if isinstance(default, str):
        if not isinstance(value, str):
            raise SpecError(f'{name} must be text, not {value!r}; type {name} = "{value}"')
        value = value.strip()
        if re.search(r'["\x00-\x1f\x7f]', value):
            raise SpecError(f"{name} must be one line without quotation marks, not {value!r}")
        if name in ("memory", "gpu_type") and re.search(r"\s", value):
            raise SpecError(
                f'{name} must be one word, not {value!r}; type {name} = "{"".join(value.split())}"'
            )
        return value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise SpecError(f'{name} must be a list of texts, not {value!r}; type {name} = ["…"]')
    if name == "sbatch" and any(re.search(r"[\x00-\x1f\x7f]", one) for one in value):
        raise SpecError("sbatch: each option is one line, without tabs and control characters")
    return tuple(value)


def _check(profile: Profile) -> None:
    if profile.jobs < 1:
        raise SpecError("jobs must be at least 1")
    if profile.gpus and profile.processes and profile.processes != profile.gpus:
        raise SpecError(
            f"processes = {profile.processes} does not fit gpus = {profile.gpus}: a worker uses one GPU in each process; "
            "leave processes out"
        )
    if profile.gpu_type and not profile.gpus:
        raise SpecError("gpu_type is set, but gpus is not; type gpus = 1")
    warning = profile.warning_seconds
    if not 1 <= warning <= 65_535:
        raise SpecError(f"warning = {profile.warning!r} must lie between 1s and 18h")
    if profile.time and 2 * warning > profile.time_seconds:
        raise SpecError(
            f"warning = {profile.warning!r} leaves less than half of time = {profile.time!r} to work in; shorten it"
        )
    for line in profile.sbatch:
        _check_options(line)


def _check_options(line: str) -> None:
    """Refuse what stands after #SBATCH, one option or several, if the script sets it itself."""
    try:
        words = shlex.split(line)
    except ValueError as wrong:
        raise SpecError(f"sbatch: {line!r} cannot be read: {one_line(wrong)}; mend it") from None
    if not words or not re.match(r"--?\w", words[0]):
        raise SpecError(f'sbatch: {line!r} is no option; type for example sbatch = ["--exclude=node7"]')
    for word in words:
        # As getopt reads it: a value may follow a short name at once, and a long name may be cut short.
        option = word.split("=")[0] if word.startswith("--") else word[:2]
        if not re.match(r"--?\w", option):
            continue
        own = next((one for one in OWN_OPTIONS if one.startswith(option)), "")
        if own:
            instead = OWN_OPTIONS[own]
            hint = f"use the field {instead!r}" if instead else "biphase needs it as it is; leave it out"
            raise SpecError(f"sbatch: {option} is set by biphase; {hint}")


def _time(text: str) -> float:
    """8h, or Slurm's own [days-]hours:minutes:seconds, in seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if match:
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    try:
        return seconds(text)
    except SpecError:
        raise SpecError(
            f"time = {text!r} is not a length of time; type for example 90m, 8h or 1-12:00:00"
        ) from None
