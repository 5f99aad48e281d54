"""Frozen, validated dataclasses of plain values that can be written as JSON and hashed.

`@record` makes a frozen dataclass that
- rejects an unknown field and suggests the nearest known one (a misspelt field must not silently use a default);
- checks every value against its annotation, converting 1 to 1.0, a list, a range or one item to a tuple, and a dict
  to the tuple of its pairs;
- calls the class's `settle` (fills in derived fields, which are None until then) and `check` (validates), if defined;
- before `check`, compares every number with the range that its field declares (`ranged`).

`encode` turns a record into JSON values, `decode` reads them back, and `content_key` hashes them. Records with equal
field values have equal JSON and equal keys, regardless of how they were written.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

from biphase.errors import SpecError, nearest

KEY_LENGTH = 32  # hex digits: 128 bits make collisions practically impossible

KEY_PATTERN = rf"[0-9a-f]{{{KEY_LENGTH}}}"
_KEY = re.compile(KEY_PATTERN)

_KINDS: dict[str, type] = {}
_PLAIN = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", type(None): "None"}
T = TypeVar("T")


def added(default: Any) -> Any:
    """Declare a field added in a later version.

    At its default it is left out of the JSON, so that existing keys and archives stay valid.
    """
    return field(default=default, metadata={"added": True})


@dataclass(frozen=True)
class Range:
    """The numbers that a field may hold, and what to type instead of others."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf
    hint: str = ""

    def holds(self, number: float) -> bool:
        return self.least <= number <= self.most and self.above < number < self.below

    def __str__(self) -> str:
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{how} {bound:,}" for how, bound in bounds.items() if math.isfinite(bound))


def ranged(default: Any = MISSING, *, added: bool = False, **bounds: Any) -> Any:
    """Declare a field whose numbers lie in a `Range`; of a tuple, each item. `added`: see there."""
    return field(default=default, metadata={"range": Range(**bounds)} | ({"added": True} if added else {}))


@dataclass_transform(frozen_default=True, field_specifiers=(field, added, ranged))
def record(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, validated dataclass and register its name for `decode`."""
    kind = dataclass(frozen=True)(cls)
    plain_init = kind.__init__
    names = [f.name for f in fields(kind)]

    @functools.wraps(plain_init)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        for name in named:
            if name not in names:
                raise SpecError(f"{cls.__name__} has no field {name!r}; {nearest(name, names)}")
        try:
            plain_init(self, *args, **named)
        except TypeError as error:
            raise SpecError(
                f"{cls.__name__}: {str(error).split('() ')[-1]}; it takes {', '.join(names)}"
            ) from None
        _check(self)

    kind.__init__ = __init__
    _KINDS[cls.__name__] = kind
    return kind


def _check(value: Any) -> None:
    if hasattr(value, "settle"):
        _fit_fields(value, given_only=True)
        value.settle()
    _fit_fields(value)
    _check_ranges(value)
    if hasattr(value, "check"):
        value.check()


def _check_ranges(instance: Any) -> None:
    for name, allowed in _ranges(type(instance)).items():
        value = getattr(instance, name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not allowed.holds(number):
                of = f" of {instance.name!r}" if "name" in _hints(type(instance)) else ""
                hint = f"; {allowed.hint}" if allowed.hint else ""
                raise SpecError(
                    f"{type(instance).__name__}.{name}{of} must be {allowed}, not {number!r}{hint}"
                )


@functools.cache
def _ranges(cls: Any) -> dict[str, Range]:
    return {each.name: each.metadata["range"] for each in fields(cls) if "range" in each.metadata}


def _fit_fields(instance: Any, *, given_only: bool = False) -> None:
    for name, kind in _hints(type(instance)).items():
        value = getattr(instance, name)
        if given_only and value is None:
            continue
        try:
            object.__setattr__(instance, name, _fit(value, kind))
        except ValueError:
            raise SpecError(
                f"{type(instance).__name__}.{name} must be {_describe(kind)}, not {value!r}{_example(kind)}"
            ) from None


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _fit(value: Any, kind: Any) -> Any:
    """Convert `value` to the annotation `kind`, or raise ValueError."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        options = get_args(kind)
        if type(value) in options:  # for int | float: 0.05 stays a fraction and 5 a count
            return _fit(value, type(value))
        for option in options:
            try:
                return _fit(value, option)
            except ValueError:
                continue
        raise ValueError
    if origin is Literal:
        if value not in get_args(kind):
            raise ValueError
        return value
    if origin is tuple:
        value = tuple(value.items()) if isinstance(value, dict) else value  # a tuple of pairs
        items = value if isinstance(value, (tuple, list, range)) else (value,)
        inner = get_args(kind)
        kinds = (inner[0],) * len(items) if inner[-1] is Ellipsis else inner
        return tuple(_fit(item, inner_kind) for item, inner_kind in zip(items, kinds, strict=True))
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    unfit = isinstance(value, bool) if kind is int else isinstance(value, float) and not math.isfinite(value)
    if unfit or not isinstance(value, kind):
        raise ValueError
    return value


def _describe(kind: Any) -> str:
    """Return a readable description of an annotation."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(kind))
    if origin is Literal:
        return " or ".join(repr(option) for option in get_args(kind))
    if origin is tuple:
        inner = get_args(kind)
        if get_origin(inner[0]) is tuple:
            return "a dict of " + " to ".join(_describe(each) for each in get_args(inner[0]))
        return f"a tuple of {_describe(inner[0])}" if inner[-1] is Ellipsis else f"{len(inner)} values"
    return _PLAIN.get(kind, getattr(kind, "__name__", str(kind)))


def _example(kind: Any) -> str:
    """Return a hint on what to write if `kind` is a tuple of records, else ""."""
    inner = get_args(kind)[:1] if get_origin(kind) is tuple else ()
    if not inner or not is_dataclass(inner[0]):
        return ""
    needed = [f.name for f in fields(inner[0]) if f.default is MISSING]
    return f"; write {_describe(inner[0])}({', '.join(needed)})"


class ByName(dict[str, T]):
    """A dict whose error for an unknown name suggests the nearest known one."""

    def __init__(self, what: str, values: Mapping[str, T]) -> None:
        super().__init__(values)
        self.what = what

    def __missing__(self, name: str) -> T:
        raise SpecError(f"there is no {self.what} {name!r}; {nearest(name, self)}")


def encode(value: Any) -> Any:
    """Convert a record to JSON values; each record becomes an object with its class name as `kind`."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = (f for f in fields(value) if "added" not in f.metadata or getattr(value, f.name) != f.default)
        return {"kind": type(value).__name__} | {f.name: encode(getattr(value, f.name)) for f in shown}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def decode(data: Any) -> Any:
    """Convert the JSON values that `encode` wrote back to records."""
    if isinstance(data, dict):
        named = dict(data)
        kind = named.pop("kind", None)
        if not isinstance(kind, str) or kind not in _KINDS:
            raise SpecError(f"there is no record {kind!r}; {nearest(str(kind), _KINDS)}")
        return _KINDS[kind](**{name: decode(item) for name, item in named.items()})
    if isinstance(data, list):
        return tuple(decode(item) for item in data)
    return data


def is_key(value: Any) -> bool:
    """Return whether a value has the form of a key. Folders of results are named by keys; others are ignored."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def content_key(value: Any) -> str:
    """Return the first 128 bits of the SHA-256 of a value's canonical JSON, as hex digits."""
    text = json.dumps(
        encode(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]
