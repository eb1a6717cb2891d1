"""Damage to valid input: of bytes, and of values inside of JSON."""

import json
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

BYTES = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)
NUMBERS = (
    *(0, 1, -1, 2, 127, 128, 255, 256, 2**15 - 1, 2**15, 2**16, 2**24, 2**30),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
)
VARINTS = (
    *(b"\xff" * 9 + b"\x01", b"\xfe" + b"\xff" * 8 + b"\x01", b"\xff" * 12, b"\x80" * 20 + b"\0"),
    *(b"\xff\xff\xff\xff\x0f", b"\xfe\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x10"),
)
STRANGE: tuple[Any, ...] = (
    *(None, True, False, "", "\0", "..", "../../../etc/passwd", "/etc/passwd", "a" * 5000),
    *("-1", "1e400", "\ud800", "'; drop table t; --", "{}", [], {}, [[]], [None], {"": None}, 0.5),
    *(float("inf"), float("-inf"), float("nan"), 1e308, 10**400, "list<" * 3000),
)
DEEP = 100_000


def mutated(data: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Return data with a few changes: flipped, cut, repeated, spliced, lengths set to extremes."""
    damaged = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(damaged) + 1)
        until = at + chance.randrange(1, 20)
        match chance.randrange(10):
            case 0 | 1 if at < len(damaged):
                damaged[at] ^= 1 << chance.randrange(8)
            case 2:
                damaged[at : at + 1] = bytes([chance.choice(BYTES)])
            case 3:
                del damaged[at:]
            case 4:
                del damaged[at:until]
            case 5:
                damaged[at:at] = damaged[at:until] * chance.choice((1, 1, 2, 50))
            case 6:
                other = chance.choice(others)
                begin = chance.randrange(len(other) + 1)
                damaged[at:] = other[begin:]
            case 7:
                number = chance.choice(NUMBERS) & (2**64 - 1)
                form = chance.choice(("<I", ">I", "<Q", ">Q", "<H", ">H"))
                size = struct.calcsize(form)
                damaged[at : at + size] = struct.pack(form, number & (1 << 8 * size) - 1)
            case 8:
                damaged[at:at] = chance.choice(VARINTS)
            case _:
                damaged[at:at] = chance.randbytes(chance.randrange(1, 9))
    return bytes(damaged)


def mutated_json(text: str, chance: Random) -> str:
    """Return a JSON text with a few values of it replaced, removed, doubled or renamed."""
    if chance.random() < 0.02:
        deep = "[" * DEEP + "]" * DEEP
        return deep if chance.random() < 0.5 else '{"a":' * DEEP + "1" + "}" * DEEP
    value = json.loads(text)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        value = _mutated_value(value, chance)
    return json.dumps(value)


def mutated_text(data: bytes, chance: Random, others: Sequence[bytes]) -> bytes:
    """Change a text, at its values if it is JSON."""
    if chance.random() < 0.3:
        return mutated(data, chance, others).decode(errors="replace").encode()
    return mutated_json(data.decode(), chance).encode()


def _mutated_value(value: Any, chance: Random) -> Any:
    """Return a JSON value with one change, at its top or further inside."""
    inside = isinstance(value, dict | list) and len(value) and chance.random() < 0.85
    if not inside:
        return _another(value, chance)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = chance.choice(keys)
    changed = dict(value) if isinstance(value, dict) else list(value)
    match chance.randrange(10):
        case 0:
            del changed[key]
        case 1 if isinstance(changed, dict):
            changed[str(chance.choice((*keys, "unknown", "", "__class__")))] = changed.pop(key)
        case 1:
            changed *= chance.choice((2, 3, 40))
        case 2:
            changed[key] = changed[chance.choice(keys)]
        case _:
            changed[key] = _mutated_value(changed[key], chance)
    return changed


def _another(value: Any, chance: Random) -> Any:
    number = chance.choice(NUMBERS)
    if isinstance(value, str) and value and chance.random() < 0.5:
        if value[0] in "[{":
            try:
                return mutated_json(value, chance)
            except (ValueError, RecursionError):
                pass
        at = chance.randrange(len(value))
        return (
            value[:at]
            + chance.choice(("", "/", "..", "\0", "\n", "'", '"', "\u202e", "9" * 50))
            + (value[at + chance.randrange(3) :])
        )
    if isinstance(value, int) and chance.random() < 0.5:
        return chance.choice((number, value + 1, value - 1, -value, str(value)[:99], 0.5))
    return chance.choice((*STRANGE, number))
