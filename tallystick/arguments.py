"""Arguments that users give, checked against the annotations of their parameters.

A function or class under `@checked` raises `OptionError` for an argument of another type, for an
unknown one and for a missing one, and names it. An argument of another type that can be meant in
one way only is converted: an annotation says how (`Annotated[str, function]`), and here is what
goes for all of them: digits as a number, "true" as a flag, a set as a list, a span of time as
milliseconds, and a function or class of ours without arguments (`count`) as its result.
"""

import inspect
import os
import re
import reprlib
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from tallystick.errors import OptionError

Checked = TypeVar("Checked", bound=Callable[..., Any])

_SECRETS = ("options", "config")
"""Arguments of functions that may hold passwords; those of dataclasses have no repr."""
_OTHER_WORDS = {
    "bootstrap": "bootstrap_servers",
    "brokers": "bootstrap_servers",
    "servers": "bootstrap_servers",
    "brokeraddress": "bootstrap_servers",
    "subscribe": "topics",
    "autooffsetreset": "starting_offsets",
    "consumergroup": "group_id",
    "checkpointlocation": "checkpoint",
    "checkpointdir": "checkpoint",
    "deserializer": "value",
    "valuedeserializer": "value",
    "valueserializer": "value",
    "serializer": "value",
    "format": "value",
    "schema": "value",
    "columns": "schema",
    "acks": "guarantee",
    "watermark": "watermark_delay",
    "mode": "guarantee",
    "connection": "dsn",
    "url": "dsn",
    "id": "uid",
    "uid": "step",
}
"""Names of arguments in Spark, Flink and Kafka's clients -> ours, where there is such a one."""


def near(name: object, known: Iterable[str]) -> str:
    """Return the question " Did you mean …?" about the nearest known name; "": none is near."""
    by_letters = {_letters(one): one for one in known}
    given = _letters(str(name))
    close = get_close_matches(given, by_letters, 1, 0.6) or [
        letters for letters in by_letters if len(given) > 2 and letters.startswith(given)
    ]
    return f" Did you mean {by_letters[close[0]]!r}?" if close else ""


def not_one_of(argument: str, given: object, known: Iterable[str], of: str = "") -> OptionError:
    """Return the error about a word that is none of a few, with the nearest of them.

    Args:
        argument: that has the word.
        given: the word.
        known: those that it may be.
        of: the function or class of the argument; "": the caller says.
    """
    words = [*known]
    text = f"{argument}={_shown(given)}"
    listed = ", ".join(map(repr, words[:-1]))
    expected = f"{listed} or {words[-1]!r}" if listed else repr(words[-1])
    place = f"{of}({text})" if of else text
    return OptionError(f"{place}: expected {expected}.{near(given, words)}")


def missing_column(what: str, name: object, columns: Iterable[str]) -> OptionError:
    """Return the error about a column that rows do not have, with the columns that they have."""
    names = [*columns]
    return OptionError(
        f"{what}: there is no column {name!r}.{near(name, names)} The rows have "
        f"{', '.join(names) if names else 'no columns'}"
    )


def checked(target: Checked) -> Checked:
    """Check the arguments of each call of a function, a method, or the constructor of a class."""
    if not isinstance(target, type):
        return cast(Checked, _wrapped(target, target, target.__name__))
    owner: Any = target
    owner.__init__ = _wrapped(owner.__init__, target, target.__name__)
    return target


def _wrapped(function: Any, target: Any, name: str) -> Any:
    @cache
    def parameters() -> tuple[inspect.Signature, dict[str, Any], frozenset[str]]:
        signature = inspect.signature(function)
        secrets = {one.name for one in fields(target) if not one.repr} if _is_class(target) else ()
        return signature, _hints(target), frozenset((*_SECRETS, *secrets))

    @wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        signature, hints, secrets = parameters()
        bound = _bound(name, signature, positional, named)
        for argument, given in bound.arguments.items():
            if argument not in hints:
                continue
            many = signature.parameters[argument].kind
            kind: Any = hints[argument]
            if many is inspect.Parameter.VAR_POSITIONAL:
                kind = types.GenericAlias(tuple, (kind, ...))
            elif many is inspect.Parameter.VAR_KEYWORD:
                kind = types.GenericAlias(dict, (str, kind))
            try:
                if many is inspect.Parameter.VAR_POSITIONAL:
                    given = _spread(given, kind)
                bound.arguments[argument] = fitted(given, kind)
            except _UnfitError as unfit:
                raise _refused(name, argument, unfit, many, argument in secrets) from None
            except OptionError as error:  # of what the argument was converted to
                raise OptionError(f"{name}({argument}=…): {error}") from None
        return function(*bound.args, **bound.kwargs)

    return call


