"""Strict CBOR (RFC 8949): the few types we use, nothing that runs code or grows.

The library's defaults accept tags (regular expressions, decimals, shared references), simple
values, indefinite lengths, repeated keys and trailing bytes. From a peer each of these is a way to
confuse or to exhaust, so all are refused; what is left is None, bool, 64-bit int, float, str,
bytes, list, and dict with text keys.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import cbor2

from p2ptrain.errors import InternalError, ProtocolError

BLOB_DEPTH_LIMIT = 32

ITEMS_LIMIT = 16_384
"""Most items of a blob whose reader expects no more: an item of a byte takes up to 72 of memory."""

INTEGER_MIN = -(2**63)

INTEGER_MAX = 2**64 - 1

_LEAVES = frozenset({type(None), bool, float, str, bytes})


def _bytes_of_item(head: int) -> int:
    """Of an item, or of a container's head, that begins with `head`; 0 = its length follows."""
    major, low = head >> 5, head & 31
    if major in (2, 3):  # bytes, text
        return 1 + low if low < 24 else 0
    return 1 + (1 << (low - 24)) if 24 <= low <= 27 else 1


_BYTES_OF_ITEM = tuple(map(_bytes_of_item, range(256)))


class _EveryTagRefused(Mapping[int, Callable[[Any, bool], Any]]):
    """Stands in for the library's table of tag decoders, so that its own are never reached."""

    def __getitem__(self, tag: int) -> Callable[[Any, bool], Any]:
        return _refuse_tag

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _refuse_tag(*_: object) -> NoReturn:
    raise ValueError("a tag, which is not allowed")


_NO_TAGS = _EveryTagRefused()


def loads(
    data: bytes,
    limit_bytes: int,
    depth_limit: int = BLOB_DEPTH_LIMIT,
    items_limit: int = ITEMS_LIMIT,
) -> Any:
    """Decode one CBOR item that must fill `data` exactly.

    Args:
        data: at most `limit_bytes`, checked before anything is decoded.
        limit_bytes: the caller's cap for this kind of blob.
        depth_limit: most containers within one another.
        items_limit: most items, those within one another included; counted before any is made.

    Raises:
        ProtocolError: `data` is too long or is not strict CBOR.
    """
    if len(data) > limit_bytes:
        raise ProtocolError(f"CBOR of {len(data)} bytes where {limit_bytes} are allowed")
    if len(data) > items_limit:
        _check_items(data, items_limit)
    value = _decode(data, depth_limit)
    _check(value, depth_limit, ProtocolError)
    return value


def dumps(value: object, depth_limit: int = BLOB_DEPTH_LIMIT) -> bytes:
    """Encode what `loads` would give back; tuples travel as lists.

    Raises:
        InternalError: `value` holds a type, key or integer that may not travel, or is too deep.
    """
    _check(value, depth_limit, InternalError)
    return cbor2.dumps(value)


def _check_items(data: bytes, items_limit: int) -> None:
    """Raise where `data` holds more: all items lie one behind the other, however they nest."""
    at, count, end = 0, 0, len(data)
    while at < end:
        count += 1
        if count > items_limit:
            raise ProtocolError(f"CBOR of more than {items_limit} items")
        step = _BYTES_OF_ITEM[data[at]]
        if not step:
            width = 1 << max((data[at] & 31) - 24, 0)
            step = 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "big")
        at += step


def _decode(data: bytes, depth_limit: int) -> Any:
    try:
        decoder = cbor2.CBORDecoder(
            io.BytesIO(data),
            tag_hook=_refuse_tag,
            semantic_decoders=_NO_TAGS,
            max_depth=depth_limit,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
        value = decoder.decode()
    except (cbor2.CBORError, ValueError, OverflowError) as error:
        raise ProtocolError(f"CBOR is malformed: {error}") from error
    _require_end(decoder)
    return value


def _require_end(decoder: cbor2.CBORDecoder) -> None:
    try:
        decoder.read(1)
    except cbor2.CBORDecodeEOF:
        return
    raise ProtocolError("CBOR is followed by further bytes")


def _check(value: object, depth_limit: int, error: type[ProtocolError | InternalError]) -> None:
    """Raise `error` unless every item is of an allowed type, level by level.

    Every message passes here twice, so what is common is settled without a call.
    """
    level: list[Any] = [value]
    while level:
        if depth_limit < 0:
            raise error("CBOR is nested too deeply")
        depth_limit -= 1
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind in _LEAVES or (kind is int and INTEGER_MIN <= item <= INTEGER_MAX):
                continue
            if kind is list:
                inner += item
            else:
                inner += _open(item, error)
        level = inner


def _open(item: object, error: type[ProtocolError | InternalError]) -> Iterable[object]:
    """What an item that is no leaf contains."""
    if type(item) is dict or isinstance(item, Mapping):
        for key in item:
            if type(key) is not str:
                raise error(f"CBOR key is a {type(key).__name__}, not text")
        return item.values()
    if isinstance(item, (str, float)):
        return ()  # a subclass such as StrEnum travels as its value
    if isinstance(item, int):
        if not INTEGER_MIN <= item <= INTEGER_MAX:
            raise error("CBOR integer does not fit into 64 bits")
        return ()
    if isinstance(item, (list, tuple)):
        return item
    raise error(f"CBOR may not carry a {type(item).__name__}")
