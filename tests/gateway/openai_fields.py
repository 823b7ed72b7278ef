"""Every field that the installed openai client knows, in requests and in answers, read off its types.

A path names a field: `messages[tool].tool_call_id` is that of the messages whose role is tool; `[]` is any element.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from typing_extensions import is_typeddict

TAGS = ("role", "type")
Put = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    """A field of a request. `sample` is of its type; `put` makes the body that has a value there.

    `param` is how an error names it: for one of several kinds, the name of what tells them apart.
    """

    path: str
    param: str
    sample: Any
    put: Put


def asked(params: Any) -> Iterator[Asked]:
    """Of a TypedDict of parameters, each field before what is in it."""
    yield from _of_dict(params, "", "", lambda value: dict(value), with_required=False)


def answered(model: type[BaseModel]) -> list[str]:
    """The paths of an answer's fields."""
    return list(dict.fromkeys(_of_model(model, "")))


def _of_model(model: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner, many = _element(field.annotation)
        here = f"{path}{name}{'[]' if many else ''}"
        yield here
        for kind in inner:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _of_model(kind, f"{here}.")


def _of_dict(kind: Any, path: str, param: str, put: Put, with_required: bool = True) -> Iterator[Asked]:
    required = _sample(kind) if with_required else {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if not (with_required and name in TAGS):
            here: Put = partial(_put, put, required, name)
            yield from _of_field(hint, f"{path}{name}", f"{param}{name}", here)


def _put(put: Put, required: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return put({**required, name: value})


def _of_field(hint: Any, path: str, param: str, put: Put) -> Iterator[Asked]:
    yield Asked(path, param, _sample(hint), put)
    kinds, many = _element(hint)
    inside: Put = (lambda value: put([value])) if many else put
    dicts = [kind for kind in kinds if is_typeddict(kind)]
    at = f"{param}[0]" if many else param
    for kind in dicts:
        tag = _tag(kind)
        if tag is None:
            yield from _of_dict(kind, f"{path}{'[]' if many else ''}.", f"{at}.", inside)
        else:
            here = f"{path}[{tag[1]}]"
            yield Asked(here, f"{at}.{tag[0]}", _sample(kind), inside)
            yield from _of_dict(kind, f"{here}.", f"{at}.", inside)


def _tag(kind: Any) -> tuple[str, str] | None:
    """What tells it from its like, and its value."""
    hints = get_type_hints(kind)
    for name in TAGS:
        if name in hints and get_origin(hints[name]) is Literal and len(get_args(hints[name])) == 1:
            return name, get_args(hints[name])[0]
    return None


def _element(hint: Any) -> tuple[list[Any], bool]:
    """The kinds that a value, or each of its elements, may be of; whether it may be many."""
    found: list[Any] = []
    many = False
    for kind in _kinds(hint):
        if get_origin(kind) in (list, Sequence, Iterable) and (inner := list(_kinds(get_args(kind)[0]))):
            many, found = True, found + inner
        else:
            found.append(kind)
    return found, many


def _kinds(hint: Any) -> Iterator[Any]:
    """What a union is made of, without None."""
    if get_origin(hint) in (Required, Annotated):
        yield from _kinds(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for kind in get_args(hint):
            yield from _kinds(kind)
    elif hint is not type(None):
        yield hint


def _sample(hint: Any) -> Any:
    """The least value of its type: of a union, of the first kind."""
    kind = next(_kinds(hint))
    origin = get_origin(kind)
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        return {name: _sample(hint) for name, hint in hints.items() if kind.__total__ or get_origin(hint) is Required}
    if origin is Literal:
        return get_args(kind)[0]
    if origin in (list, Sequence, Iterable):
        return [_sample(get_args(kind)[0])]
    if origin is dict or kind is object:
        return {"a": _sample(get_args(kind)[1])} if get_args(kind) and get_args(kind)[1] is not object else {}
    return {str: "x", int: 1, float: 1.0, bool: True}[kind]