def _spread(given: tuple[Any, ...], kind: Any) -> tuple[Any, ...]:
    """Return what stands in a list that was given in place of several arguments."""
    if len(given) == 1 and isinstance(given[0], list | tuple):
        with suppress(_UnfitError):
            return cast(tuple[Any, ...], fitted(tuple(given[0]), kind))
    return given


def _is_class(target: Any) -> bool:
    return isinstance(target, type) and is_dataclass(target)


def _hints(target: Any) -> dict[str, Any]:
    try:
        return get_type_hints(target, include_extras=True)
    except NameError:  # a name that only type checkers import
        raw = dict(target.__annotations__)
        return {name: kind for name, kind in raw.items() if not isinstance(kind, str)}


def _bound(
    name: str, signature: inspect.Signature, positional: Sequence[Any], named: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments of a call by the names of parameters.

    Raises:
        OptionError: one is unknown or missing, or there are too many.
    """
    try:
        return signature.bind(*positional, **named)
    except TypeError:
        pass
    known = [one for one in signature.parameters if one != "self"]
    text = f"Its arguments: {', '.join(known)}"
    if not known:
        extra = ", ".join([*map(_shown, positional), *(f"{one}=…" for one in named)])
        raise OptionError(f"{name}({extra}): expected no arguments: leave them out, {name}()")
    for argument in named:
        if argument not in signature.parameters:
            other = _OTHER_WORDS.get(_letters(argument))
            hint = near(argument, known) if other not in known else f" Did you mean {other!r}?"
            entries = (one.name for one in signature.parameters.values() if _is_mapping(one))
            if not hint and (entry := next(entries, "")):
                hint = f" Did you mean {entry}={{{argument!r}: …}}?"
            raise OptionError(f"{name}({argument}=…): there is no such argument.{hint} {text}")
    by_place = [
        one
        for one, parameter in signature.parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    if len(positional) > len(by_place):
        others = [one for one in known if one not in by_place and one not in named]
        hint = f"name the argument, as in {name}({others[0]}=…)" if others else "leave it out"
        extra = _shown(positional[len(by_place)])
        raise OptionError(f"{name}(…, {extra}): too many arguments without a name: {hint}. {text}")
    taken = by_place[: len(positional)]
    for argument in taken:
        if argument in named:
            raise OptionError(f"{name}({argument}=…): it is given twice, once without its name")
    missing = [
        one
        for one, parameter in signature.parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        and one not in (*taken, *named, "self")
    ]
    raise OptionError(f"{name}(): {missing[0]}= is missing. {text}")


def _is_mapping(parameter: inspect.Parameter) -> bool:
    return get_origin(parameter.annotation) is Mapping


class _UnfitError(Exception):
    """A value that is none of the kind that was asked for.

    Args:
        place: of the value inside the argument; "": the argument itself.
        given: the value.
        expected: the kind, in words.
        is_converters: the words are those of a converter, which knows more.
    """

    def __init__(
        self, place: str, given: object, expected: str, *, is_converters: bool = False
    ) -> None:
        super().__init__(place, given, expected)
        self.place, self.given, self.expected = place, given, expected
        self.is_converters = is_converters


def _refused(
    function: str, argument: str, unfit: _UnfitError, many: Any, is_secret: bool
) -> OptionError:
    place = f"{argument}{unfit.place}"
    if many is inspect.Parameter.VAR_POSITIONAL:
        place = argument
    elif many is inspect.Parameter.VAR_KEYWORD:
        place = re.sub(r"^\['(\w+)'\]", r"\1", unfit.place) or argument
    shown = "…" if is_secret else _shown(unfit.given)
    of = type(unfit.given)
    module = "" if of.__module__ == "builtins" else f"{of.__module__}."
    kind = "None" if unfit.given is None else _with_article(f"{module}{of.__name__}")
    is_word = isinstance(unfit.given, str) and unfit.expected.startswith("'")
    end = "" if is_word else f"; this is {kind}"
    if _NAMES[Callable] in unfit.expected and (
        isinstance(unfit.given, str) or _is_sparks(unfit.given)
    ):
        end += ". A Column, SQL's text or a udf is for transform(lambda frame: frame.filter(…))"
    return OptionError(f"{function}({place}={shown}): expected {unfit.expected}{end}")


def fitted(given: Any, kind: Any) -> Any:
    """Return a value as an annotation has it.

    Raises:
        _UnfitError: it is of another type, and nothing else is obviously meant by it.
    """
    origin = get_origin(kind)
    if kind is Any or isinstance(kind, str | TypeVar | ForwardRef):
        return given
    if origin is Annotated:
        kind, *converters = get_args(kind)
        for convert in converters:
            try:
                given = convert(given)
            except ValueError as error:
                raise _UnfitError("", given, str(error), is_converters=True) from None
        return fitted(given, kind)
    if origin in (Union, types.UnionType):
        return _one_of(given, get_args(kind))
    if origin is Literal:
        words = get_args(kind)
        if any(type(given) is type(word) and given == word for word in words):
            return given
        hint = near(given, [word for word in words if isinstance(word, str)])
        raise _UnfitError("", given, f"{_in_words(kind)}.{hint}" if hint else _in_words(kind))
    plain = origin or kind
    if plain in _CONVERTERS:
        try:
            return _CONVERTERS[plain](given)
        except ValueError:
            raise _UnfitError("", given, _in_words(kind)) from None
    if isinstance(plain, type) and issubclass(plain, Mapping):
        return _mapping(given, kind)
    if plain in (Sequence, Collection, Iterable, tuple, list, frozenset):
        return _several(given, kind)
    return _instance(given, kind, plain)


def _one_of(given: Any, kinds: Sequence[Any]) -> Any:
    results, refusals = [], []
    for kind in kinds:
        try:
            results.append(fitted(given, kind))
        except _UnfitError as unfit:
            refusals.append(unfit)
    for result in results:
        if result is given:
            return given
    if results:
        return results[0]
    inner = max(refusals, key=lambda unfit: (unfit.is_converters, len(unfit.place)))
    if inner.place or inner.is_converters:
        raise inner
    raise _UnfitError("", given, _or(kinds))


def _mapping(given: Any, kind: Any) -> Any:
    if not isinstance(given, Mapping):
        raise _UnfitError("", given, _in_words(kind))
    key_kind, value_kind = get_args(kind) or (Any, Any)
    result, is_same = {}, True
    for key, value in given.items():
        try:
            new_key = fitted(key, key_kind)
        except _UnfitError:
            raise _UnfitError(f", key {key!r}", given, _in_words(kind)) from None
        try:
            result[new_key] = fitted(value, value_kind)
        except _UnfitError as unfit:
            raise _UnfitError(f"[{key!r}]{unfit.place}", unfit.given, unfit.expected) from None
        is_same = is_same and new_key is key and result[new_key] is value
    return given if is_same else result


def _several(given: Any, kind: Any) -> Any:
    plain = get_origin(kind) or kind
    inner = (get_args(kind) or (Any,))[0]
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        one = f": [{_shown(given)}]" if isinstance(given, str) and inner is str else ""
        raise _UnfitError("", given, f"{_in_words(kind)}{one}")
    if isinstance(given, type) or type(given).__module__.startswith("pyspark"):
        raise _UnfitError("", given, _in_words(kind))  # a Column is an Iterable that has no end
    # Sets have no order of their own that two starts would share.
    values = sorted(given, key=repr) if isinstance(given, set | frozenset) else [*given]
    result = []
    for index, value in enumerate(values):
        try:
            result.append(fitted(value, inner))
        except _UnfitError as unfit:
            raise _UnfitError(f"[{index}]{unfit.place}", unfit.given, unfit.expected) from None
    is_same = all(one is other for one, other in zip(result, values, strict=True))
    return given if is_same and isinstance(given, plain) else tuple(result)


def _instance(given: Any, kind: Any, plain: Any) -> Any:
    if plain is Callable:
        if not callable(given) or _is_sparks(given):
            raise _UnfitError("", given, _in_words(kind))
        return given
    if not isinstance(plain, type):
        return given
    is_protocol = getattr(plain, "_is_protocol", False)
    if _has_methods(given, plain) if is_protocol else isinstance(given, plain):
        return given
    if _is_ours(given) and type(result := _called(given)).__mro__.count(plain):
        return result
    hint = f", made by a call: {given.__name__}(…)" if _is_ours(given) else ""
    raise _UnfitError("", given, f"{_in_words(kind)}{hint}")


def _has_methods(given: Any, protocol: type) -> bool:
    methods = [name for name, value in vars(protocol).items() if inspect.isfunction(value)]
    public = [name for name in methods if not name.startswith("_")]
    return not isinstance(given, type) and all(hasattr(given, name) for name in public)


def _is_sparks(given: Any) -> bool:
    """True for a Column, a DataFrame or a udf: functions of batches are no code of DataFrames."""
    return type(given).__module__.startswith("pyspark.sql") or hasattr(given, "evalType")


def _is_ours(given: Any) -> bool:
    is_made = inspect.isfunction(given) or isinstance(given, type)
    return is_made and str(given.__module__).startswith("tallystick.")  # None: made by exec


def _called(function: Any) -> Any:
    """Return what a function or class gives without arguments; None: it needs some."""
    try:
        return function()
    except OptionError:
        return None


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError
    return given


def _whole(given: Any) -> Any:
    if isinstance(given, timedelta):
        return given // timedelta(milliseconds=1)
    if isinstance(given, str) and re.fullmatch(r"\s*-?[0-9]+\s*", given):
        return int(given)
    is_whole = isinstance(given, Integral) and not isinstance(given, bool)
    if not is_whole:
        raise ValueError
    return given if isinstance(given, int) else int(given)


def _number(given: Any) -> Any:
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if not is_number:
        raise ValueError
    return given if isinstance(given, int | float) else float(given)


def _flag(given: Any) -> bool:
    words = {"true": True, "false": False}
    if isinstance(given, str) and given.strip().lower() in words:
        return words[given.strip().lower()]
    if not isinstance(given, bool):
        raise ValueError
    return given


def _nothing(given: Any) -> None:
    if given is not None:
        raise ValueError


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    str: _text,
    int: _whole,
    float: _number,
    bool: _flag,
    None: _nothing,
    types.NoneType: _nothing,
}
_NAMES: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    None: "None",
    types.NoneType: "None",
    Any: "anything",
    re.Pattern: "a compiled pattern, re.compile('…')",
    Callable: "a function, by its name alone (clean, not clean())",
}
_PROTOCOLS = {"Sink": "ts.KafkaSink(…), ts.PostgresSink(…), ts.FileSink(…)"}


def _in_words(kind: Any) -> str:
    """Return what an annotation asks for, in words."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _in_words(get_args(kind)[0])
    if origin in (Union, types.UnionType):
        return _or(get_args(kind))
    if origin is Literal:
        return " or ".join(repr(word) for word in get_args(kind))
    plain = origin or kind
    if plain in _NAMES:
        return _NAMES[plain]
    if isinstance(plain, type) and issubclass(plain, Mapping):
        inner = get_args(kind) or (Any, Any)
        return f"a dict, {{{_inner(inner[0])}: {_inner(inner[1])}}}"
    if plain in (Sequence, Collection, Iterable, tuple, list, frozenset):
        inner = get_args(kind) or (Any,)
        return f"a list, [{_inner(inner[0])}, …]"
    name = getattr(plain, "__name__", str(plain))
    if not getattr(plain, "__module__", "").startswith("tallystick."):
        return _with_article(name)
    if name in _PROTOCOLS:
        return _PROTOCOLS[name]
    maker = re.search(r"made by `(\w+)`", plain.__doc__ or "")
    return f"ts.{maker[1] if maker else name}(…)"


def _inner(kind: Any) -> str:
    """Return an annotation in words, as it stands inside of brackets."""
    return re.sub(r"\b(?:an? )?(dict|list), |\ban? ", "", _in_words(kind))


def _with_article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _or(kinds: Collection[Any]) -> str:
    if str in kinds and int in kinds:
        return "whole ms from 0, or a text such as '10 seconds'"
    words = [word for word in dict.fromkeys(map(_in_words, kinds)) if word != "None"]
    return f"{', '.join(words[:-1])} or {words[-1]}" if words[:-1] else words[0]


def as_texts(given: Any) -> Any:
    """Return a dict of settings with numbers and flags as texts, and anything else as it is."""
    if not isinstance(given, Mapping):
        return given
    return {
        name: str(value).lower() if isinstance(value, bool | int | float) else value
        for name, value in given.items()
    }


Settings: TypeAlias = Annotated[Mapping[str, str], as_texts]
"""Settings of another system, all of them texts there."""


def as_path(given: Any) -> Any:
    """Return a `pathlib.Path` as text, and anything else as it is."""
    return os.fspath(given) if isinstance(given, os.PathLike) else given


def _letters(name: str) -> str:
    return re.sub(r"[_\s.-]", "", name).lower()


def _shown(given: object) -> str:
    """Return a value as text that is not too long for a line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return " ".join(short.repr(given).split())
